"""What is particular to Gemma 3, as a causal decoder and as a bidirectional encoder."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, Gemma3ForCausalLM, Gemma3TextConfig

import toolkit
from tests.recipes.compare import (
    assert_parity,
    assert_same_weights,
    both_reaches,
    checkpoint,
    encoder,
    packed,
    read,
    read_all,
    rewrite,
)
from tests.tiny import heat, make_decoder
from toolkit.errors import CheckpointError, UnsupportedError
from toolkit.parity import verify_folder
from toolkit.parity.references import TransformersReference
from toolkit.registry import find_recipe

BIDIRECTIONAL = {"use_bidirectional_attention": True}
RECIPE = find_recipe("gemma3_text", config=BIDIRECTIONAL).recipe
DECODER = find_recipe("gemma3_text").recipe
FULL, LOCAL = "full_attention", "sliding_attention"


def types_of(**changes: Any) -> list[str]:
    spec = read(RECIPE, **changes)
    return [FULL if attention.reach is None else LOCAL for attention in spec.attentions]


@pytest.mark.parametrize(("width", "reach"), [(0, 0), (1, 0), (2, 1), (7, 3), (8, 4), (9, 4)])
def test_reach_is_the_references_layer_by_layer(width: int, reach: int, tmp_path: Path) -> None:
    """B3, B4: transformers makes w // 2 + 1 of the window, exclusive; and full layers see the last token too."""
    folder = checkpoint(tmp_path / "m", RECIPE, sliding_window=width)
    ours, theirs = both_reaches(RECIPE, folder, "self_attn", 25)
    near, everything = list(range(-reach, reach + 1)), list(range(-12, 13))
    assert ours == theirs == [near, everything, near, everything]


@pytest.mark.parametrize("width", [8, 9])
def test_window_is_stable_when_transformers_saves_the_config(width: int, tmp_path: Path) -> None:
    """B4: transformers halves the window when it reads and doubles it when it writes; nothing is lost over rounds."""
    raw = {**RECIPE.tiny, "sliding_window": width}
    first = RECIPE.read_config(raw)[0]
    for turn in range(3):
        folder = tmp_path / str(turn)
        AutoConfig.for_model(**raw).save_pretrained(folder)
        raw = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        assert read_all(RECIPE, raw) == (first, [])
    assert {attention.reach for attention in first.attentions} == {4, None}


@pytest.mark.parametrize("width", [8, 9])
def test_lengths_around_the_window(width: int, tmp_path: Path) -> None:
    """B3: shorter than the window, equal, longer, and twice as long; also around its half."""
    folder = checkpoint(tmp_path / "m", RECIPE, sliding_window=width)
    assert_parity(RECIPE, folder, [1, 3, 4, 5, 6, width - 1, width, width + 1, 2 * width, 26])


@pytest.mark.parametrize("every", [1, 2, 3, 4, 9])
def test_derived_layer_types_are_the_references(every: int) -> None:
    """B5: element by element; the full layer is the last one of each group."""
    config = AutoConfig.for_model("gemma3_text", num_hidden_layers=7, sliding_window_pattern=every)
    assert types_of(num_hidden_layers=7, sliding_window_pattern=every) == config.layer_types


def test_default_of_the_pattern_is_the_references() -> None:
    config = AutoConfig.for_model("gemma3_text", num_hidden_layers=13, _sliding_window_pattern=2)
    assert types_of(num_hidden_layers=13, sliding_window_pattern=..., _sliding_window_pattern=2) == config.layer_types


def test_explicit_layer_types_win(tmp_path: Path) -> None:
    """B5: a list that contradicts the pattern."""
    types = [FULL, LOCAL, LOCAL, FULL]
    assert types_of(layer_types=types) == types
    assert_parity(RECIPE, checkpoint(tmp_path / "m", RECIPE, layer_types=types), [5, 9, 26])


@pytest.mark.parametrize("value", [True, False, ...])
def test_the_flag_decides(value: object, tmp_path: Path) -> None:
    """B3, B4, B5: causal by default; a window then holds the token itself, and is no whole width to both sides."""
    raw = {name: field for name, field in {**RECIPE.tiny, **BIDIRECTIONAL}.items() if name not in BIDIRECTIONAL}
    raw |= {} if value is ... else {"use_bidirectional_attention": value}
    recipe = find_recipe("gemma3_text", config=raw).recipe
    assert recipe is (RECIPE if value is True else DECODER)
    assert ("generate" in recipe.all_tasks) == (value is not True)
    folder = checkpoint(tmp_path / "m", recipe)
    ours, theirs = both_reaches(recipe, folder, "self_attn", 25)
    near, everything = (range(-4, 5), range(-12, 13)) if value is True else (range(9), range(13))
    assert ours == theirs == [list(near), list(everything)] * 2
    assert_parity(recipe, folder, [1, 2, 4, 5, 8, 9, 10, 18, 26])


def test_a_bidirectional_model_generates_nothing(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path / "m", RECIPE)
    with pytest.raises(UnsupportedError, match="generate"):
        toolkit.convert(str(folder), tmp_path / "out", "generate", verify=False)


def test_a_causal_window_holds_something() -> None:
    assert {attention.reach for attention in read(DECODER, sliding_window=1).attentions} == {0, None}
    with pytest.raises(CheckpointError, match="sliding_window = 0"):
        read(DECODER, sliding_window=0)


@pytest.mark.parametrize("cap", [None, 0.5, ...])
def test_capped_logits_of_the_decoder(cap: object, tmp_path: Path) -> None:
    """I2: null and absent are none."""
    changed = {name: field for name, field in DECODER.tiny.items() if name != "final_logit_softcapping"}
    changed |= {} if cap is ... else {"final_logit_softcapping": cap}
    folder = make_decoder(tmp_path / "m", replace(DECODER, tiny=changed))
    manifest = toolkit.convert(str(folder), tmp_path / "out", verify=False).manifest
    report = verify_folder(tmp_path / "out", folder, device="cpu", modes=["eager"])
    assert report.passed, report.summary()
    assert len(manifest.head.steps) == (2 if cap == 0.5 else 1)


@pytest.mark.parametrize(
    "changes",
    [
        {"is_causal": False},
        {"is_causal": True},
        {"attn_logit_softcapping": 50.0},
        {"partial_rotary_factor": 0.5},
        {"rope_scaling": {"rope_type": "yarn", "factor": 2.0}},
    ],
    ids=str,
)
def test_unsupported_fields_are_named(changes: dict[str, Any]) -> None:
    """B4, I2: related keys that change the numbers, or might; is_causal = False widens the reference's window."""
    with pytest.raises(UnsupportedError, match="is not supported"):
        read(RECIPE, **changes)


def rope_of(**changes: Any) -> list[tuple[float, float]]:
    ropes = [attention.rope for attention in read(RECIPE, **changes).attentions]
    return [(rope.base, rope.factor) for rope in ropes if rope is not None]


def test_rope_of_each_kind_of_layer() -> None:
    """C4: scaling belongs to the full layers only, the local base to the sliding ones."""
    old = {"rope_theta": 1e6, "rope_local_base_freq": 1e4, "rope_scaling": {"rope_type": "linear", "factor": 8.0}}
    new = {
        FULL: {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
        LOCAL: {"rope_type": "default", "rope_theta": 1e4},
    }
    none = dict.fromkeys(old, ...)
    assert rope_of(**old) == [(1e4, 1.0), (1e6, 8.0)] * 2
    assert read(RECIPE, **old) == read(RECIPE, **none, rope_parameters=new)
    assert read(RECIPE, **old) == read(RECIPE, **{**old, "rope_scaling": ...}, rope_parameters=new)
    assert rope_of(**none) == [(1e4, 1.0), (1e6, 1.0)] * 2
    assert rope_of(**{**old, "rope_scaling": None}) == [(1e4, 1.0), (1e6, 1.0)] * 2


def test_rope_of_the_reference_is_the_same() -> None:
    config = AutoConfig.for_model(**RECIPE.tiny)
    full, local = config.rope_parameters[FULL], config.rope_parameters[LOCAL]
    assert rope_of() == [(local["rope_theta"], 1.0), (full["rope_theta"], full["factor"])] * 2


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rope_parameters": {FULL: {"rope_theta": 5.0}}}, "contradict"),
        ({"rope_parameters": {LOCAL: {"rope_theta": 5.0}}}, "rope_theta = 5.0 and rope_local_base_freq = 20.0"),
        ({"rope_parameters": {FULL: {"rope_type": "linear", "factor": 4.0, "rope_theta": 300.0}}}, "contradict"),
        ({"rope_parameters": {"rope_theta": 300.0}}, "rope_parameters holds 'rope_theta'"),
        ({"sliding_window": None}, "sliding_window = None"),
        ({"sliding_window": -1}, "sliding_window = -1"),
        ({"num_key_value_heads": 3}, "num_attention_heads 4 is no multiple of num_key_value_heads 3"),
        ({"num_key_value_heads": None}, "num_key_value_heads = None"),
        ({"query_pre_attn_scalar": 0}, "query_pre_attn_scalar = 0"),
        ({"use_bidirectional_attention": None}, "use_bidirectional_attention = None"),
        ({"layer_types": [FULL] * 3}, "layer_types"),
    ],
    ids=str,
)
def test_contradictions_and_impossible_values(changes: dict[str, Any], message: str) -> None:
    """B5, C4, I1: nothing is defaulted silently."""
    with pytest.raises(CheckpointError, match=message):
        read(RECIPE, **changes)


@pytest.mark.parametrize(
    "changes",
    [
        {"num_key_value_heads": 1},
        {"num_key_value_heads": 4},
        {"head_dim": 6},
        {"query_pre_attn_scalar": 17},
        {"attention_bias": False},
        {"rope_scaling": None},
    ],
    ids=str,
)
def test_heads_and_scale(changes: dict[str, Any], tmp_path: Path) -> None:
    """I1, I2, H3: scores are scaled by query_pre_attn_scalar, not by the size of a head."""
    assert_parity(RECIPE, checkpoint(tmp_path / "m", RECIPE, **changes), [1, 2, 13, 26])


def test_each_norm_has_its_place() -> None:
    """The names differ from those of other families: post_attention_layernorm is applied to the branch."""
    targets = {rule.sources[0].rpartition("layers.{i}.")[2]: rule.target for rule in RECIPE.rules if rule.target}
    assert {source: target for source, target in targets.items() if "layernorm" in source} == {
        "input_layernorm.weight": "blocks.{i}.attention_norm.weight",
        "post_attention_layernorm.weight": "blocks.{i}.attention_out_norm.weight",
        "pre_feedforward_layernorm.weight": "blocks.{i}.mlp_norm.weight",
        "post_feedforward_layernorm.weight": "blocks.{i}.mlp_out_norm.weight",
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_scaled_table_is_the_seam(dtype: torch.dtype, tmp_path: Path) -> None:
    """L1: embeds from the module's own table give the ids path bit for bit; the scale is rounded as the reference's."""
    folder = checkpoint(tmp_path / "m", RECIPE)
    model, inputs = encoder(RECIPE, folder, dtype), packed(13)
    with torch.inference_mode():
        embeds = model.embed_tokens(inputs["ids"])
        theirs = TransformersReference(folder, dtype, torch.device("cpu")).table(inputs["ids"].tolist())
        assert torch.equal(embeds, theirs)
        assert not torch.equal(embeds, model.embeddings.token(inputs["ids"]))
        given = model.forward_embeds(**inputs, embeds=embeds, is_embed=torch.ones(13, dtype=torch.bool))
        assert torch.equal(given, model.forward_ids(**inputs))


def test_stored_forms(tmp_path: Path) -> None:
    """H1, H3: with and without prefix, with a head, with stale frequencies: one identical module."""
    model = Gemma3ForCausalLM(Gemma3TextConfig(**RECIPE.tiny))
    heat(model)
    model.save_pretrained(tmp_path / "lm")
    model.model.save_pretrained(tmp_path / "base")
    base = encoder(RECIPE, tmp_path / "base")
    assert_same_weights(encoder(RECIPE, tmp_path / "lm"), base)
    head = {"lm_head.weight": torch.zeros(61, 40)}
    assert_same_weights(encoder(RECIPE, rewrite(tmp_path / "lm", lambda ts: {**ts, **head})), base)
    stale = {"rotary_emb.inv_freq": torch.ones(6), "rotary_emb_local.inv_freq": torch.ones(6)}
    assert_same_weights(encoder(RECIPE, rewrite(tmp_path / "base", lambda ts: {**ts, **stale})), base)
