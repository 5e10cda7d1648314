from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from transformers import NomicBertConfig, NomicBertForMaskedLM

from tests.recipes.stored import (
    Tensors,
    assert_identical,
    assert_inference_changes_nothing,
    load,
    prefixed,
    respell,
    rewrite,
)
from tests.tiny import heat, make_checkpoint, write_json
from toolkit.errors import CheckpointError, UnsupportedError
from toolkit.registry import find_recipe
from toolkit.spec import EncoderSpec

NOMIC = find_recipe("nomic_bert").recipe
# The configuration of the original checkpoints, in their own spelling, with this recipe's tiny sizes.
ORIGINAL: Mapping[str, Any] = {
    "activation_function": "swiglu",
    "architectures": ["NomicBertModel"],
    "attn_pdrop": 0.0,
    "causal": False,
    "dense_seq_output": True,
    "embd_pdrop": 0.0,
    "fused_bias_fc": True,
    "fused_dropout_add_ln": True,
    "head_dim": 12,
    "initializer_range": 0.02,
    "layer_norm_epsilon": 1e-3,
    "max_trained_positions": 9,
    "mlp_fc1_bias": False,
    "mlp_fc2_bias": False,
    "model_type": "nomic_bert",
    "n_embd": 40,
    "n_head": 5,
    "n_inner": 56,
    "n_layer": 3,
    "n_positions": 26,
    "pad_vocab_size_multiple": 64,
    "parallel_block": False,
    "parallel_block_tied_norm": False,
    "prenorm": False,
    "qkv_proj_bias": False,
    "reorder_and_upcast_attn": False,
    "resid_pdrop": 0.0,
    "rotary_emb_base": 70,
    "rotary_emb_fraction": 1.0,
    "rotary_emb_interleaved": False,
    "rotary_emb_scale_base": None,
    "rotary_scaling_factor": None,
    "scale_attn_by_inverse_layer_idx": False,
    "scale_attn_weights": True,
    "summary_activation": None,
    "summary_first_dropout": 0.0,
    "summary_proj_to_labels": True,
    "summary_type": "cls_index",
    "summary_use_proj": True,
    "type_vocab_size": 3,
    "use_cache": True,
    "use_flash_attn": True,
    "use_rms_norm": False,
    "use_xentropy": True,
    "vocab_size": 61,
}
TO_NATIVE = {
    "encoder.layers": "layers",
    "emb_ln": "embeddings.LayerNorm",
    "attn.out_proj": "self_attn.o_proj",
    "attn.Wqkv": "Wqkv",
    "norm1": "post_attention_layernorm",
    "norm2": "post_mlp_layernorm",
    "fc11": "up_proj",
    "fc12": "gate_proj",
    "fc2": "down_proj",
}
SPLIT = {"Wqkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")}


def native(tensors: Tensors) -> Tensors:
    return respell(tensors, TO_NATIVE, SPLIT)


def read(**changes: Any) -> EncoderSpec:
    return NOMIC.read_config({**NOMIC.tiny, **changes})[0]


def read_original(**changes: Any) -> EncoderSpec:
    spec, unrecognised = NOMIC.read_config({**ORIGINAL, **changes})
    assert unrecognised == []
    return spec


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return make_checkpoint(tmp_path / "nomic", NOMIC)


# Stored forms


@pytest.mark.parametrize("prefix", ["", "nomic_bert.", "bert.", "module.", "_orig_mod.nomic_bert."])
@pytest.mark.parametrize("names", ["original", "native"])
def test_every_stored_form_is_one_module(names: str, prefix: str, checkpoint: Path) -> None:
    """H1, H2 (wrappers)."""
    saved = load(checkpoint, NOMIC)
    rewrite(checkpoint, lambda tensors: prefixed(native(tensors) if names == "native" else tensors, prefix))
    assert_identical(load(checkpoint, NOMIC), saved)


def test_heads_and_buffers_are_left_out(tmp_path: Path, checkpoint: Path) -> None:
    """H3: what save_pretrained writes of a masked language model, and a stale buffer of frequencies."""
    model = NomicBertForMaskedLM(NomicBertConfig(**NOMIC.tiny))
    heat(model)
    model.save_pretrained(tmp_path / "head")
    model.nomic_bert.save_pretrained(tmp_path / "base")

    def stale(tensors: Tensors) -> Tensors:
        norm = tensors["nomic_bert.emb_ln.bias"]
        return tensors | {"nomic_bert.encoder.layers.1.attn.rotary_emb.inv_freq": norm, "classifier.bias": norm}

    rewrite(tmp_path / "head", stale)
    assert_identical(load(tmp_path / "head", NOMIC), load(tmp_path / "base", NOMIC))


def test_mixed_prefixes_are_an_error(checkpoint: Path) -> None:
    """H1."""
    rewrite(checkpoint, lambda t: {("nomic_bert." if "encoder" in name else "") + name: t[name] for name in t})
    with pytest.raises(CheckpointError, match="missing tensor"):
        load(checkpoint, NOMIC)


@pytest.mark.parametrize(
    ("names", "lost"),
    [
        ("original", "encoder.layers.1.norm1.bias"),
        ("original", "encoder.layers.2.mlp.fc12.weight"),
        ("original", "encoder.layers.0.attn.Wqkv.weight"),
        ("original", "emb_ln.bias"),
        ("native", "layers.1.post_attention_layernorm.bias"),
        ("native", "layers.2.mlp.gate_proj.weight"),
        ("native", "layers.0.self_attn.k_proj.weight"),
        ("native", "embeddings.LayerNorm.bias"),
    ],
)
def test_a_missing_tensor_is_named_as_the_checkpoint_would(names: str, lost: str, checkpoint: Path) -> None:
    """H2."""

    def lose(tensors: Tensors) -> Tensors:
        spelled = native(tensors) if names == "native" else tensors
        return {name: tensor for name, tensor in spelled.items() if name != lost}

    rewrite(checkpoint, lose)
    with pytest.raises(CheckpointError, match=f"missing tensor: '{lost}';"):
        load(checkpoint, NOMIC)


def test_a_bias_that_the_architecture_lacks_is_an_error(checkpoint: Path) -> None:
    """I1: weights of a variant with biases are not run without them."""
    rewrite(checkpoint, lambda t: t | {"encoder.layers.0.attn.Wqkv.bias": t["emb_ln.bias"].repeat(3)})
    with pytest.raises(CheckpointError, match=r"unexpected tensor: 'encoder\.layers\.0\.attn\.Wqkv\.bias'"):
        load(checkpoint, NOMIC)


def test_inference_changes_no_buffer(checkpoint: Path) -> None:
    """J4."""
    assert_inference_changes_nothing(load(checkpoint, NOMIC))


# Configurations


def test_the_original_configuration_is_the_same_module(checkpoint: Path) -> None:
    """C4: sizes, epsilon, and the rotary base under their original names."""
    saved = load(checkpoint, NOMIC)
    write_json(checkpoint / "config.json", dict(ORIGINAL))
    assert_identical(load(checkpoint, NOMIC), saved)
    assert read_original() == read()
    both = read_original(**{k: v for k, v in NOMIC.tiny.items() if k != "pad_token_id"})
    assert both == read()


def test_rope_forms_agree() -> None:
    """C4: legacy field, original field, new object; none of them is the default."""
    bare = {key: value for key, value in NOMIC.tiny.items() if key != "rope_theta"}
    forms: list[dict[str, Any]] = [
        {"rope_theta": 70.0},
        {"rotary_emb_base": 70},
        {"rope_theta": 70, "rotary_emb_base": 70.0, "rope_parameters": {"rope_type": "default", "rope_theta": 70.0}},
        {"rope_theta": 70, "rope_scaling": None},
        {"rope_parameters": {"rope_theta": 70.0}},
    ]
    assert [NOMIC.read_config(bare | form)[0] == read() for form in forms] == [True] * len(forms)
    rope = NOMIC.read_config(bare)[0].blocks[0].attention.rope
    assert rope is not None
    assert (rope.base, rope.factor, rope.dims) == (1000.0, 1.0, 12)
    scaled = NOMIC.read_config(bare | {"rope_theta": 70, "rope_scaling": {"type": "linear", "factor": 3.0}})[0]
    assert scaled == read(rope_parameters={"rope_type": "linear", "factor": 3.0, "rope_theta": 70.0})
    assert scaled != read()


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ({"n_embd": 40}, {"hidden_size": 80}),
        ({"n_layer": 3}, {"num_hidden_layers": 2}),
        ({"n_head": 5}, {"num_attention_heads": 4}),
        ({"n_inner": 56}, {"intermediate_size": 57}),
        ({"layer_norm_epsilon": 1e-3}, {"layer_norm_eps": 1e-4}),
        ({"rotary_emb_base": 70}, {"rope_theta": 71.0}),
        ({"rotary_emb_base": 70}, {"rope_parameters": {"rope_theta": 71.0}}),
        ({"activation_function": "swiglu"}, {"hidden_act": "gelu"}),
    ],
)
def test_spellings_that_contradict(first: dict[str, Any], second: dict[str, Any]) -> None:
    with pytest.raises(CheckpointError, match=f"{next(iter(first))}.*contradict|contradict.*{next(iter(first))}"):
        read_original(**first, **second)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("prenorm", True),
        ("parallel_block", True),
        ("causal", True),
        ("use_rms_norm", True),
        ("qkv_proj_bias", True),
        ("mlp_fc1_bias", True),
        ("mlp_fc2_bias", True),
        ("rotary_emb_fraction", 0.5),
        ("rotary_emb_fraction", 0.0),
        ("rotary_emb_interleaved", True),
        ("rotary_emb_scale_base", 512),
        ("scale_attn_weights", False),
        ("scale_attn_by_inverse_layer_idx", True),
        ("moe_every_n_layers", 2),
        ("num_experts", 8),
        ("activation_function", "gelu"),
        ("activation_function", "geglu"),
        ("partial_rotary_factor", 0.5),
    ],
)
def test_variants_are_refused_by_name(name: str, value: object) -> None:
    """I4: variants under the same name."""
    with pytest.raises(UnsupportedError) as caught:
        read_original(**{name: value})
    assert f"config.json: {name} = {value!r} is not supported" in str(caught.value)


def test_inner_width_of_null_is_four_times_the_hidden_size() -> None:
    assert read_original(n_inner=None).blocks[0].mlp.width == 160
    assert read_original(n_inner=None, intermediate_size=56) == read_original()
    bare = {key: value for key, value in ORIGINAL.items() if key != "n_inner"}
    assert NOMIC.read_config(bare)[0].blocks[0].mlp.width == 3072


def test_length_is_what_rotary_positions_are_meant_for() -> None:
    """A3; a scaling factor changes nothing up to the trained length, and everything behind it."""
    assert read_original(n_positions=30, max_position_embeddings=20).usable_length == 30
    assert read_original(rotary_scaling_factor=2).usable_length == 9
    assert read_original(rotary_scaling_factor=2.0, n_positions=7).usable_length == 7
    assert read_original(rotary_scaling_factor=2, n_positions=8192, max_trained_positions=None).usable_length == 2048
    dynamic = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 70.0}
    assert read_original(n_positions=30, max_position_embeddings=20, rope_parameters=dynamic).usable_length == 20
    with pytest.raises(CheckpointError, match="rotary_scaling_factor = 'two'"):
        read_original(rotary_scaling_factor="two")
