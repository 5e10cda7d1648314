"""FlashAttention 2 as torch ships it, under the names of the flash-attn package, which has no wheels.

Only for measuring peers: transformers finds it, and sentence-transformers then packs texts without padding.
"""

from typing import Any

import torch
from torch import Tensor

__version__ = "2.7.4"

flash_attn_with_kvcache = None


def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    offsets: tuple[Tensor | None, Tensor | None],
    longest: tuple[int, int],
    softmax_scale: float | None,
    causal: bool,
    window_size: tuple[int, int],
    unused: dict[str, Any],
) -> Tensor:
    asked = [name for name, value in unused.items() if value]
    if asked:
        raise NotImplementedError(f"{asked[0]} is not passed on to torch's kernel")
    left, right = (None if size < 0 else size for size in window_size)
    return torch.ops.aten._flash_attention_forward(
        q,
        k,
        v,
        *offsets,
        *longest,
        0.0,
        causal,
        False,
        scale=softmax_scale,
        window_size_left=left,
        window_size_right=right,
    )[0]


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    deterministic: bool = False,
) -> Tensor:
    """[batch, length, heads, size] each."""
    unused = {"dropout_p": dropout_p, "softcap": softcap}
    longest = (q.shape[1], k.shape[1])
    return _forward(q, k, v, (None, None), longest, softmax_scale, causal, window_size, unused)


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    deterministic: bool = False,
) -> Tensor:
    """[tokens, heads, size] each."""
    unused = {"dropout_p": dropout_p, "softcap": softcap}
    offsets = (cu_seqlens_q.int(), cu_seqlens_k.int())
    longest = (int(max_seqlen_q), int(max_seqlen_k))
    return _forward(q, k, v, offsets, longest, softmax_scale, causal, window_size, unused)
