from pathlib import Path

import pytest
import torch
from tokenizers import processors

from tests.converted import load as load_converted
from tests.converted import reference
from tests.recipes.loading import (
    check_each_tensor_is_needed,
    check_stored_forms,
    load,
    make_reference,
    matches,
    read,
    tensors_of,
)
from tests.tiny import make_checkpoint, make_tokenizer
from toolkit.errors import CheckpointError, InputError, UnsupportedError
from toolkit.inputs import PromptEmbeds, TokenIds
from toolkit.registry import find_recipe

RECIPE = find_recipe("distilbert").recipe
ALIASES = {"dim": "hidden_size", "n_heads": "num_attention_heads", "n_layers": "num_hidden_layers"}


def test_spec_by_hand() -> None:
    spec = read(RECIPE, hidden_dim=72)
    assert (spec.hidden, len(spec.blocks), spec.usable_length, spec.embedding.segments) == (40, 3, 26, 0)
    block = spec.blocks[0]
    assert (block.attention.heads, block.attention.head_dim, block.mlp.width, block.mlp.activation) == (
        5,
        8,
        72,
        "relu",
    )
    assert spec.embedding.norm is not None
    assert block.norm.eps == spec.embedding.norm.eps == 1e-12


def test_positions_start_at_zero() -> None:
    """A1."""
    assert matches(RECIPE).spec.embedding.position_start == 0


@pytest.mark.parametrize("name", ALIASES)
def test_other_names_of_fields(name: str) -> None:
    raw = dict(RECIPE.tiny)
    renamed = {ALIASES[name]: raw.pop(name), **raw}
    assert RECIPE.read_config(renamed) == RECIPE.read_config(RECIPE.tiny)
    with pytest.raises(CheckpointError, match=f"{name} = .* and {ALIASES[name]} = 20 contradict"):
        read(RECIPE, **{ALIASES[name]: 20})


def test_heads_must_divide() -> None:
    with pytest.raises(CheckpointError, match="dim 40 is no multiple of n_heads 3"):
        read(RECIPE, n_heads=3)


def test_unknown_activation() -> None:
    with pytest.raises(UnsupportedError, match="activation = 'quick_gelu' is not supported"):
        read(RECIPE, activation="quick_gelu")


def test_a_stated_eps_has_no_effect_and_is_reported() -> None:
    spec, unrecognised = RECIPE.read_config({**RECIPE.tiny, "layer_norm_eps": 1e-5})
    assert (spec, unrecognised) == (read(RECIPE), ["layer_norm_eps"])


@pytest.mark.parametrize("computed", [True, False])
def test_positions_come_from_the_stored_table(computed: bool) -> None:
    """Fine-tuning may have moved them, whatever sinusoidal_pos_embds says."""
    matches(RECIPE, sinusoidal_pos_embds=computed)
    tensors = tensors_of(make_reference(RECIPE, sinusoidal_pos_embds=computed))
    del tensors["embeddings.position_embeddings.weight"]
    with pytest.raises(CheckpointError, match=r"missing tensor: 'embeddings\.position_embeddings\.weight'"):
        load(RECIPE, tensors, sinusoidal_pos_embds=computed)


def test_stored_forms() -> None:
    """H1, H2 (a, b), H3."""
    check_stored_forms(RECIPE, prefix="distilbert.", others={"embeddings.position_ids": torch.arange(26)[None]})


@pytest.mark.parametrize("name", ["DistilBertForSequenceClassification", "DistilBertForQuestionAnswering"])
def test_other_heads_are_left_out(name: str) -> None:
    tensors = tensors_of(make_reference(RECIPE, name))
    dropped = {entry.source for entry in load(RECIPE, tensors).audit if entry.action == "dropped"}
    assert dropped == {key for key in tensors if not key.startswith("distilbert.")}
    assert dropped


def test_each_tensor_is_needed() -> None:
    """H2 (c)."""
    check_each_tensor_is_needed(RECIPE)


def test_segments_are_refused_and_embeds_equal_ids(tmp_path: Path) -> None:
    """G1, L1: what a tokenizer yields for another model's table is left out, as sentence-transformers does it."""
    tokenizer = make_tokenizer()
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(  # type: ignore[assignment]
        single="[CLS] $A:1 [SEP]:1", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    runner = load_converted(make_checkpoint(tmp_path / "m", RECIPE, tokenizer=tokenizer))
    ids = [5, 9, 1, 30, 4]
    zeros = runner.token_states(TokenIds(ids, [0] * 5))[0]
    assert torch.equal(zeros, runner.token_states(PromptEmbeds(runner.embed_tokens(ids)))[0])
    with pytest.raises(InputError, match="1 is outside the segment table"):
        runner.token_states(TokenIds(ids, [0, 0, 1, 0, 0]))
    same = reference(tmp_path / "m").encode(["the quick fox"], convert_to_tensor=True)
    assert torch.allclose(runner.embed("the quick fox"), same, atol=1e-5)
