"""Rotary positions, from tables that are computed once for every position that the model may see.

Shape suffixes: T tokens, N heads, H head size, R half of the rotated values, L positions.
"""

import torch
from torch import Tensor, nn

from toolkit.spec import RopeSpec

__all__ = ["RopeTable", "rotate"]


class RopeTable(nn.Module):
    """Cosines and sines of all positions, float32 [L, R]."""

    def __init__(self, spec: RopeSpec, positions: int) -> None:
        super().__init__()
        self.spec, self.positions = spec, positions
        self.register_buffer("cos", torch.empty(positions, spec.dims // 2), persistent=False)
        self.register_buffer("sin", torch.empty(positions, spec.dims // 2), persistent=False)

    def compute_buffers(self) -> None:
        """Fill the tables, on the CPU, rounding to float32 where transformers does."""
        dims = self.spec.dims
        exponents_R = torch.arange(0, dims, 2, dtype=torch.int64).float() / dims
        frequencies_R = 1.0 / (self.spec.base**exponents_R) / self.spec.factor
        angles_LR = torch.arange(self.positions).float()[:, None] * frequencies_R
        self.cos, self.sin = angles_LR.cos(), angles_LR.sin()

    def forward(self, positions_T: Tensor) -> tuple[Tensor, Tensor]:
        """int32 [T] → cosines and sines, float32 [T, R] each."""
        return self.cos[positions_T], self.sin[positions_T]


def rotate(x_TNH: Tensor, cos_TR: Tensor, sin_TR: Tensor) -> Tensor:
    """Rotate the first 2 R values of each head, pairing value i with value i + R; in float32, rounded once."""
    half = cos_TR.shape[1]
    a_TNR, b_TNR, rest_TNH = x_TNH[..., :half].float(), x_TNH[..., half : 2 * half].float(), x_TNH[..., 2 * half :]
    cos, sin = cos_TR[:, None], sin_TR[:, None]
    rotated = torch.cat((a_TNR * cos - b_TNR * sin, b_TNR * cos + a_TNR * sin), dim=-1).to(x_TNH.dtype)
    return torch.cat((rotated, rest_TNH), dim=-1) if rest_TNH.shape[-1] else rotated
