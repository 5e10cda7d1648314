"""Which compilers inductor and Triton find on this machine."""

import os
import shutil
import sys
from typing import Any

import torch

__all__ = ["launch_early", "why_no_compiler"]


def why_no_compiler(device: torch.device) -> str | None:
    """None if inductor can generate code for `device`, else the reason and the fix."""
    if device.type == "cuda":
        try:
            import triton  # noqa: F401  # pyright: ignore[reportMissingImports]
        except ImportError:
            return "Triton is not installed (pip install 'dualgraph-toolkit[gpu]')"
        compilers = [os.environ["CC"]] if "CC" in os.environ else ["gcc", "clang"]
        if not any(map(shutil.which, compilers)):
            return (
                f"no C compiler was found: Triton looks for {' or '.join(compilers)} (apt-get install gcc, or set CC)"
            )
        return None
    compiler = os.environ.get("CXX", "clang++" if sys.platform == "darwin" else "g++")
    if shutil.which(compiler) is None:
        return f"no C++ compiler was found: inductor looks for {compiler} (apt-get install g++, or set CXX)"
    return None


def launch_early(device: torch.device) -> dict[str, Any]:
    """Options of a Triton launch: whether its kernel may start before the one in front of it has ended.

    That is programmatic dependent launch, from compute capability 9.0 on; the kernel knows of it as EARLY.
    """
    early = torch.cuda.get_device_capability(device) >= (9, 0)
    return {"EARLY": True, "launch_pdl": True} if early else {"EARLY": False}
