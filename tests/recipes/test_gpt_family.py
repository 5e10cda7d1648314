"""What is particular to GPT-2, GPT-NeoX and OPT: layouts of stored tensors, branches side by side, narrow tables."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import toolkit
from tests.recipes.compare import rewrite
from tests.recipes.loading import check_each_tensor_is_needed, check_stored_forms, matches, read
from tests.tiny import add_layer_mix, make_checkpoint, make_decoder, make_tokenizer
from toolkit.errors import CheckpointError, InputError, UnsupportedError
from toolkit.parity import verify_folder
from toolkit.recipe import Recipe
from toolkit.registry import find_recipe

GPT2, NEOX, OPT = FAMILY = [find_recipe(name).recipe for name in ("gpt2", "gpt_neox", "opt")]
LENGTHS = (1, 2, 9, 26)


def buffers(*names: str) -> dict[str, torch.Tensor]:
    """Each layer's, with a mask and a number as older versions stored them."""
    return {name.format(i): torch.ones(1, 1, 26, 26, dtype=torch.uint8) for name in names for i in range(3)}


OTHERS: Mapping[str, Mapping[str, torch.Tensor]] = {
    "gpt2": buffers("h.{}.attn.bias", "h.{}.attn.masked_bias"),
    "gpt_neox": buffers("layers.{}.attention.bias", "layers.{}.attention.masked_bias")
    | buffers("layers.{}.attention.rotary_emb.inv_freq")
    | {"rotary_emb.inv_freq": torch.ones(2)},
    "opt": {},
}


@pytest.mark.parametrize("recipe", FAMILY, ids=lambda recipe: recipe.model_type)
def test_every_stored_form(recipe: Recipe) -> None:
    """H1, H2, H3: prefixes, wrappers and stale buffers change no bit; the buffers are dropped with a reason."""
    check_stored_forms(recipe, prefix=recipe.prefixes[0], others=OTHERS[recipe.model_type])
    check_each_tensor_is_needed(recipe)


@pytest.mark.parametrize(
    ("recipe", "changes"),
    [
        (GPT2, {"n_inner": None}),
        (GPT2, {"scale_attn_weights": False}),
        (GPT2, {"scale_attn_by_inverse_layer_idx": False}),
        (GPT2, {"activation_function": "gelu_new", "n_head": 2}),
        (GPT2, {"is_causal": False}),
        (NEOX, {"use_parallel_residual": False}),
        (NEOX, {"attention_bias": False}),
        (NEOX, {"hidden_act": "gelu_fast"}),
        (NEOX, {"rotary_pct": 1.0, "num_attention_heads": 2}),
        (NEOX, {"rotary_pct": 0.3}),
        (NEOX, {"rope_scaling": {"type": "linear", "factor": 2.0}}),
        (NEOX, {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8}}),
        (NEOX, {"is_decoder": True, "is_causal": False}),
        (OPT, {"word_embed_proj_dim": None}),
        (OPT, {"word_embed_proj_dim": 56}),
        (OPT, {"do_layer_norm_before": False}),
        (OPT, {"do_layer_norm_before": False, "word_embed_proj_dim": 40, "_remove_final_layer_norm": True}),
        (OPT, {"_remove_final_layer_norm": True}),
        (OPT, {"enable_bias": False}),
        (OPT, {"is_causal": False}),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else value.model_type,
)
def test_states_of_every_variant(recipe: Recipe, changes: dict[str, Any]) -> None:
    """From ids and from embeddings, up to the last position."""
    matches(recipe, LENGTHS, **changes)


@pytest.mark.parametrize(
    ("recipe", "changes"),
    [
        (GPT2, {"n_inner": None, "activation_function": "gelu_new"}),
        (NEOX, {"use_parallel_residual": False, "attention_bias": False}),
        (OPT, {"do_layer_norm_before": False}),
        (OPT, {"word_embed_proj_dim": 40, "_remove_final_layer_norm": True, "enable_bias": False}),
    ],
    ids=["gpt2", "gpt_neox", "opt-350m", "opt"],
)
def test_variants_generate(recipe: Recipe, changes: dict[str, Any], tmp_path: Path) -> None:
    source = make_decoder(tmp_path / "m", recipe, overrides=changes)
    toolkit.convert(str(source), tmp_path / "out", verify=False)
    report = verify_folder(tmp_path / "out", source, device="cpu", modes=["eager"])
    assert report.passed, report.summary()


# GPT-2


def test_either_name_of_a_field() -> None:
    """transformers' common names stand for GPT-2's own; two that differ are no guess."""
    names = {
        "hidden_size": "n_embd",
        "num_hidden_layers": "n_layer",
        "num_attention_heads": "n_head",
        "max_position_embeddings": "n_positions",
    }
    renamed = {name: GPT2.tiny[own] for name, own in names.items()}
    others = {name: value for name, value in GPT2.tiny.items() if name not in names.values()}
    assert GPT2.read_config({**others, **renamed}) == GPT2.read_config(GPT2.tiny)
    for name, own in names.items():
        with pytest.raises(CheckpointError, match=f"{own} = .* and {name} = 1 contradict each other"):
            read(GPT2, **{name: 1})


def test_each_layer_has_its_scale() -> None:
    assert [a.scale for a in read(GPT2).attentions] == [8**-0.5 / k for k in (1, 2, 3)]
    plain = read(GPT2, scale_attn_weights=False, scale_attn_by_inverse_layer_idx=False)
    assert [a.scale for a in plain.attentions] == [1.0] * 3


def test_segments_are_refused(tmp_path: Path) -> None:
    """G1: the reference would add the token table's rows for them."""
    folder = make_checkpoint(tmp_path / "m", GPT2, tokenizer=make_tokenizer(segments=True))
    with pytest.raises(UnsupportedError, match=r"tokenizer_config\.json: model_input_names has token_type_ids"):
        toolkit.convert(str(folder), tmp_path / "out")


@pytest.mark.parametrize(
    ("recipe", "field", "value"),
    [
        (GPT2, "reorder_and_upcast_attn", True),
        (GPT2, "add_cross_attention", True),
        (OPT, "layer_norm_elementwise_affine", False),
    ],
)
def test_what_is_refused(recipe: Recipe, field: str, value: bool) -> None:
    with pytest.raises(UnsupportedError, match=f"{field} = {value} is not supported"):
        read(recipe, **{field: value})


# GPT-NeoX


@pytest.mark.parametrize("name", ["embed_out", "lm_head"])
def test_either_name_of_the_output_layer(name: str, tmp_path: Path) -> None:
    source = make_decoder(tmp_path / "m", NEOX)

    def change(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        (stored,) = {key for key in tensors if key.startswith(("embed_out", "lm_head"))}
        return {f"{name}.weight" if key == stored else key: tensor for key, tensor in tensors.items()}

    rewrite(source, change)
    report = toolkit.convert(str(source), tmp_path / "out", verify=False)
    weights = load_file(source / "model.safetensors")
    assert torch.equal(
        load_file(tmp_path / "out" / "model.safetensors")["head.steps.out.linear.weight"], weights[f"{name}.weight"]
    )
    (entry,) = (entry for entry in report.manifest.audit if entry["source"] == f"{name}.weight")
    assert entry["action"] == "loaded"


@pytest.mark.parametrize(
    ("changes", "dims"),
    [
        ({}, 4),
        ({"rotary_pct": 0.2, "num_attention_heads": 2}, 4),
        ({"rope_parameters": {"rope_theta": 300, "partial_rotary_factor": 0.5}}, 4),
        ({"rope_parameters": {"rope_type": "default"}}, 4),
    ],
)
def test_how_much_of_a_head_is_rotated(changes: dict[str, Any], dims: int) -> None:
    rope = read(NEOX, **changes).attentions[0].rope
    assert rope is not None
    assert (rope.dims, rope.base) == (dims, 300.0)
    bare = NEOX.read_config({"model_type": "gpt_neox"})[0].attentions[0].rope
    assert bare is not None
    assert (bare.dims, bare.base) == (24, 10_000.0)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rotary_pct": 0.1}, "even head size, not 0"),
        ({"rotary_pct": 0.4}, "even head size, not 3"),
        ({"rotary_pct": 1.5}, "rotary_pct = 1.5, expected a number from 0 to 1"),
        ({"rotary_pct": "half"}, "rotary_pct = 'half', expected a number"),
        ({"rope_parameters": {"partial_rotary_factor": 0.75}}, "rotary_pct = 0.5 and 0.75 in rope_parameters contra"),
        ({"rope_parameters": {"rope_theta": 3.0}}, "rope_theta = 3.0 and rotary_emb_base = 300 contradict"),
    ],
)
def test_rotary_positions_that_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        read(NEOX, **changes)


# OPT


def test_states_are_as_wide_as_the_table(tmp_path: Path) -> None:
    """I6: the last hidden state lies behind the output projection; the seam before the one into the layers."""
    folder = make_checkpoint(tmp_path / "m", OPT, pooling=None)
    manifest = toolkit.convert(str(folder), tmp_path / "out").manifest
    assert (manifest.spec.hidden, manifest.spec.state_width, manifest.seam_width) == (40, 24, 24)
    runner = toolkit.load(tmp_path / "out", device="cpu", mode="eager")
    assert runner.embed(["the fox"]).shape == (1, 24)
    assert [tuple(states.shape) for states in runner.token_states([toolkit.TokenIds([3, 4]), ""])] == [(2, 24), (2, 24)]
    assert runner.embed_tokens([3, 4]).shape == (2, 24)
    with pytest.raises(InputError, match=r"shape \(2, 40\), expected \[tokens, 24\]"):
        runner.embed(toolkit.PromptEmbeds(torch.zeros(2, 40)))


@pytest.mark.parametrize("make", [make_checkpoint, make_decoder])
def test_states_of_no_tokens_are_as_wide(make: Callable[[Path, Recipe], Path], tmp_path: Path) -> None:
    folder = make(tmp_path / "m", OPT)
    make_tokenizer(special_tokens=False, segments=False).save_pretrained(folder)
    toolkit.convert(str(folder), tmp_path / "out", verify=False)
    runner = toolkit.load(tmp_path / "out", device="cpu", mode="eager")
    assert runner.token_states([""])[0].shape == (0, 24)


def test_positions_start_behind_two_unused_rows() -> None:
    spec = read(OPT)
    assert (spec.embedding.positions, spec.embedding.position_start, spec.usable_length) == (28, 2, 26)


def test_no_norm_behind_the_layers() -> None:
    assert read(OPT).final_norm is not None
    for field, value in (("do_layer_norm_before", False), ("_remove_final_layer_norm", True)):
        assert read(OPT, **{field: value}).final_norm is None


def test_a_mean_over_projected_states_is_refused(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "m", OPT)
    add_layer_mix(folder, [0.5, 1.0, 2.0], width=24)
    with pytest.raises(UnsupportedError, match="1_Mix: a mean of layers' states is not supported for projected ones"):
        toolkit.convert(str(folder), tmp_path / "out")
