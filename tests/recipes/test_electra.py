from pathlib import Path

import pytest
import torch

from tests.converted import load as load_converted
from tests.recipes.loading import (
    check_each_tensor_is_needed,
    check_stored_forms,
    load,
    make_reference,
    matches,
    tensors_of,
)
from tests.tiny import make_checkpoint
from toolkit.errors import CheckpointError, InputError
from toolkit.inputs import PromptEmbeds, TokenIds
from toolkit.registry import find_recipe

RECIPE = find_recipe("electra").recipe


@pytest.mark.parametrize(("width", "projection"), [(24, "after_norm"), (40, "none"), (56, "after_norm")])
def test_projection_only_where_the_sizes_differ(width: int, projection: str) -> None:
    """I6, A1: embeds are embedding_size wide; positions start at 0."""
    module = matches(RECIPE, embedding_size=width)
    assert (module.spec.embedding.width, module.spec.embedding.projection) == (width, projection)
    assert (module.spec.hidden, module.spec.embedding.position_start) == (40, 0)


@pytest.mark.parametrize("segments", [1, 2, 3])
def test_segments(segments: int) -> None:
    """G1: every row of the table is used."""
    assert matches(RECIPE, type_vocab_size=segments).spec.embedding.segments == segments


def test_projection_that_config_does_not_describe() -> None:
    """I6: neither left out nor guessed."""
    tensors = tensors_of(make_reference(RECIPE, embedding_size=40))
    with pytest.raises(CheckpointError, match=r"unexpected tensor: 'embeddings_project\.weight'"):
        load(RECIPE, {**tensors, "embeddings_project.weight": torch.ones(40, 40)}, embedding_size=40)
    with pytest.raises(CheckpointError, match=r"missing tensor: 'embeddings_project\.\w+'"):
        load(RECIPE, tensors, embedding_size=24)


def test_stored_forms() -> None:
    """H1, H2 (a, b), H3: the heads of generator and discriminator too."""
    others = {"embeddings.position_ids": torch.arange(27)[None], "embeddings.token_type_ids": torch.zeros(1, 27).long()}
    check_stored_forms(RECIPE, prefix="electra.", others=others)


@pytest.mark.parametrize(
    "name", ["ElectraForSequenceClassification", "ElectraForQuestionAnswering", "ElectraForMultipleChoice"]
)
def test_other_heads_are_left_out(name: str) -> None:
    tensors = tensors_of(make_reference(RECIPE, name))
    dropped = {entry.source for entry in load(RECIPE, tensors).audit if entry.action == "dropped"}
    assert dropped == {key for key in tensors if not key.startswith("electra.")}
    assert dropped


def test_a_pooler_is_not_electras() -> None:
    tensors = tensors_of(make_reference(RECIPE))
    with pytest.raises(CheckpointError, match=r"unexpected tensor: 'pooler\.dense\.weight'"):
        load(RECIPE, {**tensors, "pooler.dense.weight": torch.ones(40, 40)})


def test_each_tensor_is_needed() -> None:
    """H2 (c)."""
    check_each_tensor_is_needed(RECIPE)


def test_embeds_equal_ids_and_their_width_is_checked(tmp_path: Path) -> None:
    """L1, I6, G1."""
    runner = load_converted(make_checkpoint(tmp_path / "m", RECIPE))
    ids, segments = [5, 9, 1, 30, 4], [0, 2, 1, 1, 0]
    embeds = runner.embed_tokens(ids)
    assert embeds.shape == (5, 24)
    states = runner.token_states([TokenIds(ids, segments), PromptEmbeds(embeds, segments), TokenIds(ids)])
    assert torch.equal(states[0], states[1])
    assert not torch.allclose(states[0], states[2], atol=0.1)
    with pytest.raises(InputError, match=r"shape \(5, 40\), expected \[tokens, 24\]"):
        runner.token_states(PromptEmbeds(torch.zeros(5, 40)))
    with pytest.raises(InputError, match="3 is outside the segment table, which has 3 rows"):
        runner.token_states(TokenIds(ids, [0, 3, 0, 0, 0]))


def test_heads_of_bert_are_not_electras() -> None:
    """H2: the recipe is derived from BERT's, whose classifier reads a pooler that ELECTRA does not have."""
    assert all("Electra" in name for name in (*RECIPE.classes, *(name for h in RECIPE.heads for name in h.classes)))
