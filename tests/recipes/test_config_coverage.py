"""Every field of every configuration is used as the reference uses it, cannot change a result, or is refused."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from transformers import AutoConfig

from tests.recipes.loading import difference, make_module, make_reference, some_ids, tensors_of
from tests.tiny import why_no_reference
from toolkit.errors import ToolkitError
from toolkit.recipe import Recipe
from toolkit.registry import all_recipes

RECIPES = [entry.recipe for entry in all_recipes() if entry.recipe.reference is not None]
# What names the model, and how the reference hands out its results.
UNTRIED = {"model_type", "architectures", "transformers_version", "dtype", "return_dict"}
# Fields whose other values are names, by what they hold.
NAMES: dict[str, list[Any]] = {
    "gelu": ["relu", "gelu_new", "silu", "tanh", "gelu_pytorch_tanh", "quick_gelu"],
    "gelu_new": ["relu", "gelu"],
    "gelu_pytorch_tanh": ["relu", "gelu"],
    "silu": ["relu", "gelu"],
    "relu": ["gelu", "gated-gelu", "gated-silu"],
    "gated-gelu": ["relu", "gated-silu", "gated-relu"],
    "cls": ["mean"],
    "layer_norm": ["none"],
    "none": ["layer_norm"],
}
FIELDS: dict[str, list[Any]] = {
    "pos_att_type": [["c2p"], ["p2c"], ["c2p", "p2c"], [], "c2p|p2c", None],
    "rope_parameters": [
        {"rope_type": "linear", "factor": 2.0, "rope_theta": 77.0},
        {"rope_type": "yarn", "factor": 2.0},
    ],
    "rope_scaling": [{"rope_type": "linear", "factor": 3.0}],
    "position_embedding_type": ["relative_key"],
    "norm_rel_ebd": ["layer_norm", "none"],
    "share_att_key": [True, False],
    "conv_kernel_size": [3],
    "position_buckets": [-1, 4, 6],
    "max_relative_positions": [-1, 9],
    "is_decoder": [True],
    "add_cross_attention": [True],
    "global_attn_every_n_layers": [1, 2],
    "sliding_window_pattern": [1, 2],
    "embedding_size": [24, 40],
    "mlp_only_layers": [[1], [0, 3, 9], [], None],
}


def others(name: str, value: Any) -> Iterator[Any]:
    """Values that differ from `value` and are of its kind."""
    if name in FIELDS:
        yield from (other for other in FIELDS[name] if other != value)
    elif isinstance(value, bool):
        yield not value
    elif isinstance(value, int):
        yield from {value + 1, 2 * value, max(value - 1, 0)} - {value}
    elif isinstance(value, float):
        yield 3 * value + 0.125
    elif isinstance(value, str):
        yield from NAMES.get(value, [])
    elif value is None:
        yield from (True, 1, 2.5)


def cases() -> list[Any]:
    found: list[Any] = []
    for recipe in RECIPES:
        if why_no_reference(recipe) is not None:
            continue
        usual = AutoConfig.for_model(recipe.model_type).to_dict() | dict(recipe.tiny) | dict.fromkeys(FIELDS, None)
        usual |= recipe.tiny
        for name in sorted(set(usual) - UNTRIED):
            values = list(others(name, usual[name]))
            found += [pytest.param(recipe, name, values, id=f"{recipe.model_type}-{name}")] if values else []
    return found


@pytest.mark.parametrize(("recipe", "name", "values"), cases())
def test_a_changed_field_changes_the_result_as_it_does_there(recipe: Recipe, name: str, values: list[Any]) -> None:
    """Each value: transformers cannot build it, or we refuse it, or both give the same token states."""
    for value in values:
        try:
            reference = make_reference(recipe, **{name: value})
            with torch.inference_mode():
                reference.get_input_embeddings()(torch.tensor([1]))
        except Exception:
            continue  # no such model
        try:
            module = make_module(recipe, tensors_of(reference), **{name: value})
        except ToolkitError:
            continue  # refused
        longest = min(module.spec.usable_length, 40)
        ids = some_ids(module.spec, (5, 1, longest))
        try:
            found = difference(reference, module, ids)
        except (IndexError, ValueError, AttributeError, TypeError) as error:
            if "torch" in str(error.__traceback__):
                raise
            pytest.fail(f"{name} = {value!r}: the reference cannot run what we accept: {error}")
        assert found < 1e-4, f"{name} = {value!r}"
