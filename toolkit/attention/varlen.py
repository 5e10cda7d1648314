"""CUDA attention: the FlashAttention 2 kernel that torch ships, over packed sequences.

`torch.nn.attention.varlen.varlen_attn` is the public face of the same kernel. It also fills a random state
tensor on every call, one more kernel a layer; the operator below it does not.
Shape suffixes: T tokens, N query heads, K key/value heads, H head size, S sequences.
"""

import torch
from torch import Tensor

__all__ = ["attend", "why_unavailable"]


def why_unavailable() -> str | None:
    """None if this machine has a CUDA device of compute capability 8.0 or newer."""
    if not torch.cuda.is_available():
        return "needs a CUDA device"
    if torch.cuda.get_device_capability() < (8, 0):
        return "needs compute capability 8.0 or newer"
    return None


@torch.library.custom_op("toolkit::varlen_attention", mutates_args=())
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
    longest = int(max_len.item())
    window = reach if reach >= 0 else None
    return torch.ops.aten._flash_attention_forward(
        q_TNH,
        k_TKH,
        v_TKH,
        cu_seqlens,
        cu_seqlens,
        longest,
        longest,
        0.0,
        False,
        False,
        scale=scale,
        window_size_left=window,
        window_size_right=window,
        seqused_k=keys_S,
    )[0]


@attend.register_fake
def _(q_TNH: Tensor, *rest: object) -> Tensor:
    return q_TNH.new_empty(q_TNH.shape)
