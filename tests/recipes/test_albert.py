from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AlbertModel

from tests.converted import load as load_converted
from tests.recipes.loading import (
    build,
    check_each_tensor_is_needed,
    check_stored_forms,
    difference,
    load,
    make_reference,
    matches,
    read,
    some_ids,
    tensors_of,
)
from tests.tiny import make_checkpoint
from toolkit.checkpoint import open_checkpoint
from toolkit.errors import CheckpointError, InputError, UnsupportedError
from toolkit.inputs import PromptEmbeds, TokenIds
from toolkit.nn.model import fill, part_shapes
from toolkit.registry import find_recipe
from toolkit.weights import load_weights

RECIPE = find_recipe("albert").recipe


def shape(layers: int, groups: int, inner: int) -> dict[str, Any]:
    return {"num_hidden_layers": layers, "num_hidden_groups": groups, "inner_group_num": inner}


@pytest.mark.parametrize(
    ("layers", "groups", "inner", "schedule"),
    [
        (3, 1, 1, "0_0 0_0 0_0"),
        (4, 2, 2, "0_0 0_1 0_0 0_1 1_0 1_1 1_0 1_1"),
        (3, 2, 1, "0_0 0_0 1_0"),
        (5, 3, 1, "0_0 0_0 1_0 1_0 2_0"),
        (2, 3, 1, "0_0 1_0"),
    ],
)
def test_groups(layers: int, groups: int, inner: int, schedule: str) -> None:
    """I6: each depth runs all inner layers of its group, as in the reference."""
    module = matches(RECIPE, **shape(layers, groups, inner))
    assert module.spec.schedule == tuple(schedule.split())
    assert list(module.blocks) == [f"{i}_{j}" for i in range(groups) for j in range(inner)]


def test_group_of_a_depth_is_rounded_as_in_the_reference() -> None:
    """I6: 9 × 14 / 18 is 7, but 9 / (18 / 14) is a little less."""
    module = matches(RECIPE, (4, 2), **shape(18, 14, 1))
    assert module.spec.schedule[9] == "6_0"


def test_parameters_do_not_grow_with_depth() -> None:
    """I6."""
    few, many = (part_shapes(build(read(RECIPE, **shape(layers, 2, 2)))) for layers in (2, 12))
    assert few == many


@pytest.mark.parametrize("width", [24, 40, 56])
def test_there_is_always_a_projection(width: int) -> None:
    """I6, A1."""
    spec = matches(RECIPE, embedding_size=width).spec
    assert (spec.embedding.width, spec.embedding.projection, spec.embedding.position_start) == (width, "after_norm", 0)


@pytest.mark.parametrize("segments", [1, 2, 3])
def test_segments(segments: int) -> None:
    """G1."""
    assert matches(RECIPE, type_vocab_size=segments).spec.embedding.segments == segments


@pytest.mark.parametrize(
    ("name", "value"),
    [("net_structure_type", 1), ("gap_size", 1), ("down_scale_factor", 2), ("num_memory_blocks", 1)],
)
def test_networks_of_the_original_code_that_the_reference_does_not_have(name: str, value: int) -> None:
    with pytest.raises(UnsupportedError, match=f"{name} = {value} is not supported"):
        read(RECIPE, **{name: value})


@pytest.mark.parametrize("name", ["num_hidden_groups", "inner_group_num"])
@pytest.mark.parametrize("value", [0, 101, 2**40, True, None])
def test_impossible_groups(name: str, value: object) -> None:
    with pytest.raises(CheckpointError, match=f"{name} = {value!r}, expected an integer"):
        read(RECIPE, **{name: value})


@pytest.mark.parametrize(("stored", "configured"), [((5, 2, 2), (5, 2, 1)), ((5, 3, 2), (5, 2, 2))])
def test_more_groups_stored_than_configured(stored: tuple[int, int, int], configured: tuple[int, int, int]) -> None:
    """I6: nothing is skipped in silence."""
    tensors = tensors_of(make_reference(RECIPE, **shape(*stored)))
    with pytest.raises(CheckpointError, match=r"unexpected tensor: 'encoder\.albert_layer_groups\."):
        load(RECIPE, tensors, **shape(*configured))
    tensors = tensors_of(make_reference(RECIPE, **shape(*configured)))
    with pytest.raises(CheckpointError, match=r"missing tensor: 'encoder\.albert_layer_groups\."):
        load(RECIPE, tensors, **shape(*stored))


def test_stored_forms() -> None:
    """H1, H2 (a, b), H3: pooler, language model and sentence order heads are left out."""
    others = {"embeddings.position_ids": torch.arange(29)[None], "embeddings.token_type_ids": torch.zeros(1, 29).long()}
    check_stored_forms(RECIPE, prefix="albert.", others=others)


def test_untied_decoder_is_left_out() -> None:
    base = {f"albert.{name}": tensor for name, tensor in tensors_of(make_reference(RECIPE)).items()}
    heads = {"predictions.decoder.weight": torch.ones(66, 24), "predictions.decoder.bias": torch.ones(66)}
    audit = {entry.source: entry.action for entry in load(RECIPE, base | heads).audit}
    assert {audit[name] for name in heads} == {"dropped"}


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


def test_a_real_checkpoint() -> None:
    """Its tokenizer is not the one that its files claim, so ids are compared, not texts."""
    found = find_spec("rxnmapper")
    if found is None or not found.submodule_search_locations:
        pytest.skip("pip install --no-deps rxnmapper")
    (folder,) = Path(found.submodule_search_locations[0]).glob("models/transformers/albert_heads_8_uspto_all_1310k")
    checkpoint = open_checkpoint(str(folder), None)
    spec, unrecognised = RECIPE.read_config(checkpoint.config)
    assert unrecognised == []
    module = build(spec)
    weights = load_weights(
        checkpoint.tensors,
        rules=RECIPE.rules,
        prefixes=RECIPE.prefixes,
        aliases=RECIPE.aliases,
        expected=part_shapes(module),
        dtype=torch.float32,
    )
    fill(module, weights.state, torch.device("cpu"))
    reference: Any = AlbertModel.from_pretrained(str(folder), attn_implementation="eager", dtype=torch.float64)
    ids = some_ids(spec, (1, 7, 200, 512))
    assert difference(reference.eval(), module, ids) < 1e-4
    assert difference(reference.eval(), module, ids, embeds=True) < 1e-4
