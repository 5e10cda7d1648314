"""The CUDA kernels of a paged cache against attention written out in float64."""

import pytest
import torch

from tests.attention.paged import STEPS, check_step
from toolkit.attention import Backend
from toolkit.attention.paged import PAGED_BACKENDS

TOLERANCE = {torch.float32: 1e-5, torch.float16: 6e-3, torch.bfloat16: 4e-2}
CASES = [(backend, dtype) for backend in PAGED_BACKENDS if backend.device == "cuda" for dtype in backend.dtypes]


@pytest.mark.parametrize("softcap", [0.0, 0.5, 50.0])
@pytest.mark.parametrize("reach", [-1, 0, 5, 64])
@pytest.mark.parametrize("name", STEPS)
@pytest.mark.parametrize(("backend", "dtype"), CASES, ids=lambda v: getattr(v, "name", str(v)))
def test_equals_attention_written_out(
    backend: Backend, dtype: torch.dtype, name: str, reach: int, softcap: float
) -> None:
    """B3, I2, K3: shuffled pages, garbage elsewhere in cache and tables, NaN in the tail, sequences without tokens."""
    if backend.why_unavailable() is not None:
        pytest.skip(str(backend.why_unavailable()))
    if softcap and "capped" not in backend.scores:
        pytest.skip("refused")
    assert check_step(backend.load(), STEPS[name], reach, dtype, "cuda", softcap) < TOLERANCE[dtype]
