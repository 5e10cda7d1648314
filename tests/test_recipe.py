import json
import signal
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig
from transformers.activations import ACT2FN

from tests.tiny import edit_json, make_checkpoint, make_decoder, need_reference
from toolkit.config import NEUTRAL_EVERYWHERE, ConfigReader, Names
from toolkit.conversion import convert
from toolkit.errors import CheckpointError, ToolkitError, UnsupportedError
from toolkit.nn.linear import apply_activation
from toolkit.recipe import Recipe
from toolkit.registry import all_recipes, find_recipe
from toolkit.spec import EncoderSpec

RECIPES = [entry.recipe for entry in all_recipes()]
FILES = sorted(Path(str(import_module("toolkit.recipes").__file__)).parent.glob("[!_]*.py"))
BERT = find_recipe("bert").recipe
SIZES = """
    hidden_size num_attention_heads num_hidden_layers vocab_size max_position_embeddings type_vocab_size
    intermediate_size
""".split()

each_recipe = pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.label)


class Recorder(ConfigReader):
    """Remembers which fields a recipe reads as numbers, and all that it asks for."""

    def __init__(self, raw: Mapping[str, Any]) -> None:
        super().__init__(raw)
        self.numbers: set[str] = set()

    def integer(self, names: Names, default: int, *args: Any, **kwargs: Any) -> int:
        self.numbers.add(names if isinstance(names, str) else names[0])
        return super().integer(names, default, *args, **kwargs)

    def positive(self, names: Names, default: float, *args: Any, **kwargs: Any) -> float:
        self.numbers.add(names if isinstance(names, str) else names[0])
        return super().positive(names, default, *args, **kwargs)


def numbers_read(recipe: Recipe) -> list[str]:
    recorder = Recorder(recipe.tiny)
    recipe.spec(recorder)
    return sorted(recorder.numbers)


def bare(recipe: Recipe) -> dict[str, Any]:
    """The smallest configuration that the recipe serves."""
    return {"model_type": recipe.model_type, **recipe.when}


def defaults(recipe: Recipe) -> dict[str, Any]:
    need_reference(recipe)
    return AutoConfig.for_model(**bare(recipe)).to_dict()


def read(**changes: Any) -> EncoderSpec:
    return BERT.read_config({**BERT.tiny, **changes})[0]


# What holds for every recipe


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_recipe_file_is_short(file: Path) -> None:
    assert len(file.read_text(encoding="utf-8").splitlines()) <= 120


@each_recipe
def test_tiny_checkpoint_converts(recipe: Recipe, tmp_path: Path) -> None:
    embeds = "embed" in recipe.all_tasks
    folder = make_checkpoint(tmp_path / "tiny", recipe) if embeds else make_decoder(tmp_path / "tiny", recipe)
    report = convert(str(folder), tmp_path / "out", verify=False)
    spec, unrecognised = recipe.read_config(recipe.tiny)
    assert not unrecognised
    assert report.manifest.spec == spec
    assert not [warning for warning in report.manifest.warnings if "has no effect" in warning]


@each_recipe
def test_spec_survives_json(recipe: Recipe) -> None:
    spec, _ = recipe.read_config(recipe.tiny)
    data = json.loads(json.dumps(spec.to_dict()))
    assert type(spec).from_dict(data) == spec
    with pytest.raises(TypeError):
        type(spec).from_dict({**data, "unheard_of": 1})
    for name in data:
        with pytest.raises(TypeError):
            type(spec).from_dict({key: value for key, value in data.items() if key != name})


@each_recipe
def test_every_field_of_the_transformers_config_is_accounted_for(recipe: Recipe) -> None:
    """Read, checked to be neutral, or declared irrelevant: a field that nobody looked at could change the numbers."""
    _, unrecognised = recipe.read_config(defaults(recipe))
    assert unrecognised == []


@each_recipe
def test_defaults_are_those_of_the_transformers_config(recipe: Recipe) -> None:
    few, _ = recipe.read_config(bare(recipe))
    full, _ = recipe.read_config(defaults(recipe))
    assert few == full


@each_recipe
def test_tiny_values_are_unusual(recipe: Recipe) -> None:
    """A default that is hard-coded somewhere must not pass the parity tests."""
    usual = defaults(recipe)
    names = numbers_read(recipe)
    assert len(names) > 5
    assert [name for name in names if recipe.tiny.get(name, usual.get(name)) == usual.get(name)] == []


@each_recipe
def test_every_number_that_is_read_has_an_effect(recipe: Recipe) -> None:
    spec, _ = recipe.read_config(recipe.tiny)
    for name in numbers_read(recipe):
        assert recipe.read_config({**recipe.tiny, name: recipe.tiny[name] * 2})[0] != spec, name


@each_recipe
def test_no_field_is_both_read_and_irrelevant(recipe: Recipe) -> None:
    reader = ConfigReader({**dict.fromkeys(recipe.irrelevant), **bare(recipe)})
    recipe.spec(reader)
    assert reader.unrecognised(frozenset()) == sorted(recipe.irrelevant)
    assert not recipe.irrelevant & NEUTRAL_EVERYWHERE.keys()


@each_recipe
def test_dropped_tensors_have_a_reason(recipe: Recipe) -> None:
    assert all(len(rule.why) > 10 for rule in recipe.rules if rule.target is None)


def test_bert_spec_by_hand() -> None:
    spec = read()
    assert (spec.hidden, len(spec.schedule), spec.usable_length) == (40, 3, 24)
    assert (spec.embedding.vocab_size, spec.embedding.width, spec.embedding.positions) == (61, 40, 24)
    assert (spec.embedding.position_start, spec.embedding.segments) == (0, 3)
    block = spec.blocks[0]
    assert (block.attention.heads, block.attention.kv_heads, block.attention.head_dim) == (5, 5, 8)
    assert (block.attention.scale, block.attention.causal, block.attention.bias) == (8**-0.5, False, True)
    assert (block.mlp.width, block.mlp.activation, block.mlp.bias) == (56, "gelu", True)
    assert spec.embedding.norm is not None
    assert (block.norm.eps, spec.embedding.norm.eps) == (1e-3, 1e-3)


# Values that change the numbers and are not supported


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("position_embedding_type", "relative_key"),
        ("position_embedding_type", "relative_key_query"),
        ("position_embedding_type", "alibi"),
        ("position_embedding_type", None),
        ("is_decoder", True),
        ("is_decoder", 0),
        ("is_encoder_decoder", True),
        ("add_cross_attention", True),
        ("cross_attention_hidden_size", 40),
        ("pruned_heads", {"0": [1]}),
        ("quantization_config", {"quant_method": "bitsandbytes", "load_in_8bit": True}),
        ("quantization_config", {}),
        ("hidden_act", "nope"),
        ("hidden_act", "quick_gelu"),
        ("hidden_act", "GELU"),
        ("hidden_act", None),
        ("hidden_act", ["gelu"]),
    ],
)
def test_unsupported_value_is_named(name: str, value: object) -> None:
    """I4 among others: a variant under BERT's name is never run as plain BERT."""
    with pytest.raises(UnsupportedError) as caught:
        read(**{name: value})
    assert f"config.json: {name} = {value!r} is not supported" in str(caught.value)


@pytest.mark.parametrize("name", sorted(NEUTRAL_EVERYWHERE))
@each_recipe
def test_neutral_fields_are_checked_for_every_recipe(recipe: Recipe, name: str) -> None:
    recipe.read_config({**recipe.tiny, name: NEUTRAL_EVERYWHERE[name]})
    with pytest.raises(UnsupportedError, match=f"{name} = 'odd' is not supported"):
        recipe.read_config({**recipe.tiny, name: "odd"})


def test_unsupported_value_stops_a_conversion(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "bert", BERT)
    edit_json(folder / "config.json", is_decoder=True)
    with pytest.raises(UnsupportedError, match="is_decoder = True"):
        convert(str(folder), tmp_path / "out", verify=False)
    assert [path.name for path in tmp_path.iterdir()] == ["bert"]


@pytest.mark.parametrize("name", ["gelu", "gelu_new", "gelu_pytorch_tanh", "relu", "silu", "swish", "tanh"])
def test_activation_is_the_one_that_transformers_means(name: str) -> None:
    x = torch.linspace(-6, 6, 1001, dtype=torch.float64)
    ours = apply_activation(x, read(hidden_act=name).blocks[0].mlp.activation)
    torch.testing.assert_close(ours, ACT2FN[name](x), rtol=0, atol=1e-12)


# Values that are impossible


@pytest.mark.parametrize("value", ["40", True, False, 0, -1, 40.0, None, [40], {}, float("nan")], ids=repr)
@pytest.mark.parametrize("name", SIZES)
def test_size_of_the_wrong_type_or_range(name: str, value: object) -> None:
    with pytest.raises(CheckpointError, match=f"^config.json: {name} = ") as caught:
        read(**{name: value})
    assert f"{name} = {value!r}, expected an integer" in str(caught.value)


@pytest.mark.parametrize(
    "value",
    [0, 0.0, -1e-5, float("nan"), float("inf"), "1e-12", True, None, [1e-12], 10**400],
    ids=lambda v: repr(v)[:9],
)
def test_eps_of_the_wrong_type_or_range(value: object) -> None:
    with pytest.raises(CheckpointError, match=r"^config.json: layer_norm_eps = .*, expected a positive number"):
        read(layer_norm_eps=value)


@contextmanager
def alarm(seconds: int) -> Iterator[None]:
    def stop(signum: int, frame: object) -> None:
        raise TimeoutError(f"not done within {seconds} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize("value", [10**6, 2**62, 2**70])
@pytest.mark.parametrize("name", [name for name in SIZES if name not in ("hidden_size", "num_attention_heads")])
def test_size_beyond_any_memory(name: str, value: int, tmp_path: Path) -> None:
    """O3's bound on memory and time, for the config: no module is built that the stored tensors cannot fill."""
    source = make_checkpoint(tmp_path / "bert", BERT)
    edit_json(source / "config.json", **{name: value})
    with alarm(3), pytest.raises(ToolkitError, match=r"config\.json|missing tensor"):
        convert(str(source), tmp_path / "out", verify=False)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(("hidden", "heads"), [(40, 3), (40, 80), (41, 5)])
def test_hidden_size_is_a_multiple_of_the_heads(hidden: int, heads: int) -> None:
    """I1: a head size must not be rounded."""
    with pytest.raises(CheckpointError, match=f"hidden_size {hidden} is no multiple of num_attention_heads {heads}"):
        read(hidden_size=hidden, num_attention_heads=heads)


# Fields that nobody knows


def test_unknown_field_becomes_a_warning(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "bert", BERT)
    edit_json(folder / "config.json", mystery_scale=2.0, hidden_dropout_prob=0.9)
    report = convert(str(folder), tmp_path / "out", verify=False)
    assert len(report.manifest.warnings) == 1
    assert "config.json: the field 'mystery_scale'" in report.manifest.warnings[0]
    stored = json.loads((tmp_path / "out" / "toolkit.json").read_text(encoding="utf-8"))
    assert stored["warnings"] == report.manifest.warnings


def test_unrecognised_fields_are_sorted_and_complete() -> None:
    _, unrecognised = BERT.read_config({**BERT.tiny, "zeta": 1, "alpha": None, "Hidden_Size": 3})
    assert unrecognised == ["Hidden_Size", "alpha", "zeta"]
    narrow = replace(BERT, irrelevant=BERT.irrelevant - {"pad_token_id"})
    assert narrow.read_config(BERT.tiny)[1] == ["pad_token_id"]


def test_reader_applies_defaults_to_absent_fields_only() -> None:
    reader = ConfigReader({"there": 3, "null": None})
    assert (reader.integer("there", 5), reader.integer("absent", 5), reader.positive("eps", 1e-3)) == (3, 5, 1e-3)
    assert reader.integer("zero", 0, minimum=0) == 0
    reader.neutral(off=False)
    with pytest.raises(CheckpointError, match="null = None"):
        reader.integer("null", 5)
    assert reader.unrecognised(frozenset()) == []


def test_no_table_of_positions_beyond_any_memory() -> None:
    """O3: architectures that compute their positions store no table that would show how long it is."""
    recipe = find_recipe("eurobert").recipe
    with pytest.raises(UnsupportedError, match="tables of positions beyond"):
        recipe.read_config({**recipe.tiny, "max_position_embeddings": 2**31 - 1})
