from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import GteConfig, GteForMaskedLM

import toolkit
from tests.recipes.stored import (
    Tensors,
    assert_identical,
    assert_inference_changes_nothing,
    load,
    prefixed,
    respell,
    rewrite,
    states,
)
from tests.tiny import edit_json, heat, make_checkpoint, write_json
from toolkit.conversion import convert
from toolkit.errors import CheckpointError, UnsupportedError
from toolkit.parity import verify_folder
from toolkit.registry import find_recipe
from toolkit.spec import EncoderSpec, RopeSpec

GTE = find_recipe("gte").recipe
NEW = find_recipe("new").recipe
# The configuration of the original checkpoints, with this recipe's tiny sizes.
ORIGINAL: dict[str, Any] = {
    "architectures": ["NewModel"],
    "attention_probs_dropout_prob": 0.0,
    "classifier_dropout": None,
    "hidden_act": "gelu",
    "hidden_dropout_prob": 0.1,
    "hidden_size": 40,
    "initializer_range": 0.02,
    "intermediate_size": 56,
    "layer_norm_eps": 1e-3,
    "layer_norm_type": "layer_norm",
    "logn_attention_clip1": False,
    "logn_attention_scale": False,
    "max_position_embeddings": 26,
    "model_type": "new",
    "num_attention_heads": 5,
    "num_hidden_layers": 3,
    "pack_qkv": True,
    "pad_token_id": 5,
    "position_embedding_type": "rope",
    "rope_scaling": None,
    "rope_theta": 300,
    "type_vocab_size": 3,
    "unpad_inputs": False,
    "use_memory_efficient_attention": False,
    "vocab_size": 61,
}
TO_NATIVE = {
    "encoder.layer": "layers",
    "attention.o_proj": "self_attn.o_proj",
    "attention.qkv_proj": "qkv_proj",
    "attn_ln": "post_attention_layernorm",
    "mlp_ln": "post_mlp_layernorm",
}
SPLIT = {
    "qkv_proj": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "up_gate_proj": ("up_proj", "gate_proj"),
}


def native(tensors: Tensors) -> Tensors:
    return respell(tensors, TO_NATIVE, SPLIT)


def unpacked(tensors: Tensors) -> Tensors:
    """As the original code stores them with `pack_qkv` off."""
    return respell(tensors, {}, {"qkv_proj": ("q_proj", "k_proj", "v_proj")})


FORMS = {"original": dict, "native": native, "unpacked": unpacked}


def read(recipe: Any = GTE, **changes: Any) -> EncoderSpec:
    return recipe.read_config({**ORIGINAL, **changes})[0]


def rope(spec: EncoderSpec) -> RopeSpec:
    assert spec.blocks[0].attention.rope is not None
    return spec.blocks[0].attention.rope


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return make_checkpoint(tmp_path / "gte", GTE)


# Stored forms


@pytest.mark.parametrize("prefix", ["", "gte.", "new.", "module.new."])
@pytest.mark.parametrize("names", FORMS)
def test_every_stored_form_is_one_module(names: str, prefix: str, checkpoint: Path) -> None:
    """H1: under both model types."""
    saved = load(checkpoint, GTE)
    rewrite(checkpoint, lambda tensors: prefixed(FORMS[names](tensors), prefix))
    assert_identical(load(checkpoint, GTE), saved)
    assert_identical(load(checkpoint, NEW), saved)


def test_model_type_new_converts_to_the_same_artifact(checkpoint: Path, tmp_path: Path) -> None:
    """No transformers class answers to it, so the module is compared with the one that passes parity as "gte"."""
    ours = convert(str(checkpoint), tmp_path / "gte-out", verify=False)
    write_json(checkpoint / "config.json", ORIGINAL)
    rewrite(checkpoint, lambda tensors: prefixed(tensors, "new."))
    theirs = convert(str(checkpoint), tmp_path / "new-out", verify=False)
    assert theirs.manifest.model_type == "new"
    assert theirs.manifest.spec == ours.manifest.spec
    assert not [warning for warning in theirs.manifest.warnings if "config.json" in warning]
    texts = ["the quick brown fox", "a b c"]
    vectors = [toolkit.load(r.out, device="cpu", mode="eager").embed(texts) for r in (ours, theirs)]
    assert torch.equal(torch.as_tensor(vectors[0]), torch.as_tensor(vectors[1]))


def test_heads_and_buffers_are_left_out(tmp_path: Path) -> None:
    """H3: what save_pretrained writes of a masked language model, and a stale buffer of frequencies."""
    model = GteForMaskedLM(GteConfig(**GTE.tiny))
    heat(model)
    model.save_pretrained(tmp_path / "head")
    model.gte.save_pretrained(tmp_path / "base")
    stale = {"gte.embeddings.rotary_emb.inv_freq": torch.zeros(4), "gte.pooler.dense.bias": torch.zeros(40)}
    rewrite(tmp_path / "head", lambda tensors: tensors | stale)
    assert_identical(load(tmp_path / "head", GTE), load(tmp_path / "base", GTE))


def test_mixed_prefixes_are_an_error(checkpoint: Path) -> None:
    """H1."""
    rewrite(checkpoint, lambda t: {("new." if "encoder" in name else "gte.") + name: t[name] for name in t})
    with pytest.raises(CheckpointError, match="missing tensor"):
        load(checkpoint, GTE)


@pytest.mark.parametrize(
    ("names", "lost"),
    [
        ("original", "encoder.layer.0.attention.qkv_proj.bias"),
        ("original", "encoder.layer.1.mlp.down_proj.bias"),
        ("original", "encoder.layer.2.mlp.up_gate_proj.weight"),
        ("original", "encoder.layer.2.attn_ln.bias"),
        ("unpacked", "encoder.layer.0.attention.v_proj.bias"),
        ("native", "layers.0.self_attn.v_proj.bias"),
        ("native", "layers.1.mlp.down_proj.bias"),
        ("native", "layers.2.mlp.up_proj.weight"),
        ("native", "layers.2.post_attention_layernorm.bias"),
    ],
)
def test_a_missing_tensor_is_named_as_the_checkpoint_would(names: str, lost: str, checkpoint: Path) -> None:
    """H2."""
    rewrite(checkpoint, lambda t: {name: tensor for name, tensor in FORMS[names](t).items() if name != lost})
    with pytest.raises(CheckpointError, match=f"missing tensor: '{lost}';"):
        load(checkpoint, GTE)


def test_inference_changes_no_buffer(checkpoint: Path) -> None:
    """J4."""
    assert_inference_changes_nothing(load(checkpoint, GTE))


# Segments


def test_no_segment_table(tmp_path: Path) -> None:
    """G1, H3: `type_vocab_size` 0, with a tokenizer that emits segment ids all the same."""
    folder = make_checkpoint(tmp_path / "gte", GTE, overrides={"type_vocab_size": 0})
    manifest = convert(str(folder), tmp_path / "out", verify=False).manifest
    assert manifest.spec.embedding.segments == 0
    report = verify_folder(tmp_path / "out", folder, device="cpu", modes=["eager"])
    assert report.passed, report.summary()


def test_a_segment_table_that_the_configuration_denies(checkpoint: Path) -> None:
    """G1."""
    edit_json(checkpoint / "config.json", type_vocab_size=0)
    with pytest.raises(CheckpointError, match=r"unexpected tensor: 'embeddings\.token_type_embeddings\.weight'"):
        load(checkpoint, GTE)


# Configurations


def test_rope_forms_agree() -> None:
    """C4: legacy fields and new object; each model type has its own default."""
    bare = {key: value for key, value in ORIGINAL.items() if not key.startswith("rope")}
    forms: list[dict[str, Any]] = [
        {"rope_theta": 300.0, "rope_scaling": {"type": "linear", "factor": 2.0}},
        {"rope_theta": 300, "rope_scaling": {"rope_type": "linear", "factor": 2}},
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 300.0, "factor": 2.0}},
    ]
    for recipe in (GTE, NEW):
        specs = [recipe.read_config(bare | form)[0] for form in forms]
        assert specs[0] == specs[1] == specs[2]
        assert (rope(specs[0]).base, rope(specs[0]).factor) == (300.0, 2.0)
    assert rope(GTE.read_config(bare)[0]).base == 160_000.0
    assert rope(NEW.read_config(bare)[0]).base == 10_000.0
    with pytest.raises(CheckpointError, match="contradict"):
        read(rope_parameters={"rope_type": "default", "rope_theta": 301.0})


def test_ntk_scaling_is_what_the_linear_form_of_converted_checkpoints_says(checkpoint: Path) -> None:
    """The original code multiplies the base and divides all angles; GteModel takes that as base and linear factor."""
    factor, dims = 8.0, 8
    edit_json(
        checkpoint / "config.json",
        rope_parameters={"rope_type": "linear", "rope_theta": 300.0 * factor, "factor": factor ** (2 / dims)},
    )
    reference = transformers.AutoModel.from_pretrained(checkpoint)
    ids = list(range(26))
    with torch.inference_mode():
        expected = reference(torch.tensor([ids])).last_hidden_state[0]
    linear = load(checkpoint, GTE)
    write_json(checkpoint / "config.json", ORIGINAL | {"rope_scaling": {"type": "ntk", "factor": factor}})
    ours = load(checkpoint, NEW)
    assert_identical(ours, linear)
    torch.testing.assert_close(states(ours, ids), expected, rtol=0, atol=2e-5)
    frequencies = torch.tensor([(300 * factor) ** (-2 * i / dims) / factor ** (2 / dims) for i in range(4)])
    torch.testing.assert_close(ours.get_buffer("ropes.0.cos")[1], frequencies.cos())
    assert rope(read(NEW, rope_scaling={"type": "ntk", "factor": 1})) == rope(read(NEW))


@pytest.mark.parametrize(
    ("scaling", "message"),
    [
        ({"type": "ntk", "factor": 8.0, "mixed_b": 0.9}, "the rope parameter 'mixed_b' is not supported"),
        ({"type": "ntk", "factor": 0.5}, "factor = 0.5, expected at least 1"),
        ({"type": "ntk"}, "factor = None, expected a positive number"),
        ({"type": "ntk", "factor": "8"}, "factor = '8', expected a positive number"),
        (
            {"type": "yarn", "factor": 8.0},
            "rope type 'yarn' is not supported; supported: default, dynamic, linear, ntk",
        ),
    ],
)
def test_scaling_that_is_refused(scaling: dict[str, Any], message: str) -> None:
    with pytest.raises((UnsupportedError, CheckpointError), match=message):
        read(NEW, rope_scaling=scaling)


def test_the_transformers_class_knows_no_ntk() -> None:
    with pytest.raises(UnsupportedError, match="rope type 'ntk' is not supported; supported: default, dynamic, linear"):
        read(GTE, rope_scaling={"type": "ntk", "factor": 8.0})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("layer_norm_type", "rms_norm"),
        ("position_embedding_type", "absolute"),
        ("logn_attention_scale", True),
        ("logn_attention_clip1", True),
        ("partial_rotary_factor", 0.5),
        ("hidden_act", "elu"),
    ],
)
@pytest.mark.parametrize("recipe", [GTE, NEW], ids=lambda recipe: recipe.model_type)
def test_variants_are_refused_by_name(recipe: Any, name: str, value: object) -> None:
    """I4: variants under the same name."""
    with pytest.raises(UnsupportedError, match=f"config.json: {name} = {value!r} is not supported"):
        read(recipe, **{name: value})


def test_defaults_of_the_original_code() -> None:
    spec = NEW.read_config({"model_type": "new"})[0]
    assert (spec.embedding.vocab_size, spec.usable_length, spec.embedding.segments) == (30528, 2048, 1)
    assert (spec.hidden, len(spec.blocks), spec.blocks[0].mlp.width) == (768, 12, 3072)
