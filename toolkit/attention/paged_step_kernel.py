"""The Triton kernel of a decoding step with few sequences: all that lies between two linear layers.

Queries and keys are normalised and turned, keys and values stored, and each sequence's one new token attends to what
lies in the cache (Flash-Decoding, Dao et al., 2023). The program that ends last for a key/value head combines the
results of all.

Shape suffixes: T tokens, N query heads, K key/value heads, H head size, R half of the rotated values; L positions.
"""
# ruff: noqa: RUF005 (Triton's tuples cannot be unpacked)
# pyright: basic, reportAttributeAccessIssue=false, reportPossiblyUnboundVariable=false

import torch
import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait  # pyright: ignore[reportMissingImports]

from toolkit.attention.paged_kernel import LOG2_E, load_block, splits_for
from toolkit.attention.triton_kernel import capped
from toolkit.toolchain import launch_early

__all__ = ["attend_step"]


@triton.jit
def _normalised(x, factor, shrink, NORM: tl.constexpr):
    # Rounded as a layer of its own would round it.
    if NORM != "":
        x = (x.to(tl.float32) * shrink * (factor.to(tl.float32) + (1 if NORM == "offset" else 0))).to(x.dtype)
    return x.to(tl.float32)


@triton.jit
def _turned(x, other, factor, other_factor, c, s, eps, HEAD_DIM: tl.constexpr, NORM: tl.constexpr):
    """A query or key as it enters the scores, float32 [DIMS]; `other` are the values that it is turned with."""
    shrink = 1.0
    if NORM != "":
        wide = x.to(tl.float32)
        shrink = tl.rsqrt(tl.sum(wide * wide, axis=0) / HEAD_DIM + eps)
    turned = _normalised(x, factor, shrink, NORM) * c + _normalised(other, other_factor, shrink, NORM) * s
    return turned.to(x.dtype).to(tl.float32)


@triton.jit
def _attend(
    queries,
    place,
    highest,
    total,
    mixed,
    keys,
    values,
    columns,
    there,
    scale,
    GROUP: tl.constexpr,
    REACH: tl.constexpr,
    CAP: tl.constexpr,
):
    """Attend from each query of the group to the tokens at `columns`; without tensor cores, whose layouts cost more."""
    if REACH >= 0:
        there = there & (place - columns <= REACH)
    for member in tl.static_range(GROUP):
        scores = capped(tl.sum(keys.to(tl.float32) * queries[member][None, :], axis=1) * scale, CAP)
        scores = tl.where(there, scores, float("-inf"))
        higher = tl.maximum(highest[member], tl.max(scores, axis=0))
        shift = tl.where(higher == float("-inf"), 0.0, higher)  # none of these tokens is within reach
        weights = tl.exp2(scores - shift)
        keep = tl.exp2(highest[member] - shift)
        sum = total[member] * keep + tl.sum(weights, axis=0)
        mix = mixed[member] * keep + tl.sum(weights[:, None] * values.to(tl.float32), axis=0)
        highest = highest[:member] + (higher,) + highest[member + 1 :]
        total = total[:member] + (sum,) + total[member + 1 :]
        mixed = mixed[:member] + (mix,) + mixed[member + 1 :]
    return highest, total, mixed


@triton.jit
def _combine(
    parts,
    weights,
    out,
    row,
    active,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    SPLITS: tl.constexpr,
    WIDE: tl.constexpr,
    DIMS: tl.constexpr,
):
    splits, dims = tl.arange(0, SPLITS), tl.arange(0, DIMS)
    inside = dims < HEAD_DIM
    for member in tl.static_range(GROUP):  # what other processors wrote is read past this one's own cache
        place = (row + member) * SPLITS
        every = tl.load(weights + place + splits, mask=splits < active, other=float("-inf"), cache_modifier=".cg")
        highest = tl.max(every, axis=0)
        total = tl.sum(tl.exp2(every - highest), axis=0)
        mixed = tl.zeros((DIMS,), tl.float32)
        for start in range(0, active, WIDE):
            some = start + tl.arange(0, WIDE)
            weight = tl.load(weights + place + some, mask=some < active, other=float("-inf"), cache_modifier=".cg")
            part = parts + (place + some)[:, None] * HEAD_DIM + dims[None, :]
            mask = (some < active)[:, None] & inside[None, :]
            part = tl.load(part, mask=mask, other=0.0, cache_modifier=".cg")
            mixed += tl.sum(part * tl.exp2(weight - highest)[:, None], axis=0)
        tl.store(out + (row + member) * HEAD_DIM + dims, (mixed / total).to(out.dtype.element_ty), mask=inside)


@triton.jit
def _deliver(
    highest,
    total,
    mixed,
    parts,
    weights,
    out,
    count,
    row,
    split,
    active,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    SPLITS: tl.constexpr,
    WIDE: tl.constexpr,
    DIMS: tl.constexpr,
):
    """Store the result of the only share; or one share's, and if it is the last one to come, that of all."""
    dims = tl.arange(0, DIMS)
    wide = dims < HEAD_DIM
    for member in tl.static_range(GROUP):
        some = tl.where(total[member] > 0, total[member], 1.0)
        if active == 1:
            result = (mixed[member] / some).to(out.dtype.element_ty)
            tl.store(out + (row + member) * HEAD_DIM + dims, result, mask=wide)
        else:
            part = (row + member) * SPLITS + split
            tl.store(parts + part * HEAD_DIM + dims, mixed[member] / some, mask=wide)
            tl.store(weights + part, tl.where(total[member] > 0, highest[member] + tl.log2(some), float("-inf")))
    if active > 1:
        tl.debug_barrier()  # all of this program's stores come before its arrival
        if tl.atomic_add(count, 1, sem="acq_rel") == active - 1:
            tl.store(count, 0)  # for the next launch
            _combine(parts, weights, out, row, active, GROUP, HEAD_DIM, SPLITS, WIDE, DIMS)


@triton.jit
def _load_heads(vectors, kv_head, dims, wide, GROUP: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr):
    """The queries of a key/value head, its key and its value: a tuple of [DIMS]."""
    heads = ()
    for member in tl.static_range(GROUP + 2):
        number = kv_head * GROUP + member if member < GROUP else KV_HEADS * member + kv_head
        heads = heads + (tl.load(vectors + number * HEAD_DIM + dims, mask=wide, other=0.0),)
    return heads


@triton.jit
def _step_kernel(
    qkv,
    q_norm,
    k_norm,
    cos,
    sin,
    positions,
    k_cache,
    v_cache,
    arrived,
    parts,
    weights,
    out,
    slots,
    starts,
    lanes,
    tables,
    cu_seqlens,
    scale,
    eps,
    qkv_row,
    table_row,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HALF: tl.constexpr,
    NORM: tl.constexpr,
    KV_HEADS: tl.constexpr,
    REACH: tl.constexpr,
    CAP: tl.constexpr,
    PAGE: tl.constexpr,
    SPLITS: tl.constexpr,
    COLUMNS: tl.constexpr,
    WIDE: tl.constexpr,
    DIMS: tl.constexpr,
    EARLY: tl.constexpr,
):
    # One program for the query heads of one key/value head, and one share of a sequence's keys. A share is at least
    # one block: of a short sequence only the first programs have work.
    if EARLY:
        gdc_launch_dependents()
    sequence, kv_head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    token = tl.load(cu_seqlens + sequence)
    empty = tl.load(cu_seqlens + sequence + 1) == token
    place = tl.load(starts + sequence)
    table = tables + tl.load(lanes + sequence).to(tl.int64) * table_row
    first = 0
    if REACH >= 0:
        first = tl.maximum(place - REACH, 0) // COLUMNS * COLUMNS
    share = tl.cdiv(tl.maximum(tl.cdiv(place - first, SPLITS), 1), COLUMNS) * COLUMNS
    active = tl.maximum(tl.cdiv(place - first, share), 1)
    if (split > 0) & (split >= active):
        return  # the first program waits in any case: a launch that ended early would let the next one start
    first, last = first + split * share, tl.minimum(first + (split + 1) * share, place)
    columns = first + tl.arange(0, COLUMNS)
    there = (columns < last) & (not empty)
    dims = tl.arange(0, DIMS)
    wide = dims < HEAD_DIM
    partner = tl.where(dims < HALF, dims + HALF, tl.where(dims < 2 * HALF, dims - HALF, dims))
    k, v = k_cache + kv_head * HEAD_DIM, v_cache + kv_head * HEAD_DIM
    # weights and earlier steps' tokens, which do not depend on the launch in front
    keys = load_block(k, table, columns, there, KV_HEADS * HEAD_DIM, HEAD_DIM, PAGE, DIMS)
    values = load_block(v, table, columns, there, KV_HEADS * HEAD_DIM, HEAD_DIM, PAGE, DIMS)
    q_factor, q_other, k_factor, k_other = 0.0, 0.0, 0.0, 0.0
    if NORM != "":
        q_factor = tl.load(q_norm + dims, mask=wide, other=0.0)
        q_other = tl.load(q_norm + partner, mask=wide, other=0.0)
        k_factor = tl.load(k_norm + dims, mask=wide, other=0.0)
        k_other = tl.load(k_norm + partner, mask=wide, other=0.0)
    c, s = 1.0, 0.0
    if HALF > 0:
        turn = tl.load(positions + token, mask=not empty, other=0).to(tl.int64) * HALF + dims % HALF
        c = tl.load(cos + turn, mask=dims < 2 * HALF, other=1.0)
        s = tl.load(sin + turn, mask=dims < 2 * HALF, other=0.0)
        s = tl.where(dims < HALF, -s, s)
    if EARLY:
        gdc_wait()
    if empty:
        return
    vectors = qkv + token.to(tl.int64) * qkv_row
    slot = tl.load(slots + token).to(tl.int64)
    x = _load_heads(vectors, kv_head, dims, wide, GROUP, KV_HEADS, HEAD_DIM)
    other = _load_heads(vectors, kv_head, partner, wide, GROUP, KV_HEADS, HEAD_DIM)
    key = _turned(x[GROUP], other[GROUP], k_factor, k_other, c, s, eps, HEAD_DIM, NORM)
    value = x[GROUP + 1]
    if split == 0:
        here = slot * KV_HEADS * HEAD_DIM + dims
        tl.store(k + here, key.to(value.dtype), mask=wide & (slot >= 0))
        tl.store(v + here, value, mask=wide & (slot >= 0))
    queries, highest, total, mixed = (), (), (), ()
    for member in tl.static_range(GROUP):  # the first share's begin is the new token, which is not in the cache yet
        query = _turned(x[member], other[member], q_factor, q_other, c, s, eps, HEAD_DIM, NORM)
        score = capped(tl.sum(query * key, axis=0) * scale, CAP)
        queries = queries + (query,)
        highest = highest + (tl.where(split == 0, score, float("-inf")),)
        total = total + (tl.where(split == 0, 1.0, 0.0),)
        mixed = mixed + (tl.where(split == 0, value.to(tl.float32), 0.0),)
    highest, total, mixed = _attend(
        queries, place, highest, total, mixed, keys, values, columns, there, scale, GROUP, REACH, CAP
    )
    for start in range(first + COLUMNS, last, WIDE):
        more = start + tl.arange(0, WIDE)
        more_keys = load_block(k, table, more, more < last, KV_HEADS * HEAD_DIM, HEAD_DIM, PAGE, DIMS)
        more_values = load_block(v, table, more, more < last, KV_HEADS * HEAD_DIM, HEAD_DIM, PAGE, DIMS)
        highest, total, mixed = _attend(
            queries, place, highest, total, mixed, more_keys, more_values, more, more < last, scale, GROUP, REACH, CAP
        )
    row = (token.to(tl.int64) * KV_HEADS + kv_head) * GROUP
    count = arrived + token * KV_HEADS + kv_head
    _deliver(highest, total, mixed, parts, weights, out, count, row, split, active, GROUP, HEAD_DIM, SPLITS, WIDE, DIMS)


def attend_step(
    qkv_TX: Tensor,
    q_norm_H: Tensor | None,
    k_norm_H: Tensor | None,
    eps: float,
    offset: bool,
    cos_LR: Tensor | None,
    sin_LR: Tensor | None,
    positions: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    arrived: Tensor,
    slots: Tensor,
    starts: Tensor,
    lanes: Tensor,
    tables: Tensor,
    cu_seqlens: Tensor,
    heads: int,
    scale: float,
    reach: int,
    softcap: float,
) -> Tensor:
    """See `toolkit.nn.few_rows.attend_step`."""
    kv_heads, page, size = k_cache.shape[2], k_cache.shape[1], k_cache.shape[3]
    tokens, sequences = qkv_TX.shape[0], starts.shape[0]
    assert qkv_TX.stride(1) == 1
    assert arrived.numel() >= tokens * kv_heads
    out = torch.empty(tokens, heads * size, dtype=qkv_TX.dtype, device=qkv_TX.device)
    # programs of one warp, which need not wait for each other in the middle: eight for each processor
    splits = min(64, 4 * splits_for(sequences * kv_heads, qkv_TX.device))
    dims = triton.next_power_of_2(size)
    columns = max(8, 2048 // dims)
    parts = torch.empty(tokens, heads, splits, size, dtype=torch.float32, device=qkv_TX.device)
    weights = torch.empty(tokens, heads, splits, dtype=torch.float32, device=qkv_TX.device)
    _step_kernel[(sequences, kv_heads, splits)](  # pyright: ignore[reportIndexIssue]
        qkv_TX,
        q_norm_H,
        k_norm_H,
        cos_LR if cos_LR is not None else qkv_TX,  # not read
        sin_LR if sin_LR is not None else qkv_TX,
        positions,
        k_cache,
        v_cache,
        arrived,
        parts,
        weights,
        out,
        slots,
        starts,
        lanes,
        tables,
        cu_seqlens,
        scale * LOG2_E,
        eps,
        qkv_TX.stride(0),
        tables.stride(0),
        GROUP=heads // kv_heads,
        HEAD_DIM=size,
        HALF=cos_LR.shape[1] if cos_LR is not None else 0,
        NORM=("offset" if offset else "plain") if q_norm_H is not None else "",
        KV_HEADS=kv_heads,
        REACH=reach,
        CAP=softcap * LOG2_E,  # of base-2 scores
        PAGE=page,
        SPLITS=splits,
        COLUMNS=columns,
        WIDE=2 * columns,
        DIMS=dims,
        num_warps=1,
        **launch_early(qkv_TX.device),
    )
    return out
