"""The feed-forward block.

Shape suffixes: T tokens, D hidden size, M inner width.
"""

from torch import Tensor, nn

from toolkit.nn.experts import ExpertMlp
from toolkit.nn.linear import ActivatedLinear, FusedLinear, activate
from toolkit.spec import Activation, Gate, MlpSpec

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
    """Linear, gated activation, linear."""

    def __init__(self, hidden: int, spec: MlpSpec) -> None:
        super().__init__()
        self.up = FusedLinear(hidden, (spec.width, spec.width), spec.bias)
        self.down = nn.Linear(spec.width, hidden, spec.out_bias)
        self.activation: Activation = spec.activation
        self.gate: Gate = spec.gate

    def forward(self, x_TD: Tensor) -> Tensor:
        """[T, D] → [T, D]."""
        return self.down(activate(self.up(x_TD), self.gate, self.activation))


def build_mlp(hidden: int, spec: MlpSpec) -> Mlp | GatedMlp | ExpertMlp:
    """Build the block that an MlpSpec describes."""
    if spec.experts is not None:
        return ExpertMlp(hidden, spec, spec.experts)
    return Mlp(hidden, spec) if spec.gate == "none" else GatedMlp(hidden, spec)
