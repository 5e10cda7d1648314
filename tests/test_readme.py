"""What the README claims."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

import toolkit
from benchmarks import report
from tests.test_cli_tasks import artifacts
from tests.test_multivector import base, load, saved
from tests.tiny import make_decoder
from toolkit.registry import find_recipe

__all__ = ["artifacts"]  # a fixture

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_figures_are_those_of_the_saved_results() -> None:
    assert report.block() in README


def test_links_point_to_files() -> None:
    for document in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")]:
        text = document.read_text(encoding="utf-8")
        for target in re.findall(r"\]\(([^)#]+)", text):
            if "://" not in target:
                assert (document.parent / target).exists(), f"{document.name}: {target}"


def test_commands_exist() -> None:
    for command in set(re.findall(r"^toolkit (\w+)", README, re.MULTILINE)):
        subprocess.run([sys.executable, "-m", "toolkit", command, "--help"], check=True, capture_output=True)


@pytest.mark.parametrize("number", range(README.count("```python")))
def test_python_examples_run(
    number: int, bert_artifact: Path, artifacts: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> None:
    code = re.findall(r"```python\n(.*?)```", README, re.DOTALL)[number]
    code = code.replace("demo/all-MiniLM-L6-v2", str(bert_artifact)).replace("384", "40")
    for name, task in (("reranker", "rerank"), ("classifier", "classify"), ("tagger", "token-classify")):
        code = code.replace(f"my-{name}-toolkit", str(artifacts[task]))
    if "my-colbert-toolkit" in code:
        folder = tmp_path_factory.mktemp("colbert")
        out = load(saved(base(folder / "base"), folder / "saved")).artifact.folder
        code = code.replace("my-colbert-toolkit", str(out))
    if "my-decoder-toolkit" in code:
        folder = tmp_path_factory.mktemp("decoder")
        make_decoder(folder / "m", find_recipe("llama").recipe, overrides={"max_position_embeddings": 400})
        toolkit.convert(str(folder / "m"), folder / "out", verify=False)
        code = code.replace("my-decoder-toolkit", str(folder / "out"))
    exec(compile(code, f"README example {number}", "exec"), {})
