"""What is particular to ModernBERT."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, ModernBertConfig, ModernBertForMaskedLM

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
from tests.tiny import heat
from toolkit.errors import CheckpointError, UnsupportedError
from toolkit.registry import find_recipe

RECIPE = find_recipe("modernbert").recipe
FULL, LOCAL = "full_attention", "sliding_attention"


def types_of(**changes: Any) -> list[str]:
    spec = read(RECIPE, **changes)
    return [FULL if attention.reach is None else LOCAL for attention in spec.attentions]


@pytest.mark.parametrize(("width", "reach"), [(1, 0), (2, 1), (7, 3), (8, 4), (9, 4)])
def test_reach_is_the_references_layer_by_layer(width: int, reach: int, tmp_path: Path) -> None:
    """B3: local_attention is the whole width, half of it to either side; both ends belong to it."""
    folder = checkpoint(tmp_path / "m", RECIPE, local_attention=width)
    ours, theirs = both_reaches(RECIPE, folder, "attn", 25)
    near, everything = list(range(-reach, reach + 1)), list(range(-12, 13))
    assert ours == theirs == [everything, near, everything, near]


@pytest.mark.parametrize("width", [8, 9])
def test_lengths_around_the_window(width: int, tmp_path: Path) -> None:
    """B3: shorter than the window, equal, longer, and twice as long; also around its half."""
    folder = checkpoint(tmp_path / "m", RECIPE, local_attention=width)
    assert_parity(RECIPE, folder, [3, 4, 5, 6, width - 1, width, width + 1, 2 * width, 30])


@pytest.mark.parametrize("every", [1, 2, 3, 4, 9])
def test_derived_layer_types_are_the_references(every: int) -> None:
    """B5: element by element."""
    config = AutoConfig.for_model("modernbert", num_hidden_layers=7, global_attn_every_n_layers=every)
    assert types_of(num_hidden_layers=7, global_attn_every_n_layers=every) == config.layer_types


def test_default_of_the_pattern_is_the_references() -> None:
    config = AutoConfig.for_model("modernbert", num_hidden_layers=7)
    assert types_of(num_hidden_layers=7, global_attn_every_n_layers=...) == config.layer_types


def test_explicit_layer_types_win(tmp_path: Path) -> None:
    """B5: a list that contradicts the pattern; the first layer slides, so nothing hangs on its number but the norm."""
    types = [LOCAL, FULL, FULL, LOCAL]
    assert types_of(layer_types=types) == types
    folder = checkpoint(tmp_path / "m", RECIPE, layer_types=types)
    assert_parity(RECIPE, folder, [5, 9, 30])


@pytest.mark.parametrize("types", [[FULL] * 3, [FULL] * 5, [FULL, LOCAL, FULL, "chunked_attention"], FULL, [1] * 4])
def test_impossible_layer_types(types: object) -> None:
    with pytest.raises(CheckpointError, match="layer_types"):
        read(RECIPE, layer_types=types)


def test_each_kind_of_layer_has_its_rope_base() -> None:
    """C4: global_rope_theta for full layers, local_rope_theta for sliding ones."""
    bases = [attention.rope.base for attention in read(RECIPE).attentions if attention.rope]
    assert bases == [700.0, 30.0, 700.0, 30.0]
    names = ("global_rope_theta", "local_rope_theta")
    plain = read(RECIPE, **dict.fromkeys(names, ...))
    assert [attention.rope.base for attention in plain.attentions if attention.rope] == [160_000.0, 10_000.0] * 2


def nested(full: dict[str, Any] | None, local: dict[str, Any] | None) -> dict[str, Any]:
    return {"rope_parameters": {FULL: full, LOCAL: local}}


def test_both_forms_of_rope_give_one_specification() -> None:
    """C4: legacy fields, nested parameters, and both of them if they agree."""
    new = nested({"rope_type": "default", "rope_theta": 700.0}, {"rope_type": "default", "rope_theta": 30})
    old = {"global_rope_theta": ..., "local_rope_theta": ...}
    assert read(RECIPE, **new, **old) == read(RECIPE, **new) == read(RECIPE)
    assert read(RECIPE, **nested(None, {"rope_theta": 30}), local_rope_theta=...) == read(RECIPE)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (nested({"rope_theta": 701.0}, None), "rope_theta = 701.0 and global_rope_theta = 700.0 contradict"),
        (nested(None, {"rope_theta": 31.0}), "rope_theta = 31.0 and local_rope_theta = 30.0 contradict"),
        ({"rope_parameters": {"rope_theta": 5e4}}, "rope_parameters holds 'rope_theta' = 50000.0"),
        ({"rope_parameters": {FULL: 5e4}}, "rope_parameters holds 'full_attention' = 50000.0"),
        ({"global_rope_theta": 0}, "rope_theta = 0, expected a positive number"),
        ({"hidden_size": 35}, "even head size, not 7"),
        ({"local_attention": 0}, "local_attention = 0"),
        ({"local_attention": -1}, "local_attention = -1"),
    ],
)
def test_contradictions_and_impossible_values(changes: dict[str, Any], message: str) -> None:
    """C4: nothing is defaulted silently."""
    with pytest.raises(CheckpointError, match=message):
        read(RECIPE, **changes)


@pytest.mark.parametrize(
    "changes",
    [
        {"rope_scaling": {"rope_type": "linear", "factor": 2.0}},
        {"sliding_window": 3},
        {"is_causal": True},
        {"causal_mask": True},
        {"partial_rotary_factor": 0.5},
        nested({"rope_type": "yarn", "factor": 2.0}, None),
        nested({"rope_type": "default", "partial_rotary_factor": 0.5}, None),
    ],
    ids=str,
)
def test_unsupported_fields_are_named(changes: dict[str, Any]) -> None:
    """B4, C4: related keys that change the numbers, or might."""
    with pytest.raises(UnsupportedError, match="is not supported"):
        read(RECIPE, **changes)


def test_fields_of_hub_checkpoints_are_known() -> None:
    fields = dict.fromkeys(("reference_compile", "repad_logits_with_grad", "layer_norm_eps"), 1)
    raw = {**RECIPE.tiny, **fields, "position_embedding_type": "absolute", "causal_mask": False, "is_causal": False}
    assert read_all(RECIPE, raw) == (read(RECIPE), [])


def test_stored_with_and_without_prefix(tmp_path: Path) -> None:
    """H1: one identical module; a mixture is refused."""
    plain = checkpoint(tmp_path / "plain", RECIPE)
    under = rewrite(checkpoint(tmp_path / "under", RECIPE), lambda ts: {f"model.{name}": t for name, t in ts.items()})
    assert_same_weights(encoder(RECIPE, plain), encoder(RECIPE, under))
    mixed = rewrite(plain, lambda ts: {("model." * name.startswith("layers.1")) + name: t for name, t in ts.items()})
    with pytest.raises(CheckpointError, match="missing tensor"):
        encoder(RECIPE, mixed)


def test_masked_language_model_has_the_same_base(tmp_path: Path) -> None:
    """H1: the head's tensors are dropped, with or without its tied output."""
    model = ModernBertForMaskedLM(ModernBertConfig(**RECIPE.tiny))
    heat(model)
    model.save_pretrained(tmp_path / "mlm")
    model.model.save_pretrained(tmp_path / "base")
    base = encoder(RECIPE, tmp_path / "base")
    assert_same_weights(encoder(RECIPE, tmp_path / "mlm"), base)
    extra = {"decoder.weight": torch.zeros(61, 40), "head.norm.bias": torch.zeros(40)}
    assert_same_weights(encoder(RECIPE, rewrite(tmp_path / "mlm", lambda ts: {**ts, **extra})), base)


@pytest.mark.parametrize("name", ["norm_bias", "attention_bias", "mlp_bias"])
def test_absent_biases(name: str, tmp_path: Path) -> None:
    """H3: an absent bias is none; one that is stored against config.json, or missing, is an error."""
    folder = checkpoint(tmp_path / "m", RECIPE, **{name: False})
    assert_parity(RECIPE, folder, [1, 7, 30])
    stray = {"norm_bias": "final_norm", "attention_bias": "layers.1.attn.Wqkv", "mlp_bias": "layers.1.mlp.Wo"}[name]
    rewrite(folder, lambda ts: {**ts, f"{stray}.bias": torch.zeros(ts[f"{stray}.weight"].shape[0])})
    with pytest.raises(CheckpointError, match=f"unexpected tensor: '{stray}.bias'"):
        encoder(RECIPE, folder)
    rewrite(folder, lambda ts: ts, **{name: True})
    with pytest.raises(CheckpointError, match="missing tensor"):
        encoder(RECIPE, folder)


def test_first_layer_has_no_attention_norm(tmp_path: Path) -> None:
    """B3, H3: a stored one would have to be guessed at."""
    assert [block.attention_norm for block in read(RECIPE).blocks] == [False, True, True, True]
    folder = checkpoint(tmp_path / "m", RECIPE)
    rewrite(folder, lambda ts: {**ts, "layers.0.attn_norm.weight": torch.ones(40)})
    with pytest.raises(CheckpointError, match=r"unexpected tensor: 'layers\.0\.attn_norm\.weight'"):
        encoder(RECIPE, folder)


def test_stored_frequencies_do_not_override(tmp_path: Path) -> None:
    """H3: buffers of rope are dropped by name."""
    folder = checkpoint(tmp_path / "m", RECIPE)
    before = encoder(RECIPE, folder)
    rewrite(folder, lambda ts: {**ts, "layers.2.attn.rotary_emb.inv_freq": torch.ones(4)})
    assert_same_weights(encoder(RECIPE, folder), before)


def test_width_of_the_window_must_not_reach_other_sequences(tmp_path: Path) -> None:
    """B2: a neighbour in the batch changes nothing, within reach or not."""
    model, one = encoder(RECIPE, checkpoint(tmp_path / "m", RECIPE)), packed(5)
    ids = torch.cat([packed(17)["ids"], one["ids"], packed(3)["ids"]])
    positions = torch.cat([torch.arange(n, dtype=torch.int32) for n in (17, 5, 3)])
    cu_seqlens = torch.tensor([0, 17, 22, 25], dtype=torch.int32)
    max_len = torch.tensor([17], dtype=torch.int32)
    with torch.inference_mode():
        together = model.forward_ids(ids, positions, torch.zeros_like(ids), cu_seqlens, max_len)
        torch.testing.assert_close(together[17:22], model.forward_ids(**one), rtol=1e-5, atol=1e-5)
