"""Fingerprints of embeddings."""

import pytest
import torch

from toolkit.decoding.fingerprint import fingerprints


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_equal_embeddings_have_equal_fingerprints_and_others_do_not(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    embeds = torch.randn(50, 24).to(dtype)
    found = fingerprints(embeds)
    assert found.shape == (50, 4)
    assert len({row.tobytes() for row in found}) == 50
    assert (fingerprints(embeds.clone()) == found).all()
    assert (fingerprints(embeds[20:30]) == found[20:30]).all()
    for place in (0, 11, 23):  # the least change of one value, wherever it is
        changed = embeds.clone()
        bits = changed.view(torch.int32 if dtype == torch.float32 else torch.int16)
        bits[:, place] ^= 1
        assert (fingerprints(changed) != found).all()


def test_the_order_of_values_and_their_signs_count() -> None:
    embeds = torch.randn(1, 8)
    found = fingerprints(embeds)
    assert (fingerprints(embeds.flip(1)) != found).all()
    assert (fingerprints(-embeds) != found).all()
    assert (fingerprints(torch.zeros(1, 8)) != fingerprints(-torch.zeros(1, 8))).all()


def test_views_and_many_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    wide = torch.randn(30, 20)
    found = fingerprints(wide[:, 3:11])
    assert (fingerprints(wide[:, 3:11].contiguous()) == found).all()
    monkeypatch.setattr("toolkit.decoding.fingerprint._ROWS", 7)
    assert (fingerprints(wide[:, 3:11]) == found).all()


def test_another_process_has_others() -> None:
    """The multipliers are drawn at random: no input can be made for them."""
    import subprocess
    import sys

    code = (
        "import torch; from toolkit.decoding.fingerprint import fingerprints; print(fingerprints(torch.ones(1, 4))[0])"
    )
    first, second = (subprocess.run([sys.executable, "-c", code], capture_output=True, check=True) for _ in range(2))
    assert first.stdout != second.stdout
