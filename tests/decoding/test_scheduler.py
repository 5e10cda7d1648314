"""Steps, lanes and pages, without a model: the cache holds what each token follows from."""

import random
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from torch import Tensor

from toolkit.decoding.kvcache import PagePool, PageTables
from toolkit.decoding.request import Request, Share
from toolkit.decoding.sampling import SamplingParams
from toolkit.decoding.scheduler import Scheduler
from toolkit.inputs import Row

CPU = torch.device("cpu")


@dataclass(kw_only=True)
class Loop:
    """What an engine does, with a cache that remembers for each token all that it was computed from."""

    pages: int = 16
    page: int = 4
    lanes: int = 4
    step_tokens: int = 16
    chunked: bool = True
    caching: bool = True
    ahead: bool = False
    stop: int = 0
    finished: list[int] = field(default_factory=list)
    steps: list[list[tuple[int, int, int]]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.pool = PagePool(self.pages, caching=self.caching)
        self.tables = PageTables(self.lanes, self.pages, CPU)
        self.scheduler = Scheduler(
            self.pool, self.tables, page=self.page, step_tokens=self.step_tokens, chunked=self.chunked
        )
        self.cache: dict[int, int] = {}
        self.flight: list[tuple[Request, int]] = []
        self.known: dict[int, list[int]] = {}
        self.latest: dict[int, int] = {}
        self.arrivals = 0

    def add(
        self, ids: Iterable[int], *embeds: tuple[int, Tensor], new: int = 3, prompt_logprobs: int | None = None
    ) -> Request:
        values = np.array(list(ids), np.int32)
        self.arrivals += 1
        row = Row(ids=values, segments=np.zeros_like(values), embeds=embeds)
        params = SamplingParams(max_new_tokens=new, prompt_logprobs=prompt_logprobs, seed=0)
        request = Request.of(self.arrivals, row, params)
        self.scheduler.add(request)
        self.known[request.number] = values.tolist()
        return request

    def step(self) -> list[Share]:
        shares = self.scheduler.next_step()
        self._check_step(shares)
        self.steps.append([(share.request.number, share.start, share.count) for share in shares])
        for share in shares:
            self._write(share)
        for share in shares:
            self._read(share)
        assert shares or self.flight or not self.scheduler.requests, "the first in line can always run"
        before, self.flight = self.flight, self._launch(shares)
        self._land(before)
        if not self.ahead:
            self._land(self.flight)
            self.flight = []
        self.check_pages()
        return shares

    def _launch(self, shares: list[Share]) -> list[tuple[Request, int]]:
        """Choose tokens, which only the device knows for now."""
        flight: list[tuple[Request, int]] = []
        for share in shares:
            request, completes, lane = share.request, share.completes, share.lane
            self.scheduler.done(share)
            if completes:
                token = sum(self.known[request.number]) % 7 + 1
                self.known[request.number].append(token)
                self.latest[lane] = token
                flight.append((request, token))
                request.expect()
        return flight

    def _land(self, flight: list[tuple[Request, int]]) -> None:
        for request, token in flight:
            if request.finished:
                continue
            request.append(token)
            self.scheduler.publish(request)
            stops = token == self.stop
            if stops or len(request.generated) == request.params.max_new_tokens:
                assert request.generated.tolist() == self.known[request.number][len(request.row) : request.known]
                self.scheduler.finish(request, "stop" if stops else "length")
                self.finished.append(request.number)

    def run(self, most: int = 500) -> None:
        for _ in range(most):
            if not self.scheduler.requests:
                break
            self.step()
        assert not self.scheduler.requests, "all requests end"
        self.check_empty()

    def check_empty(self) -> None:
        assert self.pool.free == self.pages
        assert sorted(self.scheduler._lanes) == list(self.tables.lanes)

    def check_pages(self) -> None:
        """Each page is free or has owners, and the lanes are those of the running requests."""
        used = Counter(page for request in self.scheduler.requests for page in request.pages)
        assert self.pool.free + len(used) == self.pages
        assert {page: self.pool._users[page] for page in used} == dict(used)
        running = [request.lane for request in self.scheduler.requests if request.lane is not None]
        assert len(running) == len(set(running))
        assert sorted([*running, *self.scheduler._lanes]) == list(self.tables.lanes)
        for request in self.scheduler.requests:
            if request.lane is None:
                assert (request.pages, request.computed) == ([], 0)

    def _check_step(self, shares: Sequence[Share]) -> None:
        tables = self.tables.flush()
        total = sum(share.count for share in shares)
        alone = len(shares) == 1 and not self.chunked and shares[0].completes
        assert total <= self.step_tokens or alone
        assert len({share.request.number for share in shares}) == len(shares) <= self.lanes
        for share in shares:
            assert share.count > 0
            assert self.chunked or share.completes
            assert share.stop <= share.request.length
            own = share.request.pages
            assert len(own) >= -(-share.stop // self.page)
            assert tables[share.lane, : len(own)].tolist() == own

    def _write(self, share: Share) -> None:
        content = self._content(share.request)
        ids = [self.latest[-1 - token] if token < 0 else token for token in share.ids.tolist()]
        assert ids == self.known[share.request.number][share.start : share.stop]
        for place in range(share.start, share.stop):
            page = share.request.pages[place // self.page]
            self.cache[page * self.page + place % self.page] = content[place]

    def _read(self, share: Share) -> None:
        wanted = self._content(share.request)
        for place in range(share.stop):
            page = share.request.pages[place // self.page]
            assert self.cache[page * self.page + place % self.page] == wanted[place], "the cache holds something else"

    def _content(self, request: Request) -> list[int]:
        """For each token what it and all before it are."""
        items: list[object] = [*self.known[request.number]]
        for start, values in request.row.embeds:
            items[start : start + len(values)] = [tuple(value.tolist()) for value in values]
        found, before = [], 0
        for item in items:
            before = hash((before, item))
            found.append(before)
        return found


def test_requests_start_in_the_order_of_their_arrival() -> None:
    loop = Loop(lanes=2)
    for _ in range(5):
        loop.add(range(3), new=2)
    loop.run()
    first = [number for step in loop.steps for number, start, _ in step if start == 0]
    assert first == [1, 2, 3, 4, 5]
    assert loop.finished == first
    assert max(len(step) for step in loop.steps) == 2


def test_the_first_in_line_is_not_overtaken() -> None:
    """Though there is room for the second one."""
    loop = Loop(pages=4)
    loop.add(range(6), new=3)
    loop.add(range(10, 20), new=2)
    loop.add([1], new=2)
    loop.run()
    assert loop.finished == [1, 2, 3]
    assert [number for number, _, _ in loop.steps[0]] == [1]


def test_long_prompts_come_in_chunks_between_the_tokens_of_others() -> None:
    loop = Loop(step_tokens=6)
    loop.add([1, 2], new=4)
    loop.add(range(12), new=1)
    loop.run()
    assert loop.steps == [[(1, 0, 2), (2, 0, 4)], [(1, 2, 1), (2, 4, 5)], [(1, 3, 1), (2, 9, 3)], [(1, 4, 1)]]


def test_whole_prompts_wait_for_a_step_with_room() -> None:
    loop = Loop(step_tokens=6, chunked=False)
    loop.add([1, 2], new=2)
    loop.add(range(10, 15), new=1)
    loop.add(range(20, 29), new=1)
    loop.add([3], new=1)
    loop.run()
    assert loop.steps == [[(1, 0, 2)], [(1, 2, 1), (2, 0, 5)], [(3, 0, 9)], [(4, 0, 1)]]


def test_a_step_takes_no_more_tokens_than_it_may() -> None:
    loop = Loop(step_tokens=2, lanes=4)
    for _ in range(4):
        loop.add([1], new=3)
    loop.run()
    assert [sum(count for _, _, count in step) for step in loop.steps] == [2] * 6
    loop.step()
    assert loop.scheduler.stats.steps == 6, "a step without tokens is none"


def test_who_came_last_gives_way() -> None:
    loop = Loop(pages=4, page=2, caching=False)
    loop.add([1, 2, 3], new=5)
    loop.add([4, 5, 6], new=5)
    loop.step()
    loop.step()
    first, second = loop.scheduler.requests
    assert (first.lane is None, second.lane is None) == (False, False)
    loop.step()
    assert (first.lane is None, second.lane is None) == (False, True)
    assert len(second.generated) == 2, "what was generated is not lost"
    loop.run()
    assert loop.finished == [1, 2]
    assert loop.scheduler.stats.preemptions == 1
    assert (2, 0, 5) in [share for step in loop.steps for share in step], "all of it is computed anew"


def test_the_order_of_those_who_gave_way_is_that_of_their_arrival() -> None:
    loop = Loop(pages=8, page=1, lanes=4, caching=False)
    for _ in range(4):
        loop.add([1], new=6)
    loop.run()
    assert loop.scheduler.stats.preemptions > 1
    assert loop.finished == [1, 2, 3, 4]


def test_what_gave_way_finds_its_pages_again() -> None:
    """As far as nobody took them: here all three, which are full."""
    loop = Loop(pages=6, page=2)
    loop.add([1, 2, 3], new=3)
    loop.add([4, 5, 6, 7, 8], new=3)
    loop.run()
    assert loop.scheduler.stats.preemptions == 1
    assert loop.steps == [[(1, 0, 3), (2, 0, 5)], [(1, 3, 1), (2, 5, 1)], [(1, 4, 1)], [(2, 6, 1)]]
    assert loop.scheduler.stats.cached_tokens == 6


def test_who_gave_way_does_not_come_back_at_once() -> None:
    """Though its pages could all be found: those of the first, which has the same prompt."""
    loop = Loop(pages=9, page=2)
    loop.add(range(8), new=4)
    loop.add(range(8), new=3)
    loop.run()
    assert loop.steps[:3] == [[(1, 0, 8), (2, 0, 8)], [(1, 8, 1)], [(1, 9, 1), (2, 8, 1)]]
    assert loop.scheduler.stats.preemptions == 1


def test_equal_beginnings_are_computed_once() -> None:
    loop = Loop()
    loop.add(range(10), new=3)
    loop.step()
    loop.add([*range(8), 50, 51], new=3)
    loop.add([*range(4), 60, 61, 62, 63], new=3)
    loop.add([70, *range(1, 9)], new=3)
    loop.step()
    assert loop.steps[1] == [(1, 10, 1), (2, 8, 2), (3, 4, 4), (4, 0, 9)]
    one, two, three, four = loop.scheduler.requests
    assert two.pages[:2] == one.pages[:2]
    assert three.pages[:1] == one.pages[:1]
    assert not set(three.pages[1:] + four.pages) & set(one.pages + two.pages)
    assert loop.scheduler.stats.cached_tokens == 12
    assert loop.scheduler.stats.prompt_tokens == 10 + 10 + 8 + 9
    loop.run()


def test_prompts_are_found_after_their_request_ended() -> None:
    loop = Loop()
    first = loop.add(range(9), new=3)
    loop.run()
    again = loop.add([*range(9), *first.generated.tolist()], new=1)
    loop.step()
    assert loop.steps[-1] == [(again.number, 8, 4)], "its last generated token was never computed, nor its page full"


def test_the_last_token_is_always_computed() -> None:
    """A prompt that is full pages, all of them known."""
    loop = Loop()
    loop.add(range(8), new=1)
    loop.run()
    loop.add(range(8), new=1)
    loop.run()
    assert [share for step in loop.steps for share in step] == [(1, 0, 8), (2, 4, 4)]


VALUES = torch.arange(16.0).view(8, 2)


def test_embeds_of_equal_bytes_are_shared_and_others_never() -> None:
    loop = Loop(step_tokens=64)
    loop.add([0] * 9, (0, VALUES), new=2)
    loop.step()
    loop.add([0] * 9, (0, VALUES.clone()), new=2)
    loop.add([0] * 9, (0, VALUES + 1), new=2)
    loop.add([0] * 9, new=2)
    loop.step()
    assert loop.steps[1] == [(1, 9, 1), (2, 8, 1), (3, 0, 9), (4, 0, 9)]
    loop.run()


def test_prompt_logprobs_need_every_token() -> None:
    loop = Loop()
    loop.add(range(9), new=1)
    loop.run()
    loop.add(range(9), new=1, prompt_logprobs=0)
    loop.step()
    assert loop.steps[-1] == [(2, 0, 9)]


def test_without_prefix_caching_nothing_is_shared() -> None:
    loop = Loop(caching=False)
    for _ in range(2):
        loop.add(range(9), new=1)
        loop.run()
    assert loop.scheduler.stats.cached_tokens == 0


def test_cached_pages_are_no_free_ones_for_who_uses_them() -> None:
    """The cache has 4 pages: two are found, and the two that are needed besides are not there."""
    loop = Loop(pages=4)
    loop.add(range(8), new=1)
    loop.run()
    loop.add(range(20, 25), new=6)
    loop.step()
    loop.add([*range(8), 9, 10, 11, 12], new=1)
    loop.step()
    assert [number for number, _, _ in loop.steps[-1]] == [2]
    loop.run()


@pytest.mark.parametrize("finish_first", [True, False])
def test_finish_frees_pages_and_lanes(finish_first: bool) -> None:
    loop = Loop(lanes=1)
    running, waiting = loop.add(range(9), new=9), loop.add(range(9), new=9)
    loop.step()
    assert (running.lane, waiting.lane) == (1, None)
    for request in (running, waiting) if finish_first else (waiting, running):
        loop.scheduler.finish(request, "cancelled")
        assert request.finished == "cancelled"
        loop.check_pages()
    assert loop.scheduler.requests == []
    loop.check_empty()
    assert loop.step() == []


def test_a_step_ahead_uses_tokens_that_are_not_known_yet() -> None:
    loop = Loop(ahead=True)
    request = loop.add([4, 4], new=4)
    loop.step()
    assert (request.length, request.known, request.generated.tolist()) == (3, 2, [])
    assert loop.scheduler.next_step()[0].ids.tolist() == [-1 - 1]
    loop.run()
    assert request.generated.tolist() == [2, 4, 1, 2]
    assert [len(step) for step in loop.steps] == [1, 1, 1, 1, 0], "not one too many: the last token is counted"


def test_a_page_is_shared_only_once_its_tokens_are_known() -> None:
    loop = Loop(ahead=True, page=2)
    request = loop.add([4], new=6)
    loop.step()
    loop.step()
    assert (request.computed, request.known, request.published) == (2, 2, 1)
    loop.step()
    loop.step()
    assert (request.computed, request.known, request.published) == (4, 4, 2)
    request.tokens[3] = -2
    request.awaited += 1
    request.published, request.digests = 1, request.digests[:1]
    loop.scheduler.publish(request)
    assert (request.known, request.published) == (3, 1)


def test_a_request_that_fills_the_cache_runs() -> None:
    """Its last token is never computed, so it needs no page."""
    loop = Loop(pages=2, caching=False)
    loop.add(range(8), new=1)
    loop.run()
    loop.add(range(5), new=4)
    loop.run()
    assert loop.finished == [1, 2]
    assert loop.scheduler.stats.preemptions == 0


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("chunked", [True, False])
@pytest.mark.parametrize("ahead", [True, False])
@pytest.mark.parametrize("seed", range(12))
def test_any_course_of_events(seed: int, ahead: bool, chunked: bool, caching: bool) -> None:
    """L: few pages, equal beginnings, late arrivals, cancellations; the cache always holds what is read.

    Also where a step is chosen before the tokens of the one before are known.
    """
    draw = random.Random(seed)
    page = draw.choice([1, 2, 4])
    loop = Loop(
        pages=-(-24 // page) + draw.randint(0, 4),
        page=page,
        lanes=draw.randint(1, 5),
        step_tokens=draw.randint(1, 12),
        chunked=chunked,
        caching=caching,
        ahead=ahead,
        stop=draw.choice([0, 3]),
    )
    values = [torch.randn(12, 2, generator=torch.Generator().manual_seed(k)) for k in range(2)]
    cancelled: set[int] = set()
    for _ in range(80):
        if draw.random() < 0.5:
            length, kind = draw.randint(1, 12), draw.choice(["ids", "ids", "embeds", "mixed"])
            ids = [0 if kind == "embeds" else 1] * length
            if draw.random() < 0.3:
                ids[-1] = 0 if kind == "embeds" else 2
            start = draw.randint(0, length - 1) if kind == "mixed" else 0
            ids[start:] = ids[start:] if kind == "ids" else [0] * (length - start)
            embeds = () if kind == "ids" else ((start, draw.choice(values)[: length - start]),)
            wants = 0 if draw.random() < 0.1 else None
            loop.add(ids, *embeds, new=draw.randint(1, 12), prompt_logprobs=wants)
        if draw.random() < 0.1 and loop.scheduler.requests:
            request = draw.choice(loop.scheduler.requests)
            loop.scheduler.finish(request, "cancelled")
            cancelled.add(request.number)
        loop.step()
    loop.run(2000)
    assert sorted([*loop.finished, *cancelled]) == list(range(1, loop.arrivals + 1))
