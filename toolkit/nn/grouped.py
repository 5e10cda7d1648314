"""Linear layers side by side, of which each row goes through one: what a mixture of experts computes with.

Rows are put in the order of their layers, and every layer multiplies its own. How many those are is known on the
device only: no size and no launch depends on it, so that a captured graph serves every choice.

Shape suffixes: T tokens; C choices of each token; R rows, the T × C pairs of a token and one of its choices, in this
order; E layers; I input features; O output features.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = ["GroupedLinear", "group_rows", "grouped_linear"]


@torch.library.custom_op("toolkit::group_rows", mutates_args=())
def group_rows(choice_TC: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Sort the rows by their choice, int64 [T, C], each below `count`; rows with the same choice keep their order.

    Returns int32 [R], the rows in this order, and int32 [count + 1], where in it each choice begins.
    """
    choice_R = choice_TC.flatten()
    if choice_R.is_cuda and choice_R.shape[0] > 0:
        from toolkit.nn.grouped_kernel import MOST_RANKED, rank

        if choice_R.shape[0] <= MOST_RANKED:
            return rank(choice_R, count)
    sorted_R, order_R = choice_R.sort(stable=True)
    layers = torch.arange(count + 1, device=choice_R.device)
    return order_R.int(), torch.searchsorted(sorted_R, layers, out_int32=True)


@group_rows.register_fake
def _(choice_TC: Tensor, count: int) -> tuple[Tensor, Tensor]:
    rows = choice_TC.shape[0] * choice_TC.shape[1]
    return choice_TC.new_empty(rows, dtype=torch.int32), choice_TC.new_empty(count + 1, dtype=torch.int32)


@torch.library.custom_op("toolkit::grouped_linear", mutates_args=())
def grouped_linear(x: Tensor, order_R: Tensor, starts: Tensor, weight_EOI: Tensor) -> Tensor:
    """Multiply every row with the weight of its layer: [R, O], in the rows' own order.

    Args:
        x: the rows [R, I], or [T, I] the tokens that they are made of.
        order_R: int32, the rows in the order of their layers.
        starts: int32 [E + 1], where in it each layer begins.
        weight_EOI: of `x`'s dtype, contiguous.
    """
    if x.is_cuda:
        from toolkit.nn.grouped_kernel import multiply

        return multiply(x, order_R, starts, weight_EOI)
    rows = order_R.shape[0]
    out_RO = x.new_empty(rows, weight_EOI.shape[1])
    choices = rows // max(x.shape[0], 1)
    ends = starts.tolist()
    for weight_OI, start, end in zip(weight_EOI, ends[:-1], ends[1:], strict=True):
        if start < end:
            own = order_R[start:end]
            out_RO[own] = F.linear(x[own // choices], weight_OI)
    return out_RO


@grouped_linear.register_fake
def _(x: Tensor, order_R: Tensor, starts: Tensor, weight_EOI: Tensor) -> Tensor:
    return x.new_empty(order_R.shape[0], weight_EOI.shape[1])


class GroupedLinear(nn.Module):
    """`count` linear layers without bias, whose weights stand one below the other in `weight`, [E × O, I].

    Each stands for the layers of these output sizes over the same input; `parts` are those of all, as in FusedLinear.
    """

    def __init__(self, count: int, in_features: int, sizes: tuple[int, ...]) -> None:
        super().__init__()
        self.count, self.parts = count, sizes * count
        self.weight = nn.Parameter(torch.empty(sum(self.parts), in_features))

    def forward(self, x: Tensor, order_R: Tensor, starts: Tensor) -> Tensor:
        """[R, I] or [T, I] → [R, O]; `order_R` and `starts` are those of `group_rows`."""
        return grouped_linear(x, order_R, starts, self.weight.unflatten(0, (self.count, -1)))
