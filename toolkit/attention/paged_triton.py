"""CUDA attention over a paged cache: our own Triton kernels.

Shape suffixes: T tokens, N query heads, K key/value heads, H head size.
"""

import torch
from torch import Tensor

from toolkit.attention.triton_varlen import why_unavailable

__all__ = ["attend_paged", "why_unavailable"]


@torch.library.custom_op("toolkit::triton_attention_paged", mutates_args=("k_cache", "v_cache"))
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
    """See `toolkit.attention.paged.PagedBackend`.

    A captured graph bakes in the sizes of T and S, and whether `max_len` is 1.
    """
    from toolkit.attention.paged_kernel import attend_many, attend_one, store

    store(k_TKH, v_TKH, k_cache, v_cache, slots)
    attend = attend_one if int(max_len.item()) <= 1 else attend_many
    return attend(q_TNH, k_cache, v_cache, starts, lanes, tables, cu_seqlens, scale, reach, softcap)


@attend_paged.register_fake
def _(q_TNH: Tensor, *rest: object) -> Tensor:
    return q_TNH.new_empty(q_TNH.shape)
