"""Greedy tokens are those of transformers: however a prompt is given, run and scheduled, and whatever its length."""

from pathlib import Path
from typing import Any

import pytest
import torch

import toolkit
from tests.decoding.reference import Greedy
from tests.tiny import decoder_recipes, make_decoder
from toolkit import CacheOptions, DecoderRunner, PromptEmbeds
from toolkit.parity.cases import PATHS
from toolkit.recipe import Recipe
from toolkit.registry import find_recipe

PAGE, LONG, NEW = 8, 300, 12
LENGTHS = (1, 2, PAGE - 1, PAGE, PAGE + 1, 3 * PAGE + 5, LONG)
CHUNK = 45  # tokens of a step: prompts are cut within a page, and there are others beside them
COMPANY = {"ids": ("ids",), "embeds": ("embeds",), "mixed": ("mixed",), "all three": PATHS}


def longer(recipe: Recipe) -> dict[str, int]:
    """What makes the tiny configuration take long prompts."""
    return {"n_positions" if "n_positions" in recipe.tiny else "max_position_embeddings": LONG + 2 * NEW}


def make(folder: Path, recipe: Recipe) -> tuple[Path, Path]:
    """Checkpoint and artifact. With a tied head a tiny model repeats one token, which tells nothing."""
    source = make_decoder(folder / "source", recipe, tied=False, overrides=longer(recipe))
    toolkit.convert(str(source), folder / "out", verify=False)
    return source, folder / "out"


def load(folder: Path, mode: str) -> DecoderRunner:
    cache = CacheOptions(page=PAGE, requests=len(PATHS) * len(LENGTHS))
    runner: Any = toolkit.load(folder, device="cpu", mode=mode, batch_tokens=512, cache=cache)
    return runner


def set_engine(runner: DecoderRunner, *, chunked: bool, caching: bool) -> None:
    runner.engine = runner.make_engine(chunked=chunked, caching=caching, step_tokens=CHUNK if chunked else None)


@pytest.fixture(scope="module", params=["llama", "gemma2"])
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Greedy]:
    """Gemma 2 has windows, capped scores and capped logits."""
    source, out = make(tmp_path_factory.mktemp(request.param), find_recipe(request.param).recipe)
    return out, Greedy(source, toolkit.load(out, device="cpu", mode="eager").artifact.manifest.spec, LENGTHS, NEW)


@pytest.fixture(scope="module", params=["eager", "compile", "graph"])
def runner(request: pytest.FixtureRequest, made: tuple[Path, Greedy]) -> DecoderRunner:
    """Compiled once for all tests of the module."""
    return load(made[0], request.param)


@pytest.fixture
def expected(made: tuple[Path, Greedy]) -> Greedy:
    return made[1]


@pytest.mark.parametrize("company", COMPANY)
@pytest.mark.parametrize("caching", [True, False], ids=["cached", "uncached"])
@pytest.mark.parametrize("chunked", [True, False], ids=["chunked", "whole"])
def test_tokens_are_those_of_transformers(
    runner: DecoderRunner, expected: Greedy, chunked: bool, caching: bool, company: str
) -> None:
    """J2, L1: prompts of every length in one batch; again, what the cache remembers; nothing is compiled anew."""
    set_engine(runner, chunked=chunked, caching=caching)
    paths, before = COMPANY[company], runner.stats
    for _ in range(2):
        assert expected.wrong(runner.generate(expected.inputs(*paths), NEW, ignore_eos=True), *paths) == []
    stats, full = runner.stats, sum((length - 1) // PAGE * PAGE for length in LENGTHS) * len(paths)
    assert stats.cached_tokens == (full if caching else 0), "the second time all full pages, the first time none"
    assert stats.eager_fallbacks == stats.recompiles == 0
    assert stats.free_pages == stats.pages
    if runner.mode == "graph":
        hits = stats.graph_hits - before.graph_hits, stats.embeds_graph_hits - before.embeds_graph_hits
        assert sum(hits) == stats.steps
        assert (hits[1] > 0) == (company != "ids"), "ids never pay for embeddings"


@pytest.mark.parametrize("caching", [True, False], ids=["cached", "uncached"])
@pytest.mark.parametrize("chunked", [True, False], ids=["chunked", "whole"])
def test_prompts_alone(runner: DecoderRunner, expected: Greedy, chunked: bool, caching: bool) -> None:
    """J2: one sequence a step, of one token and of many; a long prompt takes as many steps as it is cut into."""
    for path in PATHS:
        found: list[Any] = []
        for length, prompt in zip(LENGTHS, expected.inputs(path), strict=True):
            set_engine(runner, chunked=chunked, caching=caching)
            found += runner.generate(prompt, NEW, ignore_eos=True)
            assert runner.stats.steps == NEW - 1 + (-(-length // CHUNK) if chunked else 1)
        assert expected.wrong(found, path) == []
    assert runner.stats.eager_fallbacks == runner.stats.recompiles == 0


def test_lookups_and_layers_are_in_the_compiled_graphs(runner: DecoderRunner, expected: Greedy) -> None:
    """J1: each way to run a prompt goes through the one graph of its kind, which is whole from the token table on."""
    set_engine(runner, chunked=True, caching=False)
    calls = {path: expected.inputs(path)[:2] for path in ("ids", "embeds")}
    for prompts in calls.values():
        assert len(runner.generate(prompts, 2)) == len(runner.token_states(prompts)) == len(runner.logits(prompts)) == 2
        assert list(runner.stream(prompts, 2))
    runner.warm_up()
    if runner.mode == "eager":
        assert runner._compiled == {}
        return
    assert set(runner._compiled) == {"forward_ids", "forward_embeds"}
    for entry in runner._compiled.values():
        assert entry.compilations == 1
        assert entry.graph is not None
        (lookup,) = (node for node in entry.graph.nodes if node.target is torch.nn.functional.embedding)
        assert "embeddings" in str(lookup.args[1])
        attention = [node for node in entry.graph.nodes if "paged" in str(node.target)]
        assert len(attention) == len(runner.artifact.manifest.spec.schedule)


def test_the_reference_is_sure_of_its_tokens(expected: Greedy) -> None:
    """Else nothing would be compared; nor if they were all the same."""
    assert expected.sure > 0.9
    assert expected.variety > 3


@pytest.mark.parametrize("recipe", decoder_recipes(), ids=lambda recipe: recipe.label)
def test_every_decoder_takes_long_prompts(recipe: Recipe, tmp_path: Path) -> None:
    """L1: several hundred tokens, and the seam is the reference's own table; the parity gate has the short ones."""
    source, out = make(tmp_path, recipe)
    runner = load(out, "eager")
    expected = Greedy(source, runner.artifact.manifest.spec, (PAGE + 1, LONG), NEW)
    assert expected.sure > 0.8
    assert expected.variety > 2
    prompt: Any = expected.inputs("ids")[0]
    embeds = runner.embed_tokens(prompt)
    assert torch.equal(embeds, expected.table(prompt.ids))
    assert torch.equal(runner.logits(PromptEmbeds(embeds))[0], runner.logits(prompt)[0])
    for chunked in (True, False):
        for caching in (True, False):
            set_engine(runner, chunked=chunked, caching=caching)
            for paths in (*((path,) for path in PATHS), PATHS):
                assert expected.wrong(runner.generate(expected.inputs(*paths), NEW, ignore_eos=True), *paths) == []
            assert (runner.stats.cached_tokens > 0) == caching
