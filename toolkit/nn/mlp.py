"""The feed-forward block.

Shape suffixes: T tokens, D hidden size, M inner width.
"""

from torch import Tensor, nn

from toolkit.nn.linear import ActivatedLinear, FusedLinear, apply_activation
from toolkit.spec import Activation, MlpSpec

__all__ = ["GatedMlp", "Mlp", "build_mlp"]


class Mlp(nn.Module):
    """Linear, activation, linear."""

    def __init__(self, hidden: int, spec: MlpSpec) -> None:
        super().__init__()
        self.up = ActivatedLinear(hidden, spec.width, spec.bias, spec.activation)
        self.down = nn.Linear(spec.width, hidden, spec.out_bias)

    def forward(self, x_TD: Tensor) -> Tensor:
        """[T, D] → [T, D]."""
        return self.down(self.up(x_TD))


class GatedMlp(nn.Module):
    """A gated linear unit (Shazeer, 2020): one half of the first layer, activated, multiplies the other."""

    def __init__(self, hidden: int, spec: MlpSpec) -> None:
        super().__init__()
        self.up = FusedLinear(hidden, (spec.width, spec.width), spec.bias)
        self.down = nn.Linear(spec.width, hidden, spec.out_bias)
        self.activation: Activation = spec.activation
        self.gate = spec.gate

    def forward(self, x_TD: Tensor) -> Tensor:
        """[T, D] → [T, D]."""
        a_TM, b_TM = self.up(x_TD).chunk(2, dim=-1)
        gate_TM, value_TM = (a_TM, b_TM) if self.gate == "first" else (b_TM, a_TM)
        return self.down(apply_activation(gate_TM, self.activation) * value_TM)


def build_mlp(hidden: int, spec: MlpSpec) -> Mlp | GatedMlp:
    """Build the block that an MlpSpec describes."""
    return Mlp(hidden, spec) if spec.gate == "none" else GatedMlp(hidden, spec)
