"""The gate of decoders holds over the registry, and fails for planted faults."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import toolkit
from tests.tiny import decoder_recipes, make_decoder
from toolkit.decoding import request
from toolkit.nn import decoder
from toolkit.parity import verify_folder
from toolkit.recipe import Recipe
from toolkit.registry import find_recipe

WAYS = {"alone", "batched", "in chunks", "whole prompts, no cache", "from the cache"}


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("recipe", decoder_recipes(), ids=lambda recipe: recipe.label)
def test_every_decoder_passes(recipe: Recipe, tied: bool, tmp_path: Path) -> None:
    """ids, embeds and mixed; states, logits and greedy tokens, however requests are scheduled."""
    checkpoint = make_decoder(tmp_path / "checkpoint", recipe, tied=tied)
    manifest = toolkit.convert(str(checkpoint), tmp_path / "out", verify=False).manifest
    assert manifest.task == "generate"
    assert manifest.ends == (3,)
    report = verify_folder(tmp_path / "out", checkpoint, device="cpu", modes=["eager"])
    assert report.passed, report.summary()
    greedy = {(c.path, c.company) for c in report.cells if c.quantity == "greedy tokens"}
    assert greedy == {(path, way) for path in ("ids", "embeds", "mixed") for way in WAYS}
    assert {c.path for c in report.cells if c.quantity == "logits"} == {"ids", "embeds", "mixed"}


def test_compiled_and_replayed_pass_too(tmp_path: Path) -> None:
    """J1, J2: what ran off the graphs, and what was compiled anew, would be counted."""
    checkpoint = make_decoder(tmp_path / "checkpoint", find_recipe("qwen3").recipe)
    report = toolkit.convert(str(checkpoint), tmp_path / "out", device="cpu").parity
    assert report.passed, report.summary()
    assert {cell.mode for cell in report.cells} == {"eager", "compile", "graph"}
    assert sum(cell.quantity == "off-graph runs" for cell in report.cells) == 2


def failed(folder: Path, checkpoint: Path) -> set[str]:
    report = verify_folder(folder, checkpoint, device="cpu", modes=["eager"])
    return {f"{c.quantity} {c.company}" for c in report.cells if not c.passed}


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("llama")
    make_decoder(folder / "checkpoint", find_recipe("llama").recipe, tied=False)
    toolkit.convert(str(folder / "checkpoint"), folder / "out", verify=False)
    return folder / "out", folder / "checkpoint"


def test_pages_that_are_known_by_their_ids_only_are_noticed(
    llama: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """L: two requests with equal placeholders and different embeddings would share pages."""
    original = request.page_digest
    monkeypatch.setattr(request, "page_digest", lambda before, ids, is_embed, embeds: original(before, ids, None, b""))
    assert failed(*llama) & {"greedy tokens from the cache", "greedy tokens batched"}


def test_pages_in_the_wrong_place_are_noticed(llama: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    original: Any = request.Share.pages.fget  # type: ignore[attr-defined]
    monkeypatch.setattr(request.Share, "pages", property(lambda share: np.roll(original(share), 1)))
    assert {f"greedy tokens {way}" for way in WAYS} <= failed(*llama)


def test_a_page_that_is_shared_too_far_is_noticed(llama: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """A digest that forgets what came before the page."""
    original = request.page_digest
    monkeypatch.setattr(
        request, "page_digest", lambda before, ids, is_embed, embeds: original(b"", ids * 0, is_embed, embeds)
    )
    assert "greedy tokens from the cache" in failed(*llama)


def test_logits_of_another_row_are_noticed(llama: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    original = decoder.Decoder._layers

    def first_rows(self: Any, x: torch.Tensor, *rest: torch.Tensor) -> Any:
        states, _ = original(self, x, *rest)
        return states, self.head.per_token(states[rest[2][:-1]])

    monkeypatch.setattr(decoder.Decoder, "_layers", first_rows)
    assert "greedy tokens alone" in failed(*llama)
