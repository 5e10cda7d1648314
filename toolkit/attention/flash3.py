"""CUDA attention: FlashAttention 3 (Shah et al., 2024), for Hopper; the package `fa3-fwd`, extra `[flash]`.

Shape suffixes: T tokens, N query heads, K key/value heads, H head size, S sequences.
"""

import importlib.util

import torch
from torch import Tensor

__all__ = ["attend", "why_unavailable"]


def why_unavailable() -> str | None:
    """None if the package is installed and the device is a Hopper GPU."""
    if not torch.cuda.is_available():
        return "needs a CUDA device"
    if torch.cuda.get_device_capability()[0] != 9:
        return "needs a Hopper GPU (compute capability 9.x)"
    if importlib.util.find_spec("fa3_fwd_interface") is None:
        return "pip install 'dualgraph-toolkit[flash]'"
    return None


@torch.library.custom_op("toolkit::flash3_attention", mutates_args=())
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
    from fa3_fwd_interface import flash_attn_varlen_func  # pyright: ignore[reportMissingImports]

    assert reach < 0, "the package's build has no windows"
    assert keys_S is None, "every token is attended to"
    longest = int(max_len.item())
    # The kernel multiplies what it reads beyond the last sequence by zero, which keeps NaN.
    beyond_T = torch.arange(len(v_TKH), device=v_TKH.device) >= cu_seqlens[-1]
    result = flash_attn_varlen_func(
        q_TNH,
        k_TKH,
        v_TKH.masked_fill(beyond_T[:, None, None], 0),
        cu_seqlens,
        cu_seqlens,
        longest,
        longest,
        softmax_scale=scale,
        causal=False,
    )
    return result[0] if isinstance(result, tuple) else result


@attend.register_fake
def _(q_TNH: Tensor, *rest: object) -> Tensor:
    return q_TNH.new_empty(q_TNH.shape)
