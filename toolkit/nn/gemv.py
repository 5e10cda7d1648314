"""Linear layers on CUDA for a handful of rows: reading the weights is all of the work.

Libraries' matrix products are made for many rows: where a layer has few outputs, they leave most of a GPU idle here.
Each program of our own kernel takes a few rows of the weight, as long as they are, and multiplies them with the whole
input.

Shape suffixes: T tokens, I input features, O output features.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from toolkit.toolchain import why_no_compiler

__all__ = ["MOST_ROWS", "FewRowsLinear", "can_serve_few_rows", "few_rows_linear", "serve_few_rows"]

MOST_ROWS = 4
# For two rows in bfloat16 an earlier form of the kernel took, on an H200, 4.3 µs instead of 8.1 for 2048 → 1024 and 6.2
# instead of 7.9 for 3072 → 1024; but 5.9 instead of 5.6 for 1024 → 4096.
_MOST_OUTPUTS = 2048


@torch.library.custom_op("toolkit::few_rows_linear", mutates_args=())
def few_rows_linear(x_TI: Tensor, weight_OI: Tensor, bias_O: Tensor | None) -> Tensor:
    """`F.linear`, with a kernel of its own for up to four rows. A captured graph bakes the choice in with its size."""
    if not 0 < x_TI.shape[0] <= MOST_ROWS:
        return F.linear(x_TI, weight_OI, bias_O)
    from toolkit.nn.gemv_kernel import multiply

    return multiply(x_TI, weight_OI, bias_O)


@few_rows_linear.register_fake
def _(x_TI: Tensor, weight_OI: Tensor, bias_O: Tensor | None) -> Tensor:
    return x_TI.new_empty(x_TI.shape[0], weight_OI.shape[0])


class FewRowsLinear(nn.Module):
    """A linear layer that is fast for few rows too; it shares the weight of the layer that it is made from."""

    def __init__(self, source: nn.Linear) -> None:
        super().__init__()
        self.weight, self.bias = source.weight, source.bias

    def forward(self, x_TI: Tensor) -> Tensor:
        """[T, I] → [T, O]."""
        return few_rows_linear(x_TI, self.weight, self.bias)


def can_serve_few_rows(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether `serve_few_rows` applies: 16-bit weights on a CUDA device for which Triton can compile."""
    half = dtype in (torch.bfloat16, torch.float16)
    return device.type == "cuda" and half and why_no_compiler(device) is None


def serve_few_rows(module: nn.Module) -> None:
    """Replace the linear layers below `module` for which that pays, in place; for inference only."""
    for name, child in list(module.named_children()):
        if isinstance(child, nn.Linear):
            if type(child).forward is nn.Linear.forward and child.out_features <= _MOST_OUTPUTS:
                setattr(module, name, FewRowsLinear(child))
        else:
            serve_few_rows(child)
