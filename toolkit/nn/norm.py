"""Normalisation over the last dimension.

Shape suffixes: T tokens, D width.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from toolkit.spec import NormSpec

__all__ = ["RmsNorm", "build_norm"]


class RmsNorm(nn.Module):
    """Divide by the root of the mean square (Zhang & Sennrich, 2019), in float32 throughout, rounded once.

    With `offset` the factor is 1 + weight.
    """

    def __init__(self, width: int, eps: float, offset: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps, self.offset = eps, offset

    def forward(self, x_TD: Tensor) -> Tensor:
        """[…, D] → […, D]."""
        factor_D = self.weight.float() + 1 if self.offset else self.weight.float()
        return F.rms_norm(x_TD.float(), factor_D.shape, factor_D, self.eps).to(x_TD.dtype)


def build_norm(width: int, spec: NormSpec) -> nn.Module:
    """Build the module that a NormSpec describes, for vectors of `width` values."""
    if spec.kind == "rms":
        return RmsNorm(width, spec.eps, spec.offset)
    return nn.LayerNorm(width, eps=spec.eps, bias=spec.bias)
