"""The CPU's attention over a paged cache against attention written out in float64."""

from dataclasses import replace

import pytest
import torch

from tests.attention.paged import STEPS, check_step
from toolkit.attention import choose_from, paged_sdpa
from toolkit.attention.paged import PAGED_BACKENDS, choose_paged_backend
from toolkit.errors import UnsupportedError
from toolkit.spec import AttentionSpec

SPEC = AttentionSpec(heads=4, kv_heads=2, head_dim=8, scale=0.3, causal=True, bias=False, out_bias=False)


@pytest.mark.parametrize("softcap", [0.0, 0.5])
@pytest.mark.parametrize("reach", [-1, 0, 5, 64])
@pytest.mark.parametrize("name", STEPS)
def test_equals_attention_written_out(name: str, reach: int, softcap: float) -> None:
    """B3, I2, K3: shuffled pages, garbage elsewhere in cache and tables, NaN in the tail, sequences without tokens."""
    assert check_step(paged_sdpa, STEPS[name], reach, torch.float32, "cpu", softcap) < 3e-6


def test_pages_side_by_side_are_not_copied() -> None:
    cache = torch.arange(5 * 4 * 2 * 3).view(5, 4, 2, 3).float()
    view = paged_sdpa._keys(cache, [1, 2, 3], 5, 11)
    assert view.data_ptr() == cache[2, 1].data_ptr()
    assert torch.equal(view, cache.flatten(0, 1)[9:15])
    assert torch.equal(paged_sdpa._keys(cache, [3, 1], 2, 6), torch.cat((cache[3, 2:], cache[1, :2])))


def test_a_backend_is_chosen_or_refused_by_name() -> None:
    cpu = torch.device("cpu")
    assert choose_paged_backend([SPEC], cpu, torch.float32) == ("sdpa", paged_sdpa)
    with pytest.raises(UnsupportedError, match="triton: runs on cuda only"):
        choose_paged_backend([SPEC], cpu, torch.float32, "triton")


def test_a_backend_that_cannot_cap_scores_is_refused_by_name() -> None:
    """I2."""
    cpu, capped = torch.device("cpu"), replace(SPEC, softcap=5.0, reach=3)
    assert choose_paged_backend([SPEC, capped], cpu, torch.float32) == ("sdpa", paged_sdpa)
    without = [replace(backend, scores=("plain", "window")) for backend in PAGED_BACKENDS]
    with pytest.raises(UnsupportedError, match="sdpa: has no capped scores"):
        choose_from(without, [SPEC, capped], cpu, torch.float32, "auto")
