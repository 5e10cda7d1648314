"""Packed batches: the tokens of all sequences one after another, without padding.

Shape suffixes: T tokens, S sequences, W width of the seam.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from toolkit.inputs import Row

__all__ = ["EmbedsBatch", "PackedBatch", "pack", "pack_embeds"]


@dataclass(frozen=True, kw_only=True)
class PackedBatch:
    """A batch of token ids.

    Attributes:
        ids: int32 [T].
        positions: int32 [T], restarting at the model's first position in every sequence.
        segments: int32 [T].
        cu_seqlens: int32 [S + 1], where each sequence starts and, last, where the batch ends.
        max_len: int32 [1], always on the CPU: an upper bound of the sequence lengths.
        skip: int32 [S], how many tokens at the start of each sequence pooling may leave out.
        keys: int32 [S], how many tokens at the start of each sequence are attended to.
    """

    ids: Tensor
    positions: Tensor
    segments: Tensor
    cu_seqlens: Tensor
    max_len: Tensor
    skip: Tensor
    keys: Tensor

    @property
    def tokens(self) -> int:
        """T."""
        return self.ids.shape[0]

    @property
    def sequences(self) -> int:
        """S."""
        return self.cu_seqlens.shape[0] - 1

    def args(self) -> tuple[Tensor, ...]:
        """All tensors: those of the encoder's ids entry point, then `skip` and `keys`."""
        return *self.encoder_args(), self.skip, self.keys

    def encoder_args(self) -> tuple[Tensor, ...]:
        """The tensors, in the order of the arguments of the encoder's entry point."""
        return self.ids, self.positions, self.segments, self.cu_seqlens, self.max_len

    def to(self, device: torch.device) -> "PackedBatch":
        """Move all tensors but `max_len`, which stays on the CPU."""
        if device == self.ids.device:
            return self
        names = ("ids", "positions", "segments", "cu_seqlens", "skip", "keys")
        return replace(self, **{name: getattr(self, name).to(device, non_blocking=True) for name in names})


@dataclass(frozen=True, kw_only=True)
class EmbedsBatch(PackedBatch):
    """A batch in which some tokens are given as embeddings.

    Attributes:
        embeds: [T, W] in the weights' dtype, on the model's device; rows that are not selected may hold anything.
        is_embed: bool [T], which rows of `embeds` take the place of the token table's.
    """

    embeds: Tensor
    is_embed: Tensor

    def args(self) -> tuple[Tensor, ...]:
        """All tensors: those of a PackedBatch, then the embeddings and their selector."""
        return *PackedBatch.encoder_args(self), self.skip, self.keys, self.embeds, self.is_embed

    def encoder_args(self) -> tuple[Tensor, ...]:
        """The tensors, in the order of the arguments of the encoder's entry point."""
        return *super().encoder_args(), self.embeds, self.is_embed

    def to(self, device: torch.device) -> "EmbedsBatch":
        """Move all tensors but `max_len`."""
        moved = super().to(device)
        return replace(moved, embeds=self.embeds.to(device), is_embed=self.is_embed.to(device))  # type: ignore[return-value]


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
        ids=_joined([row.ids for row in rows]),
        positions=_joined([positions]),
        segments=_joined([row.segments for row in rows]),
        cu_seqlens=_joined([cu_seqlens]),
        max_len=torch.tensor([lengths.max(initial=0)], dtype=torch.int32),
        skip=torch.tensor([row.skip for row in rows], dtype=torch.int32),
        keys=torch.tensor([len(row) - row.unattended for row in rows], dtype=torch.int32),
    )


def _joined(arrays: Sequence[np.ndarray]) -> Tensor:
    """Concatenate into an int32 tensor of stride 1; torch.from_numpy gives empty arrays a stride of 0."""
    joined = torch.empty(sum(map(len, arrays)), dtype=torch.int32)
    if arrays:
        np.concatenate(arrays, out=joined.numpy(), casting="same_kind")
    return joined


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
    embeds_TW = torch.zeros(batch.tokens, width, dtype=dtype, device=device)
    is_embed_T = torch.zeros(batch.tokens, dtype=torch.bool)
    for row, begin in zip(rows, batch.cu_seqlens.tolist(), strict=False):
        for start, piece in row.embeds:
            place = slice(begin + start, begin + start + len(piece))
            embeds_TW[place].copy_(piece)
            is_embed_T[place] = True
    return EmbedsBatch(**vars(batch), embeds=embeds_TW, is_embed=is_embed_T)
