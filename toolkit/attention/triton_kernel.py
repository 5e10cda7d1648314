"""Attention over packed sequences as one Triton kernel (FlashAttention's online softmax; Dao et al., 2022).

FlashAttention's own kernels work on tiles of 128 queries by 128 keys, most of it idle for the short sequences that
encoders see, and take no term that is added to the scores. Here the tiles follow the longest sequence, and scores may
carry a bias by distance, or DeBERTa's terms by distance and content.

Shape suffixes: T tokens, N query heads, K key/value heads, H head size, S sequences, R distances (query minus key,
from -(R // 2) to R // 2), B buckets of distances.
"""

import torch
import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]
from torch import Tensor
from triton.language.extra import libdevice  # pyright: ignore[reportMissingImports]

__all__ = ["capped", "launch"]


@triton.jit
def capped(scores, CAP: tl.constexpr):
    """CAP × tanh(scores / CAP); the scores as they are for a CAP of 0."""
    if CAP > 0:
        scores = CAP * libdevice.tanh(scores / CAP)
    return scores


@triton.jit
def _attend_kernel(
    q,
    k,
    v,
    out,
    cu_seqlens,
    bias,
    content_q,
    content_k,
    bucket_of,
    keys_of,
    scale,
    q_row,
    q_head,
    k_row,
    k_head,
    v_row,
    v_head,
    blocks,
    heads,
    group,
    distances,
    buckets,
    HEAD_DIM: tl.constexpr,
    REACH: tl.constexpr,
    BIAS: tl.constexpr,
    CONTENT_Q: tl.constexpr,
    CONTENT_K: tl.constexpr,
    KEYS: tl.constexpr,
    CAUSAL: tl.constexpr,
    CAP: tl.constexpr,
    PRECISION: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DIMS: tl.constexpr,
):
    # One program for a block of queries of one head of one sequence; neighbours read the same tokens' heads.
    program = tl.program_id(0)
    head = program % heads
    block = (program // heads) % blocks
    sequence = program // (heads * blocks)
    begin = tl.load(cu_seqlens + sequence)
    length = tl.load(cu_seqlens + sequence + 1) - begin
    if block * ROWS >= length:
        return
    keyed = tl.load(keys_of + sequence) if KEYS else length
    begin = begin.to(tl.int64)
    rows = block * ROWS + tl.arange(0, ROWS)
    dims = tl.arange(0, DIMS)
    inside = dims < HEAD_DIM
    queries = tl.load(
        q + (begin + rows)[:, None] * q_row + head * q_head + dims[None, :],
        mask=(rows < length)[:, None] & inside[None, :],
        other=0.0,
    )
    k += begin * k_row + (head // group) * k_head
    v += begin * v_row + (head // group) * v_head
    highest = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    mixed = tl.zeros((ROWS, DIMS), tl.float32)
    first, last = 0, keyed
    if REACH >= 0:
        first = tl.maximum(block * ROWS - REACH, 0) // COLUMNS * COLUMNS
        last = tl.minimum(keyed, block * ROWS + ROWS + REACH)
    if CAUSAL:
        last = tl.minimum(last, block * ROWS + ROWS)
    for start in range(first, last, COLUMNS):
        columns = start + tl.arange(0, COLUMNS)
        there = columns < keyed
        keys = tl.load(
            k + columns[None, :].to(tl.int64) * k_row + dims[:, None], mask=there[None, :] & inside[:, None], other=0.0
        )
        scores = capped(tl.dot(queries, keys, input_precision=PRECISION) * scale, CAP)
        valid = there[None, :]
        if REACH >= 0:
            valid = valid & (tl.abs(rows[:, None] - columns[None, :]) <= REACH)
        if CAUSAL:
            valid = valid & (columns[None, :] <= rows[:, None])
        if BIAS:
            place = rows[:, None] - columns[None, :] + distances // 2
            scores += tl.load(bias + head * distances + place, mask=valid & (rows < length)[:, None], other=0.0)
        if CONTENT_Q or CONTENT_K:
            seen = valid & (rows < length)[:, None]
            place = tl.load(bucket_of + rows[:, None] - columns[None, :] + distances // 2, mask=seen, other=0)
            if CONTENT_Q:
                row = ((begin + rows) * heads + head) * buckets
                scores += tl.load(content_q + row[:, None] + place, mask=seen, other=0.0).to(tl.float32)
            if CONTENT_K:
                row = ((begin + columns) * heads + head) * buckets
                scores += tl.load(content_k + row[None, :] + place, mask=seen, other=0.0).to(tl.float32)
        scores = tl.where(valid, scores * 1.4426950408889634, float("-inf"))
        higher = tl.maximum(highest, tl.max(scores, axis=1))
        shift = tl.where(higher == float("-inf"), 0.0, higher)  # a block that lies outside of this row's reach
        weights = tl.exp2(scores - shift[:, None])
        keep = tl.exp2(highest - shift)
        total = total * keep + tl.sum(weights, axis=1)
        values = tl.load(
            v + columns[:, None].to(tl.int64) * v_row + dims[None, :], mask=there[:, None] & inside[None, :], other=0.0
        )
        mixed = mixed * keep[:, None]
        mixed = tl.dot(weights.to(values.dtype), values, mixed, input_precision=PRECISION)
        highest = higher
    mixed = mixed / total[:, None]
    tl.store(
        out + ((begin + rows)[:, None] * heads + head) * HEAD_DIM + dims[None, :],
        mixed.to(out.dtype.element_ty),
        mask=(rows < length)[:, None] & inside[None, :],
    )


def launch(
    q_TNH: Tensor,
    k_TKH: Tensor,
    v_TKH: Tensor,
    cu_seqlens: Tensor,
    longest: int,
    scale: float,
    reach: int = -1,
    bias_NR: Tensor | None = None,
    content_q_TNB: Tensor | None = None,
    content_k_TNB: Tensor | None = None,
    bucket_of_R: Tensor | None = None,
    keys_S: Tensor | None = None,
    causal: bool = False,
    softcap: float = 0.0,
) -> Tensor:
    """Attend within each sequence. Heads are contiguous in q, k and v; rows and heads may be strided.

    Args:
        longest: an upper bound of the sequence lengths; it sets the launch grid.
        scale: factor of the products of queries and keys.
        reach: how far a query sees to either side, or -1 for all.
        bias_NR: float32, added to the scores by distance.
        content_q_TNB, content_k_TNB: added to the scores of a query (a key), by the bucket of the distance.
        bucket_of_R: int32, the bucket of a distance.
        keys_S: int32, how many tokens at the start of each sequence are attended to; None for all.
        causal: whether a query sees only itself and what is before it.
        softcap: bounds the scores, as softcap × tanh(scores / softcap); 0 for none.

    Returns:
        [T, N, H]; rows beyond the last sequence are undefined.
    """
    tokens, heads, size = q_TNH.shape
    out_TNH = torch.empty((tokens, heads, size), dtype=q_TNH.dtype, device=q_TNH.device)
    assert q_TNH.stride(2) == k_TKH.stride(2) == v_TKH.stride(2) == 1, "heads are contiguous"
    assert all(table is None or table.is_contiguous() for table in (content_q_TNB, content_k_TNB, bias_NR))
    sequences = cu_seqlens.shape[0] - 1
    if sequences == 0 or tokens == 0:
        return out_TNH
    # Measured on an H200 (head sizes 32 and 64, texts of 8 to 256 and to 512 tokens): tiles of 64 queries by 32 keys
    # take four fifths of the time of 64 by 64, and less than half of that of tiles of 128 queries.
    rows, columns, warps = (32, 32, 4) if q_TNH.dtype == torch.float32 or longest <= 32 else (64, 32, 4)
    blocks = triton.cdiv(max(longest, 1), rows)
    table = bias_NR if bias_NR is not None else bucket_of_R
    content = content_q_TNB if content_q_TNB is not None else content_k_TNB
    _attend_kernel[(blocks * heads * sequences,)](  # pyright: ignore[reportIndexIssue]
        q_TNH,
        k_TKH,
        v_TKH,
        out_TNH,
        cu_seqlens,
        bias_NR,
        content_q_TNB,
        content_k_TNB,
        bucket_of_R,
        keys_S,
        scale,
        q_TNH.stride(0),
        q_TNH.stride(1),
        k_TKH.stride(0),
        k_TKH.stride(1),
        v_TKH.stride(0),
        v_TKH.stride(1),
        blocks,
        heads,
        heads // k_TKH.shape[1],
        table.shape[-1] if table is not None else 0,
        content.shape[-1] if content is not None else 0,
        HEAD_DIM=size,
        REACH=reach,
        BIAS=bias_NR is not None,
        CONTENT_Q=content_q_TNB is not None,
        CONTENT_K=content_k_TNB is not None,
        KEYS=keys_S is not None,
        CAUSAL=causal,
        CAP=softcap,
        PRECISION="ieee",
        ROWS=rows,
        COLUMNS=columns,
        DIMS=max(16, triton.next_power_of_2(size)),
        num_warps=warps,
        num_stages=3,
    )
    return out_TNH
