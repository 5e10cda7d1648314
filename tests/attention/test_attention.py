from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from toolkit.attention import BACKENDS, choose_backend
from toolkit.attention.sdpa import attend
from toolkit.errors import UnsupportedError
from toolkit.spec import AttentionSpec

CPU = torch.device("cpu")
SPEC = AttentionSpec(heads=4, kv_heads=4, head_dim=8, scale=0.3, causal=False, bias=True)


def dense(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, offsets: list[int], scale: float) -> torch.Tensor:
    """Softmax attention within each sequence, in float64, with kv heads repeated."""
    out = torch.zeros(q.shape, dtype=torch.float64)
    groups = q.shape[1] // k.shape[1]
    for begin, end in pairwise(offsets):
        a, b, c = (x[begin:end].double().transpose(0, 1) for x in (q, k, v))
        b, c = b.repeat_interleave(groups, 0), c.repeat_interleave(groups, 0)
        out[begin:end] = ((a @ b.transpose(1, 2) * scale).softmax(-1) @ c).transpose(0, 1)
    return out


@pytest.mark.parametrize("kv_heads", [4, 2, 1])
@pytest.mark.parametrize("lengths", [[5], [1, 1, 7], [3, 3, 3, 0, 2, 2], [0, 0, 4, 4, 1], [64, 64, 63]])
def test_sdpa_within_sequences(lengths: list[int], kv_heads: int) -> None:
    """I1, B2: unusual scale, distinct kv heads, runs of equal length, empty sequences."""
    draw = torch.Generator().manual_seed(1)
    total = sum(lengths)
    q, k, v = (torch.randn(total, n, 8, generator=draw) for n in (4, kv_heads, kv_heads))
    q, k = 3 * q, 2 * k
    offsets = [0, *torch.tensor(lengths).cumsum(0).tolist()]
    out = attend(q, k, v, torch.tensor(offsets, dtype=torch.int32), torch.tensor([64], dtype=torch.int32), 0.3)
    assert (out - dense(q, k, v, offsets, 0.3)).abs().max() < 1e-5


def test_rows_beyond_the_last_sequence_reach_nothing() -> None:
    """B2: the tail may hold NaN."""
    q, k, v = (torch.randn(9, 4, 8) for _ in range(3))
    offsets = torch.tensor([0, 3, 5, 5, 5], dtype=torch.int32)
    longest = torch.tensor([9], dtype=torch.int32)
    clean = attend(q, k, v, offsets, longest, 0.3)[:5]
    for x in (q, k, v):
        x[5:] = float("nan")
    assert torch.equal(attend(q, k, v, offsets, longest, 0.3)[:5], clean)


@pytest.mark.parametrize("backend", BACKENDS, ids=lambda backend: backend.name)
def test_every_backend_is_one_traceable_op(backend: object) -> None:
    """The fake implementation gives the shape of q, so that tracing needs no data."""
    module = __import__(backend.module, fromlist=["attend"])  # type: ignore[attr-defined]
    with torch.device("meta"):
        q, k, v = torch.empty(7, 4, 8), torch.empty(7, 2, 8), torch.empty(7, 2, 8)
        offsets, longest = torch.empty(3, dtype=torch.int32), torch.empty(1, dtype=torch.int32)
    assert module.attend(q, k, v, offsets, longest, 0.3).shape == q.shape


def test_the_backend_is_chosen_when_a_module_is_built() -> None:
    assert choose_backend(SPEC, CPU, torch.float32)[0] == "sdpa"


@pytest.mark.parametrize(
    ("spec", "device", "dtype", "name", "reason"),
    [
        (replace(SPEC, causal=True), "cpu", torch.float32, "auto", "sdpa: causal"),
        (SPEC, "cpu", torch.int8, "auto", "sdpa: does not take torch.int8"),
        (SPEC, "cpu", torch.float32, "varlen", "varlen: runs on cuda only"),
        (SPEC, "cuda", torch.float32, "varlen", "varlen: does not take torch.float32"),
        (replace(SPEC, head_dim=264), "cuda", torch.bfloat16, "varlen", "varlen: head size 264 exceeds 256"),
        (replace(SPEC, head_dim=12), "cuda", torch.bfloat16, "varlen", "varlen: head size 12 is no multiple of 8"),
        (SPEC, "cpu", torch.float32, "nonsense", "nonsense"),
    ],
)
def test_an_unfit_backend_is_refused_by_name(
    spec: AttentionSpec, device: str, dtype: torch.dtype, name: str, reason: str
) -> None:
    with pytest.raises(UnsupportedError, match=reason):
        choose_backend(spec, torch.device(device), dtype, name)
