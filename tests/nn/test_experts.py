"""Mixtures of experts and the grouped layers that they are made of, beside sums written out in float64."""

import copy
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from toolkit.nn.experts import ExpertMlp
from toolkit.nn.gemv import serve_few_rows
from toolkit.nn.grouped import GroupedLinear, group_rows, grouped_linear
from toolkit.nn.linear import pack_linears
from toolkit.nn.mlp import build_mlp
from toolkit.nn.model import part_groups, part_shapes
from toolkit.spec import Activation, ExpertsSpec, Gate, MlpSpec

HIDDEN, WIDTH = 12, 7


def make(
    count: int = 5,
    chosen: int = 2,
    normalise: bool = True,
    gate: Gate = "first",
    activation: Activation = "silu",
    dtype: torch.dtype = torch.float32,
) -> ExpertMlp:
    experts = ExpertsSpec(count=count, chosen=chosen, normalise=normalise)
    spec = MlpSpec(width=WIDTH, activation=activation, bias=False, out_bias=False, gate=gate, experts=experts)
    module = build_mlp(HIDDEN, spec)
    assert isinstance(module, ExpertMlp)
    draw = torch.Generator().manual_seed(count)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=draw) * 0.5)
    return module.to(dtype).requires_grad_(False)


def written_out(module: ExpertMlp, x_TD: Tensor) -> Tensor:
    """Token by token, expert by expert, in float64."""
    x_TD, router = x_TD.double(), module.router.weight.double()
    count = router.shape[0]
    ups = module.experts_up.weight.double().chunk(count)
    downs = module.experts_down.weight.double().chunk(count)
    act = {"silu": F.silu, "gelu": F.gelu}[module.activation]
    rows: list[Tensor] = []
    for x in x_TD:
        chances = torch.softmax(router @ x, dim=0)
        best = sorted(range(count), key=lambda e: -float(chances[e]))[: module.chosen]
        weights = [chances[e] / (sum(chances[b] for b in best) if module.normalise else 1) for e in best]
        total = torch.zeros_like(x)
        for expert, weight in zip(best, weights, strict=True):
            inner = ups[expert] @ x
            match module.gate:
                case "first":
                    inner = act(inner[:WIDTH]) * inner[WIDTH:]
                case "second":
                    inner = inner[:WIDTH] * act(inner[WIDTH:])
                case "none":
                    inner = act(inner)
            total = total + weight * (downs[expert] @ inner)
        rows.append(total)
    return torch.stack(rows) if rows else torch.empty(0, HIDDEN, dtype=torch.float64)


def some(tokens: int, seed: int = 0) -> Tensor:
    return torch.randn(tokens, HIDDEN, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("normalise", [True, False])
@pytest.mark.parametrize("chosen", [1, 2, 5])
@pytest.mark.parametrize("tokens", [0, 1, 23])
def test_equals_the_sum_written_out(tokens: int, chosen: int, normalise: bool) -> None:
    module, x_TD = make(chosen=chosen, normalise=normalise), some(tokens)
    assert module(x_TD).shape == x_TD.shape
    assert torch.allclose(module(x_TD).double(), written_out(module, x_TD), atol=1e-5)


@pytest.mark.parametrize("activation", ["silu", "gelu"])
@pytest.mark.parametrize("gate", ["none", "first", "second"])
def test_experts_are_blocks_of_every_kind(gate: Gate, activation: Activation) -> None:
    module, x_TD = make(gate=gate, activation=activation), some(9)
    assert torch.allclose(module(x_TD).double(), written_out(module, x_TD), atol=1e-5)


@pytest.mark.parametrize("count", [1, 40])
def test_one_expert_and_many_that_nobody_chooses(count: int) -> None:
    module, x_TD = make(count, chosen=1), some(3)
    assert torch.allclose(module(x_TD).double(), written_out(module, x_TD), atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_sum_is_rounded_once(dtype: torch.dtype) -> None:
    """Weights are float32 in 16 bits too; products of theirs are not rounded before they are added."""
    module, x_TD = make(count=8, chosen=8, dtype=dtype), some(50).to(dtype)
    weight_TC, choice_TC = module.route(x_TD)
    assert weight_TC.dtype == torch.float32
    order_R, starts = group_rows(choice_TC, 8)
    inner = module.experts_up(x_TD, order_R, starts)
    inner = F.silu(inner[:, :WIDTH]) * inner[:, WIDTH:]
    out_TCD = module.experts_down(inner, order_R, starts).view(50, 8, HIDDEN)
    exact = (out_TCD.double() * weight_TC.double()[:, :, None]).sum(1)
    assert module(x_TD).dtype == dtype
    spacing = torch.finfo(dtype).eps * exact.abs().clamp(min=torch.finfo(dtype).tiny)
    assert ((module(x_TD).double() - exact).abs() <= 0.51 * spacing + 1e-6).all()


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_token_that_is_no_number_reaches_no_other(bad: float) -> None:
    """K3: the rows behind the last sequence hold anything."""
    module, x_TD = make(), some(9)
    good = [0, 1, 3, 4, 5, 6]
    spoilt = x_TD.clone()
    spoilt[[2, 7, 8]] = bad
    assert torch.allclose(module(spoilt)[good], module(x_TD)[good], atol=1e-5)
    choice_TC = module.route(spoilt)[1]
    assert choice_TC.min() >= 0
    assert choice_TC.max() < 5


@pytest.mark.parametrize(
    ("choice", "count"),
    [
        ([[3, 1], [1, 0], [3, 1]], 5),
        ([[4], [4], [4]], 5),
        ([[0, 1, 2]], 3),
        ([[]], 4),
    ],
)
def test_rows_are_sorted_by_their_choice(choice: list[list[int]], count: int) -> None:
    order_R, starts = group_rows(torch.tensor(choice, dtype=torch.int64), count)
    flat = [k for row in choice for k in row]
    assert order_R.tolist() == sorted(range(len(flat)), key=lambda r: flat[r])
    assert starts.tolist() == [sum(k < e for k in flat) for e in range(count + 1)]
    assert order_R.dtype == starts.dtype == torch.int32


def test_every_row_goes_through_its_own_layer() -> None:
    """Given as rows, or as the tokens that several rows share."""
    torch.manual_seed(0)
    weight_EOI, choice_TC = torch.randn(4, 6, 3), torch.tensor([[2, 0], [0, 3], [3, 2]])
    grouping = group_rows(choice_TC, 4)
    rows = torch.randn(6, 3)
    expected = torch.stack([weight_EOI[e] @ row for e, row in zip(choice_TC.flatten(), rows, strict=True)])
    assert torch.allclose(grouped_linear(rows, *grouping, weight_EOI), expected, atol=1e-6)
    tokens = torch.randn(3, 3)
    expected = torch.stack([weight_EOI[e] @ tokens[t] for t in range(3) for e in choice_TC[t]])
    assert torch.allclose(grouped_linear(tokens, *grouping, weight_EOI), expected, atol=1e-6)


def test_weights_stand_one_below_the_other() -> None:
    layer = GroupedLinear(3, 4, (2, 1))
    assert layer.weight.shape == (9, 4)
    assert part_shapes(layer)["weight"] == ((2, 4), (1, 4)) * 3
    assert part_groups(nn.ModuleDict({"a": layer})) == {"a.weight": 3}
    x, grouping = torch.eye(4)[:3], group_rows(torch.tensor([[0], [1], [2]]), 3)
    out = layer(x, *grouping)
    for row, (start, end) in enumerate(pairwise(range(0, 10, 3))):
        assert torch.equal(out[row], layer.weight[start:end, row])


def test_replacing_linear_layers_leaves_experts_as_they_are() -> None:
    module, x_TD = make(), some(6)
    for replace in (pack_linears, serve_few_rows):
        other = copy.deepcopy(module)
        replace(other)
        assert type(other.router) is not nn.Linear
        assert isinstance(other.experts_up, GroupedLinear)
        if replace is pack_linears:
            assert torch.allclose(other(x_TD), module(x_TD), atol=1e-6)
