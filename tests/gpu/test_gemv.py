"""Linear layers for few rows against torch's own, in float64."""

import pytest
import torch
import torch.nn.functional as F

from toolkit.nn.gemv import FewRowsLinear, can_serve_few_rows, few_rows_linear, serve_few_rows


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("inputs", "outputs"), [(1024, 2048), (40, 24), (3072, 1024), (1100, 7)])
@pytest.mark.parametrize("rows", [0, 1, 2, 3, 4, 5])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_equals_a_linear_layer(dtype: torch.dtype, rows: int, inputs: int, outputs: int, bias: bool) -> None:
    torch.manual_seed(0)
    wide = torch.randn(rows, inputs + 8, device="cuda").to(dtype)
    x, weight = wide[:, :inputs], torch.randn(outputs, inputs, device="cuda").to(dtype) * inputs**-0.5
    b = torch.randn(outputs, device="cuda").to(dtype) if bias else None
    ours = few_rows_linear(x, weight, b)
    exact = F.linear(x.double(), weight.double(), b.double() if b is not None else None)
    assert ours.shape == exact.shape
    assert ours.dtype == dtype
    assert torch.allclose(ours.double(), exact, rtol=torch.finfo(dtype).eps, atol=1e-4)


def test_only_layers_with_few_outputs_are_replaced() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(8, 4), torch.nn.Linear(4, 4096)).cuda().bfloat16()
    assert can_serve_few_rows(torch.device("cuda"), torch.bfloat16)
    assert not can_serve_few_rows(torch.device("cuda"), torch.float32)
    weight = model[0].weight
    serve_few_rows(model)
    assert isinstance(model[0], FewRowsLinear)
    assert model[0].weight is weight
    assert isinstance(model[1], torch.nn.Linear)
