"""The gate holds over the registry, and fails for planted faults."""

import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import toolkit
from tests.tiny import edit_json, embedding_recipes, make_checkpoint
from toolkit.artifact import Artifact
from toolkit.errors import CheckpointError, InputError, MissingDependencyError, ParityError
from toolkit.graphs import BucketLadder
from toolkit.nn import head, pooling
from toolkit.parity import TOLERANCES, Cell, ParityReport, harness, verify_folder
from toolkit.parity.rule import bound, max_abs
from toolkit.registry import find_recipe

RECIPES = embedding_recipes()


@pytest.mark.parametrize("pooling", ["mean", "cls"])
@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.label)
def test_every_recipe_passes(recipe, pooling: str, tmp_path: Path) -> None:
    """ids, embeds and mixed; alone, batched, shuffled; lengths 1, 2, limit - 1, limit; texts through the pipeline."""
    checkpoint = make_checkpoint(tmp_path / "checkpoint", recipe, pooling=pooling, normalize=pooling == "mean")
    toolkit.convert(str(checkpoint), tmp_path / "out", verify=False)
    report = verify_folder(tmp_path / "out", checkpoint, device="cpu", modes=["eager"])
    assert report.passed, report.summary()
    assert {(c.path, c.company) for c in report.cells if c.quantity == "token states"} == {
        (path, company) for path in ("ids", "embeds", "mixed") for company in ("alone", "batched", "shuffled")
    }


def test_compiled_and_replayed_pass_too(bert_checkpoint: Path, bert_artifact: Path) -> None:
    report = verify_folder(bert_artifact, bert_checkpoint, device="cpu")
    assert report.passed, report.summary()
    assert {cell.mode for cell in report.cells} == {"eager", "compile", "graph"}


def test_the_real_minilm_converts_and_passes(minilm: str, tmp_path: Path) -> None:
    report = toolkit.convert(minilm, tmp_path / "out", device="cpu").parity
    assert report.passed, report.summary()
    stored = json.loads((tmp_path / "out" / "parity.json").read_text(encoding="utf-8"))
    assert stored["passed"] is True
    assert "sentence-transformers" in stored["versions"]
    assert "parity passed" in (tmp_path / "out" / "parity.html").read_text(encoding="utf-8")
    eager = [c for c in report.cells if c.quantity == "vectors"]
    assert max(c.error for c in eager) < 1e-6


def change_weight(folder: Path, name: str, change: Callable[[torch.Tensor], object]) -> None:
    file = folder / "model.safetensors"
    weights = load_file(file)
    change(weights[name])
    save_file(weights, file, {"format": "pt"})


def add(*place: int, amount: float) -> Callable[[torch.Tensor], None]:
    """Change one value; a constant added to a whole row would vanish in the norm that follows."""

    def change(tensor: torch.Tensor) -> None:
        tensor[place] += amount

    return change


@pytest.fixture
def fresh(bert_artifact: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(bert_artifact, tmp_path / "fresh"))


def edit_spec(folder: Path, *keys: str, value: object) -> None:
    manifest = json.loads((folder / "toolkit.json").read_text(encoding="utf-8"))
    places = manifest["spec"]["blocks"] if keys[0] in manifest["spec"]["blocks"][0] else [manifest["spec"]]
    for place in places:
        for key in keys[:-1]:
            place = place[key]
        place[keys[-1]] = value
    edit_json(folder / "toolkit.json", spec=manifest["spec"])


def shift_positions(folder: Path) -> None:
    """Start at position 1; the last position falls off the table, so the limits shrink with it."""
    edit_spec(folder, "embedding", "position_start", value=1)
    edit_spec(folder, "usable_length", value=23)
    manifest = json.loads((folder / "toolkit.json").read_text(encoding="utf-8"))
    edit_json(folder / "toolkit.json", usable_length=23, tokenizer=manifest["tokenizer"] | {"limit": 23})


PLANTED: dict[str, Callable[[Path], None]] = {
    "one weight": lambda f: change_weight(f, "blocks.1.mlp.down.weight", add(0, 7, amount=1e-2)),
    "one bias": lambda f: change_weight(f, "blocks.2.attention.out.bias", add(3, amount=1e-3)),
    "query and key swapped": lambda f: change_weight(
        f, "blocks.0.attention.qkv.weight", lambda w: w[:80].copy_(w[:80].roll(40, 0))
    ),
    "position offset": lambda f: shift_positions(f),
    "one position row": lambda f: change_weight(f, "embeddings.position.weight", add(23, 4, amount=0.01)),
    "one segment row": lambda f: change_weight(f, "embeddings.segment.weight", add(2, 4, amount=0.01)),
    "one token row of many": lambda f: change_weight(f, "embeddings.token.weight", lambda w: w.mul_(1.0001)),
    "norm eps of the layers": lambda f: edit_spec(f, "norm", "eps", value=1.1e-3),
    "norm eps of the embeddings": lambda f: edit_spec(f, "embedding", "norm", "eps", value=1e-5),
    "score scale": lambda f: edit_spec(f, "attention", "scale", value=0.36),
    "tanh gelu": lambda f: edit_spec(f, "mlp", "activation", value="gelu_tanh"),
}


@pytest.mark.parametrize("fault", PLANTED)
def test_a_planted_fault_fails_the_gate(fault: str, fresh: Path, bert_checkpoint: Path) -> None:
    PLANTED[fault](fresh)
    assert not verify_folder(fresh, bert_checkpoint, device="cpu", modes=["eager"]).passed


def without_normalize(stored: dict[str, Any]) -> dict[str, Any]:
    return stored | {"steps": [step for step in stored["steps"] if step["kind"] != "normalize"]}


@pytest.mark.parametrize("mode", ["mean", "cls"])
def test_a_wrong_pooling_fails_the_gate(
    mode: str, bert_artifact: Path, bert_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The divisor counts one token too few; the vectors are not normalised here, or it would not show."""
    original = pooling.POOLINGS["mean"]

    def wrong(states: torch.Tensor, chosen: pooling.Selection) -> torch.Tensor:
        lengths = (chosen.end - chosen.begin)[:, None]
        return original(states, chosen) * lengths / (lengths - 1).clamp(min=1)

    replaced = wrong if mode == "mean" else pooling.POOLINGS["cls"]
    monkeypatch.setattr(head, "POOLINGS", {**pooling.POOLINGS, "mean": replaced})
    folder = Path(shutil.copytree(bert_artifact, bert_artifact.parent / f"pooling-{mode}"))
    checkpoint = Path(shutil.copytree(bert_checkpoint, bert_artifact.parent / f"checkpoint-{mode}"))
    manifest = json.loads((folder / "toolkit.json").read_text(encoding="utf-8"))
    edit_json(folder / "toolkit.json", head=without_normalize(manifest["head"]))
    modules = json.loads((checkpoint / "modules.json").read_text(encoding="utf-8"))
    (checkpoint / "modules.json").write_text(json.dumps(modules[:2]), encoding="utf-8")
    report = verify_folder(folder, checkpoint, device="cpu", modes=["eager"])
    assert not report.passed
    assert {cell.quantity for cell in report.cells if not cell.passed} == {"vectors"}


def test_normalisation_left_out_fails_the_gate(fresh: Path, bert_checkpoint: Path) -> None:
    manifest = json.loads((fresh / "toolkit.json").read_text(encoding="utf-8"))
    edit_json(fresh / "toolkit.json", head=without_normalize(manifest["head"]))
    assert not verify_folder(fresh, bert_checkpoint, device="cpu", modes=["eager"]).passed


def test_a_silent_fallback_fails_the_gate(
    bert_artifact: Path, bert_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """J1: numbers that are right because no graph ran do not count."""
    short = BucketLadder(tokens=(8,), longest=24)
    monkeypatch.setattr(BucketLadder, "up_to", lambda *args: short)
    report = verify_folder(bert_artifact, bert_checkpoint, device="cpu", modes=["graph"])
    assert not report.passed
    (miss,) = [cell for cell in report.cells if not cell.passed]
    assert miss.quantity == "off-graph runs"
    assert miss.error > 1


def test_a_tokenizer_difference_is_reported_as_such(fresh: Path, bert_checkpoint: Path) -> None:
    """F3: padding stored in tokenizer.json."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(fresh / "tokenizer.json"))
    tokenizer.enable_padding(length=16)
    tokenizer.save(str(fresh / "tokenizer.json"))
    report = verify_folder(fresh, bert_checkpoint, device="cpu", modes=["eager"])
    assert not report.passed
    assert "tokenize differently" in report.summary()


def test_convert_fails_and_writes_nothing(
    bert_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(head, "POOLINGS", {**pooling.POOLINGS, "mean": pooling.POOLINGS["cls"]})
    monkeypatch.setattr("shutil.which", lambda name: None)
    with pytest.raises(ParityError, match="nothing was written") as caught:
        toolkit.convert(str(bert_checkpoint), tmp_path / "out", device="cpu")
    assert caught.value.exit_status == 1
    assert isinstance(caught.value.report, ParityReport)
    assert any("no C++ compiler" in note for note in caught.value.report.notes)
    assert list(tmp_path.iterdir()) == []


def test_verify_finds_its_source_and_refuses_another(bert_checkpoint: Path, fresh: Path, tmp_path: Path) -> None:
    report = toolkit.verify(fresh, device="cpu", modes=["eager", "eager"])
    assert report.passed
    assert report.notes == ("not checked, as not asked for: compile, graph",)
    assert len(report.cells) == 12
    assert (fresh / "parity.json").is_file()
    other = make_checkpoint(tmp_path / "other", RECIPES[0], seed=5)
    with pytest.raises(CheckpointError, match="other digests"):
        toolkit.verify(fresh, other, modes=["eager"])
    with pytest.raises(CheckpointError, match="--source"):
        toolkit.verify(fresh, tmp_path / "missing", modes=["eager"])
    with pytest.raises(InputError, match="mode 'fast'"):
        toolkit.verify(fresh, modes=["fast"])


def test_without_sentence_transformers_there_is_no_silent_pass(
    bert_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("toolkit.parity.references.find_spec", lambda name: None)
    with pytest.raises(MissingDependencyError, match=r"\[reference\]"):
        toolkit.convert(str(bert_checkpoint), tmp_path / "out", device="cpu")


def test_nan_fails() -> None:
    nan, one = torch.tensor([float("nan")]), torch.tensor([1.0])
    assert max_abs([one, nan], [one, one]) == (float("inf"), 1)
    with pytest.raises(ValueError, match="shape"):
        max_abs([torch.zeros(2)], [torch.zeros(3)])


def test_the_rule() -> None:
    """k ≤ 2 in float32, ≤ 1.5 in 16 bits, and a floor of at most one unit in the last place."""
    assert TOLERANCES[torch.float32].factor <= 2
    assert max(TOLERANCES[d].factor for d in (torch.float16, torch.bfloat16)) <= 1.5
    assert max(t.floor_ulps for t in TOLERANCES.values()) <= 1
    assert bound(torch.float32, 1e-6, [torch.tensor([-4.0])]) == pytest.approx(2e-6 + 4 * 2**-23)


def test_a_report_without_comparisons_does_not_pass() -> None:
    report = ParityReport(
        source="x", device="cpu", dtype="float32", rule="", cells=(), tokenizer=(), texts=0, notes=(), versions={}
    )
    assert not report.passed
    cell = Cell(
        mode="eager", path="ids", company="alone", quantity="states", cases=1, error=float("nan"),
        reference_error=0.0, bound=1.0, worst="",
    )  # fmt: skip
    assert not dataclasses.replace(report, cells=(cell,)).passed


def test_long_sequences_are_left_out_and_said_so(tmp_path: Path) -> None:
    """The reference's attention over thousands of tokens in float64 needs gigabytes a layer."""
    heads = {"num_attention_heads": 4, "num_hidden_layers": 1}
    folder = make_checkpoint(
        tmp_path / "m", find_recipe("bert").recipe, overrides={"max_position_embeddings": 20_000, **heads}
    )
    toolkit.convert(str(folder), tmp_path / "out", verify=False)
    spec = Artifact.open(tmp_path / "out").manifest.spec
    assert spec.usable_length == 20_000
    assert harness._longest(spec) == 4729
    short = dataclasses.replace(spec, usable_length=512)
    assert harness._longest(short) == 512
    assert max(harness._lengths(harness._longest(spec))) == 4729
