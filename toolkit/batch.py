"""Packed batches: the tokens of all sequences one after another, without padding.

Shape suffixes: T tokens, S sequences, W width of the seam.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Literal, Self

import numpy as np
import torch
from torch import Tensor

from toolkit.inputs import Row

__all__ = [
    "EMBEDS_ARGS",
    "IS_EMBED",
    "Batch",
    "EmbedsBatch",
    "Field",
    "PackedBatch",
    "joined",
    "pack",
    "pack_embeds",
    "place_embeds",
]


@dataclass(frozen=True)
class Field:
    """An integer or boolean tensor of a batch, as a static input of a captured graph.

    `per` says what it has one value for ("offset": for each sequence, and one more); `tail` is what stands behind the
    batch's own values in a larger bucket, None for the number of tokens.
    """

    name: str
    per: Literal["token", "sequence", "offset"]
    tail: int | None = 0
    dtype: torch.dtype = torch.int32


@dataclass(frozen=True, kw_only=True)
class Batch:
    """What every batch has. `FIELDS` are its static inputs, `ARGS` the order in which `args` gives its tensors.

    Attributes:
        ids: int32 [T].
        positions: int32 [T], what the model takes for each token's position.
        cu_seqlens: int32 [S + 1], where each sequence starts and, last, where the batch ends.
        max_len: int32 [1], always on the CPU: an upper bound of the sequence lengths.
    """

    PATH: ClassVar[Literal["ids", "embeds"]] = "ids"
    FIELDS: ClassVar[tuple[Field, ...]]
    ARGS: ClassVar[tuple[str, ...]]

    ids: Tensor
    positions: Tensor
    cu_seqlens: Tensor
    max_len: Tensor

    @property
    def tokens(self) -> int:
        """T."""
        return self.ids.shape[0]

    @property
    def sequences(self) -> int:
        """S."""
        return self.cu_seqlens.shape[0] - 1

    def args(self) -> tuple[Tensor, ...]:
        """All tensors, in the order of `ARGS`."""
        return tuple(getattr(self, name) for name in self.ARGS)

    def to(self, device: torch.device) -> Self:
        """Move all tensors but `max_len`, which stays on the CPU."""
        if device == self.ids.device:
            return self
        names = [name for name in self.ARGS if name != "max_len"]
        return replace(self, **{name: getattr(self, name).to(device, non_blocking=True) for name in names})


# What an embeds batch adds to its kind. `embeds` is [T, W] in the weights' dtype, on the model's device, and no Field:
# rows that are not selected may hold anything.
IS_EMBED = Field("is_embed", "token", 0, torch.bool)
EMBEDS_ARGS = ("embeds", "is_embed")


@dataclass(frozen=True, kw_only=True)
class PackedBatch(Batch):
    """A batch of token ids. Positions restart at the model's first one in every sequence.

    Attributes:
        segments: int32 [T].
        skip: int32 [S], how many tokens at the start of each sequence pooling may leave out.
        keys: int32 [S], how many tokens at the start of each sequence are attended to.
    """

    FIELDS = (
        Field("ids", "token"),
        Field("positions", "token"),
        Field("segments", "token"),
        Field("cu_seqlens", "offset", None),
        Field("skip", "sequence"),
        Field("keys", "sequence"),
    )
    ARGS = ("ids", "positions", "segments", "cu_seqlens", "max_len", "skip", "keys")

    segments: Tensor
    skip: Tensor
    keys: Tensor

    def encoder_args(self) -> tuple[Tensor, ...]:
        """The tensors, in the order of the arguments of the encoder's entry point."""
        return tuple(getattr(self, name) for name in self.ARGS if name not in ("skip", "keys"))


@dataclass(frozen=True, kw_only=True)
class EmbedsBatch(PackedBatch):
    """A batch in which some tokens are given as embeddings.

    Attributes:
        embeds: [T, W] in the weights' dtype, on the model's device; rows that are not selected may hold anything.
        is_embed: bool [T], which rows of `embeds` take the place of the token table's.
    """

    PATH = "embeds"
    FIELDS = (*PackedBatch.FIELDS, IS_EMBED)
    ARGS = (*PackedBatch.ARGS, *EMBEDS_ARGS)

    embeds: Tensor
    is_embed: Tensor


# Compiled code tells inference tensors from others: they are what a batch has, whatever mode the caller is in.
@torch.inference_mode()
def pack(rows: Sequence[Row], position_start: int, position_pad: int | None = None) -> PackedBatch:
    """Pack rows of token ids, on the CPU. Rows may be empty.

    Args:
        rows: checked sequences.
        position_start: the position of each sequence's first token.
        position_pad: the id of tokens that do not count and stand at `position_start - 1`; only rows without
            embeddings are looked at, as the references do.
    """
    lengths = np.fromiter((len(row) for row in rows), np.int32, len(rows))
    cu_seqlens = np.zeros(len(rows) + 1, np.int32)
    np.cumsum(lengths, out=cu_seqlens[1:])
    positions = np.arange(cu_seqlens[-1], dtype=np.int32) - np.repeat(cu_seqlens[:-1], lengths) + position_start
    if position_pad is not None:
        for row, begin in zip(rows, cu_seqlens, strict=False):
            if not row.embeds and (row.ids == position_pad).any():
                counted = row.ids != position_pad
                place = positions[begin : begin + len(row)]
                place[:] = np.where(counted, np.cumsum(counted), 0) + position_start - 1
    return PackedBatch(
        ids=joined([row.ids for row in rows]),
        positions=joined([positions]),
        segments=joined([row.segments for row in rows]),
        cu_seqlens=joined([cu_seqlens]),
        max_len=torch.tensor([lengths.max(initial=0)], dtype=torch.int32),
        skip=torch.tensor([row.skip for row in rows], dtype=torch.int32),
        keys=torch.tensor([len(row) - row.unattended for row in rows], dtype=torch.int32),
    )


def joined(arrays: Sequence[np.ndarray]) -> Tensor:
    """Concatenate into an int32 tensor of stride 1; torch.from_numpy gives empty arrays a stride of 0."""
    joined = torch.empty(sum(map(len, arrays)), dtype=torch.int32)
    if arrays:
        np.concatenate(arrays, out=joined.numpy(), casting="same_kind")
    return joined


@torch.inference_mode()
def pack_embeds(
    rows: Sequence[Row],
    position_start: int,
    width: int,
    dtype: torch.dtype,
    device: torch.device,
    position_pad: int | None = None,
) -> EmbedsBatch:
    """Pack rows of which some hold embeddings; `embeds` is built on `device` in `dtype`, the rest on the CPU."""
    batch = pack(rows, position_start, position_pad)
    embeds_TW, is_embed_T = place_embeds(batch, [row.embeds for row in rows], width, dtype, device)
    return EmbedsBatch(**vars(batch), embeds=embeds_TW, is_embed=is_embed_T)


def place_embeds(
    batch: Batch,
    pieces: Sequence[Sequence[tuple[int, Tensor]]],
    width: int,
    dtype: torch.dtype,
    device: torch.device,
) -> tuple[Tensor, Tensor]:
    """Put each sequence's embeddings, given by their place in it, where its tokens are.

    Returns:
        [T, W] on `device` in `dtype`, and which rows are taken: bool [T] on the CPU.
    """
    embeds_TW = torch.zeros(batch.tokens, width, dtype=dtype, device=device)
    is_embed_T = torch.zeros(batch.tokens, dtype=torch.bool)
    for begin, mine in zip(batch.cu_seqlens.tolist(), pieces, strict=False):
        for start, piece in mine:
            place = slice(begin + start, begin + start + len(piece))
            embeds_TW[place].copy_(piece)
            is_embed_T[place] = True
    return embeds_TW, is_embed_T
