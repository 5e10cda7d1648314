"""Which device and which mode a name means on this machine."""

import warnings

import torch

from toolkit.errors import InputError
from toolkit.toolchain import why_no_compiler

__all__ = ["MODES", "best_mode", "resolve_device", "resolve_mode"]

MODES = ("eager", "compile", "graph")


def resolve_device(device: str) -> torch.device:
    """Return the device that a name means; "auto" is CUDA if there is one.

    Raises:
        InputError: there is no such device.
    """
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        resolved = torch.device(device)
    except RuntimeError:
        raise InputError(f"device {device!r} is no torch device; use auto, cpu, cuda or cuda:N") from None
    if resolved.type not in ("cpu", "cuda"):
        raise InputError(f"device {device!r} is not supported; use auto, cpu or cuda")
    if resolved.type == "cuda" and (resolved.index or 0) >= torch.cuda.device_count():
        raise InputError(f"device {device!r} is not there; torch sees {torch.cuda.device_count()} CUDA devices")
    if resolved.type == "cuda" and resolved.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return resolved


def resolve_mode(mode: str, device: torch.device) -> str:
    """Return the mode that a name means; "auto" is the best that the device has.

    That is graph on CUDA and compile on a CPU. Without a compiler it is eager, with a warning.

    Raises:
        InputError: there is no such mode.
    """
    if mode != "auto" and mode not in MODES:
        raise InputError(f"mode {mode!r} is unknown; use auto, {', '.join(MODES)}")
    if mode != "auto":
        return mode
    best, reason = best_mode(device)
    if reason is not None:
        warnings.warn(f"running in eager mode: {reason}", stacklevel=3)
    return best


def best_mode(device: torch.device) -> tuple[str, str | None]:
    """Return the mode that "auto" means on a device; if it is eager, the reason why it is no better."""
    reason = why_no_compiler(device)
    if reason is not None:
        return "eager", reason
    return ("graph" if device.type == "cuda" else "compile"), None
