"""Who owns which page of the key/value cache, and which pages hold what a new request begins with.

A full page is known by a digest of everything that its keys and values follow from: the digest of the page before it,
and what its tokens really are: ids, or fingerprints of their embeddings together with the selector that says which
tokens those are. Placeholder ids never count.
"""

import hashlib
from collections import OrderedDict
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

__all__ = ["PagePool", "PageTables", "page_digest"]


def page_digest(before: bytes, ids: np.ndarray, is_embed: np.ndarray | None, embeds: bytes) -> bytes:
    """What identifies a full page.

    Args:
        before: the digest of the page before it; empty for a sequence's first.
        ids: int32 [P]; those of tokens given as embeddings are zero.
        is_embed: bool [P], which tokens are given as embeddings; None for none.
        embeds: the bytes of their fingerprints.
    """
    digest = hashlib.blake2b(before, digest_size=24, key=b"ids" if is_embed is None else b"embeds")
    digest.update(ids.tobytes())
    if is_embed is not None:
        digest.update(is_embed.tobytes())
        digest.update(embeds)
    return digest.digest()


class PagePool:
    """Pages by number: who uses them, and which ones hold something that may be used again.

    Args:
        pages: how many there are.
        caching: whether pages that nobody uses any more keep their digest until they are needed.
    """

    def __init__(self, pages: int, *, caching: bool) -> None:
        self.pages, self.caching = pages, caching
        self._users = [0] * pages
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(pages))  # the next one to be taken first
        self._digest_of: dict[int, bytes] = {}
        self._page_of: dict[bytes, int] = {}

    @property
    def free(self) -> int:
        """How many pages nobody uses."""
        return len(self._free)

    def find(self, digest: bytes) -> int | None:
        """The page that holds what a digest stands for; it is not shared yet."""
        return self._page_of.get(digest)

    def share(self, pages: Sequence[int]) -> None:
        """Use pages that are known to hold what is wanted."""
        for page in pages:
            self._free.pop(page, None)
            self._users[page] += 1

    def unused(self, pages: Sequence[int]) -> int:
        """How many of these pages are free: sharing them takes them away from others."""
        return sum(not self._users[page] for page in pages)

    def take(self, count: int) -> list[int]:
        """Take free pages, those that were used longest ago; what they held is forgotten.

        Raises:
            IndexError: there are not so many.
        """
        if count > len(self._free):
            raise IndexError(f"{count} pages wanted, {len(self._free)} are free")
        taken = [self._free.popitem(last=False)[0] for _ in range(count)]
        for page in taken:
            self._users[page] = 1
            self._forget(page)
        return taken

    def release(self, pages: Sequence[int]) -> None:
        """Give up a sequence's pages. Its last ones are taken anew first: beginnings are shared more often."""
        for page in reversed(pages):
            self._users[page] -= 1
            assert self._users[page] >= 0, "a page is released once by each user"
            if not self._users[page]:
                self._free[page] = None
                if page not in self._digest_of:
                    self._free.move_to_end(page, last=False)

    def publish(self, page: int, digest: bytes) -> None:
        """Say that a page is full and computed, and what it holds. The first page of a kind is the one that counts."""
        if self.caching and digest not in self._page_of:
            self._forget(page)
            self._digest_of[page] = digest
            self._page_of[digest] = page

    def _forget(self, page: int) -> None:
        digest = self._digest_of.pop(page, None)
        if digest is not None:
            del self._page_of[digest]


class PageTables:
    """The pages of each running sequence, on the device: int32 [lanes + 1, pages of a sequence].

    A row is written as a sequence gets pages; captured graphs read it at a fixed address. Entries behind a sequence's
    own pages are what an earlier one left, and are never read. Lanes count from 1: row 0 belongs to nobody, and empty
    sequences of a bucket point to it.
    """

    def __init__(self, lanes: int, pages: int, device: torch.device) -> None:
        self.lanes = range(1, lanes + 1)
        self.tensor = torch.zeros(lanes + 1, pages, dtype=torch.int32, device=device)
        self._waiting: dict[int, int] = {}

    def write(self, lane: int, first: int, pages: Sequence[int]) -> None:
        """Note that from its page number `first` on, the sequence in `lane` has these pages."""
        start = lane * self.tensor.shape[1] + first
        self._waiting.update(zip(range(start, start + len(pages)), pages, strict=True))

    def flush(self) -> Tensor:
        """Bring what was noted to the device, in one copy, and return the tables."""
        if self._waiting:
            changes = torch.tensor([list(self._waiting), list(self._waiting.values())])
            places, pages = changes.to(self.tensor.device, non_blocking=True)
            self.tensor.view(-1).index_copy_(0, places, pages.to(torch.int32))
            self._waiting.clear()
        return self.tensor
