"""Requests of all kinds that come and go at random: each ends as it does alone, and leaves nothing behind."""

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

import toolkit
from tests.tiny import make_decoder
from toolkit import CacheOptions, DecoderRunner, MixedPrompt, PromptEmbeds, TokenIds
from toolkit.decoding import engine as engine_module
from toolkit.decoding.engine import Engine, Event
from toolkit.decoding.sampling import SamplingParams, sample
from toolkit.inputs import Row
from toolkit.registry import find_recipe

WORDS, LONGEST_BEGINNING, LONGEST_END, NEW = 61, 28, 12, 24
_TRIALS, _NOISE = 16, 1e-4  # far more than what rounding makes of logits
_ROUNDING = 1e-4  # of log-probabilities


@dataclass(frozen=True, kw_only=True)
class Known:
    """A request, and what comes of it alone."""

    row: Row
    params: SamplingParams
    events: list[Event]


@dataclass(frozen=True, kw_only=True)
class Soaked:
    """What a run was made of. `evictions` are pages whose content was forgotten for the sake of another's."""

    finished: int
    cancelled: int
    steps: int
    preemptions: int
    prompt_tokens: int
    cached_tokens: int
    evictions: int


def load_soaked(folder: Path, *, device: str, mode: str) -> DecoderRunner:
    """A tiny float32 Llama in an artifact below `folder`, with a cache that is too small for its lanes."""
    if not (folder / "out").exists():
        overrides = {"max_position_embeddings": LONGEST_BEGINNING + LONGEST_END + NEW}
        make_decoder(folder / "source", find_recipe("llama").recipe, tied=False, overrides=overrides)
        toolkit.convert(str(folder / "source"), folder / "out", dtype="float32", verify=False)
    cache = CacheOptions(page=4, pages=30, requests=7)
    runner: Any = toolkit.load(folder / "out", device=device, mode=mode, batch_tokens=48, cache=cache)
    return runner


def draw_known(runner: DecoderRunner, count: int, seed: int) -> list[Known]:
    """Random requests, and the result of each alone, computed without a cache of prefixes.

    Left out are those of whose tokens one would be another if the logits were rounded otherwise.
    """
    draw, found = random.Random(seed), list[Known]()
    beginnings = [_piece(runner, draw, kind, LONGEST_BEGINNING) for kind in ("ids", "embeds") * 3]
    beginnings += [_with_another_first(piece) for piece in beginnings]
    engine = runner.make_engine(caching=False, ahead=False)
    while len(found) < count:
        parts = []
        if draw.random() < 0.8:
            parts.append(_first(draw.choice(beginnings), draw.randint(1, LONGEST_BEGINNING)))
        if not parts or draw.random() < 0.8:
            parts.append(_piece(runner, draw, draw.choice(["ids", "embeds"]), draw.randint(1, LONGEST_END)))
        (row,) = runner.rows([MixedPrompt(parts)])
        params = _draw_params(draw, has_embeds=bool(row.embeds))
        watch = _Watch(len(found))
        with patch.object(engine_module, "sample", watch):
            events = _run_alone(engine, row, replace(params, logprobs=params.logprobs or 0))
        if watch.sure:
            found.append(Known(row=row, params=params, events=events))
    return found


def soak(runner: DecoderRunner, known: Sequence[Known], *, requests: int, seed: int) -> Soaked:
    """Run so many requests, some of which are cancelled, on an engine that is new."""
    draw, engine = random.Random(seed), runner.engine
    evictions = _count_evictions(engine)
    live: dict[int, tuple[Known, list[Event]]] = {}
    arrived, cancelled, rate, steps = 0, 0, 0.5, 0
    while arrived < requests or engine.busy:
        if steps % 50 == 0:
            rate = draw.choice([0.1, 0.5, 0.9])  # quiet times and crowded ones
        while arrived < requests and len(live) < 24 and draw.random() < rate:
            one = draw.choice(known)
            live[engine.add(one.row, one.params)] = one, []
            arrived += 1
        if live and draw.random() < 0.06:
            number = draw.choice(sorted(live))
            assert engine.cancel(number) == Event(number=number, token=None, finished="cancelled")
            one, events = live.pop(number)
            same_events(events, one.events[: len(events)], one.params)
            cancelled += 1
        for event in engine.step():
            one, events = live[event.number]
            events.append(event)
            if event.finished:
                same_events(events, one.events, one.params)
                del live[event.number]
        check_pages(engine)
        steps += 1
    assert live == {}
    check_nothing_is_left(engine)
    stats = engine.scheduler.stats
    return Soaked(finished=requests - cancelled, cancelled=cancelled, evictions=evictions[0], **vars(stats))


def same_events(found: Sequence[Event], expected: Sequence[Event], params: SamplingParams) -> None:
    """Tokens, why it ended, and the log-probabilities that were asked for."""
    assert [event.token for event in found] == [event.token for event in expected]
    assert [event.finished for event in found] == [event.finished for event in expected]
    for ours, theirs in zip(found, expected, strict=True):
        assert (ours.logprob is not None) == (params.logprobs is not None)
        if ours.logprob is not None and theirs.logprob is not None:
            assert ours.logprob[0] == pytest.approx(theirs.logprob[0], abs=_ROUNDING)
            assert [*ours.logprob[1].values()] == pytest.approx([*theirs.logprob[1].values()], abs=_ROUNDING)
        own, other = ([value for value, _ in event.prompt_logprobs] for event in (ours, theirs))
        assert own == pytest.approx(other, abs=_ROUNDING)


def check_pages(engine: Engine) -> None:
    """Each page is free or has its users, and each lane is free or one request's."""
    scheduler = engine.scheduler
    pool, requests = scheduler.pool, scheduler.requests
    users = Counter(page for request in requests for page in request.pages)
    assert pool.free + len(users) == pool.pages
    assert all(pool._users[page] == count for page, count in users.items())
    running = [request.lane for request in requests if request.lane is not None]
    assert sorted([*running, *scheduler._lanes]) == list(scheduler.tables.lanes)


def check_nothing_is_left(engine: Engine) -> None:
    """Pages that only the prefix cache remembers are free, and can all be taken."""
    assert engine.step() == []  # what was queued ahead is nobody's
    assert (engine._flight, engine._seen, engine._prompt_logprobs) == (None, {}, {})
    scheduler = engine.scheduler
    pool = scheduler.pool
    assert pool._digest_of
    assert pool.free == pool.pages
    assert sorted(scheduler._lanes) == list(scheduler.tables.lanes)
    taken = pool.take(pool.pages)
    assert sorted(taken) == list(range(pool.pages))
    assert (pool.free, pool._digest_of, pool._page_of) == (0, {}, {})
    pool.release(taken)


class _Watch:
    """Stands for `sample`, and notes whether it would choose otherwise after a little noise."""

    def __init__(self, seed: int) -> None:
        self.sure = True
        self._draw = torch.Generator().manual_seed(seed)

    def __call__(self, logits_SV: Tensor, params: Sequence[SamplingParams], uniform: Sequence[float]) -> Tensor:
        chosen_S = sample(logits_SV, params, uniform)
        noise_TV = torch.randn(_TRIALS, logits_SV.shape[1], generator=self._draw) * _NOISE
        numbers = [min(max(uniform[0] + (k - _TRIALS / 2) / _TRIALS * _NOISE, 0.0), 1 - 2**-53) for k in range(_TRIALS)]
        trials_T = sample(logits_SV + noise_TV.to(logits_SV.device), [*params] * _TRIALS, numbers)
        self.sure &= bool((trials_T == chosen_S).all())
        return chosen_S


def _run_alone(engine: Engine, row: Row, params: SamplingParams) -> list[Event]:
    engine.add(row, params)
    events: list[Event] = []
    while engine.busy:
        events += engine.step()
    return events


def _piece(runner: DecoderRunner, draw: random.Random, kind: str, length: int) -> TokenIds | PromptEmbeds:
    ids = [draw.randrange(WORDS) for _ in range(length)]
    if kind == "ids":
        return TokenIds(ids)
    table = runner.embed_tokens(ids).cpu()
    noise = torch.randn(table.shape, generator=torch.Generator().manual_seed(draw.randrange(2**31)))
    return PromptEmbeds(table + 0.5 * table.std() * noise)


def _first(piece: TokenIds | PromptEmbeds, count: int) -> TokenIds | PromptEmbeds:
    return TokenIds(piece.ids[:count]) if isinstance(piece, TokenIds) else PromptEmbeds(piece.embeds[:count])


def _with_another_first(piece: TokenIds | PromptEmbeds) -> TokenIds | PromptEmbeds:
    """The same but for the first token: pages of equal tokens that hold other keys and values."""
    if isinstance(piece, TokenIds):
        return TokenIds([(piece.ids[0] + 1) % WORDS, *piece.ids[1:]])
    return PromptEmbeds(torch.cat([-piece.embeds[:1], piece.embeds[1:]]))


def _draw_params(draw: random.Random, *, has_embeds: bool) -> SamplingParams:
    settings: dict[str, Any] = {}
    if draw.random() < 0.6:
        settings = {"temperature": draw.uniform(0.3, 3.0), "seed": draw.randrange(2**31)}
        settings |= {"top_k": draw.randint(2, 30)} if draw.random() < 0.4 else {}
        settings |= {"top_p": draw.uniform(0.3, 1.0)} if draw.random() < 0.4 else {}
        settings |= {"min_p": draw.uniform(0.0, 0.2)} if draw.random() < 0.4 else {}
    if draw.random() < 0.25:
        settings["repetition_penalty"] = draw.uniform(0.7, 2.0)
    if draw.random() < 0.3:
        settings["stop_token_ids"] = tuple(draw.sample(range(WORDS), 4))
    if draw.random() < 0.3:
        settings["logprobs"] = draw.randint(0, 3)
    if draw.random() < 0.1 and not has_embeds:
        settings["prompt_logprobs"] = 0
    return SamplingParams(max_new_tokens=draw.randint(1, NEW), ignore_eos=draw.random() < 0.5, **settings)


def _count_evictions(engine: Engine) -> list[int]:
    pool, count = engine.scheduler.pool, [0]
    original = pool.take

    def take(pages: int) -> list[int]:
        before = len(pool._digest_of)
        taken = original(pages)
        count[0] += before - len(pool._digest_of)
        return taken

    pool.take = take  # type: ignore[method-assign]
    return count
