"""CUDA attention in float32: the memory-efficient kernel that torch ships (from xFormers), packed sequences.

FlashAttention takes 16-bit inputs only; this one serves float32 artifacts on a GPU, at a lower rate.
Shape suffixes: T tokens, N query heads, K key/value heads, H head size, S sequences.
"""

import torch
from torch import Tensor

__all__ = ["attend", "why_unavailable"]


def why_unavailable() -> str | None:
    """None if this machine has a CUDA device."""
    return None if torch.cuda.is_available() else "needs a CUDA device"


@torch.library.custom_op("toolkit::efficient_attention", mutates_args=())
def attend(
    q_TNH: Tensor,
    k_TKH: Tensor,
    v_TKH: Tensor,
    cu_seqlens: Tensor,
    max_len: Tensor,
    scale: float,
    reach: int,
    keys_S: Tensor | None = None,
    causal: bool = False,
    softcap: float = 0.0,
) -> Tensor:
    """See `toolkit.attention.AttentionBackend`. `max_len` sets the launch grid: a captured graph bakes it in."""
    assert not causal, "not yet on CUDA"
    assert softcap == 0, "scores are not capped"
    assert reach < 0, "this kernel has no windows"
    groups = q_TNH.shape[1] // k_TKH.shape[1]
    if groups > 1:  # the kernel wants as many key/value heads as query heads
        k_TKH, v_TKH = (x.repeat_interleave(groups, dim=1) for x in (k_TKH, v_TKH))
    longest = int(max_len.item())
    no_mask = 0
    return torch.ops.aten._efficient_attention_forward(
        q_TNH[None],
        k_TKH[None],
        v_TKH[None],
        None,
        cu_seqlens,
        cu_seqlens,
        longest,
        longest,
        0.0,
        no_mask,
        scale=scale,
        seqlen_k=keys_S,
    )[0][0]


@attend.register_fake
def _(q_TNH: Tensor, *rest: object) -> Tensor:
    return q_TNH.new_empty(q_TNH.shape)
