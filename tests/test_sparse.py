"""Sparse embeddings: a masked language model's head and SPLADE's pooling."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from sentence_transformers import SparseEncoder
from sentence_transformers.base.modules.transformer import Transformer
from sentence_transformers.sparse_encoder.modules import SpladePooling
from transformers import AutoConfig

import toolkit
from tests.tiny import edit_json, heat, make_tokenizer, why_no_reference, write_json
from toolkit import PromptEmbeds, TokenIds
from toolkit.errors import CheckpointError, UnsupportedError
from toolkit.parity import verify_folder
from toolkit.recipe import Recipe
from toolkit.registry import all_recipes, find_recipe
from toolkit.runner import Runner

TEXTS = ["the quick fox", "query doc text one two three", "a"]
BERT = find_recipe("bert").recipe
HEADS = [
    (entry.recipe, head.classes[0])
    for entry in all_recipes()
    for head in entry.recipe.heads
    if "sparse" in head.tasks and why_no_reference(entry.recipe) is None
]


def make_mlm(folder: Path, recipe: Recipe = BERT, name: str = "BertForMaskedLM", **config: Any) -> Path:
    torch.manual_seed(0)
    raw = AutoConfig.for_model(**{**recipe.tiny, **config})
    model = getattr(transformers, name)(raw)
    heat(model)
    model.save_pretrained(folder)
    make_tokenizer(segments=getattr(raw, "type_vocab_size", 0) > 1).save_pretrained(folder)
    return folder


def saved(source: Path, out: Path, activation: Any = "relu") -> Path:
    """What the library writes."""
    modules = [Transformer(str(source), transformer_task="fill-mask"), SpladePooling("max", activation)]
    SparseEncoder(modules=modules, device="cpu").save(str(out))
    return out


def load(folder: Path, **options: Any) -> Runner:
    out = folder.parent / f"{folder.name}-out"
    toolkit.convert(str(folder), out, verify=False, **options)
    return toolkit.load(out, device="cpu", mode="eager")


@pytest.mark.parametrize(("recipe", "name"), HEADS, ids=lambda v: v if isinstance(v, str) else "")
def test_every_head_passes_the_gate(recipe: Recipe, name: str, tmp_path: Path) -> None:
    folder = saved(make_mlm(tmp_path / "mlm", recipe, name), tmp_path / "saved")
    report = toolkit.convert(str(folder), tmp_path / "out", verify=False)
    assert report.manifest.task == "sparse"
    found = verify_folder(tmp_path / "out", folder, device="cpu", modes=["eager"])
    assert found.passed, found.summary()


@pytest.mark.parametrize("activation", ["relu", "log1p_relu"])
def test_vectors_equal_sparse_encoder(tmp_path: Path, activation: str) -> None:
    """Dense rows with a column for each word; most are zero, and the same ones are."""
    folder = saved(make_mlm(tmp_path / "mlm"), tmp_path / "saved", activation)
    runner = load(folder)
    theirs = SparseEncoder(str(folder), device="cpu").encode(TEXTS, convert_to_sparse_tensor=False)
    ours = runner.embed(TEXTS)
    assert ours.shape == (3, 61)
    assert (ours - torch.as_tensor(theirs)).abs().max() < 1e-5
    assert torch.equal(ours > 0, torch.as_tensor(theirs) > 0)
    assert 0 < (ours > 0).float().mean() < 1


def test_without_modules_the_task_must_be_named(tmp_path: Path) -> None:
    """A plain masked language model may be meant for either kind of embeddings."""
    folder = make_mlm(tmp_path / "mlm")
    runner = load(folder, task="sparse")
    theirs = SparseEncoder(str(folder), device="cpu").encode(TEXTS, convert_to_sparse_tensor=False)
    assert (runner.embed(TEXTS) - torch.as_tensor(theirs)).abs().max() < 1e-5
    report = toolkit.convert(str(folder), tmp_path / "embed", verify=False)
    assert report.manifest.task == "embed"


def test_every_mode_and_path(tmp_path: Path) -> None:
    folder = saved(make_mlm(tmp_path / "mlm"), tmp_path / "saved")
    toolkit.convert(str(folder), tmp_path / "out", verify=False)
    report = verify_folder(tmp_path / "out", folder, device="cpu")
    assert report.passed, report.summary()
    runner = toolkit.load(tmp_path / "out", device="cpu", mode="graph")
    ids = runner.embed(TokenIds([2, 9, 3]))
    assert (runner.embed(PromptEmbeds(runner.embed_tokens([2, 9, 3]))) - ids).abs().max() < 1e-5


def test_an_untied_output_is_refused(tmp_path: Path) -> None:
    folder = make_mlm(tmp_path / "mlm")
    weights = load_file(folder / "model.safetensors")
    table = weights["bert.embeddings.word_embeddings.weight"]
    save_file(weights | {"cls.predictions.decoder.weight": table + 1}, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError, match="are the same parameter, but they differ"):
        load(folder, task="sparse")
    save_file(
        weights | {"cls.predictions.decoder.weight": table.clone()}, folder / "model.safetensors", {"format": "pt"}
    )
    assert load(folder, task="sparse").artifact.manifest.head.width == 61


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"pooling_strategy": "sum"}, "pooling_strategy = 'sum'"),
        ({"activation_function": "gelu"}, "activation_function = 'gelu'"),
        ({"surprise": 1}, "unknown field 'surprise'"),
    ],
)
def test_poolings_that_are_not_served(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    folder = saved(make_mlm(tmp_path / "mlm"), tmp_path / "saved")
    edit_json(folder / "1_SpladePooling" / "config.json", **change)
    with pytest.raises(UnsupportedError) as caught:
        load(folder)
    assert message in str(caught.value)


def test_other_modules_are_refused(tmp_path: Path) -> None:
    folder = saved(make_mlm(tmp_path / "mlm"), tmp_path / "saved")
    modules = json.loads((folder / "modules.json").read_text())
    modules[1]["type"] = "sentence_transformers.sentence_transformer.modules.pooling.Pooling"
    write_json(folder / "modules.json", modules)
    with pytest.raises(UnsupportedError, match="a Pooling module is not supported for task 'sparse'"):
        load(folder)
