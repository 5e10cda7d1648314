"""A checkpoint folder as the toolkit and sentence-transformers load it."""

from pathlib import Path

from sentence_transformers import SentenceTransformer

import toolkit
from toolkit.runner import Runner


def load(folder: Path) -> Runner:
    out = folder.parent / "out"
    toolkit.convert(str(folder), out, verify=False, force=out.exists())
    return toolkit.load(out, device="cpu", mode="eager")


def reference(folder: Path) -> SentenceTransformer:
    return SentenceTransformer(str(folder), device="cpu")
