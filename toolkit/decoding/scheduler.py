"""Which tokens of which requests go into the next step.

Requests run in the order of their arrival. Those that run go on first: one token each once their prompt is through.
When pages run out, the request that came last gives up its own and waits; it is computed anew later, as far as the
prefix cache does not remember it.
"""

from collections import deque
from dataclasses import dataclass

from toolkit.decoding.kvcache import PagePool, PageTables
from toolkit.decoding.request import Request, Share

__all__ = ["Scheduler", "SchedulerStats"]


@dataclass(kw_only=True)
class SchedulerStats:
    """Counters of a Scheduler.

    Attributes:
        steps: how many there were.
        prompt_tokens: tokens of prompts that came to be computed, or were found.
        cached_tokens: tokens whose pages were found in the prefix cache.
        preemptions: how often a request had to give up its pages.
    """

    steps: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    preemptions: int = 0


class Scheduler:
    """Shares out a step's tokens, lanes and pages.

    Args:
        pool: the pages.
        tables: where each lane's pages are written.
        page: tokens of a page.
        step_tokens: at most so many tokens in a step.
        chunked: whether a prompt may be spread over several steps; else it comes whole, and one that is longer than
            `step_tokens` has a step of its own.
    """

    def __init__(self, pool: PagePool, tables: PageTables, *, page: int, step_tokens: int, chunked: bool) -> None:
        self.stats = SchedulerStats()
        self.pool, self.page = pool, page
        self.tables, self._step_tokens, self._chunked = tables, step_tokens, chunked
        self._lanes = list(reversed(tables.lanes))
        self._running: list[Request] = []
        self._waiting: deque[Request] = deque()

    @property
    def requests(self) -> list[Request]:
        """All requests that are not finished, the running ones first."""
        return [*self._running, *self._waiting]

    def add(self, request: Request) -> None:
        """Let a request wait for its turn."""
        if self.pool.caching:
            _ = request.fingerprints  # now, so that no step waits for them
        self._waiting.append(request)

    def next_step(self) -> list[Share]:
        """Choose the next step's tokens, and give them pages; empty if there is nothing to do."""
        shares: list[Share] = []
        left, preemptions = self._step_tokens, self.stats.preemptions
        for request in list(self._running):
            if request.lane is None or request.complete:
                continue  # it gave way to one before it, or its last token is under way
            count = self._count(request, left, first=not shares)
            if count and (self._missing(request, count) <= 0 or self._make_room(request, count)):
                shares.append(Share(request=request, count=count))
                left -= count
        crowded = self.stats.preemptions > preemptions  # who gave way would come back at once, and give way again
        while self._waiting and self._lanes and left > 0 and not crowded:
            request = self._waiting[0]
            share = self._admit(request, left, first=not shares)
            if share is None:
                break
            self._waiting.popleft()
            self._running.append(request)
            shares.append(share)
            left -= share.count
        self.stats.steps += bool(shares)
        return shares

    def done(self, share: Share) -> None:
        """Note that a share is being computed: the next step goes on behind it."""
        share.request.computed += share.count
        self.publish(share.request)

    def publish(self, request: Request) -> None:
        """Let others share the pages that are full, and whose tokens are known."""
        full = min(request.computed, request.known) // self.page
        if full <= request.published or not self.pool.caching or request.lane is None:
            return
        for number in range(request.published, full):
            self.pool.publish(request.pages[number], request.digest(number, self.page))
        request.published = full

    def finish(self, request: Request, why: str) -> None:
        """Take a request out, whether it runs or waits; its pages are free from now on."""
        request.finished = why
        if request.lane is None:
            self._waiting.remove(request)
        else:
            self._running.remove(request)
            self._give_up(request)

    def _count(self, request: Request, left: int, *, first: bool) -> int:
        """How many of a request's tokens come into a step with room for `left` more."""
        if self._chunked or request.pending <= left:
            return min(request.pending, left)
        return request.pending if first else 0

    def _admit(self, request: Request, left: int, *, first: bool) -> Share | None:
        """Give a waiting request a lane and pages, those of the prefix cache first; None if it has to wait."""
        found = self._find(request)
        # room for one more token, unless that is the last one, which is never computed
        whole = -(-min(request.length + 1, len(request.tokens) - 1) // self.page)
        if whole - len(found) + self.pool.unused(found) > self.pool.free:
            return None
        request.computed = len(found) * self.page
        count = self._count(request, left, first=first)
        if not count:
            request.computed = 0
            return None
        self.pool.share(found)
        request.lane, request.pages, request.published = self._lanes.pop(), list(found), len(found)
        self.tables.write(request.lane, 0, found)
        self._extend(request, count)
        self.stats.cached_tokens += request.computed
        self.stats.prompt_tokens += request.length
        return Share(request=request, count=count)

    def _find(self, request: Request) -> list[int]:
        """Cached pages of what the request begins with; at least its last token is left to be computed."""
        if not self.pool.caching or request.params.prompt_logprobs is not None:
            return []
        found: list[int] = []
        for number in range((request.length - 1) // self.page):
            page = self.pool.find(request.digest(number, self.page))
            if page is None:
                break
            found.append(page)
        return found

    def _make_room(self, request: Request, count: int) -> bool:
        """Give a running request the pages for its next tokens; False if it had to give way itself."""
        while self._missing(request, count) > self.pool.free:
            last = self._running.pop()
            self._give_up(last)
            self._waiting.appendleft(last)
            self.stats.preemptions += 1
            if last is request:
                return False
        self._extend(request, count)
        return True

    def _missing(self, request: Request, count: int) -> int:
        return -(-(request.computed + count) // self.page) - len(request.pages)

    def _extend(self, request: Request, count: int) -> None:
        missing = self._missing(request, count)
        if missing > 0:
            assert request.lane is not None
            pages = self.pool.take(missing)
            self.tables.write(request.lane, len(request.pages), pages)
            request.pages += pages

    def _give_up(self, request: Request) -> None:
        assert request.lane is not None
        self.pool.release(request.pages)
        self._lanes.append(request.lane)
        request.lane, request.pages, request.computed, request.published = None, [], 0, 0
