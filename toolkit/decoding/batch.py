"""One step's batch: the next tokens of some sequences, whose earlier ones are in the cache.

Shape suffixes: T tokens, S sequences, W width of the seam.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from toolkit.batch import EMBEDS_ARGS, IS_EMBED, Batch, Field, joined, place_embeds

__all__ = ["EmbedsStep", "Piece", "StepBatch", "pack_step"]


@dataclass(frozen=True, kw_only=True)
class StepBatch(Batch):
    """The next tokens of some sequences. `positions` are places in the sequence, in the model's own counting.

    An id below 0 stands for the token that the step before chose for lane -1 - id.

    Attributes:
        slots: int32 [T], where each token's key and value go: page × page size + place, or -1 for nowhere.
        starts: int32 [S], how many tokens of each sequence are in the cache.
        lanes: int32 [S], each sequence's row of the page tables.
    """

    FIELDS = (
        Field("ids", "token"),
        Field("positions", "token"),
        Field("slots", "token", -1),
        Field("cu_seqlens", "offset", None),
        Field("starts", "sequence"),
        Field("lanes", "sequence"),
    )
    ARGS = ("ids", "positions", "slots", "cu_seqlens", "starts", "lanes", "max_len")

    slots: Tensor
    starts: Tensor
    lanes: Tensor


@dataclass(frozen=True, kw_only=True)
class EmbedsStep(StepBatch):
    """A step in which some tokens are given as embeddings; see `toolkit.batch.EmbedsBatch`."""

    PATH = "embeds"
    FIELDS = (*StepBatch.FIELDS, IS_EMBED)
    ARGS = (*StepBatch.ARGS, *EMBEDS_ARGS)

    embeds: Tensor
    is_embed: Tensor


class Piece(Protocol):
    """A sequence's part in a step: its tokens `start` … `stop` - 1."""

    @property
    def start(self) -> int: ...

    @property
    def stop(self) -> int: ...

    @property
    def lane(self) -> int: ...

    @property
    def ids(self) -> np.ndarray:
        """int32 [stop - start]."""
        ...

    @property
    def pages(self) -> Sequence[int]:
        """The numbers of the sequence's pages."""
        ...

    @property
    def embeds(self) -> Sequence[tuple[int, Tensor]]:
        """(place among the piece's tokens, embeddings)."""
        ...


@torch.inference_mode()
def pack_step(
    pieces: Sequence[Piece], position_start: int, page: int, width: int, dtype: torch.dtype, device: torch.device
) -> StepBatch:
    """Pack a step; `embeds`, if there are any, are built on `device` in `dtype`, the rest on the CPU."""
    lengths = [piece.stop - piece.start for piece in pieces]
    bounds = np.cumsum([0, *lengths], dtype=np.int32)
    ids, positions, slots = (np.empty(bounds[-1], np.int32) for _ in range(3))
    for piece, begin, length in zip(pieces, bounds.tolist(), lengths, strict=False):
        start = piece.start
        if length == 1:  # most pieces of most steps
            ids[begin], positions[begin] = piece.ids[0], start
            slots[begin] = piece.pages[start // page] * page + start % page
            continue
        places = np.arange(start, piece.stop, dtype=np.int32)
        ids[begin : begin + length], positions[begin : begin + length] = piece.ids, places
        slots[begin : begin + length] = np.array(piece.pages, np.int32)[places // page] * page + places % page
    batch = StepBatch(
        ids=joined([ids]),
        positions=joined([positions + position_start]),
        slots=joined([slots]),
        cu_seqlens=joined([bounds]),
        starts=joined([np.array([piece.start for piece in pieces], np.int32)]),
        lanes=joined([np.array([piece.lane for piece in pieces], np.int32)]),
        max_len=torch.tensor([max(lengths, default=0)], dtype=torch.int32),
    )
    embeds = [piece.embeds for piece in pieces]
    if not any(embeds):
        return batch
    embeds_TW, is_embed_T = place_embeds(batch, embeds, width, dtype, device)
    return EmbedsStep(**vars(batch), embeds=embeds_TW, is_embed=is_embed_T)
