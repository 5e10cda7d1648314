from dataclasses import replace

import pytest
import torch

from tests.attention.reference import dense, extras, offsets_of
from toolkit.attention import BACKENDS, Backend, choose_backend, sdpa
from toolkit.errors import UnsupportedError
from toolkit.spec import AlibiSpec, AttentionSpec

CPU = torch.device("cpu")
SPEC = AttentionSpec(heads=4, kv_heads=4, head_dim=8, scale=0.3, causal=False, bias=True, out_bias=True)


CASES = [[5], [1, 1, 7], [3, 3, 3, 0, 2, 2], [0, 0, 4, 4, 1], [64, 64, 63]]


def longest(n: int = 64) -> torch.Tensor:
    return torch.tensor([n], dtype=torch.int32)


def random_qkv(total: int, kv_heads: int) -> list[torch.Tensor]:
    draw = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(total, n, 8, generator=draw) for n in (4, kv_heads, kv_heads))
    return [3 * q, 2 * k, v]


@pytest.mark.parametrize("reach", [-1, 0, 1, 2, 5, 62, 63, 64])
@pytest.mark.parametrize("kv_heads", [4, 2, 1])
@pytest.mark.parametrize("lengths", CASES)
def test_sdpa_within_sequences(lengths: list[int], kv_heads: int, reach: int) -> None:
    """B2, B3, I1: unusual scale, distinct kv heads, runs of equal length, empty sequences, windows."""
    q, k, v = random_qkv(sum(lengths), kv_heads)
    out = sdpa.attend(q, k, v, offsets_of(lengths), longest(), 0.3, reach)
    assert (out - dense(q, k, v, lengths, 0.3, reach=reach)).abs().max() < 1e-5


@pytest.mark.parametrize("reach", [-1, 40])
@pytest.mark.parametrize("lengths", CASES)
def test_sdpa_with_tokens_that_are_not_attended_to(lengths: list[int], reach: int) -> None:
    """They see the others, and get results of their own."""
    q, k, v = random_qkv(sum(lengths), 2)
    keys = [min(n, max(1, n - 3 * (number % 2 + 1))) for number, n in enumerate(lengths)]
    given = torch.tensor(keys, dtype=torch.int32)
    out = sdpa.attend(q, k, v, offsets_of(lengths), longest(), 0.3, reach, given)
    expected = dense(q, k, v, lengths, 0.3, reach=reach, keys=keys)
    assert (out - expected).abs().max() < 1e-5
    assert keys == lengths or (out - dense(q, k, v, lengths, 0.3, reach=reach)).abs().max() > 0.01
    out = sdpa.attend(q, k, v, offsets_of(lengths), longest(), 0.3, reach, given, True)
    assert (out - dense(q, k, v, lengths, 0.3, reach=reach, keys=keys, causal=True)).abs().max() < 1e-5


@pytest.mark.parametrize("reach", [-1, 0, 1, 5, 62, 63, 64])
@pytest.mark.parametrize("kv_heads", [4, 2])
@pytest.mark.parametrize("lengths", CASES)
def test_sdpa_without_what_comes_later(lengths: list[int], kv_heads: int, reach: int) -> None:
    """B3, B4: a window then reaches to one side only."""
    q, k, v = random_qkv(sum(lengths), kv_heads)
    out = sdpa.attend(q, k, v, offsets_of(lengths), longest(), 0.3, reach, None, True)
    assert (out - dense(q, k, v, lengths, 0.3, reach=reach, causal=True)).abs().max() < 1e-5


@pytest.mark.parametrize("softcap", [0.05, 0.5, 50.0])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("reach", [-1, 0, 5, 63])
@pytest.mark.parametrize("lengths", CASES)
def test_sdpa_with_capped_scores(lengths: list[int], reach: int, causal: bool, softcap: float) -> None:
    """I2: capped before the mask, in every combination with windows, causality and keys that are left out."""
    q, k, v = random_qkv(sum(lengths), 2)
    args = (q, k, v, offsets_of(lengths), longest(), 0.3, reach)
    plain = {"reach": reach, "causal": causal}
    out = sdpa.attend(*args, None, causal, softcap)
    assert (out - dense(q, k, v, lengths, 0.3, **plain, softcap=softcap)).abs().max() < 1e-5
    assert reach == 0 or softcap == 50.0 or (out - dense(q, k, v, lengths, 0.3, **plain)).abs().max() > 0.01
    keys = [min(n, max(1, n - 2)) for n in lengths]
    if reach in (-1, 5):  # every token reaches one of them
        out = sdpa.attend(*args, torch.tensor(keys, dtype=torch.int32), causal, softcap)
        assert (out - dense(q, k, v, lengths, 0.3, **plain, keys=keys, softcap=softcap)).abs().max() < 1e-5


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
def test_capped_scores_are_no_less_exact_than_others(dtype: torch.dtype) -> None:
    """M1: float64 stays float64; 16 bits are computed in float32 and rounded once."""
    q, k, v = (x.to(dtype) for x in random_qkv(65, 2))
    out = sdpa.attend(q, k, v, offsets_of([1, 64]), longest(), 0.3, -1, None, True, 0.5)
    expected = dense(q, k, v, [1, 64], 0.3, causal=True, softcap=0.5)
    assert out.dtype == dtype
    assert torch.allclose(
        out.double(), expected, rtol=torch.finfo(dtype).eps, atol=4e-8 if dtype.itemsize == 2 else 1e-14
    )


def test_no_softcap_is_none() -> None:
    """I2: bit for bit what it was."""
    q, k, v = random_qkv(7, 2)
    args = (q, k, v, offsets_of([7]), longest(), 0.3, -1)
    assert torch.equal(sdpa.attend(*args, None, True, 0.0), sdpa.attend(*args, None, True))


@pytest.mark.parametrize("kind", ["bias", "content_q", "content_k", "disentangled"])
@pytest.mark.parametrize("lengths", CASES)
def test_sdpa_with_distances(lengths: list[int], kind: str) -> None:
    """I5: the sign of the distance, and which side's table is read, show in every entry."""
    total = sum(lengths)
    q, k, v = random_qkv(total, 2)
    tables = extras(kind, total, 4, 64, torch.float32)
    expected = dense(q, k, v, lengths, 0.3, **tables)
    args = (q, k, v, offsets_of(lengths), longest(), 0.3)
    if kind == "bias":
        out = sdpa.attend_biased(*args, tables["bias"])
    else:
        content = (tables.get("content_q"), tables.get("content_k"))
        out = sdpa.attend_disentangled(*args, *content, tables["bucket_of"])
    assert (out - expected).abs().max() < 1e-5


def test_rows_beyond_the_last_sequence_reach_nothing() -> None:
    """B2: the tail may hold NaN."""
    q, k, v = (torch.randn(9, 4, 8) for _ in range(3))
    offsets = torch.tensor([0, 3, 5, 5, 5], dtype=torch.int32)
    clean = sdpa.attend(q, k, v, offsets, longest(), 0.3, -1)[:5]
    for x in (q, k, v):
        x[5:] = float("nan")
    assert torch.equal(sdpa.attend(q, k, v, offsets, longest(), 0.3, -1)[:5], clean)


@pytest.mark.parametrize("backend", BACKENDS, ids=lambda backend: backend.name)
def test_every_backend_is_traceable(backend: Backend) -> None:
    """The fake implementation gives the shape of q, so that tracing needs no data."""
    with torch.device("meta"):
        q, k, v = torch.empty(7, 4, 8), torch.empty(7, 2, 8), torch.empty(7, 2, 8)
        offsets, bound = torch.empty(3, dtype=torch.int32), torch.empty(1, dtype=torch.int32)
        bias, content = torch.empty(4, 13), torch.empty(7, 4, 3)
        bucket_of = torch.empty(13, dtype=torch.int32)
    args, ops = (q, k, v, offsets, bound, 0.3), backend.load()
    assert ops.attend(*args, -1).shape == q.shape
    assert ops.attend(*args, -1, torch.empty(2, dtype=torch.int32, device="meta")).shape == q.shape
    if "bias" in backend.scores:
        assert ops.attend_biased(*args, bias).shape == q.shape
    if "disentangled" in backend.scores:
        assert ops.attend_disentangled(*args, content, None, bucket_of).shape == q.shape


def test_the_backend_is_chosen_when_a_module_is_built() -> None:
    assert choose_backend([SPEC], CPU, torch.float32)[0] == "sdpa"


@pytest.mark.parametrize(
    ("spec", "device", "dtype", "name", "reason"),
    [
        (
            replace(SPEC, causal=True, distance=AlibiSpec()),
            "cpu",
            torch.float32,
            "auto",
            "sdpa: has no causal bias scores",
        ),
        (replace(SPEC, causal=True), "cuda", torch.bfloat16, "varlen", "varlen: has no causal plain scores"),
        (SPEC, "cpu", torch.int8, "auto", "sdpa: does not take torch.int8"),
        (SPEC, "cpu", torch.float32, "varlen", "varlen: runs on cuda only"),
        (SPEC, "cuda", torch.float32, "varlen", "varlen: does not take torch.float32"),
        (replace(SPEC, head_dim=264), "cuda", torch.bfloat16, "varlen", "varlen: head size 264 exceeds 256"),
        (replace(SPEC, head_dim=12), "cuda", torch.bfloat16, "varlen", "varlen: head size 12 is no multiple of 8"),
        (replace(SPEC, distance=AlibiSpec()), "cuda", torch.bfloat16, "varlen", "varlen: has no bias scores"),
        (replace(SPEC, reach=3), "cuda", torch.float32, "efficient", "efficient: has no window scores"),
        (replace(SPEC, reach=3, distance=AlibiSpec()), "cpu", torch.float32, "auto", "a window together with a bias"),
        (
            replace(SPEC, softcap=5.0, distance=AlibiSpec()),
            "cpu",
            torch.float32,
            "auto",
            "capped scores together with a bias",
        ),
        (replace(SPEC, softcap=5.0), "cuda", torch.float32, "efficient", "efficient: has no capped scores"),
        (replace(SPEC, softcap=5.0), "cuda", torch.bfloat16, "varlen", "varlen: has no capped scores"),
        (replace(SPEC, softcap=5.0, reach=3), "cuda", torch.bfloat16, "flash3", "flash3: has no capped scores"),
        (SPEC, "cpu", torch.float32, "nonsense", "nonsense"),
        (SPEC, "cuda", torch.float16, "flash3", "flash3: does not take torch.float16"),
        (replace(SPEC, reach=3), "cuda", torch.bfloat16, "flash3", "flash3: has no window scores"),
    ],
)
def test_an_unfit_backend_is_refused_by_name(
    spec: AttentionSpec, device: str, dtype: torch.dtype, name: str, reason: str
) -> None:
    with pytest.raises(UnsupportedError, match=reason):
        choose_backend([spec] if device == "cuda" else [SPEC, spec], torch.device(device), dtype, name)


@pytest.mark.parametrize(
    ("spec", "name", "reason"),
    [
        (replace(SPEC, reach=3), "varlen", "varlen: cannot leave keys out of window scores"),
        (SPEC, "flash3", "flash3: cannot leave keys out of plain scores"),
        (replace(SPEC, distance=AlibiSpec()), "triton", "triton: cannot leave keys out of bias scores"),
    ],
)
def test_a_backend_that_cannot_leave_keys_out_is_refused(spec: AttentionSpec, name: str, reason: str) -> None:
    with pytest.raises(UnsupportedError, match=reason):
        choose_backend([spec], torch.device("cuda"), torch.bfloat16, name, keyed=True)
    (backend,) = [backend for backend in BACKENDS if backend.name == name]
    assert "keys" not in str(backend.why_unfit(spec, torch.device("cuda"), torch.bfloat16))


def test_the_cpu_leaves_keys_out() -> None:
    for spec in (SPEC, replace(SPEC, reach=3)):
        assert choose_backend([spec], CPU, torch.float32, keyed=True)[0] == "sdpa"
