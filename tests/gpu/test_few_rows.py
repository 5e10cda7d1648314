"""What a block for few rows runs, against the same written out in float64 on the CPU."""

import itertools
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from toolkit.attention.paged_sdpa import attend_paged
from toolkit.nn.few_rows import attend_step, fused_linear
from toolkit.nn.linear import apply_activation
from toolkit.nn.rope import rotate

TOLERANCE = {torch.float32: 1e-5, torch.float16: 6e-3, torch.bfloat16: 4e-2}
DTYPES = [torch.bfloat16, torch.float16]


def normalised(x: Tensor, weight: Tensor | None, offset: bool) -> Tensor:
    """[…, D] float64; as it is without a weight."""
    if weight is None:
        return x
    return F.rms_norm(x, weight.shape, weight.double() + 1 if offset else weight.double(), 1e-3)


def check_linear(
    tokens: int, sizes: tuple[int, int], norm: str, gate: str, residual: bool, dtype: torch.dtype, device: str
) -> float:
    """The largest error of one layer."""
    torch.manual_seed(0)
    inputs, outputs = sizes
    width = outputs * (1 if gate == "none" else 2)

    def draw(*shape: int, scale: float = 1.0) -> Tensor:
        return (torch.randn(shape) * scale).to(device, dtype)

    x, weight, bias = draw(tokens, inputs + 8)[:, :inputs], draw(width, inputs, scale=inputs**-0.5), draw(width)
    factor, rest = draw(inputs) if norm else None, draw(tokens, outputs) if residual else None
    ours = fused_linear(x, weight, bias, factor, 1e-3, norm == "offset", gate, "silu", rest, 0.3)
    y = F.linear(normalised(x.double(), factor, norm == "offset"), weight.double(), bias.double())
    if gate != "none":
        a, b = y.chunk(2, dim=-1)
        y = apply_activation(a, "silu") * b if gate == "first" else a * apply_activation(b, "silu")
    y = y if rest is None else rest.double() + 0.3 * y
    assert ours.shape == y.shape
    assert ours.dtype == dtype
    return float((ours.double() - y).abs().max())


@dataclass(frozen=True, kw_only=True)
class Step:
    """`starts` tokens of each sequence are in the cache; those at -1 have no new token."""

    starts: tuple[int, ...]
    heads: int = 4
    kv_heads: int = 2
    size: int = 24
    half: int = 12
    page: int = 4
    norm: str = ""
    reach: int = -1
    softcap: float = 0.0


def check_step(step: Step, dtype: torch.dtype, device: str) -> float:
    """Run one step; check what was stored, and return the largest error of the result."""
    torch.manual_seed(0)
    sequences = len(step.starts)
    of_one = max(step.starts) // step.page + 1
    tables = torch.randperm(sequences * of_one + 3)[: sequences * of_one].view(sequences, of_one).to(torch.int32)
    lanes = torch.randperm(sequences).to(torch.int32)
    live = [place for place in step.starts if place >= 0]
    cu_seqlens = torch.tensor([0, *itertools.accumulate(int(place >= 0) for place in step.starts)], dtype=torch.int32)
    rows = {k: lane for k, lane in enumerate(lanes.tolist()) if step.starts[k] >= 0}
    slots = [
        int(tables[lane, step.starts[k] // step.page]) * step.page + step.starts[k] % step.page
        for k, lane in rows.items()
    ]
    tail = sequences - len(live)
    shape = (sequences * of_one + 3, step.page, step.kv_heads, step.size)
    caches = [torch.randn(shape).to(dtype) for _ in range(2)]
    qkv = torch.randn(sequences, (step.heads + 2 * step.kv_heads) * step.size).to(dtype)
    qkv[len(live) :] = float("nan")
    factors = [torch.randn(step.size).to(dtype) if step.norm else None for _ in range(2)]
    turns = [torch.rand(9, step.half) * 2 - 1 for _ in range(2)] if step.half else [None, None]
    positions = torch.randint(9, (sequences,), dtype=torch.int32)
    integers = [
        torch.tensor([*slots, *[-1] * tail], dtype=torch.int32),
        torch.tensor([max(place, 0) for place in step.starts], dtype=torch.int32),
        lanes,
        tables,
        cu_seqlens,
    ]
    arrived = torch.zeros(sequences * step.kv_heads, dtype=torch.int32, device=device)
    given = (qkv, *factors, *turns, positions, *caches, *integers)
    on: list[Any] = [t.clone().to(device) if t is not None else None for t in given]
    offset = step.norm == "offset"
    common = (step.heads, 0.3, step.reach, step.softcap)
    ours = torch.empty(0)
    for _ in range(2):  # the counters are as they were
        ours = attend_step(*on[:3], 1e-3, offset, *on[3:8], arrived, *on[8:], *common)
    assert not arrived.any()

    heads = qkv.double().view(sequences, -1, step.size)
    q, k, v = heads.split((step.heads, step.kv_heads, step.kv_heads), dim=1)
    q, k = (normalised(x, f, offset).to(dtype) for x, f in zip((q, k), factors, strict=True))
    if turns[0] is not None and turns[1] is not None:
        cos, sin = turns[0][positions.long()], turns[1][positions.long()]
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
    exact = [cache.double() for cache in caches]
    max_len = torch.ones(1, dtype=torch.int32)
    y = attend_paged(q.double(), k.double(), v, *exact, *integers[:4], cu_seqlens, max_len, *common[1:])
    for ours_cache, before, after in zip(on[6:8], caches, exact, strict=True):
        assert (ours_cache.cpu().double() - after).abs().max() < TOLERANCE[dtype]
        untouched = after.flatten(0, 1).eq(before.double().flatten(0, 1)).flatten(1).all(dim=1)
        assert (~untouched).sum() == len(live)
        assert torch.equal(ours_cache.cpu().flatten(0, 1)[untouched], before.flatten(0, 1)[untouched])
    return float((ours.cpu().double() - y.flatten(1))[: len(live)].abs().nan_to_num(nan=torch.inf).max())


STEPS = {
    "one": Step(starts=(300,)),
    "first token": Step(starts=(0, 1)),
    "none": Step(starts=(-1, 40, -1, 7)),
    "norm": Step(starts=(65, 3, 500), norm="plain"),
    "offset, part of a head turned": Step(starts=(65, 3), norm="offset", half=4),
    "not turned": Step(starts=(65, 3), half=0),
    "window": Step(starts=(5, 3, 200, 63), reach=5),
    "capped": Step(starts=(5, 300), softcap=0.5, reach=70),
    "one key head": Step(starts=(1000, 10), heads=8, kv_heads=1, size=64, half=32, page=16),
    "as many key heads": Step(starts=(40, 0, 10), heads=3, kv_heads=3, size=20, half=10),
    "large heads": Step(starts=(100, 10), heads=2, kv_heads=1, size=256, half=128, page=16, norm="plain"),
}


@pytest.mark.parametrize(
    ("norm", "gate", "residual"),
    [("", "none", False), ("plain", "none", True), ("offset", "first", False), ("plain", "second", True)],
)
@pytest.mark.parametrize("sizes", [(40, 24), (1024, 96), (5000, 7)])
@pytest.mark.parametrize("tokens", [1, 2, 3, 4])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_layer(dtype: torch.dtype, tokens: int, sizes: tuple[int, int], norm: str, gate: str, residual: bool) -> None:
    assert check_linear(tokens, sizes, norm, gate, residual, dtype=dtype, device="cuda") < TOLERANCE[dtype]


@pytest.mark.parametrize("name", STEPS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_rest_of_an_attention(dtype: torch.dtype, name: str) -> None:
    """I1, I2, B3, K3: heads, caps, windows; shuffled pages, NaN in the tail, sequences without a token."""
    assert check_step(STEPS[name], dtype, "cuda") < TOLERANCE[dtype]
