"""Sparse embeddings: a masked language model's head and SPLADE's pooling."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from sentence_transformers import SparseEncoder
from sentence_transformers.base.modules.transformer import Transformer
from sentence_transformers.sentence_transformer.modules import Dropout, Normalize, Pooling
from sentence_transformers.sparse_encoder.modules import (
    Router,
    SparseAutoEncoder,
    SparseStaticEmbedding,
    SpladePooling,
)
from transformers import AutoConfig, AutoModelForMaskedLM

import toolkit
from tests.tiny import edit_json, heat, make_tokenizer, why_no_reference, write_json
from toolkit import PromptEmbeds, TokenIds
from toolkit.errors import CheckpointError, UnsupportedError
from toolkit.nn.head import LogActivation, build_head
from toolkit.parity import verify_folder
from toolkit.recipe import Recipe
from toolkit.registry import all_recipes, find_recipe
from toolkit.runner import Runner
from toolkit.steps import HeadSpec, LogStep, PoolingStep

TEXTS = ["the quick fox", "query doc text one two three", "a"]
BERT = find_recipe("bert").recipe
HEADS = [
    (entry.recipe, head.classes[0])
    for entry in all_recipes()
    for head in entry.recipe.heads
    if "sparse" in head.tasks and why_no_reference(entry.recipe) is None
]
POOLINGS: list[Any] = [(how, activation) for how in ("max", "sum") for activation in ("relu", "log1p_relu")]


def make_mlm(folder: Path, recipe: Recipe = BERT, name: str = "BertForMaskedLM", **config: Any) -> Path:
    torch.manual_seed(0)
    raw = AutoConfig.for_model(**{**recipe.tiny, **config})
    model = getattr(transformers, name)(raw)
    heat(model)
    model.save_pretrained(folder)
    make_tokenizer(segments=getattr(raw, "type_vocab_size", 0) > 1).save_pretrained(folder)
    return folder


def saved(source: Path, out: Path, how: Any = "max", activation: Any = "relu") -> Path:
    """What the library writes."""
    modules = [Transformer(str(source), transformer_task="fill-mask"), SpladePooling(how, activation)]
    SparseEncoder(modules=modules, device="cpu").save(str(out))
    return out


def load(folder: Path, **options: Any) -> Runner:
    out = folder.parent / f"{folder.name}-out"
    toolkit.convert(str(folder), out, verify=False, **options)
    return toolkit.load(out, device="cpu", mode="eager")


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(("recipe", "name"), HEADS, ids=lambda v: v if isinstance(v, str) else "")
def test_every_head_passes_the_gate(recipe: Recipe, name: str, tied: bool, tmp_path: Path) -> None:
    folder = saved(make_mlm(tmp_path / "mlm", recipe, name, tie_word_embeddings=tied), tmp_path / "saved")
    report = toolkit.convert(str(folder), tmp_path / "out", verify=False)
    assert report.manifest.task == "sparse"
    found = verify_folder(tmp_path / "out", folder, device="cpu", modes=["eager"])
    assert found.passed, found.summary()


@pytest.mark.parametrize("tied", [True, False])
def test_the_newer_head_of_deberta_passes_the_gate(tied: bool, tmp_path: Path) -> None:
    recipe, config = find_recipe("deberta-v2").recipe, {"legacy": False, "embedding_size": 40}
    mlm = make_mlm(tmp_path / "mlm", recipe, "DebertaV2ForMaskedLM", tie_word_embeddings=tied, **config)
    built = AutoModelForMaskedLM.from_config(AutoConfig.from_pretrained(str(mlm)))
    if tied and built._tied_weights_keys:
        pytest.skip(f"transformers {transformers.__version__} cannot load this head")
    folder = saved(mlm, tmp_path / "saved")
    toolkit.convert(str(folder), tmp_path / "out", verify=False)
    found = verify_folder(tmp_path / "out", folder, device="cpu", modes=["eager"])
    assert found.passed, found.summary()


@pytest.mark.parametrize(("how", "activation"), POOLINGS)
def test_vectors_equal_sparse_encoder(tmp_path: Path, how: str, activation: str) -> None:
    """Dense rows with a column for each word; most are zero, and the same ones are."""
    folder = saved(make_mlm(tmp_path / "mlm"), tmp_path / "saved", how, activation)
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


@pytest.mark.parametrize("how", ["max", "sum"])
def test_every_mode_and_path(how: str, tmp_path: Path) -> None:
    folder = saved(make_mlm(tmp_path / "mlm"), tmp_path / "saved", how)
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
        ({"pooling_strategy": "mean"}, "pooling_strategy = 'mean'"),
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


@pytest.mark.parametrize("how", ["max", "sum"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_passes_the_gate(dtype: str, how: str, tmp_path: Path) -> None:
    """Logarithms and sums are taken in float32, the library's in the model's dtype."""
    folder = saved(make_mlm(tmp_path / "mlm"), tmp_path / "saved", how)
    toolkit.convert(str(folder), tmp_path / "out", dtype=dtype, verify=False)
    report = verify_folder(tmp_path / "out", folder, device="cpu", modes=["eager"])
    assert report.passed, report.summary()


def test_a_sum_is_taken_in_float32() -> None:
    """512 times log(1 + x) of a bfloat16 number; not one after the other, which would lose digits."""
    steps = (LogStep(on="tokens", times=1), PoolingStep(modes=("sum",)))
    head = build_head(HeadSpec(steps=steps, width=1), torch.device("cpu"))
    states = torch.full((512, 1), 0.7109375, dtype=torch.bfloat16)
    offsets, skip = torch.tensor([0, 512], dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    vectors = head(states, offsets, skip).vectors
    assert vectors.item() == pytest.approx(512 * math.log1p(0.7109375), rel=2e-6)
    assert torch.equal(states, torch.full_like(states, 0.7109375))


def test_the_activation_leaves_its_input_alone() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        x = torch.tensor([-1.0, 2.0], dtype=dtype)
        y = LogActivation(2)(x)
        assert x.tolist() == [-1, 2]
        assert y.dtype == torch.float32
        assert y.tolist() == pytest.approx([0, math.log1p(math.log1p(2))])


def test_a_sum_is_no_pooling_of_dense_embeddings(checkpoint: Callable[..., Path]) -> None:
    folder = checkpoint()
    edit_json(folder / "1_Pooling" / "config.json", pooling_mode="sum")
    with pytest.raises(UnsupportedError, match=r"pooling \['sum'\] is not supported"):
        load(folder)


@pytest.mark.parametrize("how", ["max", "sum"])
def test_normalised_vectors(how: str, tmp_path: Path) -> None:
    source = make_mlm(tmp_path / "mlm")
    transformer = Transformer(str(source), transformer_task="fill-mask")
    modules = [transformer, SpladePooling(how), Dropout(0.5), Normalize()]  # type: ignore[arg-type]
    SparseEncoder(modules=modules, device="cpu").save(str(tmp_path / "saved"))
    theirs = SparseEncoder(str(tmp_path / "saved"), device="cpu").encode(TEXTS, convert_to_sparse_tensor=False)
    ours = load(tmp_path / "saved").embed(TEXTS)
    assert (ours - torch.as_tensor(theirs)).abs().max() < 1e-6
    assert ours.norm(dim=1).tolist() == pytest.approx([1, 1, 1])


@pytest.mark.parametrize("chunk", [None, 0, 3])
def test_the_size_of_chunks_does_not_matter(chunk: int | None, tmp_path: Path) -> None:
    folder = saved(make_mlm(tmp_path / "mlm"), tmp_path / "saved", "sum")
    edit_json(folder / "1_SpladePooling" / "config.json", chunk_size=chunk)
    theirs = SparseEncoder(str(folder), device="cpu").encode(TEXTS, convert_to_sparse_tensor=False)
    assert (load(folder).embed(TEXTS) - torch.as_tensor(theirs)).abs().max() < 1e-5


def test_impossible_chunks_are_refused(tmp_path: Path) -> None:
    folder = saved(make_mlm(tmp_path / "mlm"), tmp_path / "saved")
    edit_json(folder / "1_SpladePooling" / "config.json", chunk_size="3")
    with pytest.raises(CheckpointError, match="chunk_size = '3'"):
        load(folder)


def test_a_limit_of_active_dimensions_is_refused(tmp_path: Path) -> None:
    """The library keeps only so many values of each vector."""
    modules = [Transformer(str(make_mlm(tmp_path / "mlm")), transformer_task="fill-mask"), SpladePooling()]
    SparseEncoder(modules=modules, device="cpu", max_active_dims=4).save(str(tmp_path / "saved"))
    with pytest.raises(UnsupportedError, match="max_active_dims = 4"):
        load(tmp_path / "saved")


def test_a_sparse_auto_encoder_is_refused_by_name(checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    modules = [Transformer(str(checkpoint(pooling=None))), Pooling(40, "mean"), SparseAutoEncoder(40, 64)]
    SparseEncoder(modules=modules, device="cpu").save(str(tmp_path / "saved"))
    with pytest.raises(UnsupportedError, match="SparseAutoEncoder' is not supported"):
        load(tmp_path / "saved")


@pytest.mark.parametrize("inside", [True, False])
def test_static_weights_are_refused_by_name(inside: bool, tmp_path: Path) -> None:
    """A table of weights for queries, alone or beside a model for documents."""
    static = SparseStaticEmbedding(make_tokenizer())  # type: ignore[arg-type]
    modules: list[Any] = [static]
    if inside:
        transformer = Transformer(str(make_mlm(tmp_path / "mlm")), transformer_task="fill-mask")
        modules = [Router.for_query_document([static], [transformer, SpladePooling()])]
    SparseEncoder(modules=modules, device="cpu").save(str(tmp_path / "saved"))
    with pytest.raises(UnsupportedError, match="Router' is not supported" if inside else "StaticEmbedding' is not"):
        load(tmp_path / "saved")


@pytest.mark.parametrize("kind", ["LayerNorm", "Dense", "Pooling", "WeightedLayerPooling"])
def test_modules_of_dense_embeddings_are_refused_by_name(kind: str, tmp_path: Path) -> None:
    folder = saved(make_mlm(tmp_path / "mlm"), tmp_path / "saved")
    modules = json.loads((folder / "modules.json").read_text())
    more = {"idx": 2, "name": "2", "path": f"2_{kind}", "type": f"sentence_transformers.models.{kind}"}
    write_json(folder / "modules.json", [*modules, more])
    with pytest.raises(UnsupportedError, match=f"a {kind} module is not supported for task 'sparse'"):
        load(folder)


def test_the_older_name_of_the_transformer(tmp_path: Path) -> None:
    folder = saved(make_mlm(tmp_path / "mlm"), tmp_path / "saved")
    expected = load(folder).embed(TEXTS)
    modules = json.loads((folder / "modules.json").read_text())
    modules[0]["type"] = "sentence_transformers.sparse_encoder.models.MLMTransformer"
    write_json(folder / "modules.json", modules)
    (folder / "sentence_bert_config.json").unlink()
    again = tmp_path / "again"
    folder.rename(again)
    assert torch.equal(load(again).embed(TEXTS), expected)
