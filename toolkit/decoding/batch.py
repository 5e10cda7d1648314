"""One step's batch: the next tokens of some sequences, whose earlier ones are in the cache.

Shape suffixes: T tokens, S sequences, W width of the seam.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from toolkit.batch import EMBEDS_ARGS, IS_EMBED, Batch, Field, joined

__all__ = ["EmbedsStep", "Piece", "StepBatch", "pack_step"]


@dataclass(frozen=True, kw_only=True)
class StepBatch(Batch):
    """The next tokens of some sequences. `positions` are places in the sequence, in the model's own counting.

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
    def pages(self) -> np.ndarray:
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
    places = [np.arange(piece.start, piece.stop, dtype=np.int32) for piece in pieces]
    slots = [piece.pages[place // page] * page + place % page for piece, place in zip(pieces, places, strict=True)]
    lengths = [len(place) for place in places]
    batch = StepBatch(
        ids=joined([piece.ids for piece in pieces]),
        positions=joined([place + position_start for place in places]),
        slots=joined(slots),
        cu_seqlens=joined([np.cumsum([0, *lengths], dtype=np.int32)]),
        starts=joined([np.array([piece.start for piece in pieces], np.int32)]),
        lanes=joined([np.array([piece.lane for piece in pieces], np.int32)]),
        max_len=torch.tensor([max(lengths, default=0)], dtype=torch.int32),
    )
    if not any(piece.embeds for piece in pieces):
        return batch
    embeds_TW = torch.zeros(batch.tokens, width, dtype=dtype, device=device)
    is_embed_T = torch.zeros(batch.tokens, dtype=torch.bool)
    for piece, begin in zip(pieces, batch.cu_seqlens.tolist(), strict=False):
        for start, values in piece.embeds:
            place = slice(begin + start, begin + start + len(values))
            embeds_TW[place].copy_(values)
            is_embed_T[place] = True
    return EmbedsStep(**vars(batch), embeds=embeds_TW, is_embed=is_embed_T)
