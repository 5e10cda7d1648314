"""What `toolkit doctor` finds is true, and says what to do about the rest."""

import importlib.metadata
import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import toolkit
from toolkit.attention import BACKENDS
from toolkit.attention.paged import PAGED_BACKENDS
from toolkit.devices import resolve_mode
from toolkit.doctor import Diagnosis, Finding, diagnose
from toolkit.errors import MissingDependencyError

CPU = torch.device("cpu")
COMPILERS = {"g++", "clang++", "c++"}
LIBRARIES = ["transformers", "sentence-transformers", "onnxruntime", "onnxscript"]


def finding(diagnosis: Diagnosis, name: str) -> Finding:
    found = [finding for finding in diagnosis.findings if finding.name == name]
    assert len(found) == 1
    return found[0]


@pytest.fixture
def without_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    which: Callable[..., str | None] = shutil.which
    monkeypatch.setattr(shutil, "which", lambda name, *rest: None if name in COMPILERS else which(name, *rest))


def test_findings_are_true_here() -> None:
    diagnosis = diagnose()
    assert finding(diagnosis, "torch").detail == torch.__version__
    assert finding(diagnosis, "CUDA").present == torch.cuda.is_available()
    assert finding(diagnosis, "CPU compiler").present == any(shutil.which(name) for name in COMPILERS)
    for kind, backends in (("attention", BACKENDS), ("paged attention", PAGED_BACKENDS)):
        for backend in backends:
            found = finding(diagnosis, f"{kind}: {backend.name}, on {backend.device}")
            assert found.present == (backend.why_unavailable() is None)
    for name in LIBRARIES:
        try:
            expected = (True, importlib.metadata.version(name))
        except importlib.metadata.PackageNotFoundError:
            expected = (False, "not installed")
        found = finding(diagnosis, name)
        assert (found.present, found.detail) == expected
    assert set(diagnosis.modes) == {"cpu", "cuda"} if torch.cuda.is_available() else {"cpu"}


def test_what_is_missing_has_a_fix_and_what_is_there_has_none() -> None:
    diagnosis = diagnose()
    for found in diagnosis.findings:
        assert found.present == (found.fix == ""), found
    assert json.loads(json.dumps(diagnosis.to_dict()))["modes"] == diagnosis.modes


def test_the_mode_is_the_one_that_load_chooses() -> None:
    for device, mode in diagnose().modes.items():
        assert resolve_mode("auto", torch.device(device)) == mode


@pytest.mark.parametrize("missing", LIBRARIES)
def test_a_missing_library(monkeypatch: pytest.MonkeyPatch, missing: str) -> None:
    distribution = importlib.metadata.distribution

    def find(name: str) -> importlib.metadata.Distribution:
        if name == missing:
            raise importlib.metadata.PackageNotFoundError(name)
        return distribution(name)

    monkeypatch.setattr(importlib.metadata, "distribution", find)
    found = finding(diagnose(), missing)
    assert not found.present
    assert found.fix.startswith("pip install")
    others = [finding(diagnose(), name).present for name in ("transformers", "sentence-transformers")]
    assert others == [missing != "transformers", missing != "sentence-transformers"]


@pytest.mark.usefixtures("without_compiler")
def test_a_missing_compiler() -> None:
    diagnosis = diagnose()
    found = finding(diagnosis, "CPU compiler")
    assert not found.present
    assert "install" in found.fix
    assert diagnosis.modes["cpu"] == "eager"


@pytest.mark.parametrize("name", sorted(COMPILERS))
def test_the_compiler_is_the_one_that_inductor_takes(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """inductor runs $CXX, or g++ on Linux; another one on the path does not help it."""
    monkeypatch.setattr(shutil, "which", lambda wanted, *rest: f"/usr/bin/{name}" if wanted == name else None)
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.delenv("CXX", raising=False)
    assert finding(diagnose(), "CPU compiler").present == (name == "g++")
    monkeypatch.setenv("CXX", name)
    assert finding(diagnose(), "CPU compiler").present
    assert diagnose().modes["cpu"] == "compile"


@pytest.mark.usefixtures("without_compiler")
def test_without_a_compiler_auto_warns_and_is_eager(bert_artifact: Path) -> None:
    """J1: the fallback is said aloud, and a mode that was asked for is never swapped silently."""
    with pytest.warns(UserWarning, match="eager mode: no C\\+\\+ compiler"):
        runner = toolkit.load(bert_artifact, device="cpu", mode="auto")
    assert runner.mode == runner.stats.mode == "eager"
    assert runner.embed("the fox").isfinite().all()
    for mode in ("compile", "graph"):
        with pytest.raises(MissingDependencyError, match=r"install.*--mode eager"):
            toolkit.load(bert_artifact, device="cpu", mode=mode)
