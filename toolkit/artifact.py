"""The converted folder: self-contained, movable, written as a whole or not at all.

`toolkit.json` is its manifest; beside it lie `model*.safetensors`, the tokenizer files, the source's
`config.json`, `parity.json` and `parity.html`.
"""

import contextlib
import ctypes
import errno
import json
import os
import secrets
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from toolkit.errors import ArtifactError, CheckpointError
from toolkit.multivector import MultiVector
from toolkit.pipeline import Pipeline
from toolkit.scoring import Scoring
from toolkit.spec import EncoderSpec
from toolkit.steps import HeadSpec
from toolkit.tensorfile import parse_json, read_header, read_tensor
from toolkit.tokenizer import TokenizerSpec

__all__ = ["DTYPES", "MANIFEST", "SCHEMA", "Artifact", "Manifest", "atomic_folder"]

MANIFEST = "toolkit.json"
DTYPES = ("float32", "float16", "bfloat16")
SCHEMA = 5


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """`toolkit.json`. `spec`, `head`, `pipeline` and `tokenizer` are what the module is rebuilt from.

    `source` holds what the user wrote, the revision and the sha256 of each file; `audit` says what became of
    every source tensor; `usable_length` is the longest sequence, `seam_width` the width of caller embeds,
    `reference` the transformers class that token states are compared with, `scoring` what logits mean,
    `multi_vector` how queries and documents differ (both None for a task without), `ends` the ids that end a generated
    text.
    """

    schema: int
    model_type: str
    architectures: list[str]
    recipe: dict[str, str]
    task: str
    dtype: str
    spec: EncoderSpec
    head: HeadSpec
    pipeline: Pipeline
    scoring: Scoring | None
    multi_vector: MultiVector | None
    ends: tuple[int, ...]
    tokenizer: TokenizerSpec
    usable_length: int
    seam_width: int
    reference: str | None
    audit: list[dict[str, Any]]
    source: dict[str, Any]
    versions: dict[str, str]
    warnings: list[str]

    def to_json(self) -> str:
        """Serialise, indented."""
        return json.dumps(asdict(self), indent=2, ensure_ascii=False) + "\n"

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> "Manifest":
        """Inverse of `to_json`.

        Raises:
            ArtifactError: another schema version, or fields are missing.
        """
        if data.get("schema") != SCHEMA:
            raise ArtifactError(
                f"{MANIFEST}: schema {data.get('schema')!r}, this version reads {SCHEMA}: convert again"
            )
        try:
            parts = {
                "spec": EncoderSpec.from_dict(data["spec"]),
                "head": HeadSpec.from_dict(data["head"]),
                "pipeline": Pipeline.from_dict(data["pipeline"]),
                "scoring": Scoring.from_dict(data["scoring"]) if data["scoring"] is not None else None,
                "multi_vector": MultiVector.from_dict(data["multi_vector"])
                if data["multi_vector"] is not None
                else None,
                "ends": tuple(data["ends"]),
                "tokenizer": TokenizerSpec.from_dict(data["tokenizer"]),
            }
            return cls(**{**data, **parts})
        except (KeyError, TypeError, AttributeError) as error:
            raise ArtifactError(f"{MANIFEST} is damaged ({error}): convert again") from None

    def check(self) -> None:
        """Raise ArtifactError if a field is impossible, or the limits would let a position beyond its table be read."""
        if self.dtype not in DTYPES:
            raise ArtifactError(f"{MANIFEST}: dtype {self.dtype!r}, expected {', '.join(DTYPES)}: convert again")
        for name in ("usable_length", "seam_width"):
            if type(getattr(self, name)) is not int:
                raise ArtifactError(f"{MANIFEST}: {name} = {getattr(self, name)!r}, expected a number: convert again")
        embedding = self.spec.embedding
        table = embedding.positions - embedding.position_start if embedding.positions else self.usable_length
        both = () if self.multi_vector is None else (self.multi_vector.query, self.multi_vector.document)
        shortest = min([self.tokenizer.limit, *(side.limit for side in both)])
        longest = max([self.tokenizer.limit, *(side.longest for side in both)])
        if not 1 <= shortest <= longest <= self.usable_length == self.spec.usable_length <= table:
            raise ArtifactError(
                f"{MANIFEST}: limits contradict each other (texts {shortest} … {longest}, sequences "
                f"{self.usable_length}, positions {table}): convert again"
            )
        fill = max((side.expansion.id for side in both if side.expansion is not None), default=0)
        if not 0 <= fill < embedding.vocab_size:
            raise ArtifactError(f"{MANIFEST}: an expansion's token {fill} is outside the vocabulary: convert again")


@dataclass(frozen=True, kw_only=True)
class Artifact:
    """An opened converted folder."""

    folder: Path
    manifest: Manifest

    @classmethod
    def open(cls, folder: str | Path) -> "Artifact":
        """Open a converted folder and read its manifest.

        Raises:
            ArtifactError: it is none, or of another schema version.
        """
        folder = Path(folder)
        if not (folder / MANIFEST).is_file():
            raise ArtifactError(f"{folder} is no converted folder: {MANIFEST} is missing (run toolkit convert)")
        try:
            data = parse_json((folder / MANIFEST).read_bytes(), MANIFEST)
        except CheckpointError as error:
            raise ArtifactError(str(error)) from None
        manifest = Manifest.from_dict(data)
        manifest.check()
        return cls(folder=folder, manifest=manifest)

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the weights."""
        return getattr(torch, self.manifest.dtype)

    def weights(self, expected: Mapping[str, torch.Size]) -> dict[str, Tensor]:
        """Read the state dict, and compare it with the names and shapes that the module expects.

        Raises:
            ArtifactError: a weight file is missing or damaged, or a tensor is missing, extra, or of another shape
                or dtype.
        """
        files = sorted(self.folder.glob("model*.safetensors"))
        if not files:
            raise ArtifactError(f"{self.folder} has no model*.safetensors: convert again")
        try:
            infos = {name: info for file in files for name, info in read_header(file).items()}
        except CheckpointError as error:
            raise ArtifactError(f"{self.folder}: {error}") from None
        for name in sorted({*infos, *expected}):
            if name not in infos or name not in expected:
                state = "missing" if name not in infos else "unexpected"
                raise ArtifactError(f"{self.folder}: {state} tensor {name!r}: convert again")
            if infos[name].shape != tuple(expected[name]) or infos[name].dtype != self.dtype:
                raise ArtifactError(
                    f"{self.folder}: tensor {name!r} is {infos[name].dtype} {infos[name].shape}, expected "
                    f"{self.dtype} {tuple(expected[name])}: convert again"
                )
        return {name: read_tensor(info) for name, info in infos.items()}


# Removes a folder, and the parents that were made for it, when the process that started it goes away without
# saying so, however it went.
_JANITOR = """
import os, shutil, sys
if not sys.stdin.buffer.read(1):
    shutil.rmtree(sys.argv[1], ignore_errors=True)
    for parent in sys.argv[2:]:
        try:
            os.rmdir(parent)
        except OSError:
            break
"""


@contextlib.contextmanager
def atomic_folder(out: Path, *, force: bool) -> Iterator[Path]:
    """Give a temporary sibling of `out` to write into; at the end it becomes `out`, on an error it vanishes.

    If the process is killed, a small helper process removes the sibling. With `force` an existing artifact is
    exchanged for the new one in one step.

    Raises:
        ArtifactError: `out` exists and `force` is not set, or `out` is no artifact, or cannot be written.
    """
    refuse_occupied(out, force=force)
    temporary = out.absolute().parent / f".{out.name}.{secrets.token_hex(6)}.partial"
    new_parents = [parent for parent in temporary.parents if not parent.exists()]
    janitor = subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", _JANITOR, str(temporary), *map(str, new_parents)],
        stdin=subprocess.PIPE,
        start_new_session=True,
    )
    try:
        try:
            temporary.mkdir(parents=True)
        except OSError as error:
            raise ArtifactError(f"cannot write beside {out}: {error.strerror}") from None
        yield temporary
        _put_in_place(temporary, out, force=force)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
        for parent in new_parents:
            with contextlib.suppress(OSError):  # not empty: the artifact is in it
                parent.rmdir()
        with contextlib.suppress(BrokenPipeError):
            janitor.communicate(b".")


def refuse_occupied(out: Path, *, force: bool) -> None:
    """Raise ArtifactError if `out` may not be written: it exists, or is no artifact that `force` may replace."""
    if not os.path.lexists(out):
        return
    if not force:
        raise ArtifactError(f"{out} exists: choose another folder, or replace it with --force")
    if out.is_symlink() or not (out / MANIFEST).is_file():
        raise ArtifactError(f"{out} exists and is no converted folder: --force does not replace it, remove it yourself")


def _put_in_place(temporary: Path, out: Path, *, force: bool) -> None:
    refuse_occupied(out, force=force)
    try:
        if not out.exists():
            os.rename(temporary, out)
        elif not _exchange(temporary, out):
            _replace_in_two_steps(temporary, out)
    except OSError as error:
        raise ArtifactError(f"cannot put {out} in place: {error.strerror or error}") from None


def _replace_in_two_steps(temporary: Path, out: Path) -> None:
    """For file systems that cannot swap two folders; the old one comes back if the new one cannot be moved."""
    old = out.absolute().parent / f".{out.name}.{secrets.token_hex(6)}.old"
    os.rename(out, old)
    try:
        os.rename(temporary, out)
    except OSError:
        os.rename(old, out)
        raise
    shutil.rmtree(old)


def _exchange(a: Path, b: Path) -> bool:
    """Swap two folders in one step with Linux's renameat2; False where that is not to be had."""
    at_cwd, exchange = -100, 2
    renameat2 = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if renameat2 is None:
        return False
    if renameat2(at_cwd, os.fsencode(a), at_cwd, os.fsencode(b), exchange) == 0:
        return True
    code = ctypes.get_errno()
    if code in (errno.ENOSYS, errno.EINVAL):
        return False
    raise ArtifactError(f"cannot replace {b}: {os.strerror(code)}")
