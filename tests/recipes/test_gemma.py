"""What is particular to Gemma and Gemma 2: scaled tables, norms with an offset, capped scores and logits."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig

import toolkit
from tests.recipes.compare import assert_parity, assert_same_weights, both_reaches, checkpoint, encoder, packed, read
from tests.tiny import edit_json, make_decoder
from toolkit.errors import CheckpointError, UnsupportedError
from toolkit.nn.head import Softcap
from toolkit.parity import verify_folder
from toolkit.parity.references import TransformersReference
from toolkit.recipe import Recipe
from toolkit.registry import find_recipe

GEMMA, GEMMA2 = (find_recipe(name).recipe for name in ("gemma", "gemma2"))
BOTH = pytest.mark.parametrize("recipe", [GEMMA, GEMMA2], ids=lambda recipe: recipe.model_type)
FULL, LOCAL = "full_attention", "sliding_attention"


def types_of(**changes: Any) -> list[str]:
    return [FULL if attention.reach is None else LOCAL for attention in read(GEMMA2, **changes).attentions]


@BOTH
def test_defaults_are_the_references(recipe: Recipe) -> None:
    spec, theirs = recipe.read_config({"model_type": recipe.model_type})[0], AutoConfig.for_model(recipe.model_type)
    attention = spec.attentions[0]
    assert spec.hidden == theirs.hidden_size
    assert spec.embedding.vocab_size == theirs.vocab_size
    assert spec.embedding.scale == theirs.hidden_size**0.5
    assert spec.usable_length == theirs.max_position_embeddings
    assert (attention.heads, attention.kv_heads) == (theirs.num_attention_heads, theirs.num_key_value_heads)
    assert (attention.head_dim, attention.scale) == (theirs.head_dim, 256**-0.5)
    assert attention.softcap == getattr(theirs, "attn_logit_softcapping", None)
    assert (spec.blocks[0].mlp.width, spec.blocks[0].mlp.activation) == (theirs.intermediate_size, "gelu_tanh")
    assert len(spec.blocks) == theirs.num_hidden_layers


@BOTH
def test_what_each_layer_sees(recipe: Recipe, tmp_path: Path) -> None:
    """B3, B5: nothing later; Gemma 2 begins with a window, which holds the token itself."""
    folder = checkpoint(tmp_path / "m", recipe)
    ours, theirs = both_reaches(recipe, folder, "self_attn", 20)
    window = list(range(6 if recipe is GEMMA2 else 10))
    assert ours == theirs == [window, list(range(10)), window]
    assert_parity(recipe, folder, [1, 2, 5, 6, 7, 12, 26])


@pytest.mark.parametrize("layers", [1, 2, 5])
def test_derived_layer_types_are_the_references(layers: int) -> None:
    assert types_of(num_hidden_layers=layers) == AutoConfig.for_model("gemma2", num_hidden_layers=layers).layer_types


def test_explicit_layer_types_win(tmp_path: Path) -> None:
    """B5: a list that contradicts the pattern."""
    types = [FULL, FULL, LOCAL]
    assert types_of(layer_types=types) == types
    assert types_of(layer_types=None) == [LOCAL, FULL, LOCAL]
    assert_parity(GEMMA2, checkpoint(tmp_path / "m", GEMMA2, layer_types=types), [5, 7, 26])


@pytest.mark.parametrize("cap", [None, 0.05, 0.5, 1.0, 50.0])
def test_capped_scores(cap: float | None, tmp_path: Path) -> None:
    """I2: null means none, and a small cap changes the result."""
    folder = checkpoint(tmp_path / "m", GEMMA2, attn_logit_softcapping=cap)
    assert_parity(GEMMA2, folder, [1, 2, 6, 7, 26])
    assert {attention.softcap for attention in read(GEMMA2, attn_logit_softcapping=cap).attentions} == {cap}
    inputs = packed(13)
    states = encoder(GEMMA2, folder).forward_ids(**inputs)
    edit_json(folder / "config.json", attn_logit_softcapping=3.0)
    assert (encoder(GEMMA2, folder).forward_ids(**inputs) - states).abs().max() > 1e-3


def test_an_absent_cap_is_the_default_one() -> None:
    assert {attention.softcap for attention in read(GEMMA2, attn_logit_softcapping=...).attentions} == {50.0}


@pytest.mark.parametrize("scalar", [3, 7.5, 256])
def test_scale_of_scores(scalar: float, tmp_path: Path) -> None:
    """I2: scores are scaled by query_pre_attn_scalar, not by the size of a head."""
    assert {attention.scale for attention in read(GEMMA2, query_pre_attn_scalar=scalar).attentions} == {scalar**-0.5}
    if isinstance(scalar, int):
        assert_parity(GEMMA2, checkpoint(tmp_path / "m", GEMMA2, query_pre_attn_scalar=scalar), [1, 2, 13, 26])


@pytest.mark.parametrize(("attention", "final"), [(None, None), (0.5, None), (None, 0.5), (0.05, 5.0), (1.0, ...)])
def test_the_decoder_caps_too(attention: float | None, final: Any, tmp_path: Path) -> None:
    """I2: the two caps are independent of each other; where the final one is absent it is 30."""
    caps = {"attn_logit_softcapping": attention, "final_logit_softcapping": 30.0 if final is ... else final}
    folder = make_decoder(tmp_path / "m", GEMMA2, overrides=caps)
    if final is ...:
        edit_json(folder / "config.json", final_logit_softcapping=...)
    manifest = toolkit.convert(str(folder), tmp_path / "out", verify=False).manifest
    report = verify_folder(tmp_path / "out", folder, device="cpu", modes=["eager"])
    assert report.passed, report.summary()
    assert [getattr(step, "cap", None) for step in manifest.head.steps[1:]] == (
        [] if final is None else [caps["final_logit_softcapping"]]
    )


@pytest.mark.parametrize("name", ["gemma", "gemma2", "gemma3_text"])
def test_sixteen_bits(name: str, tmp_path: Path) -> None:
    """L1, I2: the table's scale and the capped logits are rounded as the reference's."""
    folder = make_decoder(tmp_path / "m", find_recipe(name).recipe)
    toolkit.convert(str(folder), tmp_path / "out", dtype="bfloat16", verify=False)
    report = verify_folder(tmp_path / "out", folder, device="cpu", modes=["eager"])
    assert report.passed, report.summary()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_logits_are_capped_in_their_own_dtype(dtype: torch.dtype) -> None:
    """I2: each operation is rounded, as there."""
    logits = torch.randn(7, 61, generator=torch.Generator().manual_seed(0)).to(dtype) * 9
    expected = torch.tanh(logits / 2.5) * 2.5
    assert torch.equal(Softcap(2.5)(logits), expected)
    assert Softcap(2.5)(logits).dtype == dtype


@BOTH
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_scaled_table_is_the_seam(recipe: Recipe, dtype: torch.dtype, tmp_path: Path) -> None:
    """L1: embeds from the module's own table give the ids path bit for bit; the scale is rounded as the reference's."""
    folder = checkpoint(tmp_path / "m", recipe)
    model, inputs = encoder(recipe, folder, dtype), packed(13)
    with torch.inference_mode():
        embeds = model.embed_tokens(inputs["ids"])
        theirs = TransformersReference(folder, dtype, torch.device("cpu")).table(inputs["ids"].tolist())
        assert torch.equal(embeds, theirs)
        given = model.forward_embeds(**inputs, embeds=embeds, is_embed=torch.ones(13, dtype=torch.bool))
        assert torch.equal(given, model.forward_ids(**inputs))


@pytest.mark.parametrize(
    ("recipe", "fields", "expected"),
    [
        (GEMMA, {}, "gelu_tanh"),
        (GEMMA, {"hidden_act": "gelu"}, "gelu_tanh"),
        (GEMMA, {"hidden_act": "gelu", "hidden_activation": None}, "gelu_tanh"),
        (GEMMA, {"hidden_act": "gelu", "hidden_activation": "gelu_pytorch_tanh"}, "gelu_tanh"),
        (GEMMA, {"hidden_act": "relu"}, "relu"),
        (GEMMA2, {}, "gelu_tanh"),
        (GEMMA2, {"hidden_activation": "gelu"}, "gelu"),
        (GEMMA2, {"hidden_activation": "gelu_pytorch_tanh", "hidden_act": "gelu"}, "gelu_tanh"),
        (GEMMA2, {"hidden_activation": "silu"}, "silu"),
    ],
)
def test_activations(recipe: Recipe, fields: dict[str, Any], expected: str, tmp_path: Path) -> None:
    """As hidden_act, "gelu" stands for its approximation; as hidden_activation, for itself."""
    spec, unrecognised = recipe.read_config({**recipe.tiny, **fields})
    assert spec.blocks[0].mlp.activation == expected
    assert unrecognised == []
    folder = checkpoint(tmp_path / "m", recipe, **fields)
    edit_json(folder / "config.json", **fields)  # as it was before transformers read it
    assert_parity(recipe, folder, [2, 9])


@pytest.mark.parametrize(
    ("recipe", "changes", "error", "message"),
    [
        (GEMMA, {"use_bidirectional_attention": True}, UnsupportedError, "use_bidirectional_attention = True"),
        (GEMMA2, {"use_bidirectional_attention": True}, UnsupportedError, "use_bidirectional_attention = True"),
        (GEMMA, {"is_causal": False}, UnsupportedError, "is_causal = False"),
        (GEMMA2, {"is_causal": False}, UnsupportedError, "is_causal = False"),
        (GEMMA, {"partial_rotary_factor": 0.5}, UnsupportedError, "partial_rotary_factor"),
        (GEMMA, {"hidden_act": "relu", "hidden_activation": "gelu"}, CheckpointError, "hidden_activation = 'gelu'"),
        (GEMMA, {"hidden_activation": "relu"}, CheckpointError, "hidden_act and hidden_activation = 'relu' contra"),
        (GEMMA2, {"hidden_act": "relu"}, CheckpointError, "hidden_activation and hidden_act = 'relu' contradict"),
        (GEMMA2, {"attn_logit_softcapping": 0.0}, CheckpointError, "attn_logit_softcapping = 0.0"),
        (GEMMA2, {"attn_logit_softcapping": True}, CheckpointError, "attn_logit_softcapping = True"),
        (GEMMA2, {"query_pre_attn_scalar": 0}, CheckpointError, "query_pre_attn_scalar = 0"),
        (GEMMA2, {"sliding_window": None}, CheckpointError, "sliding_window = None"),
        (GEMMA2, {"sliding_window": 0}, CheckpointError, "sliding_window = 0"),
        (GEMMA2, {"sliding_window_size": 9}, CheckpointError, "sliding_window = 6 and sliding_window_size = 9"),
        (GEMMA2, {"layer_types": [FULL]}, CheckpointError, "layer_types"),
    ],
)
def test_what_is_refused(recipe: Recipe, changes: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        read(recipe, **changes)


@pytest.mark.parametrize("value", [0.0, -1.0, "30"])
def test_a_final_cap_that_is_none_is_refused(value: Any, tmp_path: Path) -> None:
    folder = make_decoder(tmp_path / "m", GEMMA2)
    edit_json(folder / "config.json", final_logit_softcapping=value)
    with pytest.raises(CheckpointError, match="final_logit_softcapping"):
        toolkit.convert(str(folder), tmp_path / "out", verify=False)


@BOTH
def test_a_language_models_tensors_are_the_base_models(recipe: Recipe, tmp_path: Path) -> None:
    """H3: with and without prefix and head: one identical module."""
    base = checkpoint(tmp_path / "base", recipe)
    assert_same_weights(encoder(recipe, make_decoder(tmp_path / "lm", recipe)), encoder(recipe, base))
