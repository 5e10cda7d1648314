"""Versions of what takes part in a conversion, a parity run or a measurement."""

import platform
import sys
from importlib.metadata import PackageNotFoundError, version

from toolkit import __version__

__all__ = ["library_versions"]


def library_versions() -> dict[str, str]:
    """Versions of what takes part in a conversion."""
    found = {"toolkit": __version__, "python": platform.python_version(), "platform": sys.platform}
    for name in (
        "torch",
        "transformers",
        "tokenizers",
        "safetensors",
        "sentence-transformers",
        "onnxruntime",
        "triton",
    ):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found
