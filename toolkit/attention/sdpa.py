"""CPU attention: torch's SDPA per sequence, with runs of equally long neighbours in one call.

Shape suffixes: T tokens, N query heads, K key/value heads, H head size, S sequences, B sequences of one
length L.
"""

import itertools

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["attend", "why_unavailable"]


def why_unavailable() -> str | None:
    """SDPA is part of torch."""
    return None


@torch.library.custom_op("toolkit::sdpa_attention", mutates_args=())
def attend(q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor, cu_seqlens: Tensor, max_len: Tensor, scale: float) -> Tensor:
    """See `toolkit.attention.AttentionBackend`."""
    o_TNH = q_TNH.new_empty(q_TNH.shape)
    gqa = q_TNH.shape[1] != k_TKH.shape[1]
    start = 0
    lengths = cu_seqlens.diff().tolist()
    for length, run in itertools.groupby(lengths):
        stop = start + length * sum(1 for _ in run)
        if length:
            q, k, v = (x[start:stop].unflatten(0, (-1, length)).transpose(1, 2) for x in (q_TNH, k_TKH, v_TKH))
            o_BNLH = F.scaled_dot_product_attention(q, k, v, scale=scale, enable_gqa=gqa)
            o_TNH[start:stop].unflatten(0, (-1, length)).copy_(o_BNLH.transpose(1, 2))
        start = stop
    return o_TNH


@attend.register_fake
def _(q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor, cu_seqlens: Tensor, max_len: Tensor, scale: float) -> Tensor:
    return q_TNH.new_empty(q_TNH.shape)
