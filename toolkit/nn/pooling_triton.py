"""Mean pooling and normalisation on CUDA in one kernel; plain torch takes nine, and a float32 copy of all states.

Shape suffixes: T tokens, S sequences, D hidden size.
"""

import torch
import torch.nn.functional as F
import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]
from torch import Tensor

__all__ = ["pool_mean"]

_WIDEST_ROW = 1024


@triton.jit
def _mean_kernel(
    states,
    cu_seqlens,
    out,
    hidden,
    TOKENS: tl.constexpr,
    COLUMNS: tl.constexpr,
    NORMALIZE: tl.constexpr,
):
    # One program for a sequence and a block of columns. The order of summation depends on the sequence alone.
    # NORMALIZE is for blocks that hold whole rows.
    sequence = tl.program_id(0)
    begin = tl.load(cu_seqlens + sequence)
    end = tl.load(cu_seqlens + sequence + 1)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = columns < hidden
    total = tl.zeros((COLUMNS,), tl.float32)
    for start in range(begin, end, TOKENS):
        rows = (start + tl.arange(0, TOKENS)).to(tl.int64)
        mask = (rows < end)[:, None] & inside[None, :]
        block = tl.load(states + rows[:, None] * hidden + columns[None, :], mask=mask, other=0.0)
        total += tl.sum(block.to(tl.float32), axis=0)
    vector = total / tl.maximum(end - begin, 1).to(tl.float32)
    if NORMALIZE:
        vector = vector / tl.maximum(tl.sqrt(tl.sum(vector * vector, axis=0)), 1e-12)
    tl.store(out + sequence * hidden + columns, vector, mask=inside)


def pool_mean(states_TD: Tensor, cu_seqlens: Tensor, normalize: bool) -> Tensor:
    """Mean of each sequence's states, scaled to length 1 if asked: [T, D] and int32 [S + 1] → float32 [S, D]."""
    sequences, hidden = cu_seqlens.shape[0] - 1, states_TD.shape[1]
    out_SD = torch.empty(sequences, hidden, dtype=torch.float32, device=states_TD.device)
    if sequences == 0:
        return out_SD
    whole = hidden <= _WIDEST_ROW
    columns = triton.next_power_of_2(hidden) if whole else 128
    grid = (sequences, triton.cdiv(hidden, columns))
    _mean_kernel[grid](  # pyright: ignore[reportIndexIssue]
        states_TD,
        cu_seqlens,
        out_SD,
        hidden,
        TOKENS=32,
        COLUMNS=columns,
        NORMALIZE=normalize and whole,
        num_warps=4,
    )
    return F.normalize(out_SD, dim=-1) if normalize and not whole else out_SD
