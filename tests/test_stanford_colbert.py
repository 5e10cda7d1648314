"""Late interaction checkpoints in the layout of Stanford's ColBERT, as `MultiVectorEncoder` loads them."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from sentence_transformers import MultiVectorEncoder, SentenceTransformer

import toolkit
from tests.test_multivector import (
    RECIPES,
    TEXTS,
    assert_both,
    assert_equal,
    base,
    dense,
    load,
    saved,
    theirs,
    with_words,
)
from tests.tiny import edit_json, write_json
from toolkit.artifact import MANIFEST
from toolkit.checkpoint import open_checkpoint
from toolkit.errors import CheckpointError, UnsupportedError
from toolkit.multivector import KINDS, Expansion, maxsim
from toolkit.parity import verify_folder
from toolkit.recipe import Recipe
from toolkit.registry import find_recipe

BERT = find_recipe("bert").recipe
SHORT = {"query_maxlen": 7, "doc_maxlen": 9}
# every field that ColBERT 2 writes, with values that mean what no field means
COMPLETE: dict[str, Any] = json.loads(
    """
    {"query_token_id": "[unused0]", "doc_token_id": "[unused1]", "query_token": "[Q]", "doc_token": "[D]",
     "ncells": null, "centroid_score_threshold": null, "ndocs": null, "index_path": null, "nbits": 1,
     "kmeans_niters": 20, "resume": false, "similarity": "cosine", "bsize": 64, "accumsteps": 1, "lr": 1e-05,
     "maxsteps": 400000, "save_every": null, "warmup": 20000, "warmup_bert": null, "relu": false, "nway": 64,
     "use_ib_negatives": true, "reranker": false, "distillation_alpha": 1.0, "ignore_scores": false, "dim": 16,
     "doc_maxlen": 9, "mask_punctuation": true, "query_maxlen": 7, "attend_to_mask_tokens": false,
     "interaction": "colbert", "checkpoint": "a/b", "triples": "t", "collection": "c", "queries": "q",
     "index_name": null, "overwrite": false, "root": "r", "experiment": "e", "index_root": null, "name": "n",
     "rank": 0, "nranks": 4, "amp": true, "gpus": 8, "model_name": null, "index_bsize": 64,
     "load_index_with_mmap": false, "avoid_fork_if_possible": false, "meta": {"hostname": "h"}}
    """
)


def stanford(
    folder: Path, metadata: dict[str, Any] | None, recipe: Recipe = BERT, prefix: str = "bert.", **options: Any
) -> Path:
    """A heated checkpoint of the layout; its vocabulary has both markers, and a full stop."""
    with_words(base(folder, recipe, **options), "[unused0]", "[unused1]", ".")
    weights = {prefix + name: tensor for name, tensor in load_file(folder / "model.safetensors").items()}
    hidden = recipe.read_config(json.loads((folder / "config.json").read_text()))[0].state_width
    weights["linear.weight"] = 0.2 * torch.randn(16, hidden, generator=torch.Generator().manual_seed(1))
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    edit_json(folder / "config.json", architectures=["HF_ColBERT"])
    if metadata is not None:
        write_json(folder / "artifact.metadata", metadata)
    return folder


def sides(folder: Path) -> Any:
    made = load(folder).artifact.manifest.multi_vector
    assert made is not None
    return made


@pytest.mark.parametrize(
    ("fields", "queries", "documents"),
    [
        ({}, 7, [9, 3, 4, 6, 6]),
        ({"attend_to_mask_tokens": True}, 7, [9, 3, 4, 6, 6]),
        ({"attend_to_mask_tokens": False, "mask_punctuation": True}, 7, [9, 3, 4, 6, 6]),
        ({"mask_punctuation": False}, 7, [9, 3, 4, 7, 6]),
        ({"mask_punctuation": False, "attend_to_mask_tokens": True}, 7, [9, 3, 4, 7, 6]),
        ({"query_maxlen": 12, "doc_maxlen": 5}, 12, [5, 3, 4, 5, 5]),
        ({"query_maxlen": 24, "doc_maxlen": 24}, 24, [18, 3, 4, 6, 6]),
        ({"doc_maxlen": None, "dim": 16}, 7, [18, 3, 4, 6, 6]),
        ({"query_token_id": "dog", "doc_token_id": "[unused0]"}, 7, [9, 3, 4, 6, 6]),
        ({"query_token_id": None, "doc_token_id": "nope fox"}, 7, [9, 4, 5, 7, 7]),
        ({"query_token_id": "[Q]", "doc_token_id": ""}, 7, [9, 3, 4, 6, 6]),
        (COMPLETE, 7, [9, 3, 4, 6, 6]),
        ({"similarity": None, "interaction": None, "relu": None, "dim": None}, 7, [9, 3, 4, 6, 6]),
    ],
    ids=str,
)
def test_vectors_equal_the_library(tmp_path: Path, fields: dict[str, Any], queries: int, documents: list[int]) -> None:
    """Queries are filled up, documents cut, markers one token each where the vocabulary has them."""
    folder = stanford(tmp_path / "c", SHORT | fields)
    found = assert_both(folder)
    assert [len(x) for x in found["query"]] == [queries] * len(TEXTS)
    assert [len(x) for x in found["document"]] == documents
    for kind in KINDS:
        vectors = torch.cat(found[kind])
        assert vectors.shape[1] == 16
        assert (vectors.norm(dim=1) - 1).abs().max() < 1e-5
    report = verify_folder(tmp_path / "c-out", folder, device="cpu", modes=["eager"])
    assert report.passed, report.summary()
    assert any(cell.quantity == "token vectors" for cell in report.cells)


def test_without_metadata(tmp_path: Path) -> None:
    """Queries of 32 tokens that are not attended to, documents as long as any text, no punctuation."""
    folder = stanford(tmp_path / "c", None, overrides={"max_position_embeddings": 40})
    found = assert_both(folder)
    assert [len(x) for x in found["query"]] == [32] * len(TEXTS)
    assert [len(x) for x in found["document"]] == [18, 3, 4, 6, 6]
    made, manifest = sides(folder), load(folder).artifact.manifest
    assert made.query.expansion == Expansion(length=32, id=4, attend=False)
    assert made.document.limit == 40
    assert "no artifact.metadata: queries of 32 tokens are assumed, as sentence-transformers does" in manifest.warnings
    report = verify_folder(tmp_path / "c-out", folder, device="cpu", modes=["eager"])
    assert report.passed, report.summary()


def test_what_is_read(tmp_path: Path) -> None:
    """Markers stand in front of texts; no field of a real file is unknown; the task is read off config.json."""
    manifest = load(stanford(tmp_path / "c", COMPLETE | {"attend_to_mask_tokens": True})).artifact.manifest
    made = manifest.multi_vector
    assert made is not None
    assert manifest.task == "multi-vector"
    assert manifest.pipeline.prompts == {"query": "[unused0] ", "document": "[unused1] "}
    assert (made.query.limit, made.document.limit, made.similarity) == (7, 9, "maxsim")
    assert (manifest.head.width, manifest.head.token_width) == (0, 16)
    assert made.query.expansion == Expansion(length=7, id=4, attend=True)
    assert (len(made.query.skip_ids), len(made.document.skip_ids)) == (0, 1)
    assert not [warning for warning in manifest.warnings if "artifact.metadata" in warning]
    (entry,) = [entry for entry in manifest.audit if entry["source"] == "linear.weight"]
    assert (entry["action"], entry["target"]) == ("loaded", "head.steps.projection.linear.weight")
    manifest = load(stanford(tmp_path / "d", SHORT | {"surprise": 1})).artifact.manifest
    assert "artifact.metadata: the field 'surprise' is not known and has no effect" in manifest.warnings


def test_markers_are_one_token(tmp_path: Path) -> None:
    """The tokenizer alone would make three of each."""
    runner = load(stanford(tmp_path / "c", SHORT))
    prompts = runner.artifact.manifest.pipeline.prompts
    assert runner.rows(["fox"], prompts["query"], kind="query")[0].ids.tolist() == [2, 9, 8, 3, 4, 4, 4]
    assert runner.rows(["fox"], prompts["document"], kind="document")[0].ids.tolist() == [2, 10, 8, 3]


@pytest.mark.parametrize("attend", [True, False])
def test_every_mode(tmp_path: Path, attend: bool) -> None:
    folder = stanford(tmp_path / "c", SHORT | {"attend_to_mask_tokens": attend})
    report = toolkit.convert(str(folder), tmp_path / "out")
    assert report.parity.passed
    assert {cell.mode for cell in report.parity.cells} == {"eager", "compile", "graph"}
    runner = toolkit.load(tmp_path / "out", device="cpu", mode="graph")
    for kind in KINDS:
        assert_equal(runner.multi_vectors(TEXTS, kind), theirs(folder, kind))


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.label)
def test_every_family(recipe: Recipe, tmp_path: Path) -> None:
    """The library takes whatever AutoModel loads, under the class's own prefix or without one."""
    config = transformers.AutoConfig.for_model(**recipe.tiny)
    maker: Any = transformers.AutoModel
    prefix = f"{maker.from_config(config).base_model_prefix}."
    metadata = SHORT | {"attend_to_mask_tokens": True}
    folder = stanford(tmp_path / "c", metadata, recipe, prefix if prefix in recipe.prefixes else "")
    assert_both(folder)
    report = verify_folder(tmp_path / "c-out", folder, device="cpu", modes=["eager"])
    assert report.passed, report.summary()


def test_other_ways_to_store_weights(tmp_path: Path) -> None:
    """Names without a prefix, a pickled file, half precision."""
    assert_both(stanford(tmp_path / "bare", SHORT, prefix=""))
    folder = stanford(tmp_path / "pickled", SHORT)
    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    torch.save(weights, folder / "pytorch_model.bin")
    assert_both(folder)
    folder = stanford(tmp_path / "half", SHORT)
    save_file({name: x.half() for name, x in weights.items()}, folder / "model.safetensors", {"format": "pt"})
    assert_both(folder, load(folder, dtype="float32"))


@pytest.mark.parametrize("attend", [True, False])
def test_saved_once_more(tmp_path: Path, attend: bool) -> None:
    """What the library makes of the layout and saves converts to the same vectors."""
    folder = stanford(tmp_path / "c", SHORT | {"attend_to_mask_tokens": attend})
    MultiVectorEncoder(str(folder), device="cpu").save(str(tmp_path / "saved"))
    for kind in KINDS:
        assert_equal(load(tmp_path / "saved").multi_vectors(TEXTS, kind), load(folder).multi_vectors(TEXTS, kind))


def test_scores(tmp_path: Path) -> None:
    folder = stanford(tmp_path / "c", SHORT)
    runner, model = load(folder), MultiVectorEncoder(str(folder), device="cpu")
    documents = runner.multi_vectors(TEXTS, "document")
    for query in runner.multi_vectors(TEXTS, "query"):
        expected = model.similarity([query], documents)[0]
        assert (maxsim(query, documents, sides(folder).similarity) - expected).abs().max() < 1e-5


def test_files_of_sentence_transformers_need_modules(tmp_path: Path) -> None:
    """Without modules.json neither its options nor its prompts count."""
    folder = stanford(tmp_path / "c", SHORT)
    before = assert_both(folder)
    write_json(folder / "sentence_bert_config.json", {"max_seq_length": 5, "do_lower_case": True, "document_length": 4})
    stated = {"prompts": {"query": "one "}, "similarity_fn_name": "meanmaxsim", "model_type": "MultiVectorEncoder"}
    write_json(folder / "config_sentence_transformers.json", stated)
    assert_equal(assert_both(folder)["document"], before["document"])
    assert sides(folder).similarity == "maxsim"


def projected(folder: Path, *modules: Any, kind: str | None, **options: Any) -> Path:
    """The usual layout, with Stanford's class in config.json and its projection beside the base model's tensors."""
    out = saved(base(folder / "base"), folder / "saved", *modules, **options)
    edit_json(out / "config.json", architectures=["HF_ColBERT"])
    edit_json(out / "config_sentence_transformers.json", model_type=... if kind is None else kind)
    weights = load_file(out / "model.safetensors")
    save_file(weights | {"linear.weight": torch.ones(16, 40)}, out / "model.safetensors", {"format": "pt"})
    write_json(out / "artifact.metadata", {"query_maxlen": 12, "similarity": "l2"})
    return out


@pytest.mark.parametrize("kind", ["MultiVectorEncoder", None])
def test_modules_come_first(tmp_path: Path, kind: str | None) -> None:
    """With modules.json these make the head, and the class says that it is a MultiVectorEncoder's."""
    folder = projected(tmp_path, kind=kind, transformer={"document_length": 5})
    runner = load(folder)
    found = assert_both(folder, runner)
    assert [len(x) for x in found["query"]] == [17, 2, 3, 6, 5]
    (entry,) = [entry for entry in runner.artifact.manifest.audit if entry["source"] == "linear.weight"]
    assert entry["action"] == "dropped"
    assert "takes no part" in entry["why"]
    report = verify_folder(runner.artifact.folder, folder, device="cpu", modes=["eager"])
    assert report.passed, report.summary()


def test_nothing_is_added_to_modules(tmp_path: Path) -> None:
    """No normalisation and no mask, which a SentenceTransformer's modules would get."""
    unseen = {"query_expansion": {"strategy": "fixed", "attend": False, "length": 7}}
    found = assert_both(projected(tmp_path, dense(), kind=None, transformer=unseen))
    assert [len(x) for x in found["query"]] == [7, 2, 3, 6, 5]
    assert (torch.cat(found["query"]).norm(dim=1) - 1).abs().min() > 0.01


def test_contradicting_kinds(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match="model_type = 'CrossEncoder': it contradicts HF_ColBERT"):
        load(projected(tmp_path, kind="CrossEncoder"), task="multi-vector")


def test_the_base_model_alone(tmp_path: Path) -> None:
    """For another task the projection is left out, as SentenceTransformer does."""
    folder = stanford(tmp_path / "c", {"similarity": "l2"})
    runner = load(folder, task="embed")
    expected = SentenceTransformer(str(folder), device="cpu").encode(TEXTS[2:], convert_to_tensor=True)
    assert (runner.embed(TEXTS[2:]) - expected).abs().max() < 1e-5


REFUSED: dict[str, tuple[Callable[[Path], None], type[Exception], str]] = {}


def field(error: type[Exception], message: str, **fields: Any) -> None:
    """Change fields of the metadata."""
    REFUSED[str(fields)] = (lambda folder: edit_json(folder / "artifact.metadata", **fields), error, message)


def tensor(name: str, change: Callable[[dict[str, torch.Tensor]], Any], error: type[Exception], message: str) -> None:
    """Change the stored tensors."""

    def write(folder: Path) -> None:
        weights = load_file(folder / "model.safetensors")
        change(weights)
        save_file(weights, folder / "model.safetensors", {"format": "pt"})

    REFUSED[name] = (write, error, message)


def in_two_files(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = {name: f"model-0000{1 + (name == 'linear.weight')}-of-00002.safetensors" for name in weights}
    for file in set(names.values()):
        save_file({n: x for n, x in weights.items() if names[n] == file}, folder / file, {"format": "pt"})
    write_json(folder / "model.safetensors.index.json", {"metadata": {}, "weight_map": names})


field(UnsupportedError, "artifact.metadata: similarity = 'l2' is not supported, only 'cosine'", similarity="l2")
field(UnsupportedError, "interaction = 'flipr' is not supported, only 'colbert'", interaction="flipr")
field(UnsupportedError, "relu = True is not supported, only False", relu=True)
field(UnsupportedError, "reranker = True is not supported, only False", reranker=True)
field(CheckpointError, "artifact.metadata: dim = 8, but 'linear.weight' makes 16", dim=8)
field(CheckpointError, "artifact.metadata: dim = '16', expected a positive integer", dim="16")
field(CheckpointError, "query_maxlen = 0, expected a positive integer", query_maxlen=0)
field(CheckpointError, "query_maxlen = True, expected a positive integer", query_maxlen=True)
field(CheckpointError, "doc_maxlen = 9.0, expected a positive integer", doc_maxlen=9.0)
field(CheckpointError, "query_token_id = 1, expected a token", query_token_id=1)
field(CheckpointError, "doc_token_id = [], expected a token", doc_token_id=[])
field(CheckpointError, "attend_to_mask_tokens = 1, expected true or false", attend_to_mask_tokens=1)
field(CheckpointError, "mask_punctuation = None, expected true or false", mask_punctuation=None)
field(CheckpointError, "length = 25, the model takes at most 24 tokens", query_maxlen=25)
field(CheckpointError, "no room for the tokenizer's 2 special tokens", doc_maxlen=1)
tensor("none", lambda w: w.pop("linear.weight"), CheckpointError, "missing tensor: 'linear.weight'")
tensor(
    "bias", lambda w: w.update({"linear.bias": torch.zeros(16)}), CheckpointError, "unexpected tensor: 'linear.bias'"
)
tensor("width", lambda w: w.update({"linear.weight": torch.zeros(16, 39)}), CheckpointError, "expected [dim, 40]")
tensor("flat", lambda w: w.update({"linear.weight": torch.zeros(40)}), CheckpointError, "has shape (40,), expected")
tensor(
    "base", lambda w: w.pop("bert.embeddings.word_embeddings.weight"), CheckpointError, "missing tensor: 'embeddings."
)
REFUSED["shards"] = (in_two_files, UnsupportedError, "looks for 'linear.weight' in model.safetensors or pytorch_model")
REFUSED["no object"] = (lambda folder: write_json(folder / "artifact.metadata", []), CheckpointError, "holds a list")


@pytest.fixture(scope="module")
def native(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return stanford(tmp_path_factory.mktemp("native") / "c", SHORT)


@pytest.mark.parametrize("name", REFUSED)
def test_refusals(name: str, native: Path, tmp_path: Path) -> None:
    change, error, message = REFUSED[name]
    folder = shutil.copytree(native, tmp_path / "c")
    change(folder)
    with pytest.raises(error) as caught:
        load(folder)
    assert message in str(caught.value)


@pytest.mark.parametrize("what", ["projection", "query", "document", "punctuation", "attend", "length"])
def test_the_gate_sees_what_is_wrong(native: Path, tmp_path: Path, what: str) -> None:
    folder = shutil.copytree(native, tmp_path / "c")
    out = load(folder).artifact.folder
    assert verify_folder(out, folder, device="cpu", modes=["eager"]).passed
    data = json.loads((out / MANIFEST).read_text())
    if what == "projection":
        weights, name = load_file(out / "model.safetensors"), "head.steps.projection.linear.weight"
        save_file(weights | {name: weights[name].flip(0)}, out / "model.safetensors", {"format": "pt"})
    elif what == "punctuation":
        data["multi_vector"]["document"]["skip_ids"] = [13]
    elif what == "attend":
        data["multi_vector"]["query"]["expansion"]["attend"] = True
    elif what == "length":
        data["multi_vector"]["document"]["limit"] = 8
    else:
        data["pipeline"]["prompts"][what] = ""
    write_json(out / MANIFEST, data)
    assert not verify_folder(out, folder, device="cpu", modes=["eager"]).passed


def test_the_hub_is_asked_for_the_metadata(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def download(repo: str, *, allow_patterns: list[str], **options: Any) -> str:
        asked.extend(allow_patterns)
        raise OSError("no network")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    with pytest.raises(CheckpointError, match="no network"):
        open_checkpoint("org/colbert")
    assert "artifact.metadata" in asked
