"""The Triton kernels of grouped linear layers: which row comes where, and a matrix product by the layer of each row.

No launch depends on how many rows a layer has, only on how many there are together.

Shape suffixes: T tokens; R rows; E layers; I input features; O output features.
"""

import torch
import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]
from torch import Tensor

__all__ = ["MOST_RANKED", "multiply", "rank"]

# Each row is compared with all others: beyond so many rows a sort is faster.
MOST_RANKED = 4096


@triton.jit
def _rank_kernel(choice, order, starts, rows, count, BLOCK: tl.constexpr, COLUMNS: tl.constexpr):
    # A row's place is how many come before it: those with a smaller choice, and those with the same and a smaller
    # number. Behind the rows stand one for each choice and one more, that come before all others with that choice.
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    real = row < rows
    own = tl.where(real, tl.load(choice + row, mask=real, other=0).to(tl.int32), row - rows)
    number = tl.where(real, row, -1)
    place = tl.zeros((BLOCK,), tl.int32)
    for start in range(0, rows, COLUMNS):
        other = start + tl.arange(0, COLUMNS)
        theirs = tl.load(choice + other, mask=other < rows, other=count + 1).to(tl.int32)
        before = (theirs[None, :] < own[:, None]) | (
            (theirs[None, :] == own[:, None]) & (other[None, :] < number[:, None])
        )
        place += tl.sum(before.to(tl.int32), axis=1)
    tl.store(order + place, row, mask=real)
    tl.store(starts + row - rows, place, mask=(row >= rows) & (row <= rows + count))


def rank(choice_R: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """What `toolkit.nn.grouped.group_rows` returns, for a few rows in one launch."""
    rows, block = choice_R.shape[0], 32
    order_R = torch.empty(rows, dtype=torch.int32, device=choice_R.device)
    starts = torch.empty(count + 1, dtype=torch.int32, device=choice_R.device)
    _rank_kernel[(triton.cdiv(rows + count + 1, block),)](  # pyright: ignore[reportIndexIssue]
        choice_R.contiguous(), order_R, starts, rows, count, BLOCK=block, COLUMNS=128, num_warps=4
    )
    return order_R, starts


@triton.jit
def _multiply_kernel(
    x,
    order,
    starts,
    weight,
    out,
    choices,
    x_row,
    FEATURES: tl.constexpr,
    OUTPUTS: tl.constexpr,
    COUNT: tl.constexpr,
    LAYERS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
):
    # One program for some outputs of a block of rows of one layer; neighbours share the rows. The blocks of a layer
    # follow those of the layers before it; behind the last layer's there is nothing to do.
    block = tl.program_id(0) // tl.cdiv(OUTPUTS, COLUMNS)
    outputs = tl.program_id(0) % tl.cdiv(OUTPUTS, COLUMNS) * COLUMNS + tl.arange(0, COLUMNS)
    layers = tl.arange(0, LAYERS)
    begin = tl.load(starts + layers, mask=layers < COUNT, other=0)
    end = tl.load(starts + layers + 1, mask=layers < COUNT, other=0)
    blocks = (end - begin + ROWS - 1) // ROWS
    if block >= tl.sum(blocks, axis=0):
        return
    layer = tl.sum((tl.cumsum(blocks, axis=0) <= block).to(tl.int32), axis=0)
    block -= tl.sum(tl.where(layers < layer, blocks, 0), axis=0)
    place = tl.load(starts + layer) + block * ROWS + tl.arange(0, ROWS)
    there = place < tl.load(starts + layer + 1)
    rows = tl.load(order + place, mask=there, other=0).to(tl.int64)
    source = rows // choices * x_row
    own = (layer.to(tl.int64) * OUTPUTS + outputs) * FEATURES
    features = tl.arange(0, DEPTH)
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for start in range(0, FEATURES, DEPTH):
        inside = start + features < FEATURES
        y = tl.load(x + source[:, None] + start + features[None, :], mask=there[:, None] & inside[None, :], other=0.0)
        w = tl.load(
            weight + own[None, :] + start + features[:, None],
            mask=(outputs < OUTPUTS)[None, :] & inside[:, None],
            other=0.0,
        )
        total = tl.dot(y, w, total, input_precision="ieee")
    tl.store(
        out + rows[:, None] * OUTPUTS + outputs[None, :],
        total.to(out.dtype.element_ty),
        mask=there[:, None] & (outputs < OUTPUTS)[None, :],
    )


def multiply(x: Tensor, order_R: Tensor, starts: Tensor, weight_EOI: Tensor) -> Tensor:
    """Multiply every row with the weight of its layer; see `toolkit.nn.grouped.grouped_linear`."""
    rows, (count, outputs, features) = order_R.shape[0], weight_EOI.shape
    assert weight_EOI.is_contiguous()
    x = x if x.stride(1) == 1 else x.contiguous()
    out_RO = torch.empty(rows, outputs, dtype=x.dtype, device=x.device)
    if rows == 0:
        return out_RO
    tile, columns, depth, warps, stages = _tiles(rows / count, x.dtype)
    # Every layer may have a block that is not full, but none has more blocks than rows.
    blocks = min(rows, rows // tile + count)
    _multiply_kernel[(blocks * triton.cdiv(outputs, columns),)](  # pyright: ignore[reportIndexIssue]
        x,
        order_R,
        starts,
        weight_EOI,
        out_RO,
        rows // x.shape[0],
        x.stride(0),
        FEATURES=features,
        OUTPUTS=outputs,
        COUNT=count,
        LAYERS=triton.next_power_of_2(count),
        ROWS=tile,
        COLUMNS=columns,
        DEPTH=depth,
        num_warps=warps,
        num_stages=stages,
    )
    return out_RO


def _tiles(rows: float, dtype: torch.dtype) -> tuple[int, int, int, int, int]:
    """Rows, outputs and features of a step, warps, and stages, for layers with so many rows on average."""
    if dtype == torch.float32:
        return (16, 64, 32, 4, 3) if rows <= 16 else (64, 64, 32, 4, 3)
    if rows <= 16:
        return 16, 64, 128, 4, 4
    return (64, 128, 64, 4, 3) if rows <= 128 else (128, 128, 64, 8, 3)
