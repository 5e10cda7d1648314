"""Grouped linear layers on the GPU against a loop in float64, and through graphs whose routing changes."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tests.nn.test_experts import HIDDEN, make, some, written_out
from toolkit.compile import Sizes
from toolkit.nn.grouped import group_rows, grouped_linear

TOLERANCE = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
# tokens, choices, layers, inputs, outputs: odd sizes, few rows a layer and many, more rows than one launch ranks
SHAPES = [
    (1, 1, 1, 16, 16),
    (1, 8, 128, 64, 48),
    (3, 2, 5, 33, 29),
    (70, 3, 3, 40, 130),
    (300, 2, 2, 72, 136),
    (900, 2, 3, 128, 256),
    (1200, 8, 16, 96, 65),
]
ROUTINGS = ["random", "one", "last", "few"]


def route(kind: str, tokens: int, choices: int, count: int, seed: int = 0) -> Tensor:
    """Choices int64 [tokens, choices]: at random, all of one layer, all of the last, or of two layers far apart."""
    draw = torch.Generator().manual_seed(seed)
    chosen = torch.randint(count, (tokens, choices), generator=draw)
    match kind:
        case "one":
            chosen[:] = count // 2
        case "last":
            chosen[:] = count - 1
        case "few":
            chosen = (chosen % 2) * (count - 1)
    return chosen.cuda()


def exact(x: Tensor, choice_TC: Tensor, weight_EOI: Tensor) -> Tensor:
    """Layer by layer, in float64."""
    rows = choice_TC.numel()
    x = (x if x.shape[0] == rows else x.repeat_interleave(choice_TC.shape[1], 0)).double()
    out = x.new_empty(rows, weight_EOI.shape[1])
    for layer, weight_OI in enumerate(weight_EOI.double()):
        own = choice_TC.flatten() == layer
        out[own] = x[own] @ weight_OI.T
    return out


@pytest.mark.parametrize("kind", ROUTINGS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_rows_are_sorted_as_on_the_cpu(shape: tuple[int, int, int, int, int], kind: str) -> None:
    choice_TC = route(kind, *shape[:3])
    ours, expected = group_rows(choice_TC, shape[2]), group_rows(choice_TC.cpu(), shape[2])
    for a, b in zip(ours, expected, strict=True):
        assert a.dtype == b.dtype
        assert torch.equal(a.cpu(), b)


@pytest.mark.parametrize("kind", ROUTINGS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_equals_a_loop(dtype: torch.dtype, shape: tuple[int, int, int, int, int], kind: str) -> None:
    """Rows, and tokens that several rows share; layers without rows; a view with a longer stride."""
    tokens, choices, count, inputs, outputs = shape
    torch.manual_seed(0)
    weight_EOI = (torch.randn(count, outputs, inputs, device="cuda") * inputs**-0.5).to(dtype)
    choice_TC = route(kind, tokens, choices, count)
    grouping = group_rows(choice_TC, count)
    for rows in (tokens, tokens * choices):
        x = torch.randn(rows, inputs + 8, device="cuda").to(dtype)[:, :inputs]
        ours = grouped_linear(x, *grouping, weight_EOI)
        assert ours.dtype == dtype
        assert torch.allclose(
            ours.double(), exact(x, choice_TC, weight_EOI), rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype]
        )


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_rows_that_are_no_numbers_reach_no_other(dtype: torch.dtype) -> None:
    """K3: bit by bit what it is without them, in a block that they share."""
    torch.manual_seed(0)
    x, weight_EOI = torch.randn(200, 40, device="cuda").to(dtype), torch.randn(3, 24, 40, device="cuda").to(dtype)
    grouping = group_rows(route("random", 200, 2, 3), 3)
    expected = grouped_linear(x, *grouping, weight_EOI).view(200, 2, 24)
    bad = torch.arange(200, device="cuda") % 3 == 1
    ours = grouped_linear(torch.where(bad[:, None], float("nan"), x), *grouping, weight_EOI).view(200, 2, 24)
    assert torch.equal(ours[~bad], expected[~bad])
    assert torch.isnan(ours[bad]).all()


def test_no_rows() -> None:
    x, weight_EOI = torch.empty(0, 8, device="cuda"), torch.randn(3, 4, 8, device="cuda")
    order_R, starts = group_rows(torch.empty(0, 2, dtype=torch.int64, device="cuda"), 3)
    assert starts.tolist() == [0] * 4
    assert grouped_linear(x, order_R, starts, weight_EOI).shape == (0, 4)


def capture(run: Callable[[], Tensor]) -> tuple[torch.cuda.CUDAGraph, Tensor]:
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        run()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run()
    return graph, out


@pytest.mark.parametrize("tokens", [1, 4, 300, 2500], ids=str)
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_one_graph_serves_every_routing(dtype: torch.dtype, tokens: int) -> None:
    """K3: captured with all rows at one layer; 2500 tokens are more rows than one launch ranks."""
    torch.manual_seed(0)
    x = torch.randn(tokens, 40, device="cuda").to(dtype)
    weight_EOI = (torch.randn(5, 24, 40, device="cuda") * 40**-0.5).to(dtype)
    choice_TC = route("one", tokens, 2, 5)
    graph, out = capture(lambda: grouped_linear(x, *group_rows(choice_TC, 5), weight_EOI))
    for seed, kind in enumerate([*ROUTINGS, "random", "one", "random"]):
        choice_TC.copy_(route(kind, tokens, 2, 5, seed))
        x.copy_(torch.randn(tokens, 40, device="cuda"))
        graph.replay()
        assert torch.allclose(
            out.double(), exact(x, choice_TC, weight_EOI), rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype]
        )


@pytest.mark.parametrize("sizes", [Sizes.ANY, Sizes.MANY], ids=str)
@pytest.mark.parametrize("tokens", [2, 33, 300])
def test_a_compiled_mixture_in_a_graph(tokens: int, sizes: Sizes) -> None:
    """The router's choices change between replays, and rows at the end are no numbers."""
    torch._dynamo.reset()
    plain, module = make(count=7, chosen=3), make(count=7, chosen=3).cuda()
    compiled = torch.compile(module, fullgraph=True)
    x_TD = some(tokens).cuda()
    mark = torch._dynamo.decorators.mark_unbacked if sizes is Sizes.ANY else torch._dynamo.mark_dynamic
    mark(x_TD, 0)
    with torch.inference_mode():
        graph, out = capture(lambda: compiled(x_TD))
        for seed in range(5):
            fresh = some(tokens, seed) * (1 + seed)
            real = tokens - seed % 2
            fresh[real:] = float("nan")
            x_TD.copy_(fresh)
            graph.replay()
            assert out.shape == (tokens, HIDDEN)
            expected = written_out(plain, fresh[:real])
            assert torch.allclose(out[:real].double().cpu(), expected, rtol=1e-4, atol=1e-4)
