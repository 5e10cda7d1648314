from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import JinaEmbeddingsV3Config, JinaEmbeddingsV3ForMaskedLM

from tests.recipes.stored import (
    Tensors,
    assert_identical,
    assert_inference_changes_nothing,
    load,
    prefixed,
    respell,
    rewrite,
)
from tests.tiny import edit_json, heat, make_checkpoint
from toolkit.conversion import convert
from toolkit.errors import CheckpointError, UnsupportedError
from toolkit.registry import find_recipe
from toolkit.spec import EncoderSpec

JINA = find_recipe("jina_embeddings_v3").recipe
BARE = {key: value for key, value in JINA.tiny.items() if key != "rope_parameters"}
TO_NATIVE = {
    "encoder.layers": "layers",
    "emb_ln": "embeddings.LayerNorm",
    "mixer.out_proj": "self_attn.o_proj",
    "mixer.Wqkv": "Wqkv",
    "norm1": "post_attention_layernorm",
    "norm2": "post_mlp_layernorm",
}
SPLIT = {"Wqkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")}


def native(tensors: Tensors) -> Tensors:
    return respell(tensors, TO_NATIVE, SPLIT)


def read(**changes: Any) -> EncoderSpec:
    return JINA.read_config({**BARE, **changes})[0]


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return make_checkpoint(tmp_path / "jina", JINA)


@pytest.mark.parametrize("prefix", ["", "roberta.", "module.roberta."])
@pytest.mark.parametrize("names", ["original", "native"])
def test_every_stored_form_is_one_module(names: str, prefix: str, checkpoint: Path) -> None:
    """H1."""
    saved = load(checkpoint, JINA)
    rewrite(checkpoint, lambda tensors: prefixed(native(tensors) if names == "native" else tensors, prefix))
    assert_identical(load(checkpoint, JINA), saved)


def test_heads_and_buffers_are_left_out(tmp_path: Path) -> None:
    """H3: what save_pretrained writes of a masked language model, no pooler, and a stale buffer of frequencies."""
    model = JinaEmbeddingsV3ForMaskedLM(JinaEmbeddingsV3Config(**JINA.tiny))
    heat(model)
    model.save_pretrained(tmp_path / "head")
    model.roberta.save_pretrained(tmp_path / "base")
    rewrite(tmp_path / "head", lambda t: t | {"roberta.rotary_emb.inv_freq": torch.zeros(4)})
    assert_identical(load(tmp_path / "head", JINA), load(tmp_path / "base", JINA))


def test_mixed_prefixes_are_an_error(checkpoint: Path) -> None:
    """H1."""
    rewrite(checkpoint, lambda t: {("roberta." if "encoder" in name else "") + name: t[name] for name in t})
    with pytest.raises(CheckpointError, match="missing tensor"):
        load(checkpoint, JINA)


@pytest.mark.parametrize(
    ("names", "lost"),
    [
        ("original", "encoder.layers.1.norm2.bias"),
        ("original", "encoder.layers.0.mixer.Wqkv.bias"),
        ("original", "encoder.layers.2.mixer.out_proj.bias"),
        ("original", "encoder.layers.2.mlp.fc1.bias"),
        ("native", "layers.1.post_mlp_layernorm.bias"),
        ("native", "layers.0.self_attn.q_proj.bias"),
        ("native", "layers.2.self_attn.o_proj.bias"),
        ("native", "layers.2.mlp.fc1.bias"),
    ],
)
def test_a_missing_bias_is_named_as_the_checkpoint_would(names: str, lost: str, checkpoint: Path) -> None:
    """H2."""

    def lose(tensors: Tensors) -> Tensors:
        spelled = native(tensors) if names == "native" else tensors
        return {name: tensor for name, tensor in spelled.items() if name != lost}

    rewrite(checkpoint, lose)
    with pytest.raises(CheckpointError, match=f"missing tensor: '{lost}';"):
        load(checkpoint, JINA)


def test_inference_changes_no_buffer(checkpoint: Path) -> None:
    """J4."""
    assert_inference_changes_nothing(load(checkpoint, JINA))


# Adapters


def with_adapters(tensors: Tensors) -> Tensors:
    """As torch's parametrizations store them: the weight under another name, and two factors for each task."""
    changed: Tensors = {}
    for name, tensor in tensors.items():
        if ".mixer.Wqkv.weight" in name or name == "embeddings.word_embeddings.weight":
            stem = name.removesuffix("weight") + "parametrizations.weight."
            changed[stem + "original"] = tensor
            changed[stem + "0.lora_A"] = torch.ones(5, 4, tensor.shape[1])
            changed[stem + "0.lora_B"] = torch.ones(5, tensor.shape[0], 4)
        else:
            changed[name] = tensor
    return changed


def peft(tensors: Tensors) -> Tensors:
    return tensors | {"encoder.layers.0.mixer.Wqkv.lora_A.default.weight": torch.ones(4, 40)}


@pytest.mark.parametrize("adapters", [with_adapters, peft])
@pytest.mark.parametrize("prefix", ["", "roberta."])
def test_adapters_are_refused(adapters: Any, prefix: str, checkpoint: Path, tmp_path: Path) -> None:
    rewrite(checkpoint, lambda tensors: prefixed(adapters(tensors), prefix))
    with pytest.raises(UnsupportedError, match=rf"tensor '{prefix}e\S+': LoRA adapters are not supported: merge"):
        convert(str(checkpoint), tmp_path / "out", verify=False)
    assert not (tmp_path / "out").exists()


def test_adapters_are_refused_in_the_configuration() -> None:
    with pytest.raises(UnsupportedError, match=r"lora_adaptations = \['separation'\] is not supported"):
        read(lora_adaptations=["separation"])
    assert JINA.read_config({**JINA.tiny, "lora_adaptations": None, "lora_rank": 4, "lora_alpha": 1})[1] == []


# Configurations


def test_rope_forms_agree(checkpoint: Path) -> None:
    """C4: legacy fields, the original field, new object."""
    linear = {"type": "linear", "factor": 1.75}
    forms: list[dict[str, Any]] = [
        {"rope_parameters": JINA.tiny["rope_parameters"]},
        {"rope_theta": 300.0, "rope_scaling": linear},
        {"rotary_emb_base": 300, "rope_scaling": {"rope_type": "linear", "factor": 1.75}},
    ]
    assert [read(**form) == JINA.read_config(JINA.tiny)[0] for form in forms] == [True] * 3
    rope = read().blocks[0].attention.rope
    assert rope is not None
    assert (rope.base, rope.factor) == (20_000.0, 1.0)
    saved = load(checkpoint, JINA)
    edit_json(checkpoint / "config.json", rope_parameters=..., rotary_emb_base=300.0, rope_scaling=linear)
    edit_json(checkpoint / "config.json", position_embedding_type="rotary", use_flash_attn=True)
    assert_identical(load(checkpoint, JINA), saved)
    with pytest.raises(CheckpointError, match="contradict"):
        read(rope_theta=300.0, rotary_emb_base=301.0)


@pytest.mark.parametrize(
    ("name", "value"), [("position_embedding_type", "absolute"), ("partial_rotary_factor", 0.5), ("hidden_act", "elu")]
)
def test_variants_are_refused_by_name(name: str, value: object) -> None:
    with pytest.raises(UnsupportedError, match=f"config.json: {name} = {value!r} is not supported"):
        read(**{name: value})


def test_the_original_model_type_is_refused() -> None:
    """The original checkpoint calls itself XLM-RoBERTa; its rotary positions are not run as a table."""
    roberta = find_recipe("xlm-roberta").recipe
    with pytest.raises(UnsupportedError, match="position_embedding_type = 'rotary' is not supported"):
        roberta.read_config({**roberta.tiny, "position_embedding_type": "rotary", "rotary_emb_base": 20000.0})


def test_positions_do_not_depend_on_the_pad_token() -> None:
    """A1: unlike RoBERTa's, they start at 0, and every position of the configuration is usable."""
    spec = read(pad_token_id=4)
    assert (spec.embedding.position_start, spec.embedding.position_pad, spec.usable_length) == (0, None, 26)
    assert read(pad_token_id=None) == spec
