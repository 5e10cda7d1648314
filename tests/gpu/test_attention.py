"""Every CUDA backend against attention written out in float64."""

from typing import Any

import pytest
import torch

from tests.attention.reference import dense, extras, offsets_of
from toolkit.attention import BACKENDS, Backend

LENGTHS = [1, 2, 0, 17, 63, 64, 65, 130, 0, 256]
LONGEST = torch.tensor([256], dtype=torch.int32)
TOLERANCE = {torch.float32: 1e-5, torch.float16: 6e-3, torch.bfloat16: 4e-2}


def scores_of(kind: str) -> str:
    known = {"plain": "plain", "keys": "plain", "reach": "window", "capped": "capped", "bias": "bias"}
    return known.get(kind.split()[0], "disentangled")


def served(backend: Backend, kind: str) -> tuple[str, ...]:
    return {"keys": backend.keyed, "causal": backend.causal}.get(kind.split()[-1], backend.scores)


CASES = [
    (backend, dtype, kind)
    for backend in BACKENDS
    if backend.device == "cuda"
    for dtype in backend.dtypes
    for kind in (
        *("plain", "keys", "reach 0", "reach 4", "reach 64", "reach 64 keys"),
        *("plain causal", "reach 4 causal", "reach 64 causal"),
        *("capped", "capped keys", "capped causal", "capped reach 4", "capped reach 64 causal"),
        *("bias", "content_q", "content_k", "disentangled"),
    )
    if scores_of(kind) in served(backend, kind)
]


@pytest.mark.parametrize(("heads", "kv_heads", "size"), [(4, 2, 24)])
@pytest.mark.parametrize(("backend", "dtype", "kind"), CASES, ids=lambda v: getattr(v, "name", str(v)))
def test_equals_attention_written_out(
    backend: Backend, dtype: torch.dtype, kind: str, heads: int, kv_heads: int, size: int
) -> None:
    """B2, B3, I1, I2, I5: strided inputs, NaN in the tail, empty sequences, key/value heads of their own."""
    if backend.why_unavailable() is not None:
        pytest.skip(str(backend.why_unavailable()))
    total = sum(LENGTHS)
    torch.manual_seed(0)
    qkv = torch.randn(total + 9, heads + 2 * kv_heads, size, device="cuda").to(dtype)
    qkv[total:] = float("nan")
    q, k, v = qkv.split((heads, kv_heads, kv_heads), dim=1)
    args = (q, k, v, offsets_of([*LENGTHS, 0], "cuda"), LONGEST, 0.3)
    ops, tables = backend.load(), dict[str, Any]()
    words = kind.split()
    if words[0] in ("plain", "keys", "reach", "capped"):
        tables["reach"] = int(words[words.index("reach") + 1]) if "reach" in words else -1
        tables["softcap"] = 0.5 if "capped" in words else 0.0
        keys = None
        if kind.endswith("keys"):  # every token reaches one of them
            tables["keys"] = [min(n, max(1, n - 40)) for n in LENGTHS]
            keys = torch.tensor([*tables["keys"], 0], dtype=torch.int32, device="cuda")
        tables["causal"] = kind.endswith("causal")
        out = ops.attend(*args, tables["reach"], keys, tables["causal"], tables["softcap"])
    else:
        tables = extras(kind, total + 9, heads, 256, dtype, "cuda")
        if kind == "bias":
            out = ops.attend_biased(*args, tables["bias"])
        else:
            out = ops.attend_disentangled(*args, tables.get("content_q"), tables.get("content_k"), tables["bucket_of"])
    expected = dense(q, k, v, LENGTHS, 0.3, **tables)[:total]
    assert (out[:total].double() - expected).abs().max() < TOLERANCE[dtype]
