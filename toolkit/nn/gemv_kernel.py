"""The Triton kernel of linear layers for a handful of rows: a matrix product with what comes before and behind it.

Reading the weights is all of the work, and that need not wait: where the device can start a kernel before the one in
front of it has ended (programmatic dependent launch), the weights are on their way while that one still runs.

Shape suffixes: T tokens, I input features, O output features.
"""
# ruff: noqa: RUF005 (Triton's tuples cannot be unpacked)
# pyright: basic, reportAttributeAccessIssue=false, reportPossiblyUnboundVariable=false

import torch
import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]
from torch import Tensor
from triton.language.extra import libdevice  # pyright: ignore[reportMissingImports]
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait  # pyright: ignore[reportMissingImports]

from toolkit.toolchain import launch_early

__all__ = ["multiply"]

_COLUMNS = 256  # of a row at a time: 16 bytes for each thread of a warp
_STEPS = 12  # so many times at once, what registers hold
_ROWS, _WARPS = 8, 4  # the fastest of six for all layers of a small model on an H200


@triton.jit
def _activated(x, ACTIVATION: tl.constexpr):
    if ACTIVATION == "silu":
        x = x * tl.sigmoid(x)
    if ACTIVATION == "gelu":
        x = 0.5 * x * (1 + libdevice.erf(x * 0.7071067811865476))
    if ACTIVATION == "gelu_tanh":
        x = 0.5 * x * (1 + libdevice.tanh(0.7978845608028654 * (x + 0.044715 * x * x * x)))
    return x


@triton.jit
def _multiply_kernel(
    x,
    factor,
    weight,
    bias,
    residual,
    out,
    outputs,
    x_row,
    eps,
    alpha,
    FEATURES: tl.constexpr,
    NORM: tl.constexpr,
    GATE: tl.constexpr,
    ACTIVATION: tl.constexpr,
    BIAS: tl.constexpr,
    RESIDUAL: tl.constexpr,
    TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    STEPS: tl.constexpr,
    EARLY: tl.constexpr,
):
    # One program for some rows of the weight, as long as they are. The rows are spread over the warps, and a warp loads
    # all of COLUMNS at once, so that a row's sum stays within its warp. Sums are in float32. The inverse root mean
    # square is a factor of the whole sum, so both sums are under way at once.
    if EARLY:
        gdc_launch_dependents()
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    there = rows < outputs
    columns = tl.zeros((ROWS, 1), tl.int32) + tl.arange(0, COLUMNS)[None, :]
    place = rows.to(tl.int64)[:, None] * FEATURES + columns
    second = weight + outputs.to(tl.int64) * FEATURES
    none = tl.zeros((ROWS, COLUMNS), tl.float32)
    sums, sums_gated, squares = (none,) * TOKENS, (none,) * TOKENS, (none,) * TOKENS
    for first in tl.static_range(0, FEATURES, STEPS * COLUMNS):
        w, w_gated, scale = (), (), ()
        for step in tl.static_range(STEPS):
            start = first + step * COLUMNS
            inside = columns < FEATURES - start
            w = w + (tl.load(weight + place + start, mask=there[:, None] & inside, other=0.0),)
            if GATE != "":
                w_gated = w_gated + (tl.load(second + place + start, mask=there[:, None] & inside, other=0.0),)
            if NORM != "":
                scale = scale + (tl.load(factor + columns + start, mask=inside, other=0.0),)
        if EARLY and first == 0:
            gdc_wait()
        for token in tl.static_range(TOKENS):
            a, b, c = sums[token], sums_gated[token], squares[token]
            for step in tl.static_range(STEPS):
                start = first + step * COLUMNS
                y = tl.load(x + token * x_row + columns + start, mask=columns < FEATURES - start, other=0.0)
                y = y.to(tl.float32)
                if NORM != "":
                    c += y * y
                    y *= scale[step].to(tl.float32) + (1 if NORM == "offset" else 0)
                a += w[step].to(tl.float32) * y
                if GATE != "":
                    b += w_gated[step].to(tl.float32) * y
            sums = sums[:token] + (a,) + sums[token + 1 :]
            sums_gated = sums_gated[:token] + (b,) + sums_gated[token + 1 :]
            squares = squares[:token] + (c,) + squares[token + 1 :]
    for token in tl.static_range(TOKENS):
        total, gated = tl.sum(sums[token], axis=1), tl.sum(sums_gated[token], axis=1)
        if NORM != "":
            shrink = tl.rsqrt(tl.sum(squares[token], axis=1) / FEATURES + eps)
            total, gated = total * shrink, gated * shrink
        if BIAS:
            total += tl.load(bias + rows, mask=there, other=0.0).to(tl.float32)
            if GATE != "":
                gated += tl.load(bias + outputs + rows, mask=there, other=0.0).to(tl.float32)
        if GATE == "first":
            total = _activated(total, ACTIVATION) * gated
        if GATE == "second":
            total = total * _activated(gated, ACTIVATION)
        here = token * outputs + rows
        if RESIDUAL:
            total = tl.load(residual + here, mask=there, other=0.0).to(tl.float32) + alpha * total
        tl.store(out + here, total.to(out.dtype.element_ty), mask=there)


def multiply(
    x_TI: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    norm_I: Tensor | None = None,
    eps: float = 0.0,
    offset: bool = False,
    gate: str = "none",
    activation: str = "identity",
    residual_TO: Tensor | None = None,
    alpha: float = 1.0,
) -> Tensor:
    """`F.linear` for a few tokens, with what stands around it in a block; [T, O].

    Args:
        x_TI: a few tokens.
        weight: [O, I], or [2 O, I] with a gate.
        bias: of the weight's first dimension.
        norm_I: the weight of a root-mean-square norm in front; with `offset`, less one.
        eps: of the norm.
        offset: see `norm_I`.
        gate: "none", "first" or "second": the half of the outputs that goes through `activation` and multiplies the
            other.
        activation: "silu", "gelu" or "gelu_tanh".
        residual_TO: what the outcome, times `alpha`, is added to.
        alpha: see `residual_TO`.
    """
    tokens, features = x_TI.shape
    halves = 1 if gate == "none" else 2
    outputs = weight.shape[0] // halves
    assert weight.is_contiguous()
    x_TI = x_TI if x_TI.stride(1) == 1 else x_TI.contiguous()
    if residual_TO is not None:
        residual_TO = residual_TO.contiguous()
    out_TO = torch.empty(tokens, outputs, dtype=x_TI.dtype, device=x_TI.device)
    _multiply_kernel[(triton.cdiv(outputs, _ROWS),)](  # pyright: ignore[reportIndexIssue]
        x_TI,
        norm_I,
        weight,
        bias,
        residual_TO,
        out_TO,
        outputs,
        x_TI.stride(0),
        eps,
        alpha,
        FEATURES=features,
        NORM=("offset" if offset else "plain") if norm_I is not None else "",
        GATE="" if gate == "none" else gate,
        ACTIVATION=activation,
        BIAS=bias is not None,
        RESIDUAL=residual_TO is not None,
        TOKENS=tokens,
        ROWS=_ROWS,
        COLUMNS=_COLUMNS,
        STEPS=min(_STEPS // halves, triton.cdiv(features, _COLUMNS)),
        num_warps=_WARPS,
        **launch_early(x_TI.device),
    )
    return out_TO
