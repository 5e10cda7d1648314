"""A paged cache in the middle of its life, and one step of attention over it, against the same written out."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tests.attention.reference import dense, offsets_of


@dataclass(frozen=True, kw_only=True)
class Step:
    """`starts` tokens of each sequence are in the cache, `new` ones come."""

    starts: tuple[int, ...]
    new: tuple[int, ...]
    page: int = 4
    heads: int = 4
    kv_heads: int = 2
    size: int = 24
    tail: int = 3


def check_step(ops: Any, step: Step, reach: int, dtype: torch.dtype, device: str, softcap: float = 0.0) -> float:
    """Run one step; check what was stored, and return the largest error of the result."""
    torch.manual_seed(0)
    lengths = [start + new for start, new in zip(step.starts, step.new, strict=True)]
    pages_of = [-(-length // step.page) for length in lengths]
    order = torch.randperm(sum(pages_of) + 5).tolist()
    tables = torch.full((len(lengths) + 2, max(pages_of) + 1), 10**6, dtype=torch.int32)
    lanes = torch.randperm(len(lengths) + 2)[: len(lengths)].to(torch.int32)
    shape = (sum(pages_of) + 5, step.page, step.kv_heads, step.size)
    k_cache, v_cache = (torch.full(shape, float("nan"), dtype=dtype, device=device) for _ in range(2))
    whole = [torch.randn(n, step.heads + 2 * step.kv_heads, step.size, device=device).to(dtype) for n in lengths]
    slots: list[int] = []
    for k, (x, start) in enumerate(zip(whole, step.starts, strict=True)):
        mine, order = order[: pages_of[k]], order[pages_of[k] :]
        tables[lanes[k], : len(mine)] = torch.tensor(mine, dtype=torch.int32)
        places = [mine[place // step.page] * step.page + place % step.page for place in range(len(x))]
        slots += places[start:]
        old = torch.tensor(places[:start], dtype=torch.long, device=device)
        _, keys, values = x[:start].split((step.heads, step.kv_heads, step.kv_heads), dim=1)
        k_cache.view(-1, *shape[2:])[old], v_cache.view(-1, *shape[2:])[old] = keys, values
    before = k_cache.clone(), v_cache.clone()
    fresh = torch.cat([x[start:] for x, start in zip(whole, step.starts, strict=True)])
    padding = torch.full((step.tail, *fresh.shape[1:]), float("nan"), dtype=dtype, device=device)
    q, k, v = torch.cat([fresh, padding]).split((step.heads, step.kv_heads, step.kv_heads), dim=1)
    integers = (
        torch.tensor([*slots, *[-1] * step.tail]),
        torch.tensor([*step.starts, 0]),
        torch.cat((lanes, lanes[:1])),
    )
    out = ops.attend_paged(
        q,
        k.contiguous(),
        v,
        k_cache,
        v_cache,
        *(x.to(device, torch.int32) for x in integers),
        tables.to(device),
        offsets_of([*step.new, 0], device),
        torch.tensor([max(step.new)], dtype=torch.int32),
        0.3,
        reach,
        softcap,
    )
    for cache, old, values in ((k_cache, before[0], k), (v_cache, before[1], v)):
        written = torch.tensor(slots, dtype=torch.long, device=device)
        old.view(-1, *shape[2:])[written] = values[: len(slots)]
        assert torch.equal(cache.nan_to_num(7.0), old.nan_to_num(7.0))
    return _error(out, whole, step, reach, softcap)


def _error(out: Tensor, whole: list[Tensor], step: Step, reach: int, softcap: float) -> float:
    worst, begin = 0.0, 0
    for x, start, new in zip(whole, step.starts, step.new, strict=True):
        q, k, v = x.split((step.heads, step.kv_heads, step.kv_heads), dim=1)
        expected = dense(q, k, v, [len(x)], 0.3, reach=reach, causal=True, softcap=softcap)[start:]
        difference = (out[begin : begin + new].double().cpu() - expected.cpu()).abs().nan_to_num(nan=torch.inf)
        worst = max(worst, float(difference.max()) if new else 0.0)
        begin += new
    return worst


STEPS = {
    "prompts": Step(starts=(0, 0, 0, 0), new=(1, 2, 70, 5)),
    "later parts of prompts": Step(starts=(3, 4, 65, 0, 130), new=(2, 1, 33, 9, 64)),
    "prompts and one token": Step(starts=(0, 63, 7, 64), new=(40, 1, 1, 1)),
    "one token": Step(starts=(0, 1, 3, 4, 31, 32, 63, 64, 300), new=(1,) * 9),
    "one token or none": Step(starts=(5, 0, 200), new=(1, 0, 1)),
    "one sequence": Step(starts=(1000,), new=(1,), page=16, heads=8, kv_heads=1, size=64),
    "many sequences": Step(starts=tuple(range(150)), new=(1,) * 150, page=16, heads=2, kv_heads=2, size=16),
    "pages of one token": Step(starts=(5, 9), new=(3, 1), page=1),
    "wide heads": Step(starts=(17, 40), new=(20, 1), page=16, heads=2, kv_heads=1, size=256),
    "as many heads": Step(starts=(17, 40), new=(1, 1), page=8, heads=3, kv_heads=3, size=20),
}
