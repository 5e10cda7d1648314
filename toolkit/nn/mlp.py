"""The feed-forward block.

Shape suffixes: T tokens, D hidden size, M inner width.
"""

from torch import Tensor, nn

from toolkit.nn.linear import ActivatedLinear
from toolkit.spec import MlpSpec

__all__ = ["Mlp"]


class Mlp(nn.Module):
    """Linear, activation, linear."""

    def __init__(self, hidden: int, spec: MlpSpec) -> None:
        super().__init__()
        self.up = ActivatedLinear(hidden, spec.width, spec.bias, spec.activation)
        self.down = nn.Linear(spec.width, hidden, spec.bias)

    def forward(self, x_TD: Tensor) -> Tensor:
        """[T, D] → [T, D]."""
        return self.down(self.up(x_TD))
