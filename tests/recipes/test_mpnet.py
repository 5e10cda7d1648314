from pathlib import Path

import pytest
import torch

from tests.converted import load as load_converted
from tests.recipes.loading import (
    check_each_tensor_is_needed,
    check_stored_forms,
    difference,
    make_module,
    make_reference,
    matches,
    read,
    tensors_of,
)
from tests.tiny import make_checkpoint
from toolkit.errors import CheckpointError, InputError, UnsupportedError
from toolkit.inputs import MixedPrompt, PromptEmbeds, TokenIds
from toolkit.registry import find_recipe
from toolkit.spec import BucketBiasSpec

RECIPE = find_recipe("mpnet").recipe


def test_spec_by_hand() -> None:
    spec = read(RECIPE)
    assert (spec.usable_length, spec.embedding.positions, spec.embedding.segments) == (31, 33, 0)
    assert (spec.embedding.position_start, spec.embedding.position_pad) == (2, 1)
    assert {a.distance for a in spec.attentions} == {BucketBiasSpec(buckets=32, max_distance=128)}
    assert (spec.blocks[0].arrangement, spec.blocks[0].attention.scale) == ("post", 8**-0.5)


@pytest.mark.parametrize("pad", [0, 1, 4])
def test_positions_start_at_two_whatever_the_pad_id_is(pad: int) -> None:
    """A1: and it is id 1 that is skipped, in packed sequences as in single ones."""
    reference = make_reference(RECIPE, pad_token_id=pad)
    module = make_module(RECIPE, tensors_of(reference), pad_token_id=pad)
    ids = [[2, 9, 4, 0, 3], [7], [1, 8, 1, 1, 6, 0, 4, 5, 1], [1], [4, 4, 12, 13, 14, 15]]
    assert difference(reference, module, ids) < 1e-4
    assert difference(reference, module, ids, embeds=True) < 1e-4


@pytest.mark.parametrize("rows", [33, 150])
def test_far_distances(rows: int) -> None:
    """Beyond 8 tokens buckets are logarithmic; beyond 128 there is but one."""
    module = matches(RECIPE, (rows - 2, 3), max_position_embeddings=rows)
    assert module.distance is not None


@pytest.mark.parametrize(("rows", "usable"), [(3, 1), (20, 18)])
def test_usable_length(rows: int, usable: int, tmp_path: Path) -> None:
    """A3: two rows of the table are never reached; the limit works on every path and the next length is an error."""
    assert read(RECIPE, max_position_embeddings=rows).usable_length == usable
    if usable > 5:
        runner = load_converted(make_checkpoint(tmp_path / "m", RECIPE, overrides={"max_position_embeddings": rows}))
        fits, over = TokenIds([5] * usable), TokenIds([5] * (usable + 1))
        embeds = runner.embed_tokens(fits)[[0, *range(usable)]]
        runner.token_states([fits, PromptEmbeds(embeds[:-1]), MixedPrompt([TokenIds([5]), PromptEmbeds(embeds[2:])])])
        for item in (over, PromptEmbeds(embeds), MixedPrompt([TokenIds([5]), PromptEmbeds(embeds[1:])])):
            with pytest.raises(InputError, match=f"{usable + 1} tokens, the model takes at most {usable}"):
                runner.token_states(item)


@pytest.mark.parametrize("rows", [1, 2])
def test_table_without_room(rows: int) -> None:
    with pytest.raises(CheckpointError, match=f"max_position_embeddings = {rows}, expected at least 3"):
        read(RECIPE, max_position_embeddings=rows)


@pytest.mark.parametrize("buckets", [16, 31, 64, None])
def test_other_numbers_of_buckets(buckets: int | None) -> None:
    """The reference makes a table of this size and then counts to 32 all the same."""
    with pytest.raises(UnsupportedError, match=f"relative_attention_num_buckets = {buckets!r} is not supported"):
        read(RECIPE, relative_attention_num_buckets=buckets)


def test_stored_forms() -> None:
    """H1, H2 (a, b), H3."""
    others = {"embeddings.position_ids": torch.arange(33)[None]}
    check_stored_forms(RECIPE, prefix="mpnet.", others=others)


def test_each_tensor_is_needed() -> None:
    """H2 (c): the bias table too."""
    check_each_tensor_is_needed(RECIPE)


def test_segments_are_refused_and_embeds_equal_ids(tmp_path: Path) -> None:
    """G1, L1."""
    runner = load_converted(make_checkpoint(tmp_path / "m", RECIPE))
    ids = [5, 9, 2, 30, 4]
    zeros = runner.token_states(TokenIds(ids, [0] * 5))[0]
    assert torch.equal(zeros, runner.token_states(PromptEmbeds(runner.embed_tokens(ids)))[0])
    for item in (TokenIds(ids, [0, 0, 1, 0, 0]), PromptEmbeds(runner.embed_tokens(ids), [1] * 5)):
        with pytest.raises(InputError, match="1 is outside the segment table"):
            runner.token_states(item)
