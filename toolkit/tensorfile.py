"""Strict reading of weight files: what a file claims is checked before anything is allocated.

The safetensors format is specified at https://huggingface.co/docs/safetensors (8 bytes of little-endian
header length, a JSON header, one byte buffer). Its own reader accepts duplicate keys; this one does not.
"""

import json
import math
import pickle
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from toolkit.errors import CheckpointError

__all__ = ["TensorInfo", "iter_pickled", "parse_json", "read_header", "read_tensor", "refuse_lfs_pointer"]

MAX_HEADER_BYTES = 100_000_000
MAX_JSON_BYTES = 200_000_000
MAX_DIMS = 64
_LFS_MAGIC = b"version https://git-lfs"

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}


@dataclass(frozen=True, kw_only=True)
class TensorInfo:
    """One stored tensor: its name, dtype, shape, and the file that holds it."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    file: Path


def _reject_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise ValueError(f"the key {key!r} appears twice")
            seen.add(key)
    return result


def parse_json(data: bytes, what: str) -> dict[str, Any]:
    """Parse a JSON object that comes from a checkpoint; duplicate keys and non-objects are errors.

    Raises:
        CheckpointError: naming `what` and the defect.
    """
    try:
        value = json.loads(data.decode("utf-8"), object_pairs_hook=_reject_duplicates)
    except RecursionError:
        raise CheckpointError(f"{what}: the JSON is nested too deeply to be a real header or config") from None
    except (ValueError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{what}: not valid JSON ({error}); download the file again") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{what}: the JSON holds a {type(value).__name__}, expected an object")
    return value


def refuse_lfs_pointer(path: Path) -> None:
    """Raise if `path` is the small text file that git-lfs leaves in the place of the real one."""
    with path.open("rb") as file:
        if file.read(len(_LFS_MAGIC)) == _LFS_MAGIC:
            raise CheckpointError(
                f"{path.name} is a Git-LFS pointer, not the weights: run `git lfs pull` in the checkpoint folder"
            )


def read_header(path: Path) -> dict[str, TensorInfo]:
    """Read and check the header of a safetensors file; no tensor data is read.

    Returns:
        name → TensorInfo, in the order of the byte buffer.

    Raises:
        CheckpointError: the file is a Git-LFS pointer, truncated, or its header contradicts itself.
    """
    refuse_lfs_pointer(path)
    size = path.stat().st_size
    with path.open("rb") as file:
        prefix = file.read(8)
        if len(prefix) < 8:
            raise CheckpointError(f"{path.name}: {size} bytes is too short for a safetensors file")
        length = int.from_bytes(prefix, "little")
        if length > min(MAX_HEADER_BYTES, size - 8):
            raise CheckpointError(
                f"{path.name}: the header claims {length} bytes, the file has {size}: truncated or not safetensors"
            )
        header = parse_json(file.read(length), f"{path.name} header")
    metadata = header.pop("__metadata__", None) or {}
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise CheckpointError(f"{path.name}: __metadata__ must map names to strings")
    entries = sorted((_check_entry(path, name, entry) for name, entry in header.items()), key=lambda e: (e[1], e[2]))
    _check_layout(path, entries, size - 8 - length)
    return {info.name: info for info, _, _ in entries}


def _check_entry(path: Path, name: str, entry: object) -> tuple[TensorInfo, int, int]:
    where = f"{path.name}: tensor {name!r}"
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        raise CheckpointError(f"{where}: the header entry must hold dtype, shape and data_offsets, nothing else")
    dtype, shape, offsets = _DTYPES.get(str(entry["dtype"])), entry["shape"], entry["data_offsets"]
    if dtype is None:
        raise CheckpointError(f"{where}: unknown dtype {entry['dtype']!r}")
    if not _are_sizes(shape):
        raise CheckpointError(f"{where}: shape {_short(shape)} is not a list of sizes")
    if not _are_sizes(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise CheckpointError(f"{where}: data_offsets {_short(offsets)} is not a [begin, end] range")
    if len(shape) > MAX_DIMS:
        raise CheckpointError(f"{where}: shape has {len(shape)} dimensions, at most {MAX_DIMS} are possible")
    # The product without its zeros must fit, too: the format's own reader multiplies from the left.
    if math.prod(n or 1 for n in shape) >= 2**63 or math.prod(shape) * dtype.itemsize != offsets[1] - offsets[0]:
        raise CheckpointError(
            f"{where}: shape {_short(shape)} of {entry['dtype']} does not fill the byte range {offsets}"
        )
    return TensorInfo(name=name, dtype=dtype, shape=tuple(shape), file=path), offsets[0], offsets[1]


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:80] + "…"


def _are_sizes(value: object) -> bool:
    return isinstance(value, list) and all(type(n) is int and 0 <= n < 2**63 for n in value)


def _check_layout(path: Path, entries: list[tuple[TensorInfo, int, int]], buffer: int) -> None:
    position = 0
    for info, begin, end in entries:
        if begin != position:
            kind = "overlaps the one before it" if begin < position else "leaves a gap before it"
            raise CheckpointError(f"{path.name}: tensor {info.name!r} {kind} (offset {begin}, expected {position})")
        position = end
    if position != buffer:
        raise CheckpointError(
            f"{path.name}: the header describes {position} bytes of tensors, the file holds {buffer}: "
            "truncated or corrupt, download it again"
        )


def read_tensor(info: TensorInfo) -> torch.Tensor:
    """Read one tensor of a safetensors file whose header was checked."""
    with safe_open(info.file, framework="pt", device="cpu") as file:
        return file.get_tensor(info.name)


def _cause(error: Exception) -> str:
    """One line; torch's own text advises to load the file without weights_only, which must not be passed on."""
    if isinstance(error, pickle.UnpicklingError):
        return "it holds code or a type that is not allowed"
    lines = [line for line in str(error).splitlines() if line.strip() and "eights_only" not in line]
    return lines[0] if lines else type(error).__name__


def iter_pickled(path: Path) -> Iterator[tuple[TensorInfo, torch.Tensor]]:
    """Yield the tensors of a `pytorch_model.bin`, unpickled by torch's weights-only loader.

    Raises:
        CheckpointError: anything but plain tensors is inside (nothing of it is executed), or it is damaged.
    """
    refuse_lfs_pointer(path)
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch raises pickle, zip, runtime and EOF errors for damaged files
        reason = _cause(error)
        raise CheckpointError(f"{path.name}: refused by torch's weights-only loader ({reason})") from None
    if not isinstance(state, dict):
        raise CheckpointError(f"{path.name}: holds a {type(state).__name__}, expected a dict of tensors")
    for name, tensor in state.items():
        plain = isinstance(name, str) and isinstance(tensor, torch.Tensor) and tensor.layout == torch.strided
        if not plain or tensor.is_quantized or tensor.is_complex() or tensor.is_nested or tensor.device.type != "cpu":
            raise CheckpointError(f"{path.name}: entry {name!r} is no plain tensor")
        yield TensorInfo(name=name, dtype=tensor.dtype, shape=tuple(tensor.shape), file=path), tensor
