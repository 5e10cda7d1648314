"""Tensors that are stored in another layout than the module's: transposed, head by head, stacked, or one by one."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from toolkit.checkpoint import TensorSet
from toolkit.errors import CheckpointError
from toolkit.nn.attention import Attention
from toolkit.nn.model import part_groups
from toolkit.spec import self_attention
from toolkit.tensorfile import TensorInfo
from toolkit.weights import Layout, LoadedWeights, PartShapes, Rows, Rule, fuse, load_weights, rename


def load(
    layout: Layout | Rule, shapes: dict[str, PartShapes], tensors: dict[str, Tensor], groups: int | None = None
) -> LoadedWeights:
    """Bring `x.weight` and `x.bias` to `y.weight` and `y.bias`, or apply a rule."""
    info = {
        name: TensorInfo(name=name, dtype=tensor.dtype, shape=tuple(tensor.shape), file=Path("model.safetensors"))
        for name, tensor in tensors.items()
    }
    return load_weights(
        TensorSet(info=info, read=tensors.__getitem__),
        rules=(layout if isinstance(layout, Rule) else rename("y.{p}", "x.{p}", layout=layout),),
        prefixes=(),
        aliases={},
        expected=shapes,
        dtype=torch.float32,
        groups=dict.fromkeys(shapes, groups) if groups is not None else {},
    )


def test_a_transposed_weight_and_its_bias() -> None:
    weight, bias = torch.arange(6.0).view(2, 3), torch.arange(3.0)
    loaded = load("transposed", {"y.weight": ((3, 2),), "y.bias": ((3,),)}, {"x.weight": weight, "x.bias": bias})
    assert loaded.state["y.weight"].tolist() == [[0, 3], [1, 4], [2, 5]]
    assert loaded.state["y.weight"].is_contiguous()
    assert torch.equal(loaded.state["y.bias"], bias)
    assert [(e.source, e.shape, e.action, e.target, e.why) for e in loaded.audit] == [
        ("x.bias", (3,), "loaded", "y.bias", "stored transposed"),
        ("x.weight", (2, 3), "loaded", "y.weight", "stored transposed"),
    ]


def test_a_transposed_weight_of_fused_parts() -> None:
    """Queries, keys and values side by side become one below the other."""
    weight = torch.arange(8.0).view(2, 4)
    loaded = load("transposed", {"y.weight": ((2, 2), (1, 2), (1, 2))}, {"x.weight": weight})
    assert torch.equal(loaded.state["y.weight"], weight.t())


@pytest.mark.parametrize("shape", [(3, 2), (2, 4), (6,), (2, 3, 1)])
def test_a_misshapen_transposed_weight_is_named(shape: tuple[int, ...]) -> None:
    """Also one that is not transposed: its shape would be right without the rule."""
    with pytest.raises(CheckpointError) as caught:
        load("transposed", {"y.weight": ((3, 2),)}, {"x.weight": torch.zeros(shape)})
    assert str(caught.value) == f"tensor 'x.weight' has shape {shape}, config.json asks for (2, 3)"


def test_rows_that_stand_head_by_head() -> None:
    """Two heads of one key and value head each, of two values: q0 k0 v0 q1 k1 v1."""
    rows = torch.tensor([0, 1, 20, 21, 40, 41, 2, 3, 22, 23, 42, 43.0])
    wanted = [0, 1, 2, 3, 20, 21, 22, 23, 40, 41, 42, 43]
    tensors = {"x.weight": rows[:, None].repeat(1, 3), "x.bias": rows}
    loaded = load("by_head", {"y.weight": ((4, 3),) * 3, "y.bias": ((4,),) * 3}, tensors, groups=2)
    assert loaded.state["y.bias"].tolist() == wanted
    assert loaded.state["y.weight"].tolist() == [[row] * 3 for row in wanted]
    assert {(e.action, e.why) for e in loaded.audit} == {("loaded", "stored head by head")}


def test_rows_of_several_queries_for_each_key() -> None:
    """Two groups of two query heads, one value each: q0 q1 k0 v0 q2 q3 k1 v1."""
    loaded = load(
        "by_head", {"y.bias": ((4,), (2,), (2,))}, {"x.bias": torch.tensor([0, 1, 20, 40, 2, 3, 21, 41.0])}, groups=2
    )
    assert loaded.state["y.bias"].tolist() == [0, 1, 2, 3, 20, 21, 40, 41]


@pytest.mark.parametrize("shape", [(11, 3), (4, 3), (12,), (12, 4), (3, 12)])
def test_misshapen_rows_head_by_head_are_named(shape: tuple[int, ...]) -> None:
    with pytest.raises(CheckpointError) as caught:
        load("by_head", {"y.weight": ((4, 3),) * 3}, {"x.weight": torch.zeros(shape)}, groups=2)
    assert str(caught.value) == f"tensor 'x.weight' has shape {shape}, config.json asks for (12, 3)"


def test_a_parameter_without_heads_is_the_recipes_fault() -> None:
    with pytest.raises(AssertionError, match=r"y\.weight has no heads to be stored by"):
        load("by_head", {"y.weight": ((4, 3),)}, {"x.weight": torch.zeros(4, 3)})


def test_the_groups_are_heads_of_keys_and_values() -> None:
    module = torch.nn.ModuleDict({"a": Attention(40, self_attention(5, 8, bias=True), None, None)})  # type: ignore[arg-type]
    assert part_groups(module) == {"a.qkv.weight": 5, "a.qkv.bias": 5}


def test_groups_of_rows_with_a_dimension_of_their_own() -> None:
    weight = torch.arange(24.0).view(2, 4, 3)
    loaded = load("stacked", {"y.weight": ((3, 3), (1, 3)) * 2}, {"x.weight": weight}, groups=2)
    assert torch.equal(loaded.state["y.weight"], torch.cat((weight[0], weight[1])))
    assert [(e.action, e.why) for e in loaded.audit] == [("loaded", "stored with a dimension for the groups of rows")]


@pytest.mark.parametrize("shape", [(8, 3), (4, 2, 3), (2, 3, 4), (3, 4, 3), (2, 4)])
def test_misshapen_groups_are_named(shape: tuple[int, ...]) -> None:
    with pytest.raises(CheckpointError) as caught:
        load("stacked", {"y.weight": ((3, 3), (1, 3)) * 2}, {"x.weight": torch.zeros(shape)}, groups=2)
    assert str(caught.value) == f"tensor 'x.weight' has shape {shape}, config.json asks for (2, 4, 3)"


def test_a_parameter_without_groups_is_the_recipes_fault() -> None:
    with pytest.raises(AssertionError, match=r"y\.weight has no groups to be stacked by"):
        load("stacked", {"y.weight": ((4, 3),)}, {"x.weight": torch.zeros(1, 4, 3)})


ONE_BY_ONE = fuse("y.weight", "x.{e}.a", "x.{e}.b")
PARTS: PartShapes = ((2, 3), (1, 3)) * 11


def one_by_one(count: int) -> dict[str, Tensor]:
    """Named tensors of different values; 10 comes before 2 in the order of the names."""
    sizes = {"a": 2, "b": 1}
    return {f"x.{e}.{name}": torch.full((n, 3), e + 0.5 * (n == 1)) for e in range(count) for name, n in sizes.items()}


def test_numbered_tensors_follow_their_numbers() -> None:
    loaded = load(ONE_BY_ONE, {"y.weight": PARTS}, one_by_one(11))
    assert loaded.state["y.weight"][:, 0].tolist() == [value for e in range(11) for value in (e, e, e + 0.5)]
    assert {(e.action, e.target) for e in loaded.audit} == {("fused", "y.weight")}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"x.7.b": None}, "missing tensor: 'x.7.b';"),
        ({"x.10.a": None, "x.10.b": None}, "missing tensor: 'x.10.a', 'x.10.b';"),
        ({"x.11.a": torch.zeros(2, 3)}, "unexpected tensor: 'x.11.a'; config.json describes 'y.weight' in 22 parts"),
        ({"x.07.b": torch.zeros(1, 3)}, "unexpected tensor: 'x.07.b' (1 in all)"),
        ({"x.3.b": torch.zeros(2, 3)}, "tensor 'x.3.b' has shape (2, 3), config.json asks for (1, 3)"),
    ],
)
def test_numbered_tensors_that_do_not_fit_are_named(changes: dict[str, Tensor | None], message: str) -> None:
    tensors = {name: tensor for name, tensor in {**one_by_one(11), **changes}.items() if tensor is not None}
    with pytest.raises(CheckpointError) as caught:
        load(ONE_BY_ONE, {"y.weight": PARTS}, tensors)
    assert str(caught.value).startswith(message)


SOME = replace(rename("y.weight", "x.weight"), rows=Rows(chosen=(3, 0), count=4))


def test_some_rows_in_this_order() -> None:
    loaded = load(SOME, {"y.weight": ((2, 3),)}, {"x.weight": torch.arange(12.0).view(4, 3)})
    assert loaded.state["y.weight"].tolist() == [[9, 10, 11], [0, 1, 2]]
    assert [(e.source, e.shape, e.action) for e in loaded.audit] == [("x.weight", (4, 3), "loaded")]


@pytest.mark.parametrize("shape", [(2, 3), (5, 3), (4, 2), (4,)])
def test_some_rows_of_a_misshapen_tensor(shape: tuple[int, ...]) -> None:
    with pytest.raises(CheckpointError) as caught:
        load(SOME, {"y.weight": ((2, 3),)}, {"x.weight": torch.zeros(shape)})
    assert str(caught.value) == f"tensor 'x.weight' has shape {shape}, config.json asks for (4, 3)"
