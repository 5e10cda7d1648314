"""CPU attention: torch's SDPA per sequence, with runs of equally long neighbours in one call.

Shape suffixes: T tokens, N query heads, K key/value heads, H head size, S sequences, B sequences of one
length L (in `content`: B buckets), M keys, R distances.
"""

import itertools
from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["attend", "attend_biased", "attend_capped", "attend_disentangled", "why_unavailable"]


def why_unavailable() -> str | None:
    """SDPA is part of torch."""
    return None


def _runs(cu_seqlens: Tensor, keys_S: Tensor | None) -> Iterator[tuple[int, int, int, int]]:
    """(start, stop, length, keys) of each run of sequences that agree in both and are not empty."""
    lengths = cu_seqlens.diff().tolist()
    counts = lengths if keys_S is None else keys_S.tolist()
    start = 0
    for (length, keys), run in itertools.groupby(zip(lengths, counts, strict=True)):
        stop = start + length * sum(1 for _ in run)
        if length:
            yield start, stop, length, keys
        start = stop


def attend_capped(
    q_BNLH: Tensor, k_BKMH: Tensor, v_BKMH: Tensor, seen_LM: Tensor | None, scale: float, softcap: float
) -> Tensor:
    """Attention with scores softcap × tanh(scores / softcap), which SDPA has not: [B, N, L, H].

    Written out, in float32 at least. `seen_LM` (bool) says which keys a query sees, None for all.
    """
    wide = torch.promote_types(q_BNLH.dtype, torch.float32)
    q, k, v = (x.to(wide).unflatten(1, (k_BKMH.shape[1], -1)) for x in (q_BNLH, k_BKMH, v_BKMH))
    scores = (q @ k.mT).mul_(scale / softcap).tanh_().mul_(softcap)
    if seen_LM is not None:
        scores.masked_fill_(~seen_LM, float("-inf"))
    return (scores.softmax(-1) @ v).flatten(1, 2).to(q_BNLH.dtype)


def _attend(
    q_TNH: Tensor,
    k_TKH: Tensor,
    v_TKH: Tensor,
    cu_seqlens: Tensor,
    scale: float,
    mask_of: Callable[[int, int, int], Tensor | None],
    keys_S: Tensor | None = None,
    causal: bool = False,
    softcap: float = 0.0,
) -> Tensor:
    """`mask_of` gives what is added to the scores of a run: broadcastable to [B, N, L, L], or None."""
    o_TNH = q_TNH.new_empty(q_TNH.shape)
    gqa = q_TNH.shape[1] != k_TKH.shape[1]
    for start, stop, length, keys in _runs(cu_seqlens, keys_S):
        q, k, v = (x[start:stop].unflatten(0, (-1, length)).transpose(1, 2) for x in (q_TNH, k_TKH, v_TKH))
        mask = mask_of(start, stop, length)
        if keys < length:
            k, v, mask = k[..., :keys, :], v[..., :keys, :], None if mask is None else mask[..., :keys]
        if softcap:
            o_BNLH = attend_capped(q, k, v, mask, scale, softcap)
        else:
            plain = causal and mask is None
            o_BNLH = F.scaled_dot_product_attention(q, k, v, mask, is_causal=plain, scale=scale, enable_gqa=gqa)
        o_TNH[start:stop].unflatten(0, (-1, length)).copy_(o_BNLH.transpose(1, 2))
    return o_TNH


def _distances(length: int, dtype: torch.dtype = torch.int64) -> Tensor:
    """Query minus key: [L, L], to be used as an index unless `dtype` says otherwise."""
    places = torch.arange(length, dtype=dtype)
    return places[:, None] - places[None, :]


@torch.library.custom_op("toolkit::sdpa_attention", mutates_args=())
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
    """See `toolkit.attention.AttentionBackend`."""

    def mask_of(start: int, stop: int, length: int) -> Tensor | None:
        window = 0 <= reach < length - 1
        if not window and not (softcap and causal):  # SDPA has the plain causal mask itself
            return None
        distances = _distances(length, torch.int32)
        near = distances <= (reach if window else length)
        return near.logical_and_(distances >= (0 if causal else -reach))

    return _attend(q_TNH, k_TKH, v_TKH, cu_seqlens, scale, mask_of, keys_S, causal, softcap)


@torch.library.custom_op("toolkit::sdpa_attention_biased", mutates_args=())
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

    def mask_of(start: int, stop: int, length: int) -> Tensor:
        return bias_NR[:, _distances(length) + bias_NR.shape[1] // 2].to(q_TNH.dtype)[None]

    return _attend(q_TNH, k_TKH, v_TKH, cu_seqlens, scale, mask_of)


@torch.library.custom_op("toolkit::sdpa_attention_disentangled", mutates_args=())
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

    def mask_of(start: int, stop: int, length: int) -> Tensor:
        bucket_LL = bucket_of_R[_distances(length) + bucket_of_R.shape[0] // 2].long()
        shape = ((stop - start) // length, q_TNH.shape[1], length, length)
        total_BNLL = q_TNH.new_zeros(shape)
        for content, by_key in ((content_q_TNB, False), (content_k_TNB, True)):
            if content is not None:
                rows = content[start:stop].unflatten(0, (-1, length)).transpose(1, 2)
                index = bucket_LL.T if by_key else bucket_LL
                part = rows.gather(3, index.expand(shape))
                total_BNLL += part.transpose(2, 3) if by_key else part
        return total_BNLL

    return _attend(q_TNH, k_TKH, v_TKH, cu_seqlens, scale, mask_of)


@attend.register_fake
@attend_biased.register_fake
@attend_disentangled.register_fake
def _(q_TNH: Tensor, *rest: object) -> Tensor:
    return q_TNH.new_empty(q_TNH.shape)
