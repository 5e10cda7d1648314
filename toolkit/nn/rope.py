"""Rotary positions, from tables that are computed once for every position that the model may see.

Shape suffixes: T tokens, N heads, H head size, R half of the rotated values, L positions.
"""

import math

import torch
from torch import Tensor, nn

from toolkit.spec import Llama3Scaling, RopeSpec, YarnScaling

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
        dims, scaling = self.spec.dims, self.spec.scaling
        exponents_R = torch.arange(0, dims, 2, dtype=torch.int64).float() / dims
        frequencies_R = 1.0 / (self.spec.base**exponents_R) / self.spec.factor
        magnitude = 1.0
        if isinstance(scaling, Llama3Scaling):
            frequencies_R = _scale_like_llama3(frequencies_R, scaling)
        elif isinstance(scaling, YarnScaling):
            frequencies_R, magnitude = _scale_like_yarn(frequencies_R, scaling, self.spec), scaling.magnitude
        angles_LR = torch.arange(self.positions).float()[:, None] * frequencies_R
        self.cos, self.sin = angles_LR.cos() * magnitude, angles_LR.sin() * magnitude

    def forward(self, positions_T: Tensor) -> tuple[Tensor, Tensor]:
        """int32 [T] → cosines and sines, float32 [T, R] each."""
        return self.cos[positions_T], self.sin[positions_T]


def _scale_like_llama3(frequencies_R: Tensor, scaling: Llama3Scaling) -> Tensor:
    turns_R = scaling.original / (2 * math.pi / frequencies_R)
    smooth_R = ((turns_R - scaling.low) / (scaling.high - scaling.low)).clamp(0, 1)
    return (1 - smooth_R) * frequencies_R / scaling.factor + smooth_R * frequencies_R


def _scale_like_yarn(frequencies_R: Tensor, scaling: YarnScaling, spec: RopeSpec) -> Tensor:
    def dimension(turns: float) -> float:
        """The dimension that turns so often within the original length."""
        return spec.dims * math.log(scaling.original / (turns * 2 * math.pi)) / (2 * math.log(spec.base))

    low, high = dimension(scaling.fast), dimension(scaling.slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, spec.dims - 1)
    span = high - low if high != low else 0.001
    ramp_R = ((torch.arange(len(frequencies_R)).float() - low) / span).clamp(0, 1)
    return frequencies_R / scaling.factor * ramp_R + frequencies_R * (1 - ramp_R)


def rotate(x_TNH: Tensor, cos_TR: Tensor, sin_TR: Tensor) -> Tensor:
    """Rotate the first 2 R values of each head, pairing value i with value i + R; in float32, rounded once."""
    half = cos_TR.shape[1]
    a_TNR, b_TNR, rest_TNH = x_TNH[..., :half].float(), x_TNH[..., half : 2 * half].float(), x_TNH[..., 2 * half :]
    cos, sin = cos_TR[:, None], sin_TR[:, None]
    rotated = torch.cat((a_TNR * cos - b_TNR * sin, b_TNR * cos + a_TNR * sin), dim=-1).to(x_TNH.dtype)
    return torch.cat((rotated, rest_TNH), dim=-1) if rest_TNH.shape[-1] else rotated
