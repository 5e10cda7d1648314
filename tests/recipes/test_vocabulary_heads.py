"""Masked language models' heads: every field of their configuration, and every form in which they are stored."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch import Tensor
from transformers import AutoConfig

from tests.recipes.loading import CPU, build, make_reference, some_ids, tensors_of
from tests.recipes.test_config_coverage import FIELDS, UNTRIED, others
from tests.tiny import why_no_reference
from toolkit.batch import pack
from toolkit.checkpoint import TensorSet
from toolkit.config import ConfigReader
from toolkit.errors import CheckpointError, ToolkitError
from toolkit.heads import TaskHead
from toolkit.inputs import Row
from toolkit.nn.head import build_head
from toolkit.nn.model import fill, part_shapes
from toolkit.recipe import Recipe
from toolkit.registry import all_recipes
from toolkit.steps import DenseStep, HeadSpec
from toolkit.tensorfile import TensorInfo
from toolkit.weights import load_weights

# What the heads read themselves, beside what the base model reads too.
HEAD_FIELDS = {
    "AlbertForMaskedLM": {"embedding_size", "hidden_act", "layer_norm_eps"},
    "BertForMaskedLM": {"hidden_act", "layer_norm_eps"},
    "DebertaV2ForMaskedLM": {"embedding_size", "hidden_act", "layer_norm_eps"},
    "DistilBertForMaskedLM": {"activation"},
    "ElectraForMaskedLM": {"embedding_size", "layer_norm_eps"},
    "EuroBertForMaskedLM": {"mlp_bias"},
    "ModernBertForMaskedLM": {"classifier_activation", "classifier_bias", "decoder_bias", "norm_bias", "norm_eps"},
    "NomicBertForMaskedLM": {"hidden_act", "layer_norm_eps"},
}
# The classes whose output's bias has a second name.
TIED_BIASES = {
    "AlbertForMaskedLM",
    "BertForMaskedLM",
    "CamembertForMaskedLM",
    "DebertaV2ForMaskedLM",
    "JinaEmbeddingsV3ForMaskedLM",
    "MPNetForMaskedLM",
    "NomicBertForMaskedLM",
    "RobertaForMaskedLM",
    "XLMRobertaForMaskedLM",
}
FOUND: dict[str, tuple[Recipe, TaskHead]] = {
    head.classes[0]: (entry.recipe, head)
    for entry in all_recipes()
    for head in entry.recipe.heads
    if "sparse" in head.tasks and why_no_reference(entry.recipe) is None
}
HEADS = [pytest.param(*found, id=name) for name, found in FOUND.items()]


def logits(recipe: Recipe, head: TaskHead, tensors: Mapping[str, Tensor], ids: list[int], **config: Any) -> Tensor:
    """Ours, from the tensors of a checkpoint: [tokens, words]."""
    raw = {**recipe.tiny, **config}
    spec, _ = recipe.read_config(raw)
    steps = head.steps(ConfigReader(raw), spec, 0)
    words = steps[-1].outputs  # type: ignore[union-attr]
    encoder, module = build(spec), build_head(HeadSpec(steps=steps, width=0, token_width=words), CPU)
    info = {
        name: TensorInfo(name=name, dtype=tensor.dtype, shape=tuple(tensor.shape), file=None)  # type: ignore[arg-type]
        for name, tensor in tensors.items()
    }
    loaded = load_weights(
        TensorSet(info=info, read=dict(tensors).__getitem__),
        rules=recipe.head_rules(head, raw),
        prefixes=recipe.prefixes,
        aliases=recipe.aliases,
        expected=part_shapes(encoder) | {f"head.{name}": shapes for name, shapes in part_shapes(module).items()},
        dtype=torch.float32,
    )
    fill(encoder, {name: t for name, t in loaded.state.items() if not name.startswith("head.")}, CPU)
    fill(module, {n.removeprefix("head."): t for n, t in loaded.state.items() if n.startswith("head.")}, CPU)
    module.tie(encoder.embeddings.token.weight)
    row = Row(ids=np.array(ids, np.int32), segments=np.zeros(len(ids), np.int32), embeds=())
    batch = pack([row], spec.embedding.position_start, spec.embedding.position_pad)
    with torch.inference_mode():
        states = encoder.forward_ids(batch.ids, batch.positions, batch.segments, batch.cu_seqlens, batch.max_len)
        return module(states, batch.cu_seqlens, batch.skip).tokens


def their_logits(reference: Any, ids: list[int]) -> Tensor:
    """[tokens, words], of one sequence."""
    with torch.inference_mode():
        mask = torch.ones(1, len(ids), dtype=torch.long)
        return reference(input_ids=torch.tensor([ids]), attention_mask=mask).logits[0]


def difference(recipe: Recipe, head: TaskHead, reference: Any, tensors: Mapping[str, Tensor], **config: Any) -> float:
    """Max-abs difference of the logits, as a share of the largest one."""
    ids = ids_for(recipe, **config)
    theirs = their_logits(reference, ids)
    return float((logits(recipe, head, tensors, ids, **config) - theirs).abs().max() / theirs.abs().max())


def ids_for(recipe: Recipe, **config: Any) -> list[int]:
    spec, _ = recipe.read_config({**recipe.tiny, **config})
    return some_ids(spec, (min(9, spec.usable_length),))[0]


def untied_as_a_rule(recipe: Recipe) -> bool:
    return not AutoConfig.for_model(recipe.model_type).tie_word_embeddings


def ends(reference: Any) -> tuple[Any, Any]:
    return reference.get_output_embeddings(), reference.get_input_embeddings()


def ties(reference: Any) -> list[tuple[str, Any]]:
    """Every name of every parameter."""
    return list(reference.named_parameters(remove_duplicate=False))


def name_of(layer: Any, reference: Any) -> str:
    """What a layer is called in a checkpoint of the reference."""
    return next(name for name, module in reference.named_modules() if module is layer)


def test_every_family_with_such_a_class_has_one() -> None:
    for entry in all_recipes():
        stem = entry.recipe.classes[0].removesuffix("Model")
        if entry.recipe.reference is not None and hasattr(transformers, f"{stem}ForMaskedLM"):
            assert "sparse" in entry.recipe.all_tasks, entry.recipe.model_type


@pytest.mark.parametrize(("recipe", "head"), HEADS)
def test_a_changed_field_changes_the_logits_as_it_does_there(recipe: Recipe, head: TaskHead) -> None:
    """Each value of each field: transformers cannot build it, or we refuse it, or both give the same logits."""
    usual = AutoConfig.for_model(recipe.model_type).to_dict() | dict.fromkeys(FIELDS, None) | dict(recipe.tiny)
    usual["tie_word_embeddings"] = not untied_as_a_rule(recipe)
    compared: set[str] = set()
    for field in sorted(set(usual) - UNTRIED):
        for value in others(field, usual[field]):
            try:
                reference = make_reference(recipe, head.classes[0], **{field: value})
                reference.get_input_embeddings()(torch.tensor([1]))
            except Exception:
                continue  # no such model
            try:
                ids = ids_for(recipe, **{field: value})
                ours = logits(recipe, head, tensors_of(reference), ids, **{field: value})
            except ToolkitError:
                continue  # refused
            theirs = their_logits(reference, ids)
            assert (ours - theirs).abs().max() < 1e-5 * theirs.abs().max(), f"{field} = {value!r}"
            compared.add(field)
    assert {"tie_word_embeddings", "vocab_size", *HEAD_FIELDS.get(head.classes[0], ())} <= compared


@pytest.mark.parametrize(("recipe", "head"), HEADS)
def test_a_tied_output_may_be_stored_under_either_name(recipe: Recipe, head: TaskHead) -> None:
    config = {"tie_word_embeddings": True}
    reference = make_reference(recipe, head.classes[0], **config)
    tensors = tensors_of(reference)
    output, table = (name_of(layer, reference) + ".weight" for layer in ends(reference))
    values = reference.get_input_embeddings().weight.float()
    both = {**tensors, table: values, output: values.clone()}
    biases = {name for name, parameter in ties(reference) if parameter is reference.get_output_embeddings().bias}
    shared = {name: reference.get_output_embeddings().bias.float() for name in biases}
    assert len(biases) == (2 if head.classes[0] in TIED_BIASES else 1)
    for left_out in biases if len(biases) > 1 else ():
        stored = {name: tensor for name, tensor in {**both, **shared}.items() if name != left_out}
        assert difference(recipe, head, reference, stored, **config) < 1e-5
    both |= shared
    for stored in (both, *({key: t for key, t in both.items() if key != name} for name in (output, table))):
        assert difference(recipe, head, reference, stored, **config) < 1e-5
    with pytest.raises(CheckpointError, match="are the same parameter, but they differ"):
        difference(recipe, head, reference, {**both, output: values + 1}, **config)


@pytest.mark.parametrize(("recipe", "head"), HEADS)
def test_an_output_that_is_not_tied_has_its_own_tensors(recipe: Recipe, head: TaskHead) -> None:
    config = {"tie_word_embeddings": False}
    reference = make_reference(recipe, head.classes[0], **config)
    output, tensors = name_of(reference.get_output_embeddings(), reference), tensors_of(reference)
    assert not torch.equal(reference.get_output_embeddings().weight, reference.get_input_embeddings().weight)
    assert difference(recipe, head, reference, tensors, **config) < 1e-5
    spec, _ = recipe.read_config({**recipe.tiny, **config})
    assert isinstance(head.steps(ConfigReader({**recipe.tiny, **config}), spec, 0)[-1], DenseStep)
    for name in [f"{output}.weight", f"{output}.bias"]:
        with pytest.raises(CheckpointError, match=f"missing tensor: '{name}'"):
            logits(recipe, head, {key: tensor for key, tensor in tensors.items() if key != name}, [3], **config)


@pytest.mark.parametrize("name", ["BertForMaskedLM", "NomicBertForMaskedLM"])
def test_another_head_of_the_same_pre_training_is_left_out(name: str) -> None:
    recipe, head = FOUND[name]
    reference = make_reference(recipe, name)
    others = {"cls.seq_relationship.weight": torch.zeros(2, 40), "cls.seq_relationship.bias": torch.zeros(2)}
    assert difference(recipe, head, reference, tensors_of(reference) | others) < 1e-5


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("legacy", [True, False, None])
def test_deberta_has_two_heads(legacy: bool | None, tied: bool) -> None:
    """`legacy` chooses, whatever else is stored; the newer one always multiplies with the token table."""
    recipe, head = FOUND["DebertaV2ForMaskedLM"]
    config = {"embedding_size": 40, "tie_word_embeddings": tied} | ({} if legacy is None else {"legacy": legacy})
    reference = make_reference(recipe, head.classes[0], **config)
    other = make_reference(recipe, head.classes[0], **config | {"legacy": legacy is False})
    tensors = tensors_of(reference)
    assert difference(recipe, head, reference, tensors_of(other) | tensors, **config) < 1e-5
    with pytest.raises(CheckpointError, match=r"missing tensor: '(cls|lm_predictions)"):
        logits(recipe, head, tensors_of(other), [3], **config)
    if legacy is False:
        table = reference.get_input_embeddings().weight.float()
        copied = {**tensors, "lm_predictions.lm_head.weight": table.clone()}  # as some versions store it
        assert difference(recipe, head, reference, copied, **config) < 1e-5
        narrow = config | {"embedding_size": 24}  # the reference cannot multiply with such a table
        with pytest.raises(CheckpointError, match=r"lm_head\.LayerNorm\.bias' has shape"):
            logits(recipe, head, tensors_of(make_reference(recipe, head.classes[0], **narrow)), [3], **narrow)


def test_without_vocab_size_the_default_is_that_of_the_class() -> None:
    recipe, head = FOUND["BertForMaskedLM"]
    raw = {name: value for name, value in recipe.tiny.items() if name != "vocab_size"}
    spec, _ = recipe.read_config(raw)
    assert head.steps(ConfigReader(raw), spec, 0)[-1].outputs == 30522  # type: ignore[union-attr]
