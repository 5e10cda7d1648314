import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.tiny import make_checkpoint
from toolkit.attention import choose_backend
from toolkit.checkpoint import TensorSet
from toolkit.conversion import convert
from toolkit.errors import CheckpointError
from toolkit.nn.model import build_encoder, part_shapes
from toolkit.recipe import Recipe
from toolkit.registry import find_recipe
from toolkit.tensorfile import TensorInfo
from toolkit.weights import LoadedWeights, Rule, drop, fuse, load_weights, rename

Tensors = dict[str, torch.Tensor]
QUERY, KEY, VALUE = (f"encoder.layer.1.attention.self.{part}" for part in ("query", "key", "value"))
WORD = "embeddings.word_embeddings.weight"


@pytest.fixture(scope="module")
def recipe() -> Recipe:
    return find_recipe("bert").recipe


@pytest.fixture(scope="module")
def stored(bert_checkpoint: Path) -> Tensors:
    return load_file(bert_checkpoint / "model.safetensors")


@pytest.fixture
def tensors(stored: Tensors) -> Tensors:
    return {name: tensor.clone() for name, tensor in stored.items()}


def tensor_set(tensors: Tensors) -> TensorSet:
    info = {
        name: TensorInfo(name=name, dtype=tensor.dtype, shape=tuple(tensor.shape), file=Path("model.safetensors"))
        for name, tensor in tensors.items()
    }
    return TensorSet(info=info, read=tensors.__getitem__)


def load(tensors: Tensors, recipe: Recipe, dtype: torch.dtype = torch.float32, **config: Any) -> LoadedWeights:
    spec, _ = recipe.read_config({**recipe.tiny, **config})
    return load_weights(
        tensor_set(tensors),
        rules=recipe.rules,
        prefixes=recipe.prefixes,
        aliases=recipe.aliases,
        expected=part_shapes(build_encoder(spec, choose_backend(spec.attentions, torch.device("cpu"), dtype)[1])),
        dtype=dtype,
    )


def prefixed(prefix: str) -> Callable[[Tensors], Tensors]:
    return lambda tensors: {prefix + name: tensor for name, tensor in tensors.items()}


def legacy(tensors: Tensors) -> Tensors:
    def old(name: str) -> str:
        return name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta")

    return {old(name): tensor for name, tensor in tensors.items()}


def without_pooler(tensors: Tensors) -> Tensors:
    return {name: tensor for name, tensor in tensors.items() if not name.startswith("pooler.")}


def with_buffers(tensors: Tensors) -> Tensors:
    return {
        **tensors,
        "embeddings.position_ids": torch.arange(24)[None],
        "embeddings.token_type_ids": torch.zeros(1, 24, dtype=torch.long),
    }


def with_heads(tensors: Tensors) -> Tensors:
    heads = {"predictions.bias": torch.ones(61), "predictions.transform.LayerNorm.gamma": torch.ones(40)}
    return {**prefixed("bert.")(tensors), **prefixed("cls.")(heads)}


def chain(*steps: Callable[[Tensors], Tensors]) -> Callable[[Tensors], Tensors]:
    def run(tensors: Tensors) -> Tensors:
        for step in steps:
            tensors = step(tensors)
        return tensors

    return run


VARIANTS: Mapping[str, Callable[[Tensors], Tensors]] = {
    "plain": lambda tensors: tensors,
    "bert.": prefixed("bert."),
    "gamma/beta": legacy,
    "bert. and gamma/beta": chain(legacy, prefixed("bert.")),
    "module.": prefixed("module."),
    "_orig_mod.": prefixed("_orig_mod."),
    "module.bert. and gamma/beta": chain(legacy, prefixed("module.bert.")),
    "_orig_mod. around heads": chain(with_heads, prefixed("_orig_mod.")),
    "heads": with_heads,
    "no pooler": without_pooler,
    "bert. without pooler": chain(without_pooler, prefixed("bert.")),
    "buffers": with_buffers,
    "bert. with buffers": chain(with_buffers, prefixed("bert.")),
    "other order": lambda tensors: dict(reversed(tensors.items())),
}


@pytest.mark.parametrize("vary", VARIANTS.values(), ids=VARIANTS.keys())
def test_every_spelling_gives_one_identical_module(
    vary: Callable[[Tensors], Tensors], tensors: Tensors, recipe: Recipe
) -> None:
    """H1, H2 (a, b), H3: prefixes, wrappers, old names, absent pooler and stale buffers change no bit."""
    expected = load(tensors, recipe).state
    source = vary(tensors)
    found = load(source, recipe)
    assert found.state.keys() == expected.keys()
    assert all(torch.equal(found.state[name], expected[name]) for name in expected)
    assert sorted(entry.source for entry in found.audit) == sorted(source)


def test_state_is_the_source_tensors_in_order_query_key_value(tensors: Tensors, recipe: Recipe) -> None:
    """Written out by hand: a wrong fuse order or a swapped rename gives the same shapes."""
    expected = {
        "embeddings.token.weight": tensors[WORD],
        "embeddings.position.weight": tensors["embeddings.position_embeddings.weight"],
        "embeddings.segment.weight": tensors["embeddings.token_type_embeddings.weight"],
    }
    for p in ("weight", "bias"):
        expected[f"embeddings.norm.{p}"] = tensors[f"embeddings.LayerNorm.{p}"]
        for i in range(3):
            old, new = f"encoder.layer.{i}.", f"blocks.{i}."
            expected |= {
                f"{new}attention.qkv.{p}": torch.cat(
                    [tensors[f"{old}attention.self.{part}.{p}"] for part in ("query", "key", "value")]
                ),
                f"{new}attention.out.{p}": tensors[f"{old}attention.output.dense.{p}"],
                f"{new}attention_norm.{p}": tensors[f"{old}attention.output.LayerNorm.{p}"],
                f"{new}mlp.up.{p}": tensors[f"{old}intermediate.dense.{p}"],
                f"{new}mlp.down.{p}": tensors[f"{old}output.dense.{p}"],
                f"{new}mlp_norm.{p}": tensors[f"{old}output.LayerNorm.{p}"],
            }
    state = load(tensors, recipe).state
    assert state.keys() == expected.keys()
    assert all(torch.equal(state[name], expected[name]) for name in expected)


def test_layers_ten_and_two_are_not_confused(tmp_path: Path, recipe: Recipe) -> None:
    folder = make_checkpoint(tmp_path, recipe, overrides={"num_hidden_layers": 11}, pooling=None)
    source = load_file(folder / "model.safetensors")
    state = load(source, recipe, num_hidden_layers=11).state
    for i in (1, 2, 10):
        assert torch.equal(state[f"blocks.{i}.mlp.up.weight"], source[f"encoder.layer.{i}.intermediate.dense.weight"])


def test_only_whole_name_parts_are_aliases(recipe: Recipe) -> None:
    """H1: a name that merely contains gamma or beta, or ends on a look-alike, keeps its own meaning."""
    names = ["gamma_net.beta.weight", "x.LayerNorm.gammas", "x.MyLayerNorm.gamma", "x.gamma"]
    tensors = {name: torch.full((2,), float(k)) for k, name in enumerate([*names, "x.LayerNorm.gamma"])}
    result = load_weights(
        tensor_set(tensors),
        rules=(
            *(rename(f"p{k}", name) for k, name in enumerate(names)),
            rename("norm", "x.LayerNorm.weight"),
        ),
        prefixes=(),
        aliases=recipe.aliases,
        expected={**{f"p{k}": ((2,),) for k in range(len(names))}, "norm": ((2,),)},
        dtype=torch.float32,
    )
    assert {name: tensor[0].item() for name, tensor in result.state.items()} == {
        **{f"p{k}": float(k) for k in range(len(names))},
        "norm": 4.0,
    }


@pytest.mark.parametrize("extra", ["encoder.layer.0.gamma", "encoder.layer.0.output.LayerNorm.alpha", "beta"])
def test_gamma_outside_a_norm_is_an_extra_tensor(extra: str, tensors: Tensors, recipe: Recipe) -> None:
    """H1: renaming must not swallow a parameter that this architecture does not have."""
    with pytest.raises(CheckpointError, match=f"unexpected tensor: '{extra}'"):
        load({**tensors, extra: torch.ones(40)}, recipe)


@pytest.mark.parametrize(
    ("old", "new"),
    [("gamma", "weight"), ("beta", "bias")],
)
def test_old_and_new_name_of_one_parameter(old: str, new: str, tensors: Tensors, recipe: Recipe) -> None:
    """H1: which of the two is meant cannot be known."""
    norm = "encoder.layer.1.output.LayerNorm."
    tensors[norm + old] = tensors[norm + new] + 1
    with pytest.raises(CheckpointError, match=f"'{norm}{old}' and '{norm}{new}' are the same parameter"):
        load(tensors, recipe)


@pytest.mark.parametrize(
    "move",
    [
        lambda name: "bert." + name if name.startswith("embeddings.") else name,
        lambda name: name if name.startswith("embeddings.") else "bert." + name,
        lambda name: name if name == WORD else "bert." + name,
        lambda name: "bert." + name if name == WORD else name,
        lambda name: "bert." + name if name.startswith("pooler.") else name,
        lambda name: name if name.startswith("pooler.") else "bert." + name,
        lambda name: "module." + name if name.startswith("encoder.layer.0.") else name,
        lambda name: ("module." if name.startswith("encoder.layer.0.") else "_orig_mod.") + name,
        lambda name: ("roberta." if name == WORD else "bert.") + name,
        lambda name: "model." + name,
        lambda name: "bert.bert." + name,
        lambda name: "BERT." + name,
    ],
)
def test_mixed_or_unknown_prefixes(move: Callable[[str], str], tensors: Tensors, recipe: Recipe) -> None:
    """H1, H2 (a): a name that no one reading explains is an error, never a parameter left at random."""
    moved = {move(name): tensor for name, tensor in tensors.items()}
    with pytest.raises(CheckpointError, match=r"(missing|unexpected) tensor: '"):
        load(moved, recipe)


def test_two_whole_copies(tensors: Tensors, recipe: Recipe) -> None:
    """H1: ordered prefix rules would take the first copy."""
    other = {"bert." + name: tensor + 1 for name, tensor in tensors.items()}
    with pytest.raises(CheckpointError, match="stored twice, under the prefixes"):
        load({**tensors, **other}, recipe)


def test_a_second_copy_in_part(tensors: Tensors, recipe: Recipe) -> None:
    """H1: a leftover under another prefix is named, whichever reading is complete."""
    with pytest.raises(CheckpointError, match=rf"unexpected tensor: 'bert\.{WORD}'"):
        load({**tensors, f"bert.{WORD}": tensors[WORD]}, recipe)
    with pytest.raises(CheckpointError, match=f"unexpected tensor: '{WORD}'"):
        load({**prefixed("bert.")(tensors), WORD: tensors[WORD]}, recipe)


@pytest.mark.parametrize("prefix", ["", "bert.", "module."])
@pytest.mark.parametrize(
    "name",
    [f"{QUERY}.bias", f"{KEY}.bias", f"{VALUE}.bias", f"{VALUE}.weight", WORD, "encoder.layer.2.output.LayerNorm.bias"],
)
def test_missing_tensor_is_named(name: str, prefix: str, tensors: Tensors, recipe: Recipe) -> None:
    """H2 (c): nothing is filled with zeros or left at random."""
    del tensors[name]
    with pytest.raises(CheckpointError, match=f"missing tensor: '{name}';"):
        load(prefixed(prefix)(tensors), recipe)


@pytest.mark.parametrize(
    "name",
    [
        "encoder.layer.0.attention.self.rel.weight",
        "x\ny",
        f"{WORD}_scale",
        "pooler.dense.weight_g",
        "a.pooler.dense.bias",
    ],
)
def test_extra_tensor_is_named(name: str, tensors: Tensors, recipe: Recipe) -> None:
    """I4's way out: an unsupported variant shows in the inventory of its tensors."""
    with pytest.raises(CheckpointError) as caught:
        load({**tensors, name: torch.ones(1)}, recipe)
    assert f"unexpected tensor: {name!r} (1 in all)" in str(caught.value)


def test_more_layers_stored_than_configured(tensors: Tensors, recipe: Recipe) -> None:
    with pytest.raises(CheckpointError, match=r"unexpected tensor: 'encoder\.layer\.2\..*config\.json describes no"):
        load(tensors, recipe, num_hidden_layers=2)


def test_fewer_layers_stored_than_configured(tensors: Tensors, recipe: Recipe) -> None:
    with pytest.raises(
        CheckpointError, match=r"missing tensor: 'encoder\.layer\.3\.attention\.self\.query\.weight'.*and 13 more"
    ):
        load(tensors, recipe, num_hidden_layers=4)


@pytest.mark.parametrize("number", ["00", "٠", "-0", "0 "])
def test_layer_number_in_another_spelling(number: str, tensors: Tensors, recipe: Recipe) -> None:
    odd = f"encoder.layer.{number}.output.dense.bias"
    with pytest.raises(CheckpointError, match=f"unexpected tensor: '{odd}'"):
        load({**tensors, odd: torch.ones(40)}, recipe)


@pytest.mark.parametrize(
    ("name", "shape", "wanted"),
    [
        (WORD, (62, 40), (61, 40)),
        (WORD, (40, 61), (61, 40)),
        ("embeddings.LayerNorm.weight", (1, 40), (40,)),
        ("embeddings.LayerNorm.weight", (), (40,)),
        ("embeddings.LayerNorm.bias", (1,), (40,)),
        ("encoder.layer.0.intermediate.dense.weight", (40, 56), (56, 40)),
        (f"{KEY}.weight", (40, 41), (40, 40)),
        (f"{KEY}.bias", (0,), (40,)),
    ],
)
def test_misshapen_tensor(
    name: str, shape: tuple[int, ...], wanted: tuple[int, ...], tensors: Tensors, recipe: Recipe
) -> None:
    tensors[name] = torch.zeros(shape)
    with pytest.raises(CheckpointError) as caught:
        load(tensors, recipe)
    assert str(caught.value) == f"tensor {name!r} has shape {shape}, config.json asks for {wanted}"


@pytest.mark.parametrize("p", ["weight", "bias"])
def test_parts_whose_total_fits(p: str, tensors: Tensors, recipe: Recipe) -> None:
    """A fused parameter of the right size hides a boundary between query and key in the wrong place."""
    rows = torch.cat([tensors[f"{part}.{p}"] for part in (QUERY, KEY)])
    tensors[f"{QUERY}.{p}"], tensors[f"{KEY}.{p}"] = rows[:48].clone(), rows[48:].clone()
    with pytest.raises(CheckpointError, match=rf"tensor '{QUERY}\.{p}' has shape \(48.*asks for \(40"):
        load(tensors, recipe)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("name", [WORD, f"{VALUE}.weight", "encoder.layer.2.output.LayerNorm.bias"])
def test_value_that_is_no_number(name: str, value: float, tensors: Tensors, recipe: Recipe) -> None:
    tensors[name].view(-1)[-1] = value
    with pytest.raises(CheckpointError, match=f"tensor '{name}' holds NaN or infinite values"):
        load(tensors, recipe)


def test_value_that_is_no_number_in_a_dropped_tensor(tensors: Tensors, recipe: Recipe) -> None:
    tensors["pooler.dense.bias"].fill_(float("nan"))
    load(tensors, recipe)


@pytest.mark.parametrize(
    ("value", "stored_as", "dtype"),
    [
        (65520.0, torch.float32, torch.float16),
        (-1e5, torch.bfloat16, torch.float16),
        (3.4e38, torch.float32, torch.bfloat16),
        (1e300, torch.float64, torch.float32),
    ],
)
@pytest.mark.parametrize("name", [WORD, f"{QUERY}.weight", f"{VALUE}.weight"])
def test_value_beyond_the_range_of_the_dtype(
    name: str, value: float, stored_as: torch.dtype, dtype: torch.dtype, tensors: Tensors, recipe: Recipe
) -> None:
    """M1: a cast must not turn a weight into an infinity; the tensor at fault is named, also in a fused one."""
    tensors[name] = tensors[name].to(stored_as)
    tensors[name].view(-1)[3] = value
    with pytest.raises(CheckpointError, match=f"tensor '{name}' exceeds the range of {dtype}"):
        load(tensors, recipe, dtype)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("stored_as", [torch.float16, torch.bfloat16, torch.float64])
def test_cast(dtype: torch.dtype, stored_as: torch.dtype, tensors: Tensors, recipe: Recipe) -> None:
    source = {name: tensor.to(stored_as) for name, tensor in tensors.items()}
    state = load(source, recipe, dtype).state
    assert torch.equal(state["embeddings.token.weight"], source[WORD].to(dtype))
    assert {tensor.dtype for tensor in state.values()} == {dtype}
    assert all(tensor.is_contiguous() for tensor in state.values())


def test_parts_of_different_dtypes(tensors: Tensors, recipe: Recipe) -> None:
    """No part may pass through the narrower type of its neighbour."""
    tensors[f"{QUERY}.weight"] = tensors[f"{QUERY}.weight"].half()
    tensors[f"{KEY}.weight"] = tensors[f"{KEY}.weight"].bfloat16()
    state = load(tensors, recipe).state
    parts = [tensors[f"{part}.weight"].float() for part in (QUERY, KEY, VALUE)]
    assert torch.equal(state["blocks.1.attention.qkv.weight"], torch.cat(parts))


@pytest.mark.parametrize(
    "dtype", [torch.int8, torch.int64, torch.uint8, torch.bool, torch.float8_e4m3fn, torch.float8_e5m2]
)
@pytest.mark.parametrize("name", [WORD, f"{KEY}.weight"])
def test_weight_that_is_no_plain_floating_point(
    name: str, dtype: torch.dtype, tensors: Tensors, recipe: Recipe
) -> None:
    """Quantised weights mean nothing without their scales."""
    tensors[name] = tensors[name].to(dtype)
    with pytest.raises(CheckpointError, match=f"tensor '{name}' has dtype {dtype}"):
        load(tensors, recipe)


def test_audit_accounts_for_every_source_tensor_once(tensors: Tensors, recipe: Recipe) -> None:
    """H3: what is left out is left out by an explicit rule, and written down."""
    source = chain(legacy, with_buffers, with_heads)(tensors)
    result = load(source, recipe)
    audit = {entry.source: entry for entry in result.audit}
    assert len(result.audit) == len(audit)
    assert audit.keys() == source.keys()
    for name, entry in audit.items():
        assert entry.shape == tuple(source[name].shape)
        assert entry.dtype == str(source[name].dtype).removeprefix("torch.")
        left_out = name.startswith(("cls.", "bert.pooler.")) or name.endswith("_ids")
        if left_out:
            assert (entry.action, entry.target) == ("dropped", None)
            assert len(entry.why) > 10
        else:
            assert entry.action == ("fused" if "attention.self" in name else "loaded")
            assert entry.target in result.state
        if not left_out and name.endswith((".gamma", ".beta")):
            assert "alias LayerNorm." in entry.why
    assert {entry.target for entry in result.audit} - {None} == result.state.keys()


def test_buffers_are_dropped_by_name_only(tensors: Tensors, recipe: Recipe) -> None:
    """H3: an explicit list, so a look-alike is an error."""
    with pytest.raises(CheckpointError, match=r"unexpected tensor: 'encoder\.position_ids'"):
        load({**tensors, "encoder.position_ids": torch.arange(24)[None]}, recipe)


def test_conversion_writes_the_audit(bert_artifact: Path, bert_checkpoint: Path, stored: Tensors) -> None:
    manifest = json.loads((bert_artifact / "toolkit.json").read_text())
    assert sorted(entry["source"] for entry in manifest["audit"]) == sorted(stored)
    assert {entry["action"] for entry in manifest["audit"]} == {"loaded", "fused", "dropped"}
    assert all(entry["why"] for entry in manifest["audit"] if entry["action"] == "dropped")


def test_file_without_metadata(tmp_path: Path, bert_checkpoint: Path, recipe: Recipe) -> None:
    """H3: other writers leave the metadata block out."""
    folder = make_checkpoint(tmp_path / "bert", recipe)
    save_file(load_file(folder / "model.safetensors"), folder / "model.safetensors", metadata=None)
    assert b"__metadata__" not in (folder / "model.safetensors").read_bytes()
    convert(str(bert_checkpoint), tmp_path / "a", verify=False)
    convert(str(folder), tmp_path / "b", verify=False)
    one, other = load_file(tmp_path / "a" / "model.safetensors"), load_file(tmp_path / "b" / "model.safetensors")
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)


# Rules


def apply(rules: tuple[Rule, ...], names: list[str], expected: list[str]) -> LoadedWeights:
    return load_weights(
        tensor_set({name: torch.ones(2) for name in names}),
        rules=rules,
        prefixes=("base.",),
        aliases={},
        expected=dict.fromkeys(expected, ((2,),)),
        dtype=torch.float32,
    )


@pytest.mark.parametrize("second", [drop("a.{p}", why="twice"), rename("b", "a.weight"), drop("{*}", why="all")])
def test_name_that_two_rules_take(second: Rule) -> None:
    with pytest.raises(CheckpointError, match=r"tensor 'a\.weight' matches 2 rules of the recipe"):
        apply((rename("a", "a.weight"), second), ["a.weight"], ["a"])


def test_added_rule_that_overlaps_is_found_at_conversion(tensors: Tensors, recipe: Recipe) -> None:
    greedy = replace(recipe, rules=(*recipe.rules, drop("pooler.{*}", why="again")))
    with pytest.raises(CheckpointError, match=r"tensor 'pooler\.dense\.bias' matches 2 rules"):
        load(tensors, greedy)


def test_dots_in_a_rule_are_dots() -> None:
    with pytest.raises(CheckpointError, match=r"unexpected tensor: 'axweight'"):
        apply((rename("a", "a.weight"),), ["a.weight", "axweight"], ["a"])


def test_outside_rules_take_bare_names_only() -> None:
    rules = (rename("a", "a"), drop("head.{*}", why="a head", outside=True))
    assert [e.action for e in apply(rules, ["base.a", "head.x"], ["a"]).audit] == ["loaded", "dropped"]
    with pytest.raises(CheckpointError, match=r"unexpected tensor: 'base\.head\.x'"):
        apply(rules, ["base.a", "base.head.x"], ["a"])


def test_inside_rules_do_not_reach_beside_the_prefix() -> None:
    rules = (rename("a", "a"), drop("head.{*}", why="inside"))
    with pytest.raises(CheckpointError, match=r"unexpected tensor: 'head\.x'"):
        apply(rules, ["base.a", "head.x"], ["a"])


def test_parameter_without_a_rule_is_the_recipes_fault() -> None:
    with pytest.raises(AssertionError, match="no rule of the recipe fills the parameter 'b'"):
        apply((rename("a", "a"),), ["a"], ["a", "b"])


def test_fuse_takes_its_parts_by_rule_order_not_by_name() -> None:
    tensors = {name: torch.full((1,), float(k)) for k, name in enumerate(["a", "b", "c"])}
    result = load_weights(
        tensor_set(tensors),
        rules=(fuse("x", "c", "a", "b"),),
        prefixes=(),
        aliases={},
        expected={"x": ((1,), (1,), (1,))},
        dtype=torch.float32,
    )
    assert result.state["x"].tolist() == [2.0, 0.0, 1.0]
    assert [entry.action for entry in result.audit] == ["fused"] * 3
