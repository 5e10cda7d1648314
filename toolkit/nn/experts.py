"""A mixture of experts: each token goes through a few of many feed-forward blocks (Shazeer et al., 2017).

Shape suffixes: T tokens, C experts that a token goes through, R = T × C; D hidden size, M an expert's inner width,
E experts.
"""

import torch
from torch import Tensor, nn

from toolkit.nn.grouped import GroupedLinear, group_rows
from toolkit.nn.linear import activate
from toolkit.spec import Activation, ExpertsSpec, Gate, MlpSpec

__all__ = ["ExpertMlp"]


class ExpertMlp(nn.Module):
    """A router, and experts that are each what `spec` describes without them.

    The router's logits are of the model's dtype; probabilities, and the weighted sum of what the experts return, are
    in float32, rounded once. A token's NaN reaches no other token.
    """

    def __init__(self, hidden: int, spec: MlpSpec, experts: ExpertsSpec) -> None:
        super().__init__()
        assert not spec.bias
        assert not spec.out_bias
        self.activation: Activation = spec.activation
        self.gate: Gate = spec.gate
        self.chosen, self.normalise = experts.chosen, experts.normalise
        self.router = nn.Linear(hidden, experts.count, bias=False)
        halves = 1 if spec.gate == "none" else 2
        self.experts_up = GroupedLinear(experts.count, hidden, (spec.width,) * halves)
        self.experts_down = GroupedLinear(experts.count, spec.width, (hidden,))

    def forward(self, x_TD: Tensor) -> Tensor:
        """[T, D] → [T, D]."""
        weight_TC, choice_TC = self.route(x_TD)
        order_R, starts = group_rows(choice_TC, self.experts_up.count)
        inner_RM = activate(self.experts_up(x_TD, order_R, starts), self.gate, self.activation)
        out_RD = self.experts_down(inner_RM, order_R, starts)
        out_TCD = out_RD.view(x_TD.shape[0], self.chosen, x_TD.shape[1])
        return (out_TCD.float() * weight_TC[:, :, None]).sum(1).to(x_TD.dtype)

    def route(self, x_TD: Tensor) -> tuple[Tensor, Tensor]:
        """[T, D] → float32 weights and int64 numbers of each token's experts, both [T, C]."""
        chance_TE = torch.softmax(self.router(x_TD), dim=-1, dtype=torch.float32)
        weight_TC, choice_TC = chance_TE.topk(self.chosen, dim=-1)
        if self.normalise:
            weight_TC = weight_TC / weight_TC.sum(-1, keepdim=True)
        return weight_TC, choice_TC
