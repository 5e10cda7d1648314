import dataclasses
import itertools
from pathlib import Path

import pytest
import torch

import toolkit
from toolkit import MixedPrompt, PromptEmbeds, TokenIds
from toolkit.errors import InputError, UnsupportedError
from toolkit.runner import Input, Runner


@pytest.fixture(scope="module")
def runner(bert_artifact: Path) -> Runner:
    return toolkit.load(bert_artifact, device="cpu", mode="eager")


@pytest.fixture(scope="module")
def graphs(bert_artifact: Path) -> Runner:
    return toolkit.load(bert_artifact, device="cpu", mode="graph")


def all_kinds(runner: Runner) -> list[Input]:
    """A text, ids, ids with segments, embeds, embeds with segments, and a mixture."""
    table = runner.embed_tokens([5, 6, 7, 8])
    free = table + 0.3
    return [
        "the quick brown fox",
        TokenIds([2, 9, 10, 3]),
        TokenIds([2, 9, 10, 3], [0, 0, 1, 2]),
        PromptEmbeds(free),
        PromptEmbeds(free, [2, 1, 0, 0]),
        MixedPrompt([TokenIds([2, 9], [0, 1]), PromptEmbeds(free[1:], [1, 1, 2]), TokenIds([3])]),
    ]


@pytest.mark.parametrize("mode", ["runner", "graphs"])
def test_any_mixture_in_any_order_equals_each_row_alone(mode: str, request: pytest.FixtureRequest) -> None:
    """B2, G1, L1: four kinds in one call, segment ids on both paths."""
    runner: Runner = request.getfixturevalue(mode)
    kinds = all_kinds(runner)
    alone = [runner.embed([item])[0] for item in kinds]
    states = [runner.token_states([item])[0] for item in kinds]
    assert len({tuple(v.round(decimals=3).tolist()) for v in alone}) == len(kinds)
    for order in itertools.islice(itertools.permutations(range(len(kinds))), 0, None, 97):
        together = runner.embed([kinds[k] for k in order])
        together_states = runner.token_states([kinds[k] for k in order])
        for place, k in enumerate(order):
            assert torch.allclose(together[place], alone[k], atol=1e-6)
            assert torch.allclose(together_states[place], states[k], atol=2e-5)


def test_segments_matter_on_both_paths(runner: Runner) -> None:
    """G1: 'segment ids dropped' moves a heated model far."""
    kinds = all_kinds(runner)
    vectors = runner.embed(kinds)
    assert (vectors[1] - vectors[2]).abs().max() > 0.01
    assert (vectors[3] - vectors[4]).abs().max() > 0.01


def test_the_seam(runner: Runner) -> None:
    """L1: ids path == embeds path, bitwise in eager mode, for embeddings from the runner's own table."""
    ids = [2, 9, 10, 11, 3]
    embeds = runner.embed_tokens(ids)
    assert embeds.shape == (5, 40)
    assert torch.equal(runner.token_states([PromptEmbeds(embeds)])[0], runner.token_states([TokenIds(ids)])[0])
    with pytest.raises(InputError):
        runner.embed_tokens([61])


def test_ids_only_batches_never_use_the_embeds_graph(bert_artifact: Path) -> None:
    """J1: the counters show which graph served; nothing falls back."""
    runner = toolkit.load(bert_artifact, device="cpu", mode="graph", batch_tokens=64)
    ids: list[Input] = [TokenIds([k % 50 + 5] * (k % 20 + 1)) for k in range(30)]
    runner.embed(ids)
    only_ids = runner.stats
    assert only_ids.graph_hits > 1
    assert only_ids.embeds_graph_hits == 0
    assert only_ids.captured["embeds"] == []
    long = [TokenIds([9] * 24)] * 60
    runner.embed([*long, PromptEmbeds(runner.embed_tokens([5, 6]))])
    mixed = runner.stats
    assert mixed.embeds_graph_hits == 1
    assert mixed.graph_hits - only_ids.graph_hits == 60 * 24 // 48
    assert mixed.eager_fallbacks == mixed.recompiles == 0


@pytest.mark.parametrize("public", ["embed", "token_states"])
@pytest.mark.parametrize("kind", ["ids", "embeds"])
def test_every_public_path_runs_compiled(public: str, kind: str, bert_artifact: Path) -> None:
    """J1: compiled code serves each public entry, on ids and on embeds, with the lookup inside."""
    runner = toolkit.load(bert_artifact, device="cpu", mode="compile")
    item = TokenIds([2, 9, 3]) if kind == "ids" else PromptEmbeds(runner.embed_tokens([2, 9, 3]))
    getattr(runner, public)([item])
    entry = runner._compiled["forward_ids" if kind == "ids" else "forward_embeds"]
    assert entry.compilations == 1
    assert entry.graph is not None


def test_order_is_kept_across_batches(bert_artifact: Path) -> None:
    small = toolkit.load(bert_artifact, device="cpu", mode="eager", batch_tokens=24)
    texts = [" ".join(["fox", "dog", "the", "a"][: k % 4 + 1] * (k % 3 + 1)) for k in range(25)]
    together = small.embed(texts)
    for text, vector in zip(texts, together, strict=True):
        assert torch.allclose(small.embed(text)[0], vector, atol=1e-6)


def test_a_single_input_is_a_batch_of_one(runner: Runner) -> None:
    assert torch.equal(runner.embed("a fox"), runner.embed(["a fox"]))
    assert runner.embed(TokenIds([5])).shape == (1, 40)
    assert len(runner.token_states(TokenIds([5, 6]))) == 1


def test_results_are_float32_on_the_cpu_and_owned(runner: Runner) -> None:
    vectors = runner.embed(["a", "b"])
    assert (vectors.dtype, vectors.device.type, vectors.is_inference()) == (torch.float32, "cpu", False)
    states = runner.token_states(["a", "b c"])
    kept = [state.clone() for state in states]
    states[0].zero_()
    assert torch.equal(states[1], kept[1])


def test_the_length_limit_on_both_paths(runner: Runner) -> None:
    """A3: the limit is stored and works; one token more is an error before any kernel runs."""
    limit = runner.limits.length
    assert limit == runner.artifact.manifest.usable_length == 24
    assert runner.embed([TokenIds([5] * limit), PromptEmbeds(runner.embed_tokens([5] * limit))]).shape == (2, 40)
    for item in (TokenIds([5] * 25), PromptEmbeds(torch.zeros(25, 40))):
        with pytest.raises(InputError, match="25 tokens, the model takes at most 24"):
            runner.embed([item])


def test_what_the_artifact_was_not_converted_for(runner: Runner) -> None:
    for call in (
        lambda: runner.score([("a", "b")]),
        lambda: runner.classify(["a"]),
        lambda: runner.generate(["a"], max_new_tokens=1),
    ):
        with pytest.raises(UnsupportedError, match="was converted for 'embed'"):
            call()


def test_unfit_inputs_name_their_number(runner: Runner) -> None:
    with pytest.raises(InputError, match="inputs are a NoneType"):
        runner.embed(None)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="truncate_dim"):
        runner.embed(["a"], truncate_dim=2.5)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="input 1 is a int"):
        runner.embed(["a", 5])  # type: ignore[list-item]
    with pytest.raises(InputError, match="no prompt named 'x'"):
        runner.embed(["a"], prompt_name="x")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"device": "tpu"}, "no torch device"),
        ({"device": "cuda:99"}, "is not there"),
        ({"device": "meta"}, "not supported"),
        ({"mode": "fast"}, "mode 'fast' is unknown"),
    ],
)
def test_load_refuses_unknown_options(options: dict[str, str], message: str, bert_artifact: Path) -> None:
    with pytest.raises(InputError, match=message):
        toolkit.load(bert_artifact, **options)  # type: ignore[arg-type]


def test_stats_are_plain_data(graphs: Runner) -> None:
    graphs.embed(["a"])
    stats = dataclasses.asdict(graphs.stats)
    assert stats["mode"] == "graph"
    assert stats["attention"] == "sdpa"
    assert stats["bytes"]["weights"] > 100_000
    assert {"tokens", "sequences", "max_len"} == set(stats["captured"]["ids"][0])


def test_running_twice_is_running_once(runner: Runner, graphs: Runner) -> None:
    kinds = all_kinds(runner)
    for r in (runner, graphs):
        assert torch.equal(r.embed(kinds), r.embed(kinds))


def test_warm_up_captures_the_ladder(bert_artifact: Path) -> None:
    runner = toolkit.load(bert_artifact, device="cpu", mode="graph", batch_tokens=96)
    runner.warm_up()
    assert [bucket["tokens"] for bucket in runner.stats.captured["ids"]] == [32, 48, 64, 96]
    runner.embed(["a fox"])
    assert runner.stats.recompiles == 0


def test_groups_fill_batches_and_separate_embeds(bert_artifact: Path) -> None:
    runner = toolkit.load(bert_artifact, device="cpu", mode="eager", batch_tokens=48)
    assert toolkit.load(bert_artifact, device="cpu", mode="eager", batch_tokens=5).batch_tokens == 24
    lengths = [3, 24, 10, 24, 11]
    rows = runner.rows([TokenIds([5] * n) for n in lengths], "")
    groups = [members for members, _ in runner._batches([dict(enumerate(rows))])]
    assert groups == [[1, 3], [4, 2, 0]]


def test_truncation_keeps_the_first_values(bert_artifact: Path) -> None:
    runner = toolkit.load(bert_artifact, device="cpu", mode="eager")
    full = runner.embed(["a fox"])
    assert torch.equal(runner.embed(["a fox"], truncate_dim=3), full[:, :3])
    assert runner.embed(["a fox"], truncate_dim=40).shape == (1, 40)
    for bad in (0, 41, True):
        with pytest.raises(toolkit.errors.InputError, match="1 … 40"):
            runner.embed(["a fox"], truncate_dim=bad)
    assert not torch.equal(runner.embed(["a fox"], prompt="query "), full)
    assert torch.equal(runner.embed(["a fox"], prompt="query "), runner.embed(["query a fox"]))


@pytest.mark.parametrize("tokens", [0, -5, 2.5, "9", True])
def test_load_refuses_an_impossible_batch_size(tokens: object, bert_artifact: Path) -> None:
    with pytest.raises(InputError, match="batch_tokens"):
        toolkit.load(bert_artifact, device="cpu", mode="eager", batch_tokens=tokens)  # type: ignore[arg-type]
