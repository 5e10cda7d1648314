"""The Triton kernel behind `toolkit.nn.gemv`.

Shape suffixes: T tokens, I input features, O output features.
"""

import torch
import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]
from torch import Tensor

__all__ = ["multiply"]


@triton.jit
def _multiply_kernel(
    x,
    weight,
    bias,
    out,
    features,
    outputs,
    x_row,
    BIAS: tl.constexpr,
    TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    STEPS: tl.constexpr,
    EVEN: tl.constexpr,
):
    # One program for some rows of the weight; sums are in float32.
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    there = rows < outputs
    tokens = tl.arange(0, TOKENS)
    total = tl.zeros((TOKENS, ROWS), tl.float32)
    for step in tl.static_range(STEPS):
        columns = step * COLUMNS + tl.arange(0, COLUMNS)
        place = rows.to(tl.int64)[:, None] * features + columns[None, :]
        if EVEN:
            w = tl.load(weight + place, mask=there[:, None], other=0.0)
            y = tl.load(x + tokens[:, None] * x_row + columns[None, :])
        else:
            inside = columns < features
            w = tl.load(weight + place, mask=there[:, None] & inside[None, :], other=0.0)
            y = tl.load(x + tokens[:, None] * x_row + columns[None, :], mask=inside[None, :], other=0.0)
        total += tl.sum(w.to(tl.float32)[None, :, :] * y.to(tl.float32)[:, None, :], axis=2)
    if BIAS:
        total += tl.load(bias + rows, mask=there, other=0.0).to(tl.float32)[None, :]
    tl.store(out + tokens[:, None] * outputs + rows[None, :], total.to(out.dtype.element_ty), mask=there[None, :])


def multiply(x_TI: Tensor, weight_OI: Tensor, bias_O: Tensor | None) -> Tensor:
    """`F.linear` for a number of tokens that is a power of two after padding; [T, O]."""
    tokens, features = x_TI.shape
    outputs = weight_OI.shape[0]
    assert weight_OI.is_contiguous()
    if tokens & (tokens - 1):
        x_TI = torch.cat((x_TI, x_TI[:1].expand(triton.next_power_of_2(tokens) - tokens, -1)))
    x_TI = x_TI if x_TI.stride(1) == 1 else x_TI.contiguous()
    out_TO = torch.empty(x_TI.shape[0], outputs, dtype=x_TI.dtype, device=x_TI.device)
    columns = min(1024, triton.next_power_of_2(features))
    rows = 4 if x_TI.shape[0] <= 2 else 2  # measured on an H200 between 2 and 16
    _multiply_kernel[(triton.cdiv(outputs, rows),)](  # pyright: ignore[reportIndexIssue]
        x_TI,
        weight_OI,
        bias_O,
        out_TO,
        features,
        outputs,
        x_TI.stride(0),
        BIAS=bias_O is not None,
        TOKENS=x_TI.shape[0],
        ROWS=rows,
        COLUMNS=columns,
        STEPS=triton.cdiv(features, columns),
        EVEN=features % columns == 0,
        num_warps=4,
    )
    return out_TO[:tokens]
