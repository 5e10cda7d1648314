"""The parity rule, and the one table of tolerances.

Our error against a float64 reference may be at most k times the error that transformers itself makes in the
same dtype on the same device, plus a floor: a fraction of the spacing of that dtype's numbers at the
reference's largest magnitude.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["TOLERANCES", "Tolerance", "bound", "max_abs"]


@dataclass(frozen=True, kw_only=True)
class Tolerance:
    """`factor` is k; `floor_ulps` is the floor in units of eps(dtype) × max |reference|."""

    factor: float
    floor_ulps: float


TOLERANCES: Mapping[torch.dtype, Tolerance] = {
    torch.float32: Tolerance(factor=2.0, floor_ulps=1.0),
    torch.float16: Tolerance(factor=1.5, floor_ulps=0.25),
    torch.bfloat16: Tolerance(factor=1.5, floor_ulps=0.25),
}


def max_abs(ours: Sequence[Tensor], reference: Sequence[Tensor]) -> tuple[float, int]:
    """Largest absolute difference, and the number of the tensor it is in. NaN counts as infinite.

    Raises:
        ValueError: shapes differ.
    """
    worst, where = 0.0, 0
    for number, (a, b) in enumerate(zip(ours, reference, strict=True)):
        if a.shape != b.shape:
            raise ValueError(f"case {number}: shape {tuple(a.shape)}, the reference has {tuple(b.shape)}")
        difference = (a.double().cpu() - b.double().cpu()).abs().nan_to_num(nan=float("inf"))
        error = float(difference.max()) if difference.numel() else 0.0
        if error > worst:
            worst, where = error, number
    return worst, where


def bound(dtype: torch.dtype, reference_error: float, reference: Sequence[Tensor]) -> float:
    """The largest error that the rule allows."""
    tolerance = TOLERANCES[dtype]
    magnitude = max((float(t.abs().max()) for t in reference if t.numel()), default=0.0)
    return tolerance.factor * reference_error + tolerance.floor_ulps * torch.finfo(dtype).eps * magnitude
