"""Decoders on the GPU: parity through captured graphs, and that no replay sees what came before it."""

import random
from pathlib import Path

import pytest
import torch

import toolkit
from tests.tiny import decoder_recipes, make_decoder
from toolkit import CacheOptions, MixedPrompt, PromptEmbeds, TokenIds
from toolkit.parity import verify_folder
from toolkit.recipe import Recipe
from toolkit.registry import find_recipe


@pytest.mark.parametrize("recipe", decoder_recipes(), ids=lambda recipe: recipe.label)
def test_every_decoder_in_graphs(recipe: Recipe, tmp_path: Path) -> None:
    """bfloat16: states, logits and greedy tokens; ids, embeds and mixed; every way of scheduling."""
    checkpoint = make_decoder(tmp_path / "checkpoint", recipe)
    toolkit.convert(str(checkpoint), tmp_path / "out", dtype="bfloat16", verify=False)
    report = verify_folder(tmp_path / "out", checkpoint, device="cuda", modes=["graph"])
    assert report.passed, report.summary()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_mode(dtype: str, tmp_path: Path) -> None:
    checkpoint = make_decoder(tmp_path / "checkpoint", find_recipe("qwen3").recipe)
    report = toolkit.convert(str(checkpoint), tmp_path / "out", dtype=dtype, device="cuda").parity
    assert report.passed, report.summary()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """float32, so that a difference is no rounding."""
    folder = tmp_path_factory.mktemp("llama")
    make_decoder(folder / "checkpoint", find_recipe("llama").recipe, overrides={"max_position_embeddings": 400})
    toolkit.convert(str(folder / "checkpoint"), folder / "out", dtype="float32", verify=False)
    return folder / "out"


def test_poisoned_buffers_between_steps(folder: Path) -> None:
    """K3: random requests of all kinds, preemptions included; every static input is garbage before each step."""
    cache = CacheOptions(page=4, pages=70, requests=9)
    runner = toolkit.load(folder, device="cuda", mode="graph", batch_tokens=64, cache=cache)
    alone = toolkit.load(folder, device="cuda", mode="eager")
    draw, inputs = random.Random(0), []
    for k in range(30):
        ids = [draw.randrange(61) for _ in range(draw.choice([1, 2, 3, 4, 5, 17, 60, 150]))]
        cut = draw.randint(0, len(ids) - 1)
        rows = runner.embed_tokens(ids)
        parts = [*([TokenIds(ids[:cut])] if cut else []), PromptEmbeds(rows[cut:] + 0.1 * k)]
        inputs.append(draw.choice([TokenIds(ids), MixedPrompt(parts)]))
    original = runner.engine.step

    def step():
        assert runner.graphs is not None
        runner.graphs.poison()
        return original()

    runner.engine.step = step  # type: ignore[method-assign]
    together = runner.generate(inputs, 40, ignore_eos=True)
    for k, given in enumerate(inputs):
        assert together[k].token_ids == alone.generate(given, 40, ignore_eos=True)[0].token_ids, k
    stats = runner.stats
    assert stats.preemptions > 0
    assert stats.graph_hits > 0 < stats.embeds_graph_hits
    assert stats.eager_fallbacks == stats.recompiles == 0
    assert stats.free_pages == stats.pages


def test_the_embeds_graph_is_for_embeds_only(folder: Path) -> None:
    runner = toolkit.load(folder, device="cuda", mode="graph")
    runner.generate([TokenIds([1, 2, 3])], 5, ignore_eos=True)
    assert runner.stats.embeds_graph_hits == 0
    assert runner.stats.captured["embeds"] == []
    runner.generate([PromptEmbeds(runner.embed_tokens([1, 2, 3])), TokenIds([4, 5])], 5, ignore_eos=True)
    assert runner.stats.embeds_graph_hits == 1  # the step with the prompt; the tokens after it are ids


def test_long_prompts(folder: Path) -> None:
    """A prompt of several hundred tokens, in one step and in many, as ids and as embeddings."""
    ids = [random.Random(1).randrange(61) for _ in range(380)]
    results = []
    for tokens in (8192, 48):
        runner = toolkit.load(folder, device="cuda", mode="graph", batch_tokens=tokens, cache=CacheOptions(requests=16))
        given = [TokenIds(ids), PromptEmbeds(runner.embed_tokens(ids))]
        results += [x.token_ids for x in runner.generate(given, 16, ignore_eos=True)]
    assert results == [results[0]] * 4


def test_sampling_is_the_same_on_both_devices(folder: Path) -> None:
    settings = {"temperature": 1.3, "top_k": 20, "top_p": 0.9, "seed": 5, "repetition_penalty": 1.2, "ignore_eos": True}
    cuda, cpu = (toolkit.load(folder, device=device, mode="eager") for device in ("cuda", "cpu"))
    a, b = (runner.generate(["the quick brown", "a b c"], 24, **settings) for runner in (cuda, cpu))
    assert [x.token_ids for x in a] == [x.token_ids for x in b]
    assert torch.cuda.is_available()
