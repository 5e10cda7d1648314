"""What attention scores know of the distance between two tokens, shared by all layers.

A distance is the query's position minus the key's. Tables have a column for each distance from 1 - L to L - 1,
where L is the longest sequence, so that nothing depends on the length of a batch.
Shape suffixes: R = 2 L - 1 distances, N heads, B buckets, D hidden size.
"""

import math

import torch
from torch import Tensor, nn

from toolkit.nn.norm import build_norm
from toolkit.spec import AlibiSpec, BucketBiasSpec, DisentangledSpec, DistanceSpec

__all__ = ["AlibiBias", "BucketBias", "DistanceTable", "alibi_slopes", "build_distance", "log_buckets", "t5_buckets"]


def _distances(longest: int) -> Tensor:
    return torch.arange(1 - longest, longest)


def t5_buckets(distances: Tensor, buckets: int, max_distance: int) -> Tensor:
    """T5's bucket of each distance: half the buckets for either sign; of these, half exact and half logarithmic."""
    half, size = buckets // 2, distances.abs()
    exact = half // 2
    far = torch.log(size.float() / exact) / math.log(max_distance / exact) * (half - exact)
    logarithmic = (exact + far.clamp(min=0).long()).clamp(max=half - 1)
    return torch.where(size < exact, size, logarithmic) + half * (distances < 0)


def log_buckets(distances: Tensor, buckets: int, max_distance: int) -> Tensor:
    """DeBERTa's signed bucket of each distance: exact up to half the buckets, logarithmic beyond."""
    middle = buckets // 2
    size = distances.abs().clamp(min=middle - 1)
    far = torch.log(size / middle) / torch.log(torch.tensor((max_distance - 1) / middle)) * (middle - 1)
    logarithmic = (torch.ceil(far) + middle) * distances.sign()
    return torch.where(size <= middle, distances, logarithmic.long())


def alibi_slopes(heads: int) -> Tensor:
    """Slopes of ALiBi: a geometric series for powers of two, filled up from the next one's odd places."""

    def series(count: int) -> list[float]:
        start = 2 ** (-8 / count)
        return [start ** (k + 1) for k in range(count)]

    power = 1 << (heads.bit_length() - 1)
    return torch.tensor(series(power) + series(2 * power)[::2][: heads - power])


class BucketBias(nn.Module):
    """A learned number for each bucket and head."""

    def __init__(self, spec: BucketBiasSpec, heads: int, longest: int) -> None:
        super().__init__()
        self.spec, self.longest = spec, longest
        self.table = nn.Embedding(spec.buckets, heads)
        self.register_buffer("bucket_of", torch.empty(2 * longest - 1, dtype=torch.int32), persistent=False)

    def compute_buffers(self) -> None:
        """Fill the map from distances to buckets."""
        buckets = t5_buckets(_distances(self.longest), self.spec.buckets, self.spec.max_distance)
        self.bucket_of = buckets.to(torch.int32)

    def forward(self) -> Tensor:
        """The bias of each head by distance, float32 [N, R]."""
        return self.table(self.bucket_of).T.float().contiguous()


class AlibiBias(nn.Module):
    """Minus slope × |distance|; nothing is learned."""

    def __init__(self, heads: int, longest: int) -> None:
        super().__init__()
        self.heads, self.longest = heads, longest
        self.register_buffer("bias", torch.empty(heads, 2 * longest - 1), persistent=False)

    def compute_buffers(self) -> None:
        """Fill the table."""
        self.bias = -alibi_slopes(self.heads)[:, None] * _distances(self.longest).abs()

    def forward(self) -> Tensor:
        """The bias of each head by distance, float32 [N, R]."""
        return self.bias


class DistanceTable(nn.Module):
    """DeBERTa's embedded distances, from which each layer computes its own terms."""

    def __init__(self, spec: DisentangledSpec, hidden: int, longest: int) -> None:
        super().__init__()
        self.spec, self.longest = spec, longest
        self.weight = nn.Parameter(torch.empty(2 * spec.span, hidden))
        self.norm = build_norm(hidden, spec.norm) if spec.norm is not None else nn.Identity()
        self.register_buffer("bucket_of", torch.empty(2 * longest - 1, dtype=torch.int32), persistent=False)

    def compute_buffers(self) -> None:
        """Fill the map from distances to rows of the table."""
        spec, distances = self.spec, _distances(self.longest)
        if spec.buckets > 0:
            distances = log_buckets(distances, spec.buckets, spec.max_distance)
        self.bucket_of = (distances + spec.span).clamp(0, 2 * spec.span - 1).to(torch.int32)

    def forward(self) -> Tensor:
        """The rows of the table, normalised: [B, D]."""
        return self.norm(self.weight)


def build_distance(spec: DistanceSpec, hidden: int, heads: int, longest: int) -> nn.Module:
    """Build the module that a DistanceSpec describes."""
    match spec:
        case BucketBiasSpec():
            return BucketBias(spec, heads, longest)
        case AlibiSpec():
            return AlibiBias(heads, longest)
        case DisentangledSpec():
            return DistanceTable(spec, hidden, longest)
