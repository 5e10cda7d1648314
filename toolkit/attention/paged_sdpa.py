"""CPU attention over a paged cache: torch's SDPA, one sequence after another.

Shape suffixes: T tokens, N query heads, K key/value heads, H head size, L keys; B pages, P tokens of a page.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from toolkit.attention.sdpa import attend_capped

__all__ = ["attend_paged", "why_unavailable"]


def why_unavailable() -> str | None:
    """SDPA is part of torch."""
    return None


def _keys(cache_BPKH: Tensor, pages: list[int], first: int, last: int) -> Tensor:
    """The cached tokens `first` … `last` - 1 of a sequence: [L, K, H]; a view where the pages lie side by side."""
    size = cache_BPKH.shape[1]
    pages, first, last = pages[first // size :], first % size, last - first // size * size
    if pages == list(range(pages[0], pages[0] + len(pages))):
        chosen = cache_BPKH[pages[0] : pages[0] + len(pages)]
    else:
        chosen = cache_BPKH[torch.tensor(pages)]
    return chosen.flatten(0, 1)[first:last]


def _mask(start: int, new: int, first: int, reach: int) -> Tensor:
    """Which of the keys from `first` on each new token sees: bool [new, L]."""
    distances = torch.arange(start, start + new)[:, None] - torch.arange(first, start + new)
    seen = distances >= 0
    return seen if reach < 0 else seen.logical_and_(distances <= reach)


@torch.library.custom_op("toolkit::sdpa_attention_paged", mutates_args=("k_cache", "v_cache"))
def attend_paged(
    q_TNH: Tensor,
    k_TKH: Tensor,
    v_TKH: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slots: Tensor,
    starts: Tensor,
    lanes: Tensor,
    tables: Tensor,
    cu_seqlens: Tensor,
    max_len: Tensor,
    scale: float,
    reach: int,
    softcap: float,
) -> Tensor:
    """See `toolkit.attention.paged.PagedBackend`."""
    o_TNH = q_TNH.new_empty(q_TNH.shape)
    bounds = cu_seqlens.tolist()
    slots = slots[: bounds[-1]].long()
    assert slots.numel() == 0 or int(slots.min()) >= 0, "a token of a sequence has a place in the cache"
    for cache, values in ((k_cache, k_TKH), (v_cache, v_TKH)):
        cache.view(-1, *cache.shape[2:]).index_copy_(0, slots, values[: bounds[-1]])
    gqa, size = q_TNH.shape[1] != k_TKH.shape[1], k_cache.shape[1]
    for begin, end, start, lane in zip(bounds, bounds[1:], starts.tolist(), lanes.tolist(), strict=False):
        new = end - begin
        if new == 0:
            continue
        first = max(0, start - reach) if reach >= 0 else 0
        pages = tables[lane, : -(-(start + new) // size)].tolist()
        k_KLH, v_KLH = (_keys(cache, pages, first, start + new).transpose(0, 1) for cache in (k_cache, v_cache))
        whole = not softcap and start == 0 and not 0 <= reach < new - 1  # then the mask is SDPA's causal one
        mask = None if whole or new == 1 else _mask(start, new, first, reach)
        causal = whole and new > 1
        q_NTH = q_TNH[begin:end].transpose(0, 1)
        qkv = (q_NTH[None], k_KLH[None], v_KLH[None])
        if softcap:
            o_1NTH = attend_capped(*qkv, mask, scale, softcap)
        else:
            o_1NTH = F.scaled_dot_product_attention(*qkv, mask, is_causal=causal, scale=scale, enable_gqa=gqa)
        o_TNH[begin:end] = o_1NTH[0].transpose(0, 1)
    return o_TNH


@attend_paged.register_fake
def _(q_TNH: Tensor, *rest: object) -> Tensor:
    return q_TNH.new_empty(q_TNH.shape)
