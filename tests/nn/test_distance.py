"""Buckets, slopes and tables against the references' functions and the published rules, element by element."""

import math
from typing import TypeVar

import pytest
import torch
from torch import Tensor
from transformers.models.deberta_v2.modeling_deberta_v2 import make_log_bucket_position
from transformers.models.t5.modeling_t5 import T5Attention

from toolkit.nn.attention import match_rows
from toolkit.nn.distance import AlibiBias, BucketBias, DistanceTable, alibi_slopes, log_buckets, t5_buckets
from toolkit.spec import BucketBiasSpec, DisentangledSpec, NormSpec

DISTANCES = torch.arange(-1300, 1301)


@pytest.mark.parametrize(
    ("buckets", "farthest"),
    [(b, f) for b in (2, 3, 4, 8, 9, 16, 31, 64, 256) for f in (20, 64, 128, 511, 512, 1024) if b // 2 < f - 1],
)
def test_log_buckets_are_debertas(buckets: int, farthest: int) -> None:
    """I5, for distances beyond the farthest too; the sign is kept, so that both ways round share a table."""
    theirs = make_log_bucket_position(DISTANCES, buckets, farthest).long()
    ours = log_buckets(DISTANCES, buckets, farthest)
    assert torch.equal(ours, theirs)
    assert torch.equal(ours, -ours.flip(0))


@pytest.mark.parametrize(
    ("buckets", "farthest"),
    [(b, f) for b in (8, 12, 16, 32, 34, 64) for f in (16, 20, 64, 128, 129, 1000) if b // 4 < f],
)
def test_t5_buckets_are_t5s(buckets: int, farthest: int) -> None:
    """The reference's distance is the key's position minus the query's."""
    theirs = T5Attention._relative_position_bucket(-DISTANCES, True, buckets, farthest)
    assert torch.equal(t5_buckets(DISTANCES, buckets, farthest), theirs)


def published_slopes(heads: int) -> list[float]:
    """Press et al., 2021: 2^(-8/n), its square, …; else those of the power below and every other one of the next."""
    if math.log2(heads).is_integer():
        return [2 ** (-8 * (k + 1) / heads) for k in range(heads)]
    below = 2 ** math.floor(math.log2(heads))
    return published_slopes(below) + published_slopes(2 * below)[0::2][: heads - below]


@pytest.mark.parametrize("heads", range(1, 17))
def test_alibi_slopes_are_the_published_ones(heads: int) -> None:
    """I4: head counts that are not powers of two among them."""
    slopes = alibi_slopes(heads)
    assert slopes.dtype == torch.float32
    torch.testing.assert_close(slopes, torch.tensor(published_slopes(heads)), rtol=1e-6, atol=0)


def test_alibi_slopes_by_hand() -> None:
    assert alibi_slopes(2).tolist() == [2**-4, 2**-8]
    assert alibi_slopes(8).tolist() == [2**-k for k in range(1, 9)]
    assert alibi_slopes(6).tolist() == [2**-2, 2**-4, 2**-6, 2**-8, 2**-1, 2**-3]


M = TypeVar("M", AlibiBias, BucketBias, DistanceTable)


def filled(module: M) -> M:
    module.compute_buffers()
    return module


def by_pairs(table_R: Tensor, length: int) -> Tensor:
    """A table by distance as the backends read it: query minus key, distance 0 in the middle."""
    places = torch.arange(length)
    return table_R[..., places[:, None] - places[None, :] + table_R.shape[-1] // 2]


def test_alibi_bias_is_symmetric() -> None:
    """I4: a causal-style bias would favour one side."""
    bias_NR = filled(AlibiBias(6, 9))()
    places = torch.arange(5)
    expected = -alibi_slopes(6)[:, None, None] * (places[:, None] - places[None, :]).abs()
    assert torch.equal(by_pairs(bias_NR, 5), expected)
    assert bias_NR.shape == (6, 17)


def test_bucket_bias_is_t5s() -> None:
    module = filled(BucketBias(BucketBiasSpec(buckets=8, max_distance=16), 3, 40))
    bucket_of = T5Attention._relative_position_bucket(
        torch.arange(40)[None, :] - torch.arange(40)[:, None], True, 8, 16
    )
    assert torch.equal(by_pairs(module(), 40), module.table.weight[bucket_of].permute(2, 0, 1))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("tokens", [0, 1, 7])
def test_rows_are_matched_into_contiguous_memory(tokens: int, dtype: torch.dtype) -> None:
    """The GPU's kernel computes addresses from the shape alone."""
    draw = torch.Generator().manual_seed(0)
    qkv = torch.randn(tokens, 15, 8, generator=draw, dtype=torch.float64).to(dtype)
    rows = torch.randn(16, 3, 5, 8, generator=draw, dtype=torch.float64).to(dtype)[:, 1]
    x = qkv[:, 5:10]
    matched = match_rows(x, rows)
    assert (matched.shape, matched.dtype, matched.is_contiguous()) == ((tokens, 5, 16), dtype, True)
    exact = torch.einsum("tnh,bnh->tnb", x.double(), rows.double())
    torch.testing.assert_close(matched.double(), exact, rtol=0, atol=20 * torch.finfo(dtype).eps)


@pytest.mark.parametrize(("buckets", "span"), [(8, 8), (0, 20)])
def test_distance_table_clamps_like_deberta(buckets: int, span: int) -> None:
    """I5: distances beyond the table's rows share the last one on either side."""
    spec = DisentangledSpec(
        span=span, buckets=buckets, max_distance=20, c2p=True, p2c=True, shared=False, norm=NormSpec(eps=1e-3)
    )
    module = filled(DistanceTable(spec, 6, 60))
    distance = torch.arange(60)[:, None] - torch.arange(60)[None, :]
    rows = make_log_bucket_position(distance, buckets, 20).long() if buckets else distance
    assert isinstance(module.bucket_of, Tensor)
    assert torch.equal(by_pairs(module.bucket_of, 60).long(), (rows + span).clamp(0, 2 * span - 1))
    assert module.weight.shape == (2 * span, 6)
