"""From token states to one vector a sequence, in float32 whatever the states' dtype.

Shape suffixes: T tokens (rows beyond the last sequence's end are garbage), S sequences, D hidden size.
Empty sequences give zero vectors.
"""

from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from toolkit.toolchain import why_no_compiler

__all__ = ["POOLINGS", "Pooler"]


def mean(states_TD: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Mean over each sequence's tokens. Rows are selected by offset, never multiplied by a mask."""
    offsets = cu_seqlens.long()
    sum_SD = torch.segment_reduce(states_TD.float(), "sum", offsets=offsets, axis=0, unsafe=True, initial=0)
    return sum_SD / offsets.diff().clamp(min=1)[:, None]


def cls(states_TD: Tensor, cu_seqlens: Tensor) -> Tensor:
    """State of each sequence's first token."""
    offsets = cu_seqlens.long()
    if states_TD.shape[0] == 0:
        return states_TD.new_zeros(offsets.shape[0] - 1, states_TD.shape[1], dtype=torch.float32)
    first_SD = states_TD[offsets[:-1].clamp(max=states_TD.shape[0] - 1)].float()
    return torch.where((offsets.diff() > 0)[:, None], first_SD, 0.0)


POOLINGS: Mapping[str, Callable[[Tensor, Tensor], Tensor]] = {"mean": mean, "cls": cls}


class Pooler(nn.Module):
    """A pooling by name, then L2 normalisation if asked; a zero vector stays zero.

    On CUDA the mean runs as one Triton kernel, if Triton can run.
    """

    def __init__(self, pooling: str, normalize: bool, device: torch.device) -> None:
        super().__init__()
        self.pool, self.normalize = POOLINGS[pooling], normalize
        self.pool_fused: Callable[[Tensor, Tensor, bool], Tensor] | None = None
        if pooling == "mean" and device.type == "cuda" and why_no_compiler(device) is None:
            from toolkit.nn.pooling_triton import pool_mean

            self.pool_fused = pool_mean

    def forward(self, states_TD: Tensor, cu_seqlens: Tensor) -> Tensor:
        """[T, D] → float32 [S, D]."""
        if self.pool_fused is not None:
            return self.pool_fused(states_TD, cu_seqlens, self.normalize)
        vectors_SD = self.pool(states_TD, cu_seqlens)
        return F.normalize(vectors_SD, dim=-1) if self.normalize else vectors_SD
