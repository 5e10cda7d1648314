"""Steps as batches, value by value."""

import random
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from torch import Tensor

from toolkit.decoding.batch import EmbedsStep, StepBatch, pack_step

CPU = torch.device("cpu")


@dataclass
class Part:
    start: int
    stop: int
    lane: int
    ids: np.ndarray
    pages: list[int]
    embeds: list[tuple[int, Tensor]] = field(default_factory=list)


def part(start: int, ids: list[int], lane: int, pages: list[int], *embeds: tuple[int, Tensor]) -> Part:
    return Part(start, start + len(ids), lane, np.array(ids, np.int32), pages, list(embeds))


@pytest.mark.parametrize("position_start", [0, 2])
def test_every_field(position_start: int) -> None:
    parts = [part(0, [5, 6, 7, 8, 9], 3, [4, 1]), part(6, [3], 0, [2, 7]), part(3, [1, 2], 1, [0, 5, 6])]
    batch = pack_step(parts, position_start, 4, 2, torch.float32, CPU)
    assert type(batch) is StepBatch
    assert batch.ids.tolist() == [5, 6, 7, 8, 9, 3, 1, 2]
    assert batch.positions.tolist() == [p + position_start for p in (0, 1, 2, 3, 4, 6, 3, 4)]
    assert batch.slots.tolist() == [16, 17, 18, 19, 4, 30, 3, 20]
    assert batch.cu_seqlens.tolist() == [0, 5, 6, 8]
    assert batch.starts.tolist() == [0, 6, 3]
    assert batch.lanes.tolist() == [3, 0, 1]
    assert batch.max_len.tolist() == [5]
    assert (batch.tokens, batch.sequences) == (8, 3)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_against_a_loop_over_tokens(seed: int, dtype: torch.dtype) -> None:
    draw, page, width = random.Random(seed), 3, 2
    torch.manual_seed(seed)
    parts: list[Part] = []
    for lane in range(draw.randint(1, 5)):
        start, count = draw.randint(0, 7), draw.randint(1, 6)
        pages = random.Random(seed + lane).sample(range(50), -(-(start + count) // page) + draw.randint(0, 2))
        pieces, place = [], draw.randint(0, 2)
        while place < count and draw.random() < 0.7:
            size = draw.randint(1, count - place)
            pieces.append((place, torch.randn(size, width)))
            place += size + draw.randint(0, 2)
        parts.append(part(start, [draw.randrange(90) for _ in range(count)], lane, pages, *pieces))
    parts[0].embeds = parts[0].embeds or [(0, torch.randn(1, width))]
    batch = pack_step(parts, 2, page, width, dtype, CPU)
    assert isinstance(batch, EmbedsStep)
    assert batch.embeds.dtype == dtype
    token = 0
    for number, own in enumerate(parts):
        assert (batch.starts[number], batch.lanes[number], batch.cu_seqlens[number]) == (own.start, own.lane, token)
        given = {place + k: value for place, values in own.embeds for k, value in enumerate(values)}
        for k, place in enumerate(range(own.start, own.stop)):
            assert batch.ids[token] == own.ids[k]
            assert batch.positions[token] == place + 2
            assert batch.slots[token] == own.pages[place // page] * page + place % page
            assert batch.is_embed[token] == (k in given)
            assert torch.equal(batch.embeds[token], given.get(k, torch.zeros(width)).to(dtype))
            token += 1
    assert batch.cu_seqlens[-1] == batch.tokens == token
    assert batch.max_len.tolist() == [max(len(own.ids) for own in parts)]


def test_tensors_are_what_graphs_take() -> None:
    """int32 on the CPU, stride 1, in the order of the entry points."""
    plain = pack_step([part(0, [1], 0, [0])], 0, 4, 2, torch.float32, CPU)
    mixed = pack_step([part(0, [0], 0, [0], (0, torch.ones(1, 2)))], 0, 4, 2, torch.float32, CPU)
    names = ["ids", "positions", "slots", "cu_seqlens", "starts", "lanes", "max_len", "embeds", "is_embed"]
    for batch, count in ((plain, 7), (mixed, 9)):
        assert len(batch.args()) == count
        for found, wanted in zip(batch.args(), names, strict=False):
            assert found is getattr(batch, wanted)
        for tensor in batch.args()[:7]:
            assert (tensor.dtype, tensor.device, tensor.dim(), tensor.stride()) == (torch.int32, CPU, 1, (1,))
        assert {field.name for field in batch.FIELDS} == set(names[:count]) - {"max_len", "embeds"}
    tails = {field.name: field.tail for field in EmbedsStep.FIELDS}
    assert tails["slots"] == -1, "tokens beyond the batch go nowhere"
    assert tails["cu_seqlens"] is None, "sequences beyond the batch are empty"


def test_one_sequence_with_embeds_makes_it_an_embeds_step() -> None:
    parts = [part(0, [1], 0, [0]), part(2, [0, 4], 1, [1], (0, torch.full((1, 2), 3.0)))]
    batch = pack_step(parts, 0, 4, 2, torch.float32, CPU)
    assert isinstance(batch, EmbedsStep)
    assert batch.is_embed.tolist() == [False, True, False]
    assert batch.embeds.tolist() == [[0, 0], [3, 3], [0, 0]]
    assert batch.ids.tolist() == [1, 0, 4]
