from pathlib import Path

import pytest
import torch
from transformers import T5Config

from tests.converted import load as load_converted
from tests.recipes.loading import (
    check_each_tensor_is_needed,
    check_stored_forms,
    load,
    make_reference,
    matches,
    read,
    tensors_of,
)
from tests.tiny import make_checkpoint
from toolkit.errors import CheckpointError, InputError, UnsupportedError
from toolkit.inputs import PromptEmbeds, TokenIds
from toolkit.registry import find_recipe
from toolkit.spec import BucketBiasSpec

RECIPE = find_recipe("t5").recipe
SHARED, TIED = "shared.weight", "encoder.embed_tokens.weight"
ALIASES = {
    "d_model": "hidden_size",
    "num_heads": "num_attention_heads",
    "num_layers": "num_hidden_layers",
    "d_kv": "head_dim",
}


def test_spec_by_hand() -> None:
    spec = read(RECIPE)
    assert (spec.hidden, len(spec.blocks), spec.usable_length, spec.embedding.width) == (40, 3, 34, 40)
    assert (spec.embedding.positions, spec.embedding.segments, spec.embedding.norm) == (0, 0, None)
    attention, norm = spec.blocks[0].attention, spec.blocks[0].norm
    assert (attention.heads, attention.head_dim, attention.scale, attention.bias, attention.out_bias) == (
        3, 12, 1.0, False, False,
    )  # fmt: skip
    assert attention.distance == BucketBiasSpec(buckets=10, max_distance=19)
    assert (norm.kind, norm.eps, spec.final_norm, spec.blocks[0].arrangement) == ("rms", 1e-3, norm, "pre")
    mlp = spec.blocks[0].mlp
    assert (mlp.activation, mlp.gate, mlp.width, mlp.bias) == ("gelu_tanh", "first", 56, False)


@pytest.mark.parametrize("form", ["relu", "gelu", "gelu_new", "silu", "gated-relu", "gated-gelu", "gated-silu"])
def test_feed_forward(form: str) -> None:
    matches(RECIPE, feed_forward_proj=form)


@pytest.mark.parametrize("form", ["gated-tanh-relu", "gated", "gelu-gated", "quick_gelu", "GELU", "", None, ["relu"]])
def test_unknown_feed_forward(form: object) -> None:
    with pytest.raises(UnsupportedError, match=r"feed_forward_proj = .* is not supported"):
        read(RECIPE, feed_forward_proj=form)


@pytest.mark.parametrize(
    ("name", "value"), [("dense_act_fn", "relu"), ("dense_act_fn", "gelu"), ("is_gated_act", False)]
)
def test_fields_that_overrule_feed_forward(name: str, value: object) -> None:
    """The reference obeys them; a checkpoint that contradicts itself is not guessed at."""
    assert getattr(T5Config.from_dict({"feed_forward_proj": "gated-gelu", name: value}), name) == value
    with pytest.raises(UnsupportedError, match=f"{name} = {value!r} is not supported"):
        read(RECIPE, **{name: value})
    read(RECIPE, dense_act_fn="gelu_new", is_gated_act=True)


def test_bias_by_distance() -> None:
    """Exact, logarithmic and saturated buckets of both signs; an odd number leaves the last row unused."""
    for buckets, farthest in ((4, 2), (5, 20), (10, 19), (32, 128)):
        matches(RECIPE, (34, 20, 1), relative_attention_num_buckets=buckets, relative_attention_max_distance=farthest)


@pytest.mark.parametrize(("buckets", "farthest"), [(3, 19), (0, 19), (32, 8), (32, 1), (4, 1)])
def test_impossible_buckets(buckets: int, farthest: int) -> None:
    """The reference divides by zero, or takes logarithms the wrong way round."""
    with pytest.raises(CheckpointError, match=r"config\.json: relative_attention_.* expected an integer of at least"):
        read(RECIPE, relative_attention_num_buckets=buckets, relative_attention_max_distance=farthest)


def test_head_size_is_free() -> None:
    """I1's case: heads times d_kv is not d_model; scores are not scaled, whatever the size."""
    for size in (4, 12, 20):
        matches(RECIPE, d_kv=size)


@pytest.mark.parametrize("name", ALIASES)
def test_other_names_of_fields(name: str) -> None:
    raw = dict(RECIPE.tiny)
    renamed = {ALIASES[name]: raw.pop(name), **raw}
    assert RECIPE.read_config(renamed) == RECIPE.read_config(RECIPE.tiny)
    with pytest.raises(CheckpointError, match=f"{name} = .* and {ALIASES[name]} = 20 contradict"):
        read(RECIPE, **{ALIASES[name]: 20})


def test_usable_length(tmp_path: Path) -> None:
    """A3: there is no table; n_positions, or 512, is the limit."""
    assert read(RECIPE, n_positions=100).usable_length == 100
    raw = {name: value for name, value in RECIPE.tiny.items() if name != "n_positions"}
    assert RECIPE.read_config(raw)[0].usable_length == 512
    with pytest.raises(CheckpointError, match=f"n_positions = {2**30}, expected an integer of at most"):
        read(RECIPE, n_positions=2**30)
    runner = load_converted(make_checkpoint(tmp_path / "m", RECIPE))
    runner.token_states(TokenIds([5] * 34))
    with pytest.raises(InputError, match="35 tokens, the model takes at most 34"):
        runner.token_states(TokenIds([5] * 35))


@pytest.mark.parametrize("value", [True, False])
def test_both_halves_or_the_encoder_alone(value: bool) -> None:
    assert read(RECIPE, is_encoder_decoder=value) == read(RECIPE)


@pytest.mark.parametrize("value", [1, None, "yes"])
def test_neither(value: object) -> None:
    with pytest.raises(UnsupportedError, match=f"is_encoder_decoder = {value!r} is not supported, only True or False"):
        read(RECIPE, is_encoder_decoder=value)


def test_a_decoder_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="is_decoder = True"):
        read(RECIPE, is_decoder=True)


def test_stored_forms() -> None:
    """H1, H2 (a), H3: decoder and heads are left out."""
    check_stored_forms(RECIPE, prefix="transformer.", others={"decoder.final_layer_norm.weight": torch.ones(40)})


def test_decoder_and_head_are_left_out_with_a_reason() -> None:
    tensors = tensors_of(make_reference(RECIPE, "T5ForConditionalGeneration"))
    audit = load(RECIPE, {**tensors, "lm_head.weight": torch.ones(69, 40)}).audit
    for entry in audit:
        left_out = entry.source.startswith(("decoder.", "lm_head."))
        assert (entry.action == "dropped") == left_out
        assert not left_out or ("decoder" in entry.why or "head" in entry.why)


@pytest.mark.parametrize("name", ["T5ForSequenceClassification", "T5ForTokenClassification", "T5ForQuestionAnswering"])
def test_other_heads_are_left_out(name: str) -> None:
    load(RECIPE, tensors_of(make_reference(RECIPE, name)))


def test_the_token_table_under_either_name_or_both() -> None:
    """H1, H3: the two are tied; equal copies are one table, different ones a contradiction."""
    tensors = tensors_of(make_reference(RECIPE))
    table = tensors.pop(SHARED)
    expected = load(RECIPE, {**tensors, SHARED: table}).state["embeddings.token.weight"]
    assert torch.equal(expected, table)
    assert torch.equal(load(RECIPE, {**tensors, TIED: table}).state["embeddings.token.weight"], table)
    both = load(RECIPE, {**tensors, SHARED: table, TIED: table.clone()})
    assert torch.equal(both.state["embeddings.token.weight"], table)
    (entry,) = (entry for entry in both.audit if entry.source == TIED)
    assert (entry.action, entry.target, entry.why) == ("dropped", None, f"a copy of {SHARED!r}, with equal values")
    for other in (table + 1e-3, table[:-1], table.half()):
        with pytest.raises(CheckpointError, match=f"'{SHARED}' and '{TIED}' are the same parameter, but they differ"):
            load(RECIPE, {**tensors, SHARED: table, TIED: other})
    with pytest.raises(CheckpointError, match=f"missing tensor: '{SHARED}'"):
        load(RECIPE, tensors)


def test_gate_and_configuration_must_agree() -> None:
    """H2 (c): one form of the feed-forward is never taken for the other."""
    gated = tensors_of(make_reference(RECIPE, feed_forward_proj="gated-relu"))
    plain = tensors_of(make_reference(RECIPE, feed_forward_proj="relu"))
    with pytest.raises(CheckpointError, match=r"wi_0\.weight', .*wi_1\.weight' are 2 parts of what .* describes in 1"):
        load(RECIPE, gated, feed_forward_proj="relu")
    with pytest.raises(CheckpointError, match=r"wi\.weight' has shape"):
        load(RECIPE, plain, feed_forward_proj="gated-relu")
    with pytest.raises(CheckpointError, match="are the same parameter"):
        load(RECIPE, {**plain, **gated}, feed_forward_proj="relu")


def test_each_tensor_is_needed() -> None:
    """H2 (c): the bias of block 0 too, which serves all of them."""
    check_each_tensor_is_needed(RECIPE)


def test_a_bias_of_another_block_is_refused() -> None:
    tensors = tensors_of(make_reference(RECIPE))
    name = "encoder.block.1.layer.0.SelfAttention.relative_attention_bias.weight"
    with pytest.raises(CheckpointError, match=f"unexpected tensor: '{name}'"):
        load(RECIPE, {**tensors, name: torch.ones(10, 3)})


def test_segments_are_refused_and_embeds_equal_ids(tmp_path: Path) -> None:
    """G1, L1: the seam is the table's output, not scaled."""
    runner = load_converted(make_checkpoint(tmp_path / "m", RECIPE))
    ids = [5, 9, 1, 30, 4]
    table = runner.model.embeddings.token.weight
    assert torch.equal(runner.embed_tokens(ids), table[ids])
    zeros = runner.token_states(TokenIds(ids, [0] * 5))[0]
    assert torch.equal(zeros, runner.token_states(PromptEmbeds(runner.embed_tokens(ids)))[0])
    with pytest.raises(InputError, match="1 is outside the segment table"):
        runner.token_states(TokenIds(ids, [0, 0, 1, 0, 0]))
