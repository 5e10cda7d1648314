"""Generation with a tiny model: whatever happens around a request, its tokens are its own, and transformers'."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from transformers.generation.logits_process import RepetitionPenaltyLogitsProcessor

import toolkit
from tests.tiny import make_decoder
from toolkit import MixedPrompt, PromptEmbeds, TokenIds
from toolkit.decoding.cache import CacheOptions
from toolkit.decoding.engine import Event
from toolkit.decoding.results import Chunk
from toolkit.decoding.runner import DecoderRunner
from toolkit.decoding.sampling import SamplingParams
from toolkit.errors import InputError
from toolkit.registry import find_recipe
from toolkit.rows import Input

WORDS, LENGTH = 25, 40  # as many ids as the tokenizer has


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("llama")
    overrides = {"vocab_size": WORDS, "max_position_embeddings": LENGTH, "pad_token_id": 0}
    make_decoder(folder / "checkpoint", find_recipe("llama").recipe, tied=False, overrides=overrides)
    toolkit.convert(str(folder / "checkpoint"), folder / "out", verify=False)
    return folder / "out", folder / "checkpoint"


def load(folder: Path, **options: Any) -> DecoderRunner:
    runner: Any = toolkit.load(folder, device="cpu", mode="eager", cache=CacheOptions(**{"page": 4, **options}))
    assert isinstance(runner, DecoderRunner)
    return runner


@pytest.fixture(scope="module")
def loaded(folders: tuple[Path, Path]) -> DecoderRunner:
    return load(folders[0])


@pytest.fixture
def runner(loaded: DecoderRunner) -> Iterator[DecoderRunner]:
    """With a new engine; whatever a test did, it leaves nothing behind."""
    loaded.engine = loaded.make_engine()
    yield loaded
    assert not loaded.engine.busy
    assert loaded._inboxes == {}
    everything_is_free(loaded)


def everything_is_free(runner: DecoderRunner) -> None:
    scheduler = runner.engine.scheduler
    assert runner.stats.free_pages == runner.stats.pages
    assert sorted(scheduler._lanes) == list(scheduler.tables.lanes)
    assert (runner.engine._seen, runner.engine._prompt_logprobs) == ({}, {})


@pytest.fixture(scope="module")
def model(folders: tuple[Path, Path]) -> Any:
    return transformers.LlamaForCausalLM.from_pretrained(str(folders[1]), dtype=torch.float32).eval()


def ids(length: int, seed: int = 0) -> list[int]:
    """Of words, none of them special."""
    return torch.randint(5, WORDS, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def embeds(length: int, seed: int = 0) -> Tensor:
    return torch.randn(length, 40, generator=torch.Generator().manual_seed(seed)) * 0.5


def mixed(seed: int = 0) -> MixedPrompt:
    return MixedPrompt([TokenIds(ids(3, seed)), PromptEmbeds(embeds(5, seed)), TokenIds(ids(2, seed + 1))])


def inputs_embeds(model: Any, item: Input) -> Tensor:
    """A prompt as what transformers takes: [tokens, D]."""
    if isinstance(item, MixedPrompt):
        return torch.cat([inputs_embeds(model, part) for part in item.parts])
    if isinstance(item, PromptEmbeds):
        return item.embeds
    assert isinstance(item, TokenIds)
    return model.get_input_embeddings()(torch.tensor(list(item.ids)))


@torch.inference_mode()
def logits_of(model: Any, item: Input, then: Sequence[int] = ()) -> Tensor:
    """transformers' logits behind each token of a prompt and of what follows: [tokens, V]."""
    table = model.get_input_embeddings()
    whole = torch.cat([inputs_embeds(model, item), table(torch.tensor([*then], dtype=torch.long))])
    return model(inputs_embeds=whole[None]).logits[0]


PROMPTS: list[Input] = [
    TokenIds(ids(1, 1)),
    TokenIds(ids(3, 2)),
    TokenIds(ids(8, 3)),
    TokenIds([*ids(8, 3), 7, 9]),
    TokenIds(ids(21, 4)),
    PromptEmbeds(embeds(9, 5)),
    PromptEmbeds(torch.cat([embeds(8, 5), embeds(1, 6)])),
    PromptEmbeds(embeds(9, 7)),
    mixed(8),
    "the quick brown fox",
]
DRAWN: dict[str, Any] = {"temperature": 1.7, "ignore_eos": True, "max_new_tokens": 12}
KINDS: list[dict[str, Any]] = [
    {**DRAWN, "seed": 1},
    {**DRAWN, "seed": 1, "repetition_penalty": 1.4},
    {**DRAWN, "seed": 2, "top_k": 6, "logprobs": 2},
    {**DRAWN, "seed": 3, "top_p": 0.8, "min_p": 0.05, "temperature": 3.0},
    {"max_new_tokens": 9},
    {"max_new_tokens": 15, "ignore_eos": True, "repetition_penalty": 2.0, "logprobs": 0},
]
Results = dict[int, list[Event]]


def run(runner: DecoderRunner, prompts: Mapping[int, Input], kinds: Mapping[int, dict[str, Any]]) -> Results:
    """Every prompt's events, all requests together, added in the order of `prompts`."""
    engine = runner.engine
    added = {}
    for number, row in zip(prompts, runner.rows(list(prompts.values())), strict=True):
        added[engine.add(row, SamplingParams(**kinds[number]))] = number
    found: Results = {number: [] for number in prompts}
    while engine.busy:
        for event in engine.step():
            found[added[event.number]].append(event)
    return found


def tokens(results: Results) -> dict[int, list[int | None]]:
    return {number: [event.token for event in events] for number, events in sorted(results.items())}


@pytest.fixture(scope="module")
def requests() -> tuple[dict[int, Input], dict[int, dict[str, Any]]]:
    prompts = dict(enumerate(PROMPTS * 2))
    kinds = {number: KINDS[(number + number // len(PROMPTS)) % len(KINDS)] for number in prompts}
    return prompts, kinds


@pytest.fixture(scope="module")
def alone(loaded: DecoderRunner, requests: tuple[dict[int, Input], dict[int, dict[str, Any]]]) -> Results:
    """Each request by itself, without a cache of prefixes."""
    prompts, kinds = requests
    found: Results = {}
    for number, prompt in prompts.items():
        loaded.engine = loaded.make_engine(caching=False)
        found |= run(loaded, {number: prompt}, kinds)
    assert len({tuple(own) for own in tokens(found).values()}) >= len(found) - 1, "results that tell requests apart"
    return found


WAYS: dict[str, dict[str, Any]] = {
    "together": {},
    "whole prompts": {"chunked": False},
    "small chunks": {"step_tokens": 3},
    "chunks in company": {"step_tokens": 17},
    "no prefix cache": {"caching": False},
    "a step ahead": {"ahead": True},
    "a step ahead, in chunks": {"ahead": True, "step_tokens": 18},
}


@pytest.mark.parametrize("reverse", [False, True], ids=["in order", "in reverse"])
@pytest.mark.parametrize("way", WAYS)
def test_tokens_do_not_depend_on_company(
    runner: DecoderRunner,
    requests: tuple[dict[int, Input], dict[int, dict[str, Any]]],
    alone: Results,
    way: str,
    reverse: bool,
) -> None:
    """L: seeds, greedy ones, penalties and log-probabilities, however requests are scheduled."""
    runner.engine = runner.make_engine(**WAYS[way])
    prompts, kinds = requests
    order = sorted(prompts, reverse=reverse)
    found = run(runner, {number: prompts[number] for number in order}, kinds)
    same_events(found, alone)


def same_events(found: Results, expected: Results) -> None:
    assert tokens(found) == tokens(expected)
    for number, events in found.items():
        assert [event.finished for event in events] == [event.finished for event in expected[number]]
        for ours, theirs in zip(events, expected[number], strict=True):
            assert (ours.logprob is None) == (theirs.logprob is None)
            if ours.logprob is not None and theirs.logprob is not None:
                assert ours.logprob[0] == pytest.approx(theirs.logprob[0], abs=1e-4)
                assert ours.logprob[1] == pytest.approx(theirs.logprob[1], abs=1e-4)


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("options", [{}, {"ahead": True}, {"chunked": False}, {"step_tokens": 5}], ids=str)
def test_tokens_do_not_depend_on_who_gives_way(
    folders: tuple[Path, Path],
    requests: tuple[dict[int, Input], dict[int, dict[str, Any]]],
    alone: Results,
    options: dict[str, Any],
    caching: bool,
) -> None:
    """L: few pages; requests are computed anew, with the same random numbers."""
    few = load(folders[0], pages=10, requests=5, prefix_caching=caching)
    few.engine = few.make_engine(**options)
    same_events(run(few, *requests), alone)
    assert few.stats.preemptions > 0
    assert (few.stats.cached_tokens > 0) == caching
    everything_is_free(few)


def test_seeds(runner: DecoderRunner) -> None:
    settings: dict[str, Any] = {**DRAWN, "max_new_tokens": 20}
    first, again = (runner.generate([PROMPTS[2]] * 3, **settings, seed=5) for _ in range(2))
    assert [one.token_ids for one in first] == [one.token_ids for one in again]
    assert first[0].token_ids == first[1].token_ids, "each request has its own numbers"
    other = runner.generate(PROMPTS[2], **settings, seed=6)[0]
    assert other.token_ids != first[0].token_ids
    fresh = runner.generate([PROMPTS[2]] * 2, **settings)
    assert fresh[0].token_ids != fresh[1].token_ids


@pytest.mark.parametrize("ahead", [False, True])
def test_seeded_tokens_are_those_of_their_numbers(runner: DecoderRunner, model: Any, ahead: bool) -> None:
    """One number a token, in the order of Philox: a draw by hand gives the same."""
    import numpy as np

    runner.engine = runner.make_engine(ahead=ahead, step_tokens=3)
    settings: dict[str, Any] = {"temperature": 2.0, "seed": 11, "ignore_eos": True}
    found = runner.generate(PROMPTS[4], 12, **settings)[0].token_ids
    numbers, expected = np.random.Generator(np.random.Philox(11)), []
    for _ in range(12):
        shares, order = (logits_of(model, PROMPTS[4], expected)[-1] / 2.0).softmax(-1).sort(descending=True)
        expected.append(int(order[int((shares.cumsum(0) <= numbers.random()).sum())]))
    assert found == expected


@pytest.mark.parametrize("step_tokens", [None, 4])
def test_logprobs_are_those_of_transformers(runner: DecoderRunner, model: Any, step_tokens: int | None) -> None:
    """Under the model's own logits, whatever the tokens were chosen by."""
    runner.engine = runner.make_engine(step_tokens=step_tokens)
    prompts = [PROMPTS[0], PROMPTS[4], PROMPTS[2], PROMPTS[2]]
    settings: dict[str, Any] = {"temperature": 1.5, "top_k": 5, "repetition_penalty": 1.3, "seed": 0}
    found = runner.generate(prompts, 7, ignore_eos=True, logprobs=3, prompt_logprobs=2, **settings)
    for prompt, one in zip(prompts, found, strict=True):
        assert isinstance(prompt, TokenIds)
        theirs = logits_of(model, prompt, one.token_ids).log_softmax(-1)
        count = len(prompt.ids)
        sequence = [*prompt.ids, *one.token_ids]
        assert one.logprobs is not None
        assert one.prompt_logprobs is not None
        expected = [theirs[place, sequence[place + 1]].item() for place in range(len(sequence) - 1)]
        assert one.prompt_logprobs.chosen == pytest.approx(expected[: count - 1], abs=1e-4)
        assert one.logprobs.chosen == pytest.approx(expected[count - 1 :], abs=1e-4)
        for top, place in zip(one.prompt_logprobs.top, range(count - 1), strict=True):
            values, likeliest = theirs[place].topk(2)
            assert list(top) == likeliest.tolist()
            assert list(top.values()) == pytest.approx(values.tolist(), abs=1e-4)
        for top, place in zip(one.logprobs.top, range(count - 1, len(sequence) - 1), strict=True):
            assert list(top) == theirs[place].topk(3).indices.tolist()


def test_logprobs_are_there_only_if_asked_for(runner: DecoderRunner) -> None:
    plain = runner.generate(PROMPTS[2], 3)[0]
    assert (plain.logprobs, plain.prompt_logprobs) == (None, None)
    none = runner.generate(PROMPTS[2], 3, ignore_eos=True, logprobs=0, prompt_logprobs=0)[0]
    assert none.logprobs is not None
    assert none.prompt_logprobs is not None
    assert (none.logprobs.top, none.prompt_logprobs.top) == ([{}] * 3, [{}] * 7)
    assert none.token_ids[: len(plain.token_ids)] == plain.token_ids


def test_prompt_logprobs_of_a_request_that_gave_way(folders: tuple[Path, Path]) -> None:
    few = load(folders[0], pages=10, requests=3)
    prompts = [TokenIds(ids(12, seed)) for seed in range(3)]
    settings: dict[str, Any] = {"ignore_eos": True, "prompt_logprobs": 1, "logprobs": 1}
    expected = [few.generate(prompt, 16, **settings)[0] for prompt in prompts]
    assert few.stats.preemptions == 0
    for step_tokens in (None, 5):
        few.engine = few.make_engine(step_tokens=step_tokens)
        found = few.generate(prompts, 16, **settings)
        assert few.stats.preemptions > 0
        for ours, theirs in zip(found, expected, strict=True):
            assert ours.token_ids == theirs.token_ids
            assert ours.prompt_logprobs is not None
            assert theirs.prompt_logprobs is not None
            assert ours.prompt_logprobs.chosen == pytest.approx(theirs.prompt_logprobs.chosen, abs=1e-4)


def test_prompt_logprobs_of_a_request_that_gave_way_within_its_prompt(folders: tuple[Path, Path]) -> None:
    few = load(folders[0], pages=10, requests=2)
    few.engine = few.make_engine(step_tokens=3)
    prompts = {0: TokenIds(ids(8)), 1: TokenIds(ids(24))}
    kinds: dict[int, dict[str, Any]] = {
        0: {"max_new_tokens": 24, "ignore_eos": True},
        1: {"max_new_tokens": 2, "ignore_eos": True, "prompt_logprobs": 0},
    }
    gave_way: list[tuple[int, int]] = []
    give_up = few.engine.scheduler._give_up

    def note(request: Any) -> None:
        if not request.finished:
            gave_way.append((request.number, request.computed))
        give_up(request)

    few.engine.scheduler._give_up = note
    found = run(few, prompts, kinds)[1][0].prompt_logprobs
    assert len(gave_way) == 1
    assert 0 < gave_way[0][1] < 24
    expected = few.generate(prompts[1], 2, ignore_eos=True, prompt_logprobs=0)[0].prompt_logprobs
    assert expected is not None
    assert [own for own, _ in found] == pytest.approx(expected.chosen, abs=1e-4)
    everything_is_free(few)


@pytest.mark.parametrize("prompt", [PROMPTS[4], PROMPTS[5], PROMPTS[8]], ids=["ids", "embeds", "mixed"])
@pytest.mark.parametrize("penalty", [1.5, 0.6])
def test_repetition_penalty(runner: DecoderRunner, model: Any, prompt: Input, penalty: float) -> None:
    """Ids of the prompt and generated ones count, placeholders of embeddings do not."""
    parts = prompt.parts if isinstance(prompt, MixedPrompt) else [prompt]
    seen = [token for part in parts if isinstance(part, TokenIds) for token in part.ids]
    processor: Any = RepetitionPenaltyLogitsProcessor(penalty)
    expected: list[int] = []
    for _ in range(14):
        raw = logits_of(model, prompt, expected)[-1:]
        expected.append(int(processor(torch.tensor([[*seen, *expected]], dtype=torch.long), raw).argmax()))
    for ahead in (False, True):
        runner.engine = runner.make_engine(ahead=ahead)
        found = runner.generate(prompt, 14, ignore_eos=True, repetition_penalty=penalty)[0].token_ids
        assert found == expected
    assert runner.generate(prompt, 14, ignore_eos=True)[0].token_ids != expected


def test_greedy_tokens_are_the_likeliest(runner: DecoderRunner, model: Any) -> None:
    found = runner.generate(PROMPTS[:9], 10, ignore_eos=True)
    for prompt, one in zip(PROMPTS[:9], found, strict=True):
        count = len(inputs_embeds(model, prompt))
        assert one.token_ids == logits_of(model, prompt, one.token_ids)[count - 1 : -1].argmax(-1).tolist()
        assert (one.finish_reason, one.prompt_tokens) == ("length", count)


def test_embeds_of_ids_are_ids(runner: DecoderRunner) -> None:
    """L1: the seam takes what `embed_tokens` gives; as a whole and within a prompt."""
    given = ids(11, 4)
    prompts: list[Input] = [
        TokenIds(given),
        PromptEmbeds(runner.embed_tokens(given)),
        MixedPrompt([TokenIds(given[:4]), PromptEmbeds(runner.embed_tokens(given[4:9])), TokenIds(given[9:])]),
    ]
    for settings in ({}, {"temperature": 1.5, "seed": 3}):
        found = runner.generate(prompts, 12, ignore_eos=True, **settings)
        assert found[0].token_ids == found[1].token_ids == found[2].token_ids


# Where generation ends.


def ending(runner: DecoderRunner, **settings: Any) -> tuple[list[int], str, str]:
    one = runner.generate(PROMPTS[4], 16, temperature=2.0, seed=4, **settings)[0]
    return one.token_ids, one.text, one.finish_reason


def test_end_tokens(runner: DecoderRunner) -> None:
    """The checkpoint's own is 3; it is the last of the ids, and not in the text."""
    for seed in range(40):
        whole = runner.generate(PROMPTS[4], 16, temperature=2.0, seed=seed, ignore_eos=True)[0]
        if 3 in whole.token_ids[2:-2]:
            break
    else:
        pytest.fail("no seed brings forth an end token")
    assert (len(whole.token_ids), whole.finish_reason) == (16, "length")
    for ahead in (False, True):
        runner.engine = runner.make_engine(ahead=ahead)
        one = runner.generate(PROMPTS[4], 16, temperature=2.0, seed=seed)[0]
        assert one.token_ids == whole.token_ids[: whole.token_ids.index(3) + 1]
        assert one.finish_reason == "stop"
        assert "[SEP]" not in one.text
        assert not runner.engine.busy


def test_stop_ids_are_added_to_the_end_tokens(runner: DecoderRunner) -> None:
    whole = ending(runner, ignore_eos=True)[0]
    chosen = next(token for token in whole[2:] if token not in whole[:2] and token != 3)
    cut = whole[: whole.index(chosen) + 1]
    for stop in (chosen, [chosen], (chosen, 24), {chosen}):
        assert ending(runner, stop_token_ids=stop, ignore_eos=True)[::2] == (cut, "stop")
    assert (
        ending(runner, stop_token_ids=[token for token in range(25) if token not in whole], ignore_eos=True)[0] == whole
    )


def test_the_last_token_may_be_a_stop(runner: DecoderRunner) -> None:
    whole = ending(runner, ignore_eos=True)[0]
    place = max(k for k in range(16) if whole[k] not in whole[:k])
    one = runner.generate(PROMPTS[4], place + 1, 2.0, seed=4, ignore_eos=True, stop_token_ids=whole[place])[0]
    assert (one.token_ids, one.finish_reason) == (whole[: place + 1], "stop")


@pytest.mark.parametrize("ahead", [False, True])
def test_stop_texts(runner: DecoderRunner, ahead: bool) -> None:
    runner.engine = runner.make_engine(ahead=ahead)
    whole, text, _ = ending(runner, ignore_eos=True)
    words = text.split()
    assert len(words) > 6
    stop = f"{words[3]} {words[4][:1]}"
    found, cut, reason = ending(runner, ignore_eos=True, stop=["nowhere", stop])
    assert cut == text[: text.index(stop)]
    assert reason == "stop"
    assert found == whole[: len(found)]
    assert stop in runner._texts.tokenizer.decode(found)
    assert stop not in runner._texts.tokenizer.decode(found[:-1])
    assert ending(runner, ignore_eos=True, stop="nowhere") == (whole, text, "length")
    chunks = list(runner.stream(PROMPTS[4], 16, 2.0, seed=4, ignore_eos=True, stop=f"{words[-1]} nowhere"))
    assert joined(chunks, 0) == (whole, text, "length"), "what was held back comes in the end"
    assert not runner.engine.busy


# Streams.


def joined(chunks: Sequence[Chunk], index: int) -> tuple[list[int], str, str | None]:
    own = [chunk for chunk in chunks if chunk.index == index]
    assert [chunk.finish_reason for chunk in own[:-1]] == [None] * (len(own) - 1)
    ids = [chunk.token_id for chunk in own if chunk.token_id is not None]
    return ids, "".join(chunk.text for chunk in own), own[-1].finish_reason


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("settings", [{}, {"stop": ("o", "dog the")}, {"temperature": 2.0, "seed": 7}], ids=str)
def test_streams_say_what_generate_does(runner: DecoderRunner, settings: dict[str, Any], ahead: bool) -> None:
    runner.engine = runner.make_engine(ahead=ahead)
    expected = runner.generate(PROMPTS, 14, **settings)
    chunks = list(runner.stream(PROMPTS, 14, **settings))
    for index, one in enumerate(expected):
        assert joined(chunks, index) == (one.token_ids, one.text, one.finish_reason)


@pytest.mark.parametrize("ahead", [False, True])
def test_closing_a_stream_frees_what_it_had(runner: DecoderRunner, ahead: bool) -> None:
    runner.engine = runner.make_engine(ahead=ahead)
    stream: Any = runner.stream(PROMPTS, 14, ignore_eos=True)
    for _ in range(5):
        next(stream)
    assert runner.stats.free_pages < runner.stats.pages
    stream.close()
    assert not runner.engine.busy
    everything_is_free(runner)
    runner.engine = runner.make_engine(ahead=ahead, step_tokens=8)
    stream = runner.stream([PROMPTS[1], PROMPTS[4]], 9, ignore_eos=True, prompt_logprobs=0, repetition_penalty=2.0)
    next(stream)
    assert runner.engine._prompt_logprobs or ahead, "the second prompt is not through"
    stream.close()
    everything_is_free(runner)
    expected = runner.generate(PROMPTS[2], 5, ignore_eos=True)[0].token_ids
    runner.engine = runner.make_engine(caching=False)
    assert runner.generate(PROMPTS[2], 5, ignore_eos=True)[0].token_ids == expected


def test_a_stream_that_is_not_begun_has_nothing(runner: DecoderRunner) -> None:
    stream: Any = runner.stream(PROMPTS, 14)
    assert not runner.engine.busy
    stream.close()
    with pytest.raises(InputError, match="'unknown' is no setting"):
        runner.stream(PROMPTS, 14, unknown=3)


@pytest.mark.parametrize("ahead", [False, True])
def test_callers_do_not_take_each_others_tokens(runner: DecoderRunner, ahead: bool) -> None:
    """Two streams in turn, and a whole generation between their tokens."""
    runner.engine = runner.make_engine(ahead=ahead)
    settings: dict[str, Any] = {"ignore_eos": True, "stop": "lazy"}
    expected = [runner.generate(prompt, 12, **settings)[0] for prompt in PROMPTS]
    first, second = runner.stream(PROMPTS[2:4], 12, **settings), runner.stream(PROMPTS[4], 12, **settings)
    early, late = [next(first), next(first)], [next(second)]
    assert runner.generate(PROMPTS, 12, **settings) == expected
    early += first
    late += second
    for chunks, index, one in ((early, 0, expected[2]), (early, 1, expected[3]), (late, 0, expected[4])):
        assert joined(chunks, index) == (one.token_ids, one.text, one.finish_reason)


def test_requests_of_the_engine_run_beside_those_of_the_runner(runner: DecoderRunner) -> None:
    expected = runner.generate(PROMPTS[2], 5)
    number = runner.engine.add(runner.rows(PROMPTS[4])[0], SamplingParams(max_new_tokens=12, ignore_eos=True))
    assert runner.generate(PROMPTS[2], 5) == expected
    events: list[Event] = []
    while runner.engine.busy:
        events += runner.engine.step()
    assert {event.number for event in events} == {number}
    assert events[-1].finished == "length"


def test_a_request_that_is_cancelled_elsewhere_ends_its_stream(
    runner: DecoderRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = runner.stream(PROMPTS[4], 12, ignore_eos=True)
    next(stream)
    monkeypatch.setattr(runner.engine, "step", lambda: pytest.fail("there is nothing to wait for"))
    (request,) = runner.engine.scheduler.requests
    event = runner.engine.cancel(request.number)
    assert event == Event(number=request.number, token=None, finished="cancelled")
    assert runner.engine.cancel(request.number) is None
    assert list(stream) == []


# What is refused.


@pytest.mark.parametrize(
    ("inputs", "settings", "message"),
    [
        (
            TokenIds([5] * 30),
            {"max_new_tokens": 11},
            "30 prompt tokens and max_new_tokens = 11 are 41, the model takes 40",
        ),
        (TokenIds([5]), {"max_new_tokens": 0}, "max_new_tokens = 0"),
        (TokenIds([5]), {"tempature": 1.0}, "'tempature' is no setting of generate; there are max_new_tokens, temper"),
        (TokenIds([5]), {"temperature": -1}, "temperature = -1"),
        (TokenIds([5]), {"stop_token_ids": [25]}, "stop_token_ids: 25 is outside the vocabulary of 25"),
        (TokenIds([5]), {"stop_token_ids": 25}, "stop_token_ids: 25 is outside the vocabulary of 25"),
        (TokenIds([5]), {"stop_token_ids": "5"}, "stop_token_ids = "),
        (TokenIds([5]), {"stop_token_ids": None}, "stop_token_ids = "),
        (TokenIds([5]), {"stop_token_ids": True}, "stop_token_ids = "),
        (TokenIds([5]), {"stop_token_ids": 2.0}, "stop_token_ids = "),
        (TokenIds([5]), {"stop": None}, "stop = "),
        (TokenIds([5]), {"stop": 5}, "stop = "),
        (TokenIds([5]), {"stop": 1.5}, "stop = "),
        (TokenIds([5]), {"stop": ["a", ""]}, "stop = "),
        (mixed(), {"prompt_logprobs": 0}, "prompt_logprobs: tokens given as embeddings have no id"),
        (TokenIds([25]), {}, "25 is outside the vocabulary"),
        (TokenIds([]), {}, "at least one token"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_errors(runner: DecoderRunner, inputs: Input, settings: dict[str, Any], message: str) -> None:
    """F4: before anything runs; nothing of the call is left, also not of its good inputs."""
    for call in (runner.generate, runner.stream):
        with pytest.raises(InputError) as error:
            call([PROMPTS[0], inputs], **{"max_new_tokens": 3, **settings})
        assert message in str(error.value)
        assert not runner.engine.busy


def test_a_prompt_without_tokens(folders: tuple[Path, Path]) -> None:
    """F4."""
    runner = load(folders[0])
    runner._texts.tokenizer.post_processor = None  # type: ignore[assignment]
    with pytest.raises(InputError, match="no tokens"):
        runner.generate(["the", ""], 3)


def test_the_longest_sequences_run(runner: DecoderRunner) -> None:
    one, other = runner.generate([TokenIds(ids(LENGTH - 1)), TokenIds(ids(1))], 1, ignore_eos=True)
    assert len(one.token_ids) == len(other.token_ids) == 1
    assert len(runner.generate(TokenIds(ids(1)), LENGTH - 1, ignore_eos=True)[0].token_ids) == LENGTH - 1


def test_what_cannot_fit_into_the_cache(folders: tuple[Path, Path]) -> None:
    small = load(folders[0], pages=3)
    advice = "load with more cache memory or pages, or ask for fewer new tokens"
    with pytest.raises(InputError, match=f"13 tokens need 4 pages of 4, the cache has 3: {advice}"):
        small.generate([TokenIds(ids(2)), TokenIds(ids(8))], 5)
    assert len(small.generate(TokenIds(ids(8)), 4, ignore_eos=True)[0].token_ids) == 4
    with pytest.raises(InputError, match="13 tokens need 4 pages of 4, the cache has 3: load with more cache memory"):
        small.token_states([TokenIds(ids(2)), TokenIds(ids(13))])
    everything_is_free(small)


# Token states and logits.


def test_states_are_refused_while_requests_run(runner: DecoderRunner) -> None:
    stream: Any = runner.stream(PROMPTS[2], 5, ignore_eos=True)
    next(stream)
    for call in (runner.token_states, runner.logits):
        with pytest.raises(InputError, match="only while no request runs"):
            call(PROMPTS[2])
    stream.close()
    assert len(runner.token_states(PROMPTS[2])[0]) == 8


def test_states_after_a_step_ahead(runner: DecoderRunner) -> None:
    """What was queued for a request that ended is nobody's."""
    runner.engine = runner.make_engine(ahead=True)
    expected = runner.logits(PROMPTS[:9])
    stream: Any = runner.stream(PROMPTS[2], 9, ignore_eos=True)
    next(stream)
    stream.close()
    again = runner.logits(PROMPTS[:9])
    assert all(torch.equal(a, b) for a, b in zip(expected, again, strict=True))
    runner.generate(PROMPTS[4], 5, ignore_eos=True, stop="o")
    assert len(runner.token_states(PROMPTS[2])[0]) == 8


@pytest.mark.parametrize("step_tokens", [None, 3])
def test_logits_are_those_of_transformers(runner: DecoderRunner, model: Any, step_tokens: int | None) -> None:
    runner.engine = runner.make_engine(step_tokens=step_tokens)
    for _ in range(2):  # the second time from no cache either
        for prompt, ours in zip(PROMPTS[:9], runner.logits(PROMPTS[:9]), strict=True):
            torch.testing.assert_close(ours, logits_of(model, prompt), atol=1e-4, rtol=1e-4)


def test_states_of_sequences_that_fill_the_cache(folders: tuple[Path, Path]) -> None:
    """The longest sequence, in a cache that has room for just one: no token follows, so none needs room."""
    one = load(folders[0], requests=1)
    assert one.stats.pages == LENGTH // 4
    rows = [TokenIds(ids(LENGTH)), TokenIds(ids(3)), TokenIds(ids(LENGTH, 1))]
    assert [len(states) for states in one.token_states(rows)] == [LENGTH, 3, LENGTH]
    everything_is_free(one)


@pytest.mark.parametrize("ahead", [False, True])
def test_an_error_in_a_step_leaves_nothing_behind(
    runner: DecoderRunner, monkeypatch: pytest.MonkeyPatch, ahead: bool
) -> None:
    runner.engine = runner.make_engine(ahead=ahead, step_tokens=6)
    expected = runner.generate(PROMPTS[:5], 6, ignore_eos=True)
    original, calls = runner._executor.run, 0

    def fail_later(batch: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 4:
            raise RuntimeError("out of memory")
        return original(batch)

    for call in (lambda: runner.generate(PROMPTS[:5], 6, ignore_eos=True), lambda: runner.token_states(PROMPTS)):
        calls = 0
        monkeypatch.setattr(runner._executor, "run", fail_later)
        with pytest.raises(RuntimeError, match="out of memory"):
            call()
        monkeypatch.undo()
        assert not runner.engine.busy
        everything_is_free(runner)
        assert runner.generate(PROMPTS[:5], 6, ignore_eos=True) == expected


# The rest of the surface.


def test_prefixes_are_found_again(runner: DecoderRunner) -> None:
    before = runner.generate(PROMPTS[4], 3, ignore_eos=True)[0]
    assert runner.stats.cached_tokens == 0
    again = runner.generate(PROMPTS[4], 3, ignore_eos=True)[0]
    assert again == before
    assert (runner.stats.cached_tokens, runner.stats.prompt_tokens) == (20, 42)
    assert runner.stats.steps == 6


@pytest.mark.parametrize("ahead", [False, True])
def test_generated_tokens_are_found_too(runner: DecoderRunner, ahead: bool) -> None:
    """All but the last one, which was never computed: three pages."""
    runner.engine = runner.make_engine(ahead=ahead)
    prompt = ids(8, 3)
    found = runner.generate(TokenIds(prompt), 5, ignore_eos=True)[0].token_ids
    runner.generate(TokenIds([*prompt, *found]), 1)
    assert runner.stats.cached_tokens == 12


def test_a_step_ahead_is_queued_before_tokens_are_known(runner: DecoderRunner) -> None:
    runner.engine = runner.make_engine(ahead=True)
    runner.engine.add(runner.rows(PROMPTS[2])[0], SamplingParams(max_new_tokens=3, ignore_eos=True))
    events = [[event.finished for event in runner.engine.step()] for _ in range(4)]
    assert events == [[], [""], [""], ["length"]]
    assert runner.stats.steps == 3


def test_texts_and_chats(runner: DecoderRunner) -> None:
    prompt = runner.chat_prompt([{"role": "user", "content": " the fox "}, {"role": "assistant", "content": "dog"}])
    names = runner._texts.tokenizer
    assert [names.id_to_token(token) for token in prompt.ids] == "[CLS] the fox [SEP] [CLS] dog [SEP] [CLS]".split()
    text, same = runner.generate(["the fox", TokenIds(names.encode("the fox").ids)], 6, ignore_eos=True)
    assert text == same
    assert text.text == names.decode(text.token_ids, skip_special_tokens=True)


def test_one_input_or_many(runner: DecoderRunner) -> None:
    """F4: also none."""
    assert runner.generate([], 3) == []
    assert list(runner.stream([], 3)) == []
    one = runner.generate(PROMPTS[2], 3)
    assert one == runner.generate([PROMPTS[2]], 3)
    assert one[0].to_dict()["token_ids"] == one[0].token_ids
    assert (runner.token_states([]), runner.logits([])) == ([], [])


def test_warming_up_changes_nothing(runner: DecoderRunner) -> None:
    expected = runner.generate(PROMPTS[:3], 4)
    runner.warm_up()
    assert runner.generate(PROMPTS[:3], 4) == expected
