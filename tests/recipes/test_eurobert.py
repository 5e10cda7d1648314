"""What is particular to EuroBERT."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, EuroBertConfig, EuroBertForMaskedLM

from tests.recipes.compare import assert_parity, assert_same_weights, checkpoint, encoder, read, read_all, rewrite
from tests.tiny import heat
from toolkit.errors import CheckpointError, UnsupportedError
from toolkit.registry import find_recipe

RECIPE = find_recipe("eurobert").recipe


@pytest.mark.parametrize("changes", [{}, {"num_key_value_heads": 1}, {"num_key_value_heads": 4}, {"head_dim": 6}])
def test_heads(changes: dict[str, Any], tmp_path: Path) -> None:
    """I1: grouped heads in the order of the reference, one for all, a head size that is not hidden size / heads."""
    folder = checkpoint(tmp_path / "m", RECIPE, **changes)
    assert_parity(RECIPE, folder, [1, 2, 13, 26])


def test_key_value_heads_differ(tmp_path: Path) -> None:
    """I1: the reference repeats each key and value head for neighbours; swapping two of them must show."""
    folder = checkpoint(tmp_path / "m", RECIPE)

    def swap(tensors: Any) -> dict[str, torch.Tensor]:
        names = [f"layers.0.self_attn.{name}_proj.{p}" for name in "kv" for p in ("weight", "bias")]
        return {**tensors, **{name: tensors[name].roll(12, 0) for name in names}}

    before = encoder(RECIPE, folder)
    after = encoder(RECIPE, rewrite(folder, swap))
    assert not torch.equal(
        before.state_dict()["blocks.0.attention.qkv.weight"], after.state_dict()["blocks.0.attention.qkv.weight"]
    )
    assert_parity(RECIPE, folder, [13])


def test_defaults_of_head_sizes() -> None:
    """I1: null and absent both mean as many key and value heads, and hidden size / heads."""
    for value in (None, ...):
        spec = read(RECIPE, head_dim=value, num_key_value_heads=value)
        assert (spec.attentions[0].kv_heads, spec.attentions[0].head_dim) == (4, 10)
        assert spec.attentions[0].scale == 10**-0.5


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_key_value_heads": 3}, "num_attention_heads 4 is no multiple of num_key_value_heads 3"),
        ({"num_key_value_heads": 8}, "num_attention_heads 4 is no multiple of num_key_value_heads 8"),
        ({"num_key_value_heads": 0}, "num_key_value_heads = 0"),
        ({"head_dim": 7}, "even head size, not 7"),
        ({"head_dim": ..., "num_attention_heads": 3, "num_key_value_heads": 3}, "hidden_size 40 is no multiple"),
        ({"rope_parameters": {"rope_theta": 301.0}}, "rope_theta = 301.0 and rope_theta = 300.0 contradict"),
        ({"rope_scaling": {"type": "linear"}}, "factor = None, expected a positive number"),
        (
            {"rope_scaling": {"type": "linear", "factor": 2.0}, "rope_parameters": {"rope_theta": 300.0}},
            "rope_parameters = .* and rope_scaling = .* contradict",
        ),
        ({"rope_parameters": [1]}, "rope_parameters = .*, expected an object"),
    ],
    ids=str,
)
def test_contradictions_and_impossible_values(changes: dict[str, Any], message: str) -> None:
    """C4, I1: nothing is rounded, tiled or defaulted silently."""
    with pytest.raises(CheckpointError, match=message):
        read(RECIPE, **changes)


@pytest.mark.parametrize(
    "changes",
    [
        {"is_causal": True},
        {"is_decoder": True},
        {"partial_rotary_factor": 0.5},
        {"hidden_act": "quick_gelu"},
        {"rope_scaling": {"rope_type": "yarn", "factor": 2.0}},
        {"rope_scaling": {"rope_type": ["linear"], "factor": 2.0}},
        {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "attention_factor": 1.0}},
    ],
    ids=str,
)
def test_unsupported_fields_are_named(changes: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedError, match="is not supported"):
        read(RECIPE, **changes)


def test_both_forms_of_rope_give_one_specification() -> None:
    """C4: the old field, the new one, both if they agree; and the class's default."""
    new = {"rope_parameters": {"rope_type": "default", "rope_theta": 300}}
    assert read(RECIPE, **new, rope_theta=...) == read(RECIPE, **new) == read(RECIPE)
    bare = read(RECIPE, rope_theta=...).attentions[0].rope
    assert bare is not None
    assert bare.base == AutoConfig.for_model("eurobert").rope_parameters["rope_theta"] == 10_000.0
    old = {"rope_scaling": {"type": "linear", "factor": 4}}
    linear = {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 300}}
    assert read(RECIPE, **old) == read(RECIPE, **linear)


@pytest.mark.parametrize("kind", ["linear", "dynamic"])
def test_scaled_rope(kind: str, tmp_path: Path) -> None:
    """C4, C3: linear scaling divides positions; dynamic scaling is plain rope up to the trained length."""
    folder = checkpoint(tmp_path / "m", RECIPE, rope_scaling={"rope_type": kind, "factor": 3.0})
    assert_parity(RECIPE, folder, [1, 13, 26])


@pytest.mark.parametrize("name", ["attention_bias", "mlp_bias"])
def test_absent_biases(name: str, tmp_path: Path) -> None:
    """H3: an absent bias is none; one that is stored against config.json is an error."""
    folder = checkpoint(tmp_path / "m", RECIPE, **{name: False})
    assert_parity(RECIPE, folder, [1, 13])
    stray = {"attention_bias": "layers.1.self_attn.o_proj", "mlp_bias": "layers.1.mlp.down_proj"}[name]
    rewrite(folder, lambda ts: {**ts, f"{stray}.bias": torch.zeros(40)})
    with pytest.raises(CheckpointError, match=f"unexpected tensor: '{stray}.bias'"):
        encoder(RECIPE, folder)


def test_stored_forms(tmp_path: Path) -> None:
    """H1, H3: with and without prefix, with a head, with stale frequencies: one identical module."""
    model = EuroBertForMaskedLM(EuroBertConfig(**RECIPE.tiny))
    heat(model)
    model.save_pretrained(tmp_path / "mlm")
    model.model.save_pretrained(tmp_path / "base")
    base = encoder(RECIPE, tmp_path / "base")
    assert_same_weights(encoder(RECIPE, tmp_path / "mlm"), base)
    stale = {"rotary_emb.inv_freq": torch.ones(6), "layers.0.self_attn.rotary_emb.inv_freq": torch.ones(6)}
    assert_same_weights(encoder(RECIPE, rewrite(tmp_path / "base", lambda ts: {**ts, **stale})), base)


def test_fields_of_hub_checkpoints_are_known() -> None:
    names = "bos_token clf_pooling eos_token hidden_dropout mask_token pad_token pretraining_tp".split()
    assert read_all(RECIPE, {**RECIPE.tiny, **dict.fromkeys(names, 1), "rope_scaling": None}) == (read(RECIPE), [])
