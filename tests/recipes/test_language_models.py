"""Whole causal language models: scaled rotary positions up to the last one, heads of every kind, stored forms."""

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import toolkit
from tests.decoding.reference import Greedy
from tests.recipes.compare import read
from tests.recipes.loading import check_each_tensor_is_needed, check_stored_forms
from tests.tiny import decoder_recipes, make_decoder, need_reference
from toolkit import CacheOptions, DecoderRunner, TokenIds
from toolkit.errors import CheckpointError, InputError
from toolkit.recipe import Recipe
from toolkit.registry import find_recipe

LLAMA, QWEN2, QWEN3 = (find_recipe(name).recipe for name in ("llama", "qwen2", "qwen3"))
GEMMA2, GEMMA3, NEOX = (find_recipe(name).recipe for name in ("gemma2", "gemma3_text", "gpt_neox"))
LENGTH, ORIGINAL = 26, 16
LABEL: Callable[[Any], str] = lambda value: value.label if isinstance(value, Recipe) else str(value)  # noqa: E731
Tensors = dict[str, Tensor]


def load(source: Path, out: Path) -> DecoderRunner:
    toolkit.convert(str(source), out, verify=False)
    runner: Any = toolkit.load(out, device="cpu", mode="eager", cache=CacheOptions(page=4))
    return runner


# Rotary positions.

YARN = {"rope_type": "yarn", "factor": 16.0, "original_max_position_embeddings": ORIGINAL}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LINEAR = {"rope_type": "linear", "factor": 3.0}
ROPES: list[tuple[Recipe, dict[str, Any]]] = [
    (LLAMA, {"rope_scaling": YARN}),
    (LLAMA, {"rope_scaling": YARN | {"attention_factor": 1.0}}),
    (LLAMA, {"rope_scaling": YARN | {"mscale": 0.7, "mscale_all_dim": 1.0}}),
    (LLAMA, {"rope_scaling": LLAMA3 | {"original_max_position_embeddings": ORIGINAL}}),
    (LLAMA, {"rope_scaling": LINEAR}),
    (LLAMA, {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}),
    (QWEN3, {"rope_parameters": {**YARN, "rope_theta": 300.0}, "rope_theta": None}),
    (NEOX, {"rope_scaling": YARN | {"factor": 4.0}}),
    (GEMMA3, {}),
]


@pytest.mark.parametrize(("recipe", "fields"), ROPES, ids=LABEL)
def test_scaled_rotary_positions_up_to_the_last(recipe: Recipe, fields: dict[str, Any], tmp_path: Path) -> None:
    """C1, C3, C4: logits and tokens around the original length and up to the last position; one more is refused."""
    overrides = {name: value for name, value in fields.items() if value is not None}
    tiny = {name: value for name, value in recipe.tiny.items() if fields.get(name, ...) is not None}
    source = make_decoder(tmp_path / "m", replace(recipe, tiny=tiny), tied=False, overrides=overrides)
    runner = load(source, tmp_path / "out")
    lengths = (1, ORIGINAL - 1, ORIGINAL, ORIGINAL + 1, LENGTH - 1, LENGTH)
    expected = Greedy(source, runner.artifact.manifest.spec, lengths, LENGTH)
    assert expected.sure > 0.8
    expected.check(runner)
    with pytest.raises(InputError, match=f"{LENGTH} prompt tokens and max_new_tokens = 1 are {LENGTH + 1}"):
        runner.generate(TokenIds([5] * LENGTH), 1)
    with pytest.raises(InputError, match=f"{LENGTH + 1} tokens, the model takes at most {LENGTH}"):
        runner.logits(TokenIds([5] * (LENGTH + 1)))


@pytest.mark.parametrize("recipe", [LLAMA, QWEN3], ids=LABEL)
def test_dynamic_rope_is_plain_up_to_the_trained_length(recipe: Recipe) -> None:
    """C3: which is the longest that is served."""
    dynamic = read(recipe, rope_scaling={"rope_type": "dynamic", "factor": 4.0})
    assert dynamic == read(recipe)
    assert dynamic.usable_length == LENGTH


# Heads.


@pytest.mark.parametrize(
    ("recipe", "changes"),
    [
        (LLAMA, {"num_key_value_heads": 1}),
        (LLAMA, {"num_key_value_heads": 4, "attention_bias": False, "mlp_bias": False}),
        (LLAMA, {"num_attention_heads": 5, "num_key_value_heads": 5}),
        (LLAMA, {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 16}),
        (QWEN2, {"num_attention_heads": 5, "num_key_value_heads": 1}),
        (QWEN3, {"num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": 16}),
        (GEMMA2, {"num_attention_heads": 8, "num_key_value_heads": 4, "query_pre_attn_scalar": 7}),
        (GEMMA3, {"num_key_value_heads": 1, "head_dim": 16}),
    ],
    ids=LABEL,
)
def test_heads_of_every_kind(recipe: Recipe, changes: dict[str, Any], tmp_path: Path) -> None:
    """I1, I2: sizes that do not follow from each other, one key for all queries, and groups in their order."""
    source = make_decoder(tmp_path / "m", recipe, tied=False, overrides=changes)
    runner = load(source, tmp_path / "out")
    Greedy(source, runner.artifact.manifest.spec, (1, 7, 13), 12).check(runner)


# Stored forms.


def rewrite(source: Path, change: Callable[[Tensors], Mapping[str, Tensor]]) -> None:
    """Store other tensors, in a file without metadata."""
    file = source / "model.safetensors"
    tensors = {name: tensor.clone() for name, tensor in change(load_file(file)).items()}
    file.unlink()
    save_file(tensors, file)


def weights(folder: Path) -> Tensors:
    return load_file(folder / "model.safetensors")


def converted(source: Path, out: Path) -> Tensors:
    toolkit.convert(str(source), out, verify=False, force=out.exists())
    return weights(out)


def head_of(tensors: Mapping[str, Tensor]) -> str:
    return next(name for name in tensors if re.match(r"(lm_head|embed_out)\.", name))


def table_of(tensors: Mapping[str, Tensor]) -> str:
    return next(name for name in tensors if re.search(r"(embed_tokens|embed_in|wte)\.weight$", name))


@pytest.mark.parametrize("recipe", decoder_recipes(), ids=LABEL)
def test_stored_forms_of_a_language_model(recipe: Recipe, tmp_path: Path) -> None:
    """H1, H2, H3: wrappers, no prefix and no metadata change no bit; a prefix on a part and a lost head are errors."""
    source, out = make_decoder(tmp_path / "m", recipe, tied=False), tmp_path / "out"
    expected, stored = converted(source, out), weights(source)
    prefix = recipe.prefixes[0]
    assert all(name.startswith(prefix) for name in stored.keys() - {head_of(stored)})
    head, table = head_of(stored), table_of(stored)
    forms: dict[str, Tensors] = {
        "no metadata": stored,
        "module.": {f"module.{name}": tensor for name, tensor in stored.items()},
        "_orig_mod.": {f"_orig_mod.{name}": tensor for name, tensor in stored.items()},
        "no prefix": {name.removeprefix(prefix): tensor for name, tensor in stored.items()},
    }
    for form, tensors in forms.items():
        rewrite(source, lambda _, tensors=tensors: tensors)
        found = converted(source, out)
        assert found.keys() == expected.keys(), form
        assert all(torch.equal(found[name], expected[name]) for name in expected), form
    names = sorted(name for name in stored if name != head)
    halved = {name.removeprefix(prefix) if name in names[::2] else name: tensor for name, tensor in stored.items()}
    faults: dict[str, tuple[Tensors, str]] = {
        "no head": ({name: tensor for name, tensor in stored.items() if name != head}, re.escape(head)),
        "no table": ({n: t for n, t in stored.items() if n != table}, re.escape(table.removeprefix(prefix))),
        "some prefixes": (halved, "tensor"),
        "one too many": ({**stored, head.replace("weight", "bias"): torch.zeros(61)}, "bias"),
    }
    for form, (tensors, message) in faults.items():
        rewrite(source, lambda _, tensors=tensors: tensors)
        with pytest.raises(CheckpointError, match=message):
            converted(source, tmp_path / form)
        assert not (tmp_path / form).exists()


FREQUENCIES = {"rotary_emb.inv_freq": torch.ones(6), "layers.0.self_attn.rotary_emb.inv_freq": torch.ones(6)}
LIKE_LLAMA = [recipe for recipe in decoder_recipes() if recipe.model_type not in ("gpt2", "gpt_neox", "opt")]


@pytest.mark.parametrize("recipe", LIKE_LLAMA, ids=LABEL)
def test_stored_forms_of_the_base_model(recipe: Recipe) -> None:
    """H1, H2, H3: stale frequencies are left out and never used; every other tensor is needed."""
    need_reference(recipe)
    check_stored_forms(recipe, prefix="model.", others=FREQUENCIES)
    check_each_tensor_is_needed(recipe)


@pytest.mark.parametrize("recipe", decoder_recipes(), ids=LABEL)
def test_a_tied_head_may_be_stored_too(recipe: Recipe, tmp_path: Path) -> None:
    """H2: under its own name, with the table's values; others would be a choice that nobody made."""
    source, out = make_decoder(tmp_path / "m", recipe, tied=True), tmp_path / "out"
    expected, stored = converted(source, out), weights(source)
    name = {"gpt_neox": "embed_out.weight"}.get(recipe.model_type, "lm_head.weight")
    table = stored[table_of(stored)]
    rewrite(source, lambda _: {**stored, name: table})
    found = converted(source, out)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[key], expected[key]) for key in expected)
    rewrite(source, lambda _: {**stored, name: table + 1})
    with pytest.raises(CheckpointError, match="are the same parameter, but they differ"):
        converted(source, tmp_path / "other")
