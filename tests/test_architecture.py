"""Imports point one way: each module may import only what comes before it in the flow of data."""

import ast
import re
from pathlib import Path

import pytest

import toolkit

ROOT = Path(toolkit.__file__).parent
ORDER = [
    "errors",
    "versions",
    "toolchain",
    "devices",
    "tensorfile",
    "checkpoint",
    "spec",
    "steps",
    "config",
    "weights",
    "heads",
    "decoders",
    "recipe",
    "recipes",
    "registry",
    "inputs",
    "batch",
    "tokenizer",
    "rows",
    "scoring",
    "multivector",
    "pylate",
    "stanford",
    "modules",
    "logit_score",
    "messages",
    "pipeline",
    "artifact",
    "attention",
    "compile",
    "nn",
    "graphs",
    "executor",
    "loaded",
    "decoding",
    "runner",
    "precision",
    "parity",
    "conversion",
    "bench",
    "doctor",
    "lines",
    "console",
    "cli_generate",
    "cli",
    "__main__",
]
# `convert` verifies what it wrote, and asks for versions; `verify` of an artifact finds its checkpoint again.
FILES = sorted(path for folder in (ROOT, ROOT.parent / "recipes") for path in folder.rglob("*.py"))


def unit(path: Path) -> str:
    if path.parent.name == "recipes":
        return "recipes"
    parts = path.relative_to(ROOT).with_suffix("").parts
    return parts[0]


def imported_units(path: Path) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("toolkit."):
            found.add(node.module.split(".")[1])
    return found


@pytest.mark.parametrize("path", FILES, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_imports_point_up_the_flow(path: Path) -> None:
    here = unit(path)
    if here == "__init__":
        return
    assert here in ORDER, f"place {here} in the flow"
    later = {name for name in imported_units(path) if ORDER.index(name) > ORDER.index(here)}
    assert not later


def test_only_compile_calls_torch_compile() -> None:
    callers = {path.name for path in FILES if "torch.compile(" in path.read_text(encoding="utf-8")}
    assert callers == {"compile.py"}


def test_only_parity_loads_reference_models() -> None:
    loaders = re.compile(r"(?<!AutoTokenizer)\.from_pretrained\(|SentenceTransformer\(|CrossEncoder\(")
    users = {unit(path) for path in FILES if loaders.search(path.read_text(encoding="utf-8"))}
    assert users <= {"parity", "bench"}
    assert "parity" in users


def test_no_generic_layer_names_a_model() -> None:
    names = [path.stem for path in (ROOT.parent / "recipes").glob("*.py") if path.stem != "__init__"]
    for path in FILES:
        if unit(path) in {"nn", "attention", "graphs", "compile", "batch"}:
            code = [
                node.value
                for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
                if isinstance(node, ast.Constant) and isinstance(node.value, str)
            ]
            assert not any(text in names for text in code), path


@pytest.mark.parametrize("path", FILES, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_files_and_functions_stay_readable(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 420
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef):
            body = (node.end_lineno or node.lineno) - node.body[0].lineno
            assert body <= 70, f"{path.name}:{node.name} has {body} lines"
