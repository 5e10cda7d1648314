"""CUDA attention: our own Triton kernel, for the short sequences that encoders see and for biased scores.

Shape suffixes: T tokens, N query heads, K key/value heads, H head size, S sequences, R distances, B buckets.
"""

import torch
from torch import Tensor

from toolkit.toolchain import why_no_compiler

__all__ = ["attend", "attend_biased", "attend_disentangled", "why_unavailable"]


def why_unavailable() -> str | None:
    """None if this machine has a CUDA device of compute capability 8.0 or newer, and Triton can compile."""
    if not torch.cuda.is_available():
        return "needs a CUDA device"
    if torch.cuda.get_device_capability() < (8, 0):
        return "needs compute capability 8.0 or newer"
    return why_no_compiler(torch.device("cuda"))


@torch.library.custom_op("toolkit::triton_attention", mutates_args=())
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
    from toolkit.attention.triton_kernel import launch

    options = {"reach": reach, "keys_S": keys_S, "causal": causal, "softcap": softcap}
    return launch(q_TNH, k_TKH, v_TKH, cu_seqlens, int(max_len.item()), scale, **options)


@torch.library.custom_op("toolkit::triton_attention_biased", mutates_args=())
def attend_biased(
    q_TNH: Tensor,
    k_TKH: Tensor,
    v_TKH: Tensor,
    cu_seqlens: Tensor,
    max_len: Tensor,
    scale: float,
    bias_NR: Tensor,
) -> Tensor:
    """See `toolkit.attention.AttentionBackend`."""
    from toolkit.attention.triton_kernel import launch

    return launch(q_TNH, k_TKH, v_TKH, cu_seqlens, int(max_len.item()), scale, bias_NR=bias_NR)


@torch.library.custom_op("toolkit::triton_attention_disentangled", mutates_args=())
def attend_disentangled(
    q_TNH: Tensor,
    k_TKH: Tensor,
    v_TKH: Tensor,
    cu_seqlens: Tensor,
    max_len: Tensor,
    scale: float,
    content_q_TNB: Tensor | None,
    content_k_TNB: Tensor | None,
    bucket_of_R: Tensor,
) -> Tensor:
    """See `toolkit.attention.AttentionBackend`."""
    from toolkit.attention.triton_kernel import launch

    return launch(
        q_TNH,
        k_TKH,
        v_TKH,
        cu_seqlens,
        int(max_len.item()),
        scale,
        content_q_TNB=content_q_TNB,
        content_k_TNB=content_k_TNB,
        bucket_of_R=bucket_of_R,
    )


@attend.register_fake
@attend_biased.register_fake
@attend_disentangled.register_fake
def _(q_TNH: Tensor, *rest: object) -> Tensor:
    return q_TNH.new_empty(q_TNH.shape)
