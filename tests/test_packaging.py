"""The wheel holds exactly what the tree holds, `recipes/` as `toolkit.recipes`."""

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy of what git tracks, so that leftovers in the checkout cannot help."""
    folder = tmp_path_factory.mktemp("wheel")
    files = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout.split("\n")
    for name in filter(None, files):
        if (ROOT / name).is_file():
            (folder / "source" / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / "source" / name).write_bytes((ROOT / name).read_bytes())
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(folder)]
    subprocess.run([*command, str(folder / "source")], check=True, capture_output=True)
    return next(folder.glob("*.whl"))


def test_contents_are_the_tree(wheel: Path) -> None:
    packed = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    tree = {str(path.relative_to(ROOT)) for path in (ROOT / "toolkit").rglob("*.py")} | {"toolkit/py.typed"}
    tree |= {f"toolkit/recipes/{path.name}" for path in (ROOT / "recipes").glob("*.py")}
    assert packed == tree


def test_metadata(wheel: Path) -> None:
    archive = zipfile.ZipFile(wheel)
    names = archive.namelist()
    assert any(name.endswith("licenses/LICENSE") for name in names)
    metadata = archive.read(next(name for name in names if name.endswith("/METADATA"))).decode()
    assert "Name: dualgraph-toolkit" in metadata
    required = [line for line in metadata.splitlines() if line.startswith("Requires-Dist") and "extra ==" not in line]
    core = {line.split(": ")[1].split("<")[0].split(">")[0].strip().lower() for line in required}
    assert core == {"torch", "transformers", "safetensors", "huggingface_hub", "typer", "rich"}
    extras = {line.split(": ")[1] for line in metadata.splitlines() if line.startswith("Provides-Extra")}
    assert extras >= {"gpu", "flash", "onnx", "reference", "test"}


def test_the_wheel_works_outside_the_checkout(wheel: Path, tmp_path: Path) -> None:
    zipfile.ZipFile(wheel).extractall(tmp_path / "site")
    code = "from toolkit.registry import all_recipes; print([e.recipe.model_type for e in all_recipes()])"
    env = {**os.environ, "PYTHONPATH": str(tmp_path / "site")}
    run = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=env, capture_output=True, text=True, check=True
    )
    assert "bert" in run.stdout
