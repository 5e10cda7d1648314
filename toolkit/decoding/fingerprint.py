"""What stands for an embedding where contents are compared: a fingerprint that the device computes.

Reading embeddings back to digest their bytes would make the host wait for the device, page after page. Multilinear
hashing (Carter & Wegman, 1979; Lemire & Kaser, 2014) needs one pass over them where they are: Σ m_i x_i modulo 2^64, of
which the upper half counts. With multipliers drawn at random, two different embeddings agree in one such number with
probability 2^-32, whatever they are; four of them make 128 bits. The multipliers are the process's secret, so nobody
can look for embeddings that agree.

Shape suffixes: T tokens, W width of the seam, F numbers of a fingerprint.
"""

import functools
import secrets

import numpy as np
import torch
from torch import Tensor

__all__ = ["fingerprints"]

_NUMBERS, _ROWS = 4, 4096  # rows at a time, for the memory that products take


@torch.no_grad()
def fingerprints(embeds_TW: Tensor) -> np.ndarray:
    """int32 [T, F], equal for equal bits; float32 or 16-bit values on any device."""
    kind = torch.int16 if embeds_TW.dtype.itemsize == 2 else torch.int32
    multipliers = _multipliers(embeds_TW.shape[1], embeds_TW.device)
    parts: list[Tensor] = []
    for some in embeds_TW.contiguous().split(_ROWS):
        bits = some.view(kind).long()
        sums = [(bits * row[1:]).sum(dim=1) + row[0] for row in multipliers]
        parts.append((torch.stack(sums, dim=1) >> 32).int())
    return torch.cat(parts).cpu().numpy()


@functools.cache
def _secret(width: int) -> np.ndarray:
    """Random int64 [F, W + 1]."""
    return np.frombuffer(secrets.token_bytes(8 * _NUMBERS * (width + 1)), np.int64).reshape(_NUMBERS, width + 1)


@functools.cache
def _multipliers(width: int, device: torch.device) -> Tensor:
    """Where they are needed."""
    return torch.tensor(_secret(width), device=device)
