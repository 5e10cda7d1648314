"""A request: its prompt, what was generated, and where its keys and values are."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TypeVar

import numpy as np
from torch import Tensor

from toolkit.decoding.fingerprint import fingerprints
from toolkit.decoding.kvcache import page_digest
from toolkit.decoding.sampling import SamplingParams
from toolkit.inputs import Row

__all__ = ["Request", "Share"]


@dataclass(kw_only=True, eq=False)
class Request:
    """A sequence that grows.

    Attributes:
        number: in the order of arrival.
        row: the prompt.
        params: how it is continued.
        random: its own random numbers.
        tokens: the ids of prompt and result; zero for tokens given as embeddings.
        length: how many of `tokens` are there.
        awaited: how many of them, at the end, are being computed still: in their place stands -1 - lane.
        computed: how many of them have their keys and values in the cache, or will when the steps under way are done.
        pages: the numbers of its pages.
        lane: its row of the page tables, None while it waits.
        finished: why it ended; empty while it goes on.
    """

    number: int
    row: Row
    params: SamplingParams
    random: np.random.Generator
    tokens: np.ndarray
    length: int
    awaited: int = 0
    computed: int = 0
    pages: list[int] = field(default_factory=list)
    lane: int | None = None
    finished: str = ""
    digests: list[bytes] = field(default_factory=list)
    published: int = 0

    @classmethod
    def of(cls, number: int, row: Row, params: SamplingParams) -> "Request":
        """A new request."""
        tokens = np.zeros(len(row) + params.max_new_tokens, np.int32)
        tokens[: len(row)] = row.ids
        return cls(
            number=number,
            row=row,
            params=params,
            random=np.random.Generator(np.random.Philox(params.seed)),
            tokens=tokens,
            length=len(row),
        )

    @property
    def pending(self) -> int:
        """How many known tokens are not computed yet; never 0 while it goes on."""
        return self.length - self.computed

    @property
    def known(self) -> int:
        """How many tokens are known, those of the prompt and the generated ones."""
        return self.length - self.awaited

    @property
    def complete(self) -> bool:
        """Whether there will be no more tokens than those that are there or under way."""
        return self.length == len(self.tokens)

    @property
    def generated(self) -> np.ndarray:
        """The ids generated so far."""
        return self.tokens[len(self.row) : self.known]

    def expect(self) -> None:
        """Make room for a token that is being computed."""
        assert self.lane is not None
        self.tokens[self.length] = -1 - self.lane
        self.length += 1
        self.awaited += 1

    def append(self, token: int) -> None:
        """Add a generated token, in the place of the first that is awaited if there is one."""
        self.tokens[self.known] = token
        if self.awaited:
            self.awaited -= 1
        else:
            self.length += 1

    def digest(self, number: int, page: int) -> bytes:
        """What identifies page `number` of the sequence, for pages of `page` tokens; it must be full."""
        while len(self.digests) <= number:
            start = len(self.digests) * page
            stop = start + page
            assert stop <= self.length
            pieces = _between(self.fingerprints, start, stop)
            selector, values = None, b""
            if pieces:
                selector = np.zeros(page, np.bool_)
                for begin, piece in pieces:
                    selector[begin : begin + len(piece)] = True
                values = b"".join(piece.tobytes() for _, piece in pieces)
            before = self.digests[-1] if self.digests else b""
            self.digests.append(page_digest(before, self.tokens[start:stop], selector, values))
        return self.digests[number]

    def embeds_between(self, start: int, stop: int) -> list[tuple[int, Tensor]]:
        """What of the prompt's embeddings falls into a range: (place from its start on, embeddings)."""
        return _between(self.row.embeds, start, stop)

    @cached_property
    def fingerprints(self) -> list[tuple[int, np.ndarray]]:
        """Each piece of embeddings, by its place in the sequence, as one row of numbers a token.

        To find them out the host waits for the device, once.
        """
        return [(begin, fingerprints(values)) for begin, values in self.row.embeds]


@dataclass(frozen=True, kw_only=True)
class Share:
    """A request's part in a step: its next `count` tokens."""

    request: Request
    count: int

    @property
    def start(self) -> int:
        """The first token's place in the sequence."""
        return self.request.computed

    @property
    def stop(self) -> int:
        """The place behind the last token."""
        return self.request.computed + self.count

    @property
    def lane(self) -> int:
        """The row of the page tables."""
        assert self.request.lane is not None
        return self.request.lane

    @property
    def ids(self) -> np.ndarray:
        """int32 [count]."""
        return self.request.tokens[self.start : self.stop]

    @property
    def pages(self) -> Sequence[int]:
        """The numbers of the sequence's pages."""
        return self.request.pages

    @property
    def embeds(self) -> Sequence[tuple[int, Tensor]]:
        """(place among these tokens, embeddings)."""
        return self.request.embeds_between(self.start, self.stop)

    @property
    def completes(self) -> bool:
        """Whether nothing is pending after this step, so that its last logits say how the sequence goes on."""
        return self.count == self.request.pending


Rows = TypeVar("Rows", Tensor, np.ndarray)


def _between(pieces: Sequence[tuple[int, Rows]], start: int, stop: int) -> list[tuple[int, Rows]]:
    """What of the pieces, given by their place, falls into a range: (place from its start on, rows)."""
    found: list[tuple[int, Rows]] = []
    for begin, values in pieces:
        low, high = max(begin, start), min(begin + len(values), stop)
        if low < high:
            found.append((low - start, values[low - begin : high - begin]))
    return found
