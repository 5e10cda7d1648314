"""Layouts of packed batches, value by value."""

import numpy as np
import pytest
import torch

from toolkit.batch import EmbedsBatch, pack, pack_embeds
from toolkit.inputs import Row

CPU = torch.device("cpu")


def row(ids: list[int], segments: list[int] | None = None, *embeds: tuple[int, torch.Tensor]) -> Row:
    values = np.array(ids, np.int32)
    return Row(ids=values, segments=np.array(segments or [0] * len(ids), np.int32), embeds=embeds)


@pytest.mark.parametrize("start", [0, 2])
def test_positions_restart_in_every_sequence(start: int) -> None:
    """A1: at the model's first position, whatever it is; no pad token is in the batch."""
    batch = pack([row([5, 6, 7], [0, 1, 1]), row([8]), row([9, 9], [2, 0])], start)
    assert batch.ids.tolist() == [5, 6, 7, 8, 9, 9]
    assert batch.positions.tolist() == [p + start for p in (0, 1, 2, 0, 0, 1)]
    assert batch.segments.tolist() == [0, 1, 1, 0, 2, 0]
    assert batch.cu_seqlens.tolist() == [0, 3, 4, 6]
    assert batch.max_len.tolist() == [3]
    assert (batch.tokens, batch.sequences) == (6, 3)


@pytest.mark.parametrize("lengths", [[], [0], [0, 0], [3, 0, 2], [0, 1], [1, 0], [1], [4, 4, 4, 4]])
def test_empty_rows_and_empty_batches(lengths: list[int]) -> None:
    """F4, J2: rows without tokens and batches without rows keep dtype and shape."""
    batch = pack([row(list(range(n))) for n in lengths], 0)
    assert batch.cu_seqlens.diff().tolist() == lengths
    assert (batch.tokens, batch.sequences) == (sum(lengths), len(lengths))
    assert batch.positions.tolist() == [p for n in lengths for p in range(n)]
    assert batch.max_len.tolist() == [max(lengths, default=0)]
    for tensor in pack([row(list(range(n))) for n in lengths], 0).args():
        assert (tensor.dtype, tensor.dim(), tensor.device) == (torch.int32, 1, CPU)


def test_arguments_are_in_the_order_of_the_entry_points() -> None:
    batch = pack_embeds([row([1, 2], [1, 1], (0, torch.ones(1, 4)))], 0, 4, torch.float32, CPU)
    names = ["ids", "positions", "segments", "cu_seqlens", "max_len", "embeds", "is_embed"]
    assert all(found is getattr(batch, name) for found, name in zip(batch.encoder_args(), names, strict=True))
    names[5:5] = ["skip", "keys"]
    assert all(found is getattr(batch, name) for found, name in zip(batch.args(), names, strict=True))
    assert all(moved is tensor for moved, tensor in zip(batch.to(CPU).args(), batch.args(), strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("start", [0, 2])
def test_embeds_land_on_their_tokens(start: int, dtype: torch.dtype) -> None:
    a, b, c = (torch.full((n, 4), value, dtype=dtype) for n, value in ((2, 1.5), (1, 2.5), (2, 3.5)))
    rows = [row([7]), row([5, 0, 0, 6, 0], None, (1, a), (4, b)), row([]), row([0, 0], [1, 2], (0, c))]
    batch = pack_embeds(rows, start, 4, dtype, CPU)
    assert isinstance(batch, EmbedsBatch)
    assert batch.is_embed.tolist() == [False, False, True, True, False, True, True, True]
    assert batch.is_embed.dtype == torch.bool
    assert batch.embeds[batch.is_embed, 0].tolist() == [1.5, 1.5, 2.5, 3.5, 3.5]
    assert (batch.embeds.shape, batch.embeds.dtype) == ((8, 4), dtype)
    assert batch.embeds.isfinite().all()
    plain = pack(rows, start)
    for name in ("ids", "positions", "segments", "cu_seqlens", "max_len"):
        assert torch.equal(getattr(batch, name), getattr(plain, name))


def test_the_batch_owns_its_embeds() -> None:
    """K2: what the caller does to the tensor afterwards changes nothing."""
    given = torch.ones(2, 4)
    batch = pack_embeds([row([0, 0], None, (0, given))], 0, 4, torch.float32, CPU)
    given.zero_()
    assert batch.embeds.eq(1).all()
