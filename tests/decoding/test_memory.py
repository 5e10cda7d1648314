"""Memory of a decoder: what steps leave behind reaches no other, results are their own, and buffers stay in place."""

import random
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import toolkit
from tests.tiny import make_decoder
from toolkit import CacheOptions, DecoderRunner, MixedPrompt, PromptEmbeds, TokenIds, loaded
from toolkit.compile import compile_entry_point
from toolkit.nn.rope import RopeTable
from toolkit.recipe import Recipe
from toolkit.registry import find_recipe
from toolkit.rows import Input

LLAMA, GEMMA3, GPT2 = (find_recipe(name).recipe for name in ("llama", "gemma3_text", "gpt2"))
WORDS, LENGTH = 61, 60


def load(folder: Path, mode: str, **options: Any) -> DecoderRunner:
    cache = CacheOptions(**{"page": 4, "requests": 9, **options})
    runner: Any = toolkit.load(folder, device="cpu", mode=mode, batch_tokens=64, cache=cache)
    return runner


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama")
    make_decoder(folder / "m", LLAMA, tied=False, overrides={"max_position_embeddings": LENGTH})
    toolkit.convert(str(folder / "m"), folder / "out", verify=False)
    return folder / "out"


@pytest.fixture(scope="module")
def graphs(folder: Path) -> DecoderRunner:
    """Traced into whole graphs, without code generation. Few pages: requests give way to others."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loaded, "compile_entry_point", partial(compile_entry_point, backend="eager"))
        return load(folder, "graph", pages=40)


@pytest.fixture(scope="module")
def eager(folder: Path) -> DecoderRunner:
    return load(folder, "eager", prefix_caching=False)


def prompts(runner: DecoderRunner, count: int, seed: int) -> list[Input]:
    """Ids, embeddings and both, of all lengths."""
    draw, found = random.Random(seed), list[Input]()
    for k in range(count):
        ids = [draw.randrange(WORDS) for _ in range(draw.choice([1, 2, 3, 4, 5, 9, 17, 40]))]
        cut = draw.randint(0, len(ids) - 1)
        parts = [*([TokenIds(ids[:cut])] if cut else []), PromptEmbeds(runner.embed_tokens(ids)[cut:] + 0.1 * k)]
        found.append(draw.choice([TokenIds(ids), MixedPrompt(parts)]))
    return found


def tokens(runner: DecoderRunner, given: list[Input], together: bool) -> list[list[int]]:
    groups = [given] if together else [[one] for one in given]
    return [one.token_ids for group in groups for one in runner.generate(group, 16, ignore_eos=True)]


def garbage(runner: DecoderRunner) -> None:
    """Nothing that a sequence wrote into the cache, its tables or the latest tokens means anything to another."""
    for name, buffer in runner.model.named_buffers():
        if name.rpartition(".")[2] in ("k_cache", "v_cache"):
            buffer.fill_(torch.nan)
    runner.model.tables.fill_(39)
    runner.model.latest.fill_(WORDS - 1)


@pytest.mark.parametrize("ahead", [False, True])
def test_garbage_in_every_static_input(graphs: DecoderRunner, eager: DecoderRunner, ahead: bool) -> None:
    """K3: before each step, large steps before small ones and embeddings before ids; and in pages of nobody."""
    given = prompts(eager, 30, seed=0)
    graphs.engine = graphs.make_engine(ahead=ahead)
    garbage(graphs)
    original: Any = graphs.engine.executor

    class Poisoned:
        stats = original.stats

        def run(self, batch: Any) -> Any:
            original.poison()
            return original.run(batch)

        def part(self, batch: Any, name: str) -> Tensor:
            original.poison()
            return original.part(batch, name)

    graphs.engine.executor = Poisoned()  # type: ignore[assignment]
    assert tokens(graphs, given, together=True) == tokens(eager, given, together=False)
    stats = graphs.stats
    assert stats.preemptions > 0
    assert stats.graph_hits > 0 < stats.embeds_graph_hits
    assert stats.eager_fallbacks == stats.recompiles == 0
    assert stats.free_pages == stats.pages


def test_results_own_their_memory(graphs: DecoderRunner, eager: DecoderRunner) -> None:
    """K2: states and logits of 50 batches, of which several make one result, while the same graphs go on."""
    graphs.engine = graphs.make_engine(step_tokens=9)
    kept: list[tuple[Tensor, Tensor]] = []
    for seed in range(25):
        given = prompts(graphs, 2, seed)
        for ours, theirs in ((graphs.token_states, eager.token_states), (graphs.logits, eager.logits)):
            kept += zip(ours(given), theirs(given), strict=True)
    for tensor, expected in kept:
        torch.testing.assert_close(tensor, expected, rtol=0, atol=1e-4)


def test_tokens_that_are_not_read_yet_are_not_overwritten(graphs: DecoderRunner, eager: DecoderRunner) -> None:
    """K2: a step ahead, the next replay comes before the tokens of the one before are looked at."""
    graphs.engine = graphs.make_engine(ahead=True)
    given = prompts(eager, 9, seed=3)
    assert tokens(graphs, given, together=True) == tokens(eager, given, together=False)
    for temperature in (0.0, 1.5):
        settings: dict[str, Any] = {"temperature": temperature, "seed": 1, "ignore_eos": True, "logprobs": 0}
        ours = graphs.generate(given, 12, **settings)
        theirs = [eager.generate(one, 12, **settings)[0] for one in given]
        assert [one.token_ids for one in ours] == [one.token_ids for one in theirs]


def test_either_path_may_be_captured_anew(graphs: DecoderRunner, eager: DecoderRunner) -> None:
    """K4: in any order, with other work in between; neither changes what the other gives."""
    draw = random.Random(1)
    graphs.engine = graphs.make_engine(ahead=True)
    given = prompts(eager, 12, seed=5)
    expected = tokens(eager, given, together=False)
    assert graphs.graphs is not None
    for _ in range(20):
        chosen = draw.sample(range(12), draw.randint(1, 5))
        if draw.random() < 0.4:
            path = draw.choice(["ids", "embeds"])
            graphs.graphs.drop(path)
            assert graphs.graphs.captured[path] == []
        if draw.random() < 0.3:
            graphs.logits([given[draw.randrange(12)]])
        assert tokens(graphs, [given[k] for k in chosen], together=True) == [expected[k] for k in chosen]
    captured = graphs.graphs.captured
    ladder = graphs.graphs.ladder.default()
    assert all(0 < len(buckets) <= 2 * len(ladder) for buckets in captured.values())


LONG = {"max_position_embeddings": LENGTH}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
BUFFERS: dict[str, tuple[Recipe, dict[str, Any]]] = {
    "default": (LLAMA, LONG),
    "linear": (LLAMA, LONG | {"rope_scaling": {"rope_type": "linear", "factor": 3.0}}),
    "dynamic": (LLAMA, LONG | {"rope_scaling": {"rope_type": "dynamic", "factor": 3.0}}),
    "yarn": (LLAMA, LONG | {"rope_scaling": YARN}),
    "llama3": (LLAMA, LONG | {"rope_scaling": LLAMA3 | {"original_max_position_embeddings": 16}}),
    "by layer": (GEMMA3, LONG),
    "learned": (GPT2, {"n_positions": LENGTH}),
}


@pytest.mark.parametrize("kind", BUFFERS)
def test_buffers_stay_where_they_are(kind: str, tmp_path: Path) -> None:
    """J4: all addresses, and the values of what is no cache, over growing lengths and engines that come and go."""
    recipe, overrides = BUFFERS[kind]
    make_decoder(tmp_path / "m", recipe, overrides=overrides)
    toolkit.convert(str(tmp_path / "m"), tmp_path / "out", verify=False)
    runner = load(tmp_path / "out", "eager")
    written = ("k_cache", "v_cache", "tables", "latest")

    def everything() -> dict[str, Tensor]:
        return dict(runner.model.named_parameters()) | dict(runner.model.named_buffers())

    before = {name: (tensor.data_ptr(), tensor.clone()) for name, tensor in everything().items()}
    tables = [module for module in runner.model.modules() if isinstance(module, RopeTable)]
    assert [len(table.cos) for table in tables] == [LENGTH] * {"by layer": 2, "learned": 0}.get(kind, 1)
    for length in (1, 17, LENGTH - 1):
        runner.generate([TokenIds([5] * length), PromptEmbeds(runner.embed_tokens([6] * length))], 1)
        runner.engine = runner.make_engine(chunked=length > 9, step_tokens=8)
    after = everything()
    assert after.keys() == before.keys()
    for name, (address, values) in before.items():
        assert after[name].data_ptr() == address, name
        assert name.rpartition(".")[2] in written or torch.equal(after[name], values), name
    assert {name.rpartition(".")[2] for name, (_, values) in before.items() if not torch.equal(after[name], values)}
