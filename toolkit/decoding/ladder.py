"""The sizes that a decoder's steps are captured for."""

import bisect
from dataclasses import dataclass
from functools import cached_property

from toolkit.graphs import Bucket

__all__ = ["StepLadder"]

_SMALLEST_MIXED = 16


@dataclass(frozen=True, kw_only=True)
class StepLadder:
    """Buckets of two kinds: those in which each sequence has one token, and those with prompts in them.

    Attributes:
        step_tokens: most tokens in a step.
        sequences: most sequences in a step.
        smallest: the smallest size.
    """

    step_tokens: int
    sequences: int
    smallest: int

    @cached_property
    def decode(self) -> list[int]:
        """Ascending sizes of steps with one token a sequence."""
        steps = [1, 2, 4, *(size for size in range(8, self.sequences, 8) if size <= 64 or size % 32 == 0)]
        return sorted({max(self.smallest, min(size, self.sequences)) for size in (*steps, self.sequences)})

    @cached_property
    def mixed(self) -> list[int]:
        """Ascending sizes of steps with prompts: two steps an octave, so at most a third is tail."""
        steps = (base << octave for octave in range(self.step_tokens.bit_length()) for base in (16, 24))
        return sorted({size for size in steps if size < self.step_tokens} | {max(self.step_tokens, _SMALLEST_MIXED)})

    def find(self, tokens: int, sequences: int, max_len: int) -> Bucket | None:
        """Return the smallest bucket that holds such a step, or None."""
        sizes = self.decode if max_len <= 1 else self.mixed
        place = bisect.bisect_left(sizes, tokens)
        if place == len(sizes) or sequences > max(self.sequences, self.smallest):
            return None
        return self._decode(sizes[place]) if max_len <= 1 else self._mixed(sizes[place], sequences)

    def default(self) -> list[Bucket]:
        """Every size, the largest first; with prompts, few sequences."""
        return [
            *(self._mixed(size, 1) for size in reversed(self.mixed)),
            *(self._decode(size) for size in reversed(self.decode)),
        ]

    @staticmethod
    def _decode(size: int) -> Bucket:
        return Bucket(tokens=size, sequences=size, max_len=1)

    def _mixed(self, size: int, sequences: int) -> Bucket:
        """Room for a few sequences, or for as many as there can be: attention launches for each that could come."""
        few = min(8, size)
        return Bucket(
            tokens=size, sequences=few if sequences <= few else max(self.sequences, self.smallest), max_len=size
        )
