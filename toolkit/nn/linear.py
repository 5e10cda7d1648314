"""Linear layers: fused outputs, a fused activation, and weights packed once for the CPU's matrix kernels.

Shape suffixes: T tokens, I input features, O output features.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from toolkit.spec import Activation, Gate

__all__ = [
    "ActivatedLinear",
    "FusedLinear",
    "PackedLinear",
    "activate",
    "apply_activation",
    "can_pack",
    "gelu_by_series",
    "pack_linears",
]


def apply_activation(x: Tensor, activation: Activation) -> Tensor:
    """Apply an activation by name; `gelu` is the exact form, `gelu_tanh` the tanh approximation."""
    match activation:
        case "gelu":
            # Eager mode would run the formula's every step as a kernel of its own.
            half = x.dtype in (torch.bfloat16, torch.float16)
            return gelu_by_series(x) if half and torch.compiler.is_compiling() else F.gelu(x)
        case "gelu_tanh":
            return F.gelu(x, approximate="tanh")
        case "identity":
            return x
        case "relu":
            return F.relu(x)
        case "sigmoid":
            return torch.sigmoid(x)
        case "silu":
            return F.silu(x)
        case "tanh":
            return torch.tanh(x)


def activate(x: Tensor, gate: Gate, activation: Activation) -> Tensor:
    """Apply an activation, [T, M] → [T, M]; with a gate, [T, 2 M] → [T, M].

    That is a gated linear unit (Shazeer, 2020): the half that `gate` names, activated, multiplies the other.
    """
    if gate == "none":
        return apply_activation(x, activation)
    first, second = x.chunk(2, dim=-1)
    if gate == "first":
        return apply_activation(first, activation) * second
    return apply_activation(second, activation) * first


def gelu_by_series(x: Tensor) -> Tensor:
    """Exact gelu, x × Φ(x), in float32 by formula 7.1.26 of Abramowitz and Stegun for erfc; of `x`'s dtype.

    Off by at most 4e-7, no more than `F.gelu` in float32. erf is what bounds gelu's speed on a GPU: this form needs a
    third of its operations, which leaves the time to memory.
    """
    y, distance = x.float(), x.float().abs()
    t = 1 / (1 + (0.3275911 * 0.5**0.5) * distance)
    tail = t * (0.254829592 + t * (-0.284496736 + t * (1.421413741 + t * (-1.453152027 + t * 1.061405429))))
    return (y.relu() - distance * (0.5 * tail * torch.exp(-0.5 * y * y))).to(x.dtype)


class FusedLinear(nn.Linear):
    """One linear layer in the place of several over the same input; `parts` are their output sizes."""

    def __init__(self, in_features: int, parts: tuple[int, ...], bias: bool) -> None:
        super().__init__(in_features, sum(parts), bias)
        self.parts = parts


class ActivatedLinear(nn.Linear):
    """A linear layer followed by an activation."""

    def __init__(self, in_features: int, out_features: int, bias: bool, activation: Activation) -> None:
        super().__init__(in_features, out_features, bias)
        self.activation: Activation = activation

    def forward(self, input: Tensor) -> Tensor:
        """[T, I] → [T, O]."""
        return apply_activation(super().forward(input), self.activation)


# oneDNN sums over all input features in one chain, where other libraries sum blocks: over long rows its rounding
# error is two to four times theirs. Rows are cut into pieces of at most this many features.
_LONGEST_SUM = 512


@torch.library.custom_op("toolkit::packed_linear", mutates_args=())
def packed_linear(x_TI: Tensor, weights: Sequence[Tensor], bias_O: Tensor, gelu: bool) -> Tensor:
    """Matrix product with a weight in oneDNN's own blocked layout, with bias, and optionally exact gelu.

    `weights` are the pieces of one weight along its input features. They are opaque to tracing, hence an op of our
    own with a fake implementation: the compiler sees one node. On CPUs with AVX-512 oneDNN's kernels run at more
    than twice the rate of `F.linear`.
    """
    pieces = x_TI.tensor_split(len(weights), dim=1)
    post, algorithm = ("gelu", "none") if gelu and len(weights) == 1 else ("none", "")
    y_TO = torch.ops.mkldnn._linear_pointwise(pieces[0], weights[0], bias_O, post, [], algorithm)
    for piece, weight in zip(pieces[1:], weights[1:], strict=True):
        y_TO = torch.ops.mkldnn._linear_pointwise.binary(piece, y_TO, weight, None, "add")
    return F.gelu(y_TO) if gelu and len(weights) > 1 else y_TO


@packed_linear.register_fake
def _(x_TI: Tensor, weights: Sequence[Tensor], bias_O: Tensor, gelu: bool) -> Tensor:
    return x_TI.new_empty(x_TI.shape[0], bias_O.shape[0])


class PackedLinear(nn.Module):
    """A linear layer whose weight was repacked for oneDNN; exact gelu is fused, other activations follow."""

    def __init__(self, source: nn.Linear) -> None:
        super().__init__()
        bias = source.bias if source.bias is not None else source.weight.new_zeros(source.out_features)
        activation: Activation | None = source.activation if isinstance(source, ActivatedLinear) else None
        self.gelu = activation == "gelu"
        self.activation: Activation | None = None if self.gelu else activation
        self.register_buffer("bias", bias.detach(), persistent=False)
        pieces = source.weight.detach().tensor_split(-(-source.in_features // _LONGEST_SUM), dim=1)
        self.weights = [torch.ops.mkldnn._reorder_linear_weight(piece.contiguous()) for piece in pieces]

    def forward(self, x_TI: Tensor) -> Tensor:
        """[T, I] float32 → [T, O] float32."""
        y_TO = packed_linear(x_TI, self.weights, self.bias, self.gelu)
        return y_TO if self.activation is None else apply_activation(y_TO, self.activation)


def can_pack(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether `pack_linears` applies: float32 on a CPU build of torch that carries oneDNN."""
    return device.type == "cpu" and dtype == torch.float32 and torch.backends.mkldnn.is_available()


def pack_linears(module: nn.Module) -> None:
    """Replace every linear layer below `module` by its packed form, in place; for inference only."""
    for name, child in list(module.named_children()):
        if isinstance(child, nn.Linear):
            setattr(module, name, PackedLinear(child))
        else:
            pack_linears(child)
