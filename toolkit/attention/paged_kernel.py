"""Triton kernels for a paged cache: storing, attention of prompts, attention of one new token a sequence.

Softmax is computed online (Dao et al., 2022). With one new token the keys of a sequence are split among several
programs, whose results are then combined (Flash-Decoding, Dao et al., 2023). No launch depends on how many tokens are
in the cache: a captured graph serves every length.

Shape suffixes: T tokens, S sequences, N query heads, K key/value heads, H head size; B pages, P tokens of a page.
"""

import torch
import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]
from torch import Tensor

from toolkit.attention.triton_kernel import capped

__all__ = [
    "LOG2_E",
    "attend_many",
    "attend_one",
    "load_block",
    "splits_for",
    "store",
]

LOG2_E = 1.4426950408889634


@triton.jit
def _store_kernel(k, v, k_cache, v_cache, slots, k_row, v_row, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    token = tl.program_id(0)
    slot = tl.load(slots + token).to(tl.int64)
    if slot < 0:
        return
    place = tl.arange(0, BLOCK)
    inside = place < SIZE
    token = token.to(tl.int64)
    tl.store(k_cache + slot * SIZE + place, tl.load(k + token * k_row + place, mask=inside), mask=inside)
    tl.store(v_cache + slot * SIZE + place, tl.load(v + token * v_row + place, mask=inside), mask=inside)


def store(k_TKH: Tensor, v_TKH: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor) -> None:
    """Write each token's key and value to its slot, -1 for nowhere."""
    tokens, heads, size = k_TKH.shape
    assert k_TKH.stride()[1:] == v_TKH.stride()[1:] == (size, 1), "a token's heads lie side by side"
    assert k_cache.is_contiguous()
    assert v_cache.is_contiguous()
    if tokens:
        _store_kernel[(tokens,)](  # pyright: ignore[reportIndexIssue]
            k_TKH,
            v_TKH,
            k_cache,
            v_cache,
            slots,
            k_TKH.stride(0),
            v_TKH.stride(0),
            SIZE=heads * size,
            BLOCK=triton.next_power_of_2(heads * size),
        )


@triton.jit
def load_block(
    cache,
    table,
    columns,
    there,
    row,
    HEAD_DIM: tl.constexpr,
    PAGE: tl.constexpr,
    DIMS: tl.constexpr,
):
    """One head's keys or values of the tokens at `columns`, where they are `there`: [columns, DIMS]."""
    dims = tl.arange(0, DIMS)
    page = tl.load(table + columns // PAGE, mask=there, other=0).to(tl.int64)
    slot = (page * PAGE + columns % PAGE) * row
    return tl.load(cache + slot[:, None] + dims[None, :], mask=there[:, None] & (dims < HEAD_DIM)[None, :], other=0.0)


@triton.jit
def _online(
    queries,
    places,
    highest,
    total,
    mixed,
    k,
    v,
    table,
    first,
    last,
    scale,
    row,
    HEAD_DIM: tl.constexpr,
    REACH: tl.constexpr,
    CAP: tl.constexpr,
    PAGE: tl.constexpr,
    COLUMNS: tl.constexpr,
    DIMS: tl.constexpr,
):
    """Attend from queries at `places` in the sequence to its tokens `first` … `last` - 1; see FlashAttention."""
    for start in range(first, last, COLUMNS):
        columns = start + tl.arange(0, COLUMNS)
        there = columns < last
        keys = load_block(k, table, columns, there, row, HEAD_DIM, PAGE, DIMS)
        values = load_block(v, table, columns, there, row, HEAD_DIM, PAGE, DIMS)
        scores = capped(tl.dot(queries, tl.trans(keys), input_precision="ieee") * scale, CAP)
        seen = there[None, :] & (columns[None, :] <= places[:, None])
        if REACH >= 0:
            seen = seen & (places[:, None] - columns[None, :] <= REACH)
        scores = tl.where(seen, scores, float("-inf"))
        higher = tl.maximum(highest, tl.max(scores, axis=1))
        shift = tl.where(higher == float("-inf"), 0.0, higher)  # a block that lies outside of this row's reach
        weights = tl.exp2(scores - shift[:, None])
        keep = tl.exp2(highest - shift)
        total = total * keep + tl.sum(weights, axis=1)
        mixed = tl.dot(weights.to(values.dtype), values, mixed * keep[:, None], input_precision="ieee")
        highest = higher
    return highest, total, mixed


@triton.jit
def _many_kernel(
    q,
    k_cache,
    v_cache,
    out,
    starts,
    lanes,
    tables,
    cu_seqlens,
    scale,
    q_row,
    q_head,
    table_row,
    sequences,
    heads,
    group,
    HEAD_DIM: tl.constexpr,
    KV_HEADS: tl.constexpr,
    REACH: tl.constexpr,
    CAP: tl.constexpr,
    PAGE: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DIMS: tl.constexpr,
):
    # One program for a block of queries of one head. Sequence s has its blocks from number cu_seqlens[s] // ROWS + s
    # on: that leaves room for all of them, wherever the sequences begin, and is found by bisection.
    head = tl.program_id(0) % heads
    block = tl.program_id(0) // heads
    low, high = 0, sequences
    while high - low > 1:
        middle = (low + high) // 2
        if tl.load(cu_seqlens + middle) // ROWS + middle <= block:
            low = middle
        else:
            high = middle
    begin = tl.load(cu_seqlens + low)
    new = tl.load(cu_seqlens + low + 1) - begin
    block -= begin // ROWS + low
    if block * ROWS >= new:
        return
    start = tl.load(starts + low)
    rows = block * ROWS + tl.arange(0, ROWS)
    dims = tl.arange(0, DIMS)
    inside = (rows < new)[:, None] & (dims < HEAD_DIM)[None, :]
    tokens = (begin + rows).to(tl.int64)
    queries = tl.load(q + tokens[:, None] * q_row + head * q_head + dims[None, :], mask=inside, other=0.0)
    first = 0
    if REACH >= 0:
        first = tl.maximum(start + block * ROWS - REACH, 0) // COLUMNS * COLUMNS
    last = start + tl.minimum(new, block * ROWS + ROWS)
    _, total, mixed = _online(
        queries,
        start + rows,
        tl.full((ROWS,), float("-inf"), tl.float32),
        tl.zeros((ROWS,), tl.float32),
        tl.zeros((ROWS, DIMS), tl.float32),
        k_cache + (head // group) * HEAD_DIM,
        v_cache + (head // group) * HEAD_DIM,
        tables + tl.load(lanes + low).to(tl.int64) * table_row,
        first,
        last,
        scale,
        KV_HEADS * HEAD_DIM,
        HEAD_DIM,
        REACH,
        CAP,
        PAGE,
        COLUMNS,
        DIMS,
    )
    total = tl.where(rows < new, total, 1.0)
    tl.store(
        out + (tokens[:, None] * heads + head) * HEAD_DIM + dims[None, :],
        (mixed / total[:, None]).to(out.dtype.element_ty),
        mask=inside,
    )


def attend_many(
    q_TNH: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    starts: Tensor,
    lanes: Tensor,
    tables: Tensor,
    cu_seqlens: Tensor,
    scale: float,
    reach: int,
    softcap: float,
) -> Tensor:
    """Attention of sequences with any number of new tokens, whose keys and values are stored already: [T, N, H]."""
    tokens, heads, size = q_TNH.shape
    kv_heads, page = k_cache.shape[2], k_cache.shape[1]
    out_TNH = torch.empty_like(q_TNH, memory_format=torch.contiguous_format)
    sequences = starts.shape[0]
    if tokens == 0 or sequences == 0:
        return out_TNH
    rows, columns = (32, 32) if q_TNH.dtype == torch.float32 or size > 128 else (64, 32)
    blocks = tokens // rows + sequences
    _many_kernel[(blocks * heads,)](  # pyright: ignore[reportIndexIssue]
        q_TNH,
        k_cache,
        v_cache,
        out_TNH,
        starts,
        lanes,
        tables,
        cu_seqlens,
        scale * LOG2_E,
        q_TNH.stride(0),
        q_TNH.stride(1),
        tables.stride(0),
        sequences,
        heads,
        heads // kv_heads,
        HEAD_DIM=size,
        KV_HEADS=kv_heads,
        REACH=reach,
        CAP=softcap * LOG2_E,  # of base-2 scores
        PAGE=page,
        ROWS=rows,
        COLUMNS=columns,
        DIMS=max(16, triton.next_power_of_2(size)),
        num_warps=4,
        num_stages=3,
    )
    return out_TNH


@triton.jit
def _one_kernel(
    q,
    k_cache,
    v_cache,
    mixed_out,
    weight_out,
    starts,
    lanes,
    tables,
    cu_seqlens,
    scale,
    q_row,
    q_head,
    table_row,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    KV_HEADS: tl.constexpr,
    REACH: tl.constexpr,
    CAP: tl.constexpr,
    PAGE: tl.constexpr,
    SPLITS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DIMS: tl.constexpr,
):
    # One program for the query heads of one key/value head, and one share of a sequence's keys.
    sequence, kv_head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    token = tl.load(cu_seqlens + sequence)
    if tl.load(cu_seqlens + sequence + 1) == token:
        return
    place = tl.load(starts + sequence)
    first = 0
    if REACH >= 0:
        first = tl.maximum(place - REACH, 0) // COLUMNS * COLUMNS
    share = tl.cdiv(tl.cdiv(place + 1 - first, SPLITS), COLUMNS) * COLUMNS
    first += split * share
    last = tl.minimum(first + share, place + 1)
    rows = tl.arange(0, ROWS)
    dims = tl.arange(0, DIMS)
    inside = (rows < GROUP)[:, None] & (dims < HEAD_DIM)[None, :]
    token = token.to(tl.int64)
    head = kv_head * GROUP + rows
    queries = tl.load(q + token * q_row + head[:, None] * q_head + dims[None, :], mask=inside, other=0.0)
    highest, total, mixed = _online(
        queries,
        place + tl.zeros((ROWS,), tl.int32),
        tl.full((ROWS,), float("-inf"), tl.float32),
        tl.zeros((ROWS,), tl.float32),
        tl.zeros((ROWS, DIMS), tl.float32),
        k_cache + kv_head * HEAD_DIM,
        v_cache + kv_head * HEAD_DIM,
        tables + tl.load(lanes + sequence).to(tl.int64) * table_row,
        first,
        last,
        scale,
        KV_HEADS * HEAD_DIM,
        HEAD_DIM,
        REACH,
        CAP,
        PAGE,
        COLUMNS,
        DIMS,
    )
    some = tl.where(total > 0, total, 1.0)
    part = ((token * KV_HEADS * GROUP + head) * SPLITS + split).to(tl.int64)
    tl.store(
        mixed_out + part[:, None] * HEAD_DIM + dims[None, :],
        (mixed / some[:, None]).to(mixed_out.dtype.element_ty),
        mask=inside,
    )
    if SPLITS > 1:
        tl.store(weight_out + part, tl.where(total > 0, highest + tl.log2(some), float("-inf")), mask=rows < GROUP)


@triton.jit
def _combine_kernel(
    parts, weights, out, cu_seqlens, sequences, heads, HEAD_DIM: tl.constexpr, SPLITS: tl.constexpr, DIMS: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    if row // heads >= tl.load(cu_seqlens + sequences):
        return
    dims = tl.arange(0, DIMS)
    inside = dims < HEAD_DIM
    splits = tl.arange(0, SPLITS)
    weight = tl.load(weights + row * SPLITS + splits)
    weight = tl.exp2(weight - tl.max(weight, axis=0))
    place = (row * SPLITS + splits)[:, None] * HEAD_DIM + dims[None, :]
    part = tl.load(parts + place, mask=inside[None, :], other=0.0)
    mixed = tl.sum(part * weight[:, None], axis=0) / tl.sum(weight, axis=0)
    tl.store(out + row * HEAD_DIM + dims, mixed.to(out.dtype.element_ty), mask=inside)


def splits_for(rows: int, device: torch.device) -> int:
    """Into how many shares the keys of each row of heads are split: a power of two.

    That makes about two programs for each of the device's processors.
    """
    wanted = 2 * torch.cuda.get_device_properties(device).multi_processor_count // rows
    return min(64, 1 << max(wanted, 1).bit_length() - 1)


def attend_one(
    q_TNH: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    starts: Tensor,
    lanes: Tensor,
    tables: Tensor,
    cu_seqlens: Tensor,
    scale: float,
    reach: int,
    softcap: float,
) -> Tensor:
    """Like `attend_many`, for sequences with one new token each, or none."""
    tokens, heads, size = q_TNH.shape
    kv_heads, page = k_cache.shape[2], k_cache.shape[1]
    sequences = starts.shape[0]
    out_TNH = torch.empty_like(q_TNH, memory_format=torch.contiguous_format)
    if tokens == 0 or sequences == 0:
        return out_TNH
    splits = splits_for(sequences * kv_heads, q_TNH.device)
    parts, weights = out_TNH, out_TNH
    if splits > 1:
        parts = torch.empty(tokens, heads, splits, size, dtype=torch.float32, device=q_TNH.device)
        weights = torch.empty(tokens, heads, splits, dtype=torch.float32, device=q_TNH.device)
    dims = max(16, triton.next_power_of_2(size))
    _one_kernel[(sequences, kv_heads, splits)](  # pyright: ignore[reportIndexIssue]
        q_TNH,
        k_cache,
        v_cache,
        parts,
        weights,
        starts,
        lanes,
        tables,
        cu_seqlens,
        scale * LOG2_E,
        q_TNH.stride(0),
        q_TNH.stride(1),
        tables.stride(0),
        GROUP=heads // kv_heads,
        HEAD_DIM=size,
        KV_HEADS=kv_heads,
        REACH=reach,
        CAP=softcap * LOG2_E,  # of base-2 scores
        PAGE=page,
        SPLITS=splits,
        ROWS=max(16, triton.next_power_of_2(heads // kv_heads)),
        COLUMNS=32,
        DIMS=dims,
        num_warps=4,
        num_stages=3,
    )
    if splits > 1:
        _combine_kernel[(tokens * heads,)](  # pyright: ignore[reportIndexIssue]
            parts, weights, out_TNH, cu_seqlens, sequences, heads, HEAD_DIM=size, SPLITS=splits, DIMS=dims, num_warps=2
        )
    return out_TNH
