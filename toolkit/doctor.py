"""What of torch, CUDA, attention backends, compiler and reference libraries is there, and what to do about the rest."""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

from toolkit.attention import BACKENDS
from toolkit.attention.paged import PAGED_BACKENDS
from toolkit.devices import best_mode
from toolkit.nn.linear import can_pack
from toolkit.toolchain import why_no_compiler

__all__ = ["Diagnosis", "Finding", "diagnose"]


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One thing that was looked for. `fix` is empty if it is there."""

    name: str
    present: bool
    detail: str
    fix: str


@dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """All findings, and the mode that `toolkit.load` would choose on each device."""

    findings: tuple[Finding, ...]
    modes: dict[str, str]

    def to_dict(self) -> dict[str, Any]:
        """Plain dict, for JSON."""
        return asdict(self)


def diagnose() -> Diagnosis:
    """Look at this machine."""
    cuda = torch.cuda.is_available()
    cpu, gpu = torch.device("cpu"), torch.device("cuda")
    findings = [
        Finding(name="torch", present=True, detail=torch.__version__, fix=""),
        _cuda(cuda),
        _reasoned("CPU compiler", why_no_compiler(cpu)),
        Finding(
            name="packed CPU weights (oneDNN)",
            present=can_pack(cpu, torch.float32),
            detail=torch.backends.cpu.get_cpu_capability(),
            fix="" if torch.backends.mkldnn.is_available() else "install a torch build with oneDNN",
        ),
        *(_reasoned(f"attention: {b.name}, on {b.device}", b.why_unavailable()) for b in BACKENDS),
        *(_reasoned(f"paged attention: {b.name}, on {b.device}", b.why_unavailable()) for b in PAGED_BACKENDS),
        *(
            _library(name, fix)
            for name, fix in (
                ("transformers", "pip install transformers"),
                ("sentence-transformers", "pip install 'dualgraph-toolkit[reference]'"),
                ("onnxruntime", "pip install 'dualgraph-toolkit[onnx]'"),
                ("onnxscript", "pip install 'dualgraph-toolkit[onnx]'"),
            )
        ),
    ]
    if cuda:
        findings.insert(3, _reasoned("CUDA compiler (Triton)", why_no_compiler(gpu)))
    modes = {device.type: best_mode(device)[0] for device in ([cpu, gpu] if cuda else [cpu])}
    return Diagnosis(findings=tuple(findings), modes=modes)


def _cuda(available: bool) -> Finding:
    if available:
        major, minor = torch.cuda.get_device_capability()
        detail = f"{torch.cuda.get_device_name()}, CUDA {torch.version.cuda}, compute capability {major}.{minor}"
        return Finding(name="CUDA", present=True, detail=detail, fix="")
    if torch.version.cuda is None:
        return Finding(
            name="CUDA",
            present=False,
            detail="this torch is a CPU build",
            fix="install a CUDA build of torch",
        )
    return Finding(name="CUDA", present=False, detail="torch sees no device", fix="check the driver with nvidia-smi")


def _reasoned(name: str, reason: str | None) -> Finding:
    return Finding(name=name, present=reason is None, detail="available" if reason is None else "", fix=reason or "")


def _library(name: str, fix: str, find: Callable[[str], str] = version) -> Finding:
    try:
        return Finding(name=name, present=True, detail=find(name), fix="")
    except PackageNotFoundError:
        return Finding(name=name, present=False, detail="not installed", fix=fix)
