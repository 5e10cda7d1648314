"""Decoders as classifiers: which token counts as the last one."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from sentence_transformers import CrossEncoder
from torch import Tensor
from transformers import AutoConfig, AutoModelForSequenceClassification

import toolkit
from tests.test_scoring import make_classifier
from tests.tiny import decoder_recipes, edit_json, make_tokenizer, why_no_reference
from toolkit import MixedPrompt, PromptEmbeds, TokenIds
from toolkit.config import ConfigReader
from toolkit.errors import CheckpointError, UnsupportedError
from toolkit.heads import TaskHead
from toolkit.recipe import Recipe
from toolkit.registry import find_recipe
from toolkit.runner import Runner
from toolkit.steps import PoolingStep

FOUND: dict[str, tuple[Recipe, TaskHead]] = {
    recipe.model_type: (recipe, head)
    for recipe in decoder_recipes()
    for head in recipe.heads
    if "classify" in head.tasks and why_no_reference(recipe) is None
}
FAMILIES = pytest.mark.parametrize("family", FOUND)
# With a tokenizer that adds nothing: padding at the end, within, everywhere, and none; mixed lengths.
TEXTS = ["the fox [PAD] a [PAD] [PAD]", "[PAD] [PAD]", "a", "fox [PAD]", "[PAD] dog", "the quick fox jumps over a fox"]
PAD, FOX = 0, 8
LLAMA = find_recipe("llama").recipe


def make(folder: Path, family: str, labels: int = 3, *, special_tokens: bool = False, **config: Any) -> Path:
    recipe, head = FOUND[family]
    make_classifier(folder, recipe, head.classes[0], labels, **config)
    make_tokenizer(segments=False, special_tokens=special_tokens).save_pretrained(folder)
    return folder


def load(folder: Path, task: str = "classify", mode: str = "eager", **options: Any) -> Runner:
    out = folder.parent / f"{folder.name}-{task}"
    toolkit.convert(str(folder), out, task=task, verify=False, force=out.exists(), **options)
    return toolkit.load(out, device="cpu", mode=mode)


def reference(folder: Path, **given: Any) -> Tensor:
    """What transformers makes of one sequence alone, not padded: [labels]."""
    model = AutoModelForSequenceClassification.from_pretrained(folder, attn_implementation="eager").eval()
    with torch.inference_mode():
        return model(**given).logits[0]


def expected(folder: Path, texts: list[str]) -> Tensor:
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    return torch.stack([reference(folder, **tokenizer(text, return_tensors="pt")) for text in texts])


@pytest.mark.parametrize("pad", [PAD, FOX, None])
@FAMILIES
def test_padding_that_stands_in_a_text(family: str, pad: int | None, tmp_path: Path) -> None:
    """D2, F3: transformers takes the last token that is no padding, of a single text too; the first if all are."""
    folder = make(tmp_path / "m", family, pad_token_id=pad)
    runner = load(folder)
    step = runner.artifact.manifest.head.steps[0]
    assert isinstance(step, PoolingStep)
    assert step.pad == pad
    theirs = expected(folder, TEXTS)
    assert (runner.classify(TEXTS).logits - theirs).abs().max() < 1e-5
    assert (torch.cat([runner.classify(text).logits for text in TEXTS]) - theirs).abs().max() < 1e-5
    whole = runner.token_states(TEXTS)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    assert [len(states) for states in whole] == [len(tokenizer(text)["input_ids"]) for text in TEXTS]


@FAMILIES
def test_padding_that_ends_every_text(family: str, tmp_path: Path) -> None:
    """D2, F3: it often is the token that ends a text, as the tokenizer puts it there; by the gate, as pairs too."""
    folder = make(tmp_path / "m", family, 1, special_tokens=True, pad_token_id=3)
    from toolkit.parity import verify_folder

    for task in ("rerank", "classify"):
        runner = load(folder, task)
        found = verify_folder(runner.artifact.folder, folder, device="cpu", modes=["eager"])
        assert found.passed, found.summary()
    pairs = [("the fox", "a dog"), ("", "a b"), ("text", "")]
    model = CrossEncoder(str(folder), device="cpu")
    theirs = torch.as_tensor([model.predict([pair])[0] for pair in pairs])
    assert (load(folder, "rerank").score(pairs) - theirs).abs().max() < 1e-5


@FAMILIES
def test_padding_that_config_json_does_not_name(family: str) -> None:
    """The default of transformers' configuration, which null is not."""
    recipe, head = FOUND[family]
    raw = {name: value for name, value in recipe.tiny.items() if name != "pad_token_id"}
    changes: dict[str, Any]
    spec, _ = recipe.read_config(recipe.tiny)
    for changes in ({}, {"pad_token_id": None}, {"pad_token_id": 5}, {"pad_token_id": -1}):
        first = head.steps(ConfigReader(raw | changes), spec, 2)[0]
        assert isinstance(first, PoolingStep)
        assert first.pad == AutoConfig.for_model(**raw, **changes).pad_token_id


def test_ids_and_embeddings(tmp_path: Path) -> None:
    """Ids are looked at as a text's are; of embeddings the last one is taken, as in transformers."""
    folder = make(tmp_path / "m", "llama", pad_token_id=PAD)
    runner = load(folder)
    ids = [5, 8, 9, PAD, PAD]
    embeds = runner.embed_tokens(ids)
    mixed = MixedPrompt([PromptEmbeds(embeds[:2]), TokenIds(ids[2:])])
    found = runner.classify([TokenIds(ids), PromptEmbeds(embeds), mixed]).logits
    by_ids = reference(folder, input_ids=torch.tensor([ids]))
    by_embeds = reference(folder, inputs_embeds=embeds[None])
    assert (by_ids - by_embeds).abs().max() > 1e-2
    assert (found[0] - by_ids).abs().max() < 1e-5
    assert (found[1:] - by_embeds).abs().max() < 1e-5


@pytest.mark.parametrize("mode", ["compile", "graph"])
def test_in_every_mode(mode: str, tmp_path: Path) -> None:
    """K3: what was cut off is not in the static inputs either."""
    folder = make(tmp_path / "m", "qwen3", pad_token_id=PAD)
    eager, other = load(folder), load(folder, mode=mode)
    for texts in (TEXTS, TEXTS[:2], TEXTS[::-1]):
        assert (eager.classify(texts).logits - other.classify(texts).logits).abs().max() < 1e-5


def test_bidirectional_models(tmp_path: Path) -> None:
    """B4: there, what is behind the token that counts makes a difference; without padding nothing is behind it."""
    folder = make(tmp_path / "m", "llama", is_causal=False)
    with pytest.raises(UnsupportedError, match=r"is_causal = False is not supported .* pad_token_id = 7"):
        load(folder)
    edit_json(folder / "config.json", pad_token_id=None)
    assert (load(folder).classify(TEXTS).logits - expected(folder, TEXTS)).abs().max() < 1e-5


def test_padding_that_is_no_id(tmp_path: Path) -> None:
    folder = make(tmp_path / "m", "llama")
    for value in ("0", 1.5, [0], -2, True):
        edit_json(folder / "config.json", pad_token_id=value)
        with pytest.raises(CheckpointError, match=r"pad_token_id = .*, expected an integer of at least -1"):
            load(folder)


def test_a_bias_that_the_class_has_not(tmp_path: Path) -> None:
    """G6: a stored tensor of the head that nothing reads is an error."""
    from safetensors.torch import load_file, save_file

    folder = make(tmp_path / "m", "llama")
    weights = load_file(folder / "model.safetensors")
    save_file({**weights, "score.bias": torch.ones(3)}, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError, match=r"unexpected tensor: 'score\.bias'"):
        load(folder)
    assert load(folder, "embed").artifact.manifest.task == "embed"


def test_every_family_that_transformers_has_a_class_for() -> None:
    """G6: and no others."""
    named: dict[str, Any] = {
        recipe.model_type: transformers.AutoModelForSequenceClassification._model_mapping.get(
            transformers.CONFIG_MAPPING[recipe.model_type], None
        )
        for recipe in decoder_recipes()
        if why_no_reference(recipe) is None
    }
    assert {name: kind.__name__ for name, kind in named.items() if kind is not None} == {
        name: head.classes[0] for name, (_, head) in FOUND.items()
    }
