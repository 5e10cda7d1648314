"""Long runs of random requests; see `tests.decoding.soak`."""

from pathlib import Path
from typing import Any

import pytest

from tests.decoding.soak import Known, Soaked, draw_known, load_soaked, soak
from toolkit import DecoderRunner

WAYS: dict[str, tuple[str, dict[str, Any]]] = {
    "eager": ("eager", {"ahead": False}),
    "whole prompts, a step ahead": ("eager", {"ahead": True, "chunked": False}),
    "graphs, a step ahead": ("graph", {"ahead": True, "step_tokens": 20}),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("soak")


def run(folder: Path, known: list[Known], way: str, requests: int) -> tuple[DecoderRunner, Soaked]:
    mode, options = WAYS[way]
    runner = load_soaked(folder, device="cpu", mode=mode)
    runner.engine = runner.make_engine(**options)
    found = soak(runner, known, requests=requests, seed=requests)
    print(f"{way}: {found}")
    assert found.finished > 0.5 * requests
    assert min(found.cancelled, found.preemptions, found.evictions) > 0.02 * requests
    assert found.cached_tokens > 0.1 * found.prompt_tokens
    return runner, found


@pytest.fixture(scope="module")
def known(folder: Path) -> list[Known]:
    return draw_known(load_soaked(folder, device="cpu", mode="eager"), 150, seed=1)


@pytest.mark.parametrize("way", WAYS)
def test_each_request_ends_as_it_does_alone(folder: Path, known: list[Known], way: str) -> None:
    """K3, L1: ids, embeddings and both, greedy and drawn, with and without what the cache remembers."""
    runner, _ = run(folder, known, way, 400)
    assert runner.stats.eager_fallbacks == runner.stats.recompiles == 0


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_ten_thousand_requests(folder: Path, way: str) -> None:
    known = draw_known(load_soaked(folder, device="cpu", mode="eager"), 500, seed=2)
    runner, _ = run(folder, known, way, 10_000)
    assert runner.stats.eager_fallbacks == runner.stats.recompiles == 0
