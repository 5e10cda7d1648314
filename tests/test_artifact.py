"""The converted folder: complete or not there, movable, reproducible, and refused by name when damaged."""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import toolkit
from tests.tiny import edit_json
from toolkit.artifact import MANIFEST, SCHEMA, Artifact, Manifest
from toolkit.errors import ArtifactError, CheckpointError, ParityError, ToolkitError

ROOT = Path(__file__).parents[1]
WEIGHTS = "model.safetensors"
FILES = {MANIFEST, WEIGHTS, "config.json", "tokenizer.json", "tokenizer_config.json"}
TEXTS = ["the fox", "a", "query doc text one two three"]


@pytest.fixture
def artifact(bert_artifact: Path, tmp_path: Path) -> Path:
    return shutil.copytree(bert_artifact, tmp_path / "artifact")


@pytest.fixture
def parent(tmp_path: Path) -> Path:
    folder = tmp_path / "parent"
    folder.mkdir()
    return folder


def convert(checkpoint: Path, out: Path, **options: Any) -> toolkit.ConversionReport:
    return toolkit.convert(str(checkpoint), out, verify=False, **options)


def vectors(folder: Path) -> torch.Tensor:
    return toolkit.load(folder, device="cpu", mode="eager").embed(TEXTS)


def test_manifest_round_trip(bert_artifact: Path) -> None:
    manifest = Artifact.open(bert_artifact).manifest
    assert Manifest.from_dict(json.loads(manifest.to_json())) == replace(
        manifest, audit=[{**entry, "shape": list(entry["shape"])} for entry in manifest.audit]
    )
    assert manifest.to_json() == (bert_artifact / MANIFEST).read_text(encoding="utf-8")
    assert (manifest.schema, manifest.model_type, manifest.task) == (SCHEMA, "bert", "embed")
    assert (manifest.usable_length, manifest.seam_width, manifest.dtype) == (24, 40, "float32")
    assert set(manifest.source["sha256"]) == {"config.json", WEIGHTS}


def test_an_artifact_moves_without_its_source(bert_checkpoint: Path, tmp_path: Path) -> None:
    """Self-contained: another place, the checkpoint gone, the same vectors."""
    source = shutil.copytree(bert_checkpoint, tmp_path / "source")
    convert(source, tmp_path / "out")
    before = vectors(tmp_path / "out")
    shutil.rmtree(source)
    moved = tmp_path / "else" / "where"
    moved.parent.mkdir()
    (tmp_path / "out").rename(moved)
    assert torch.equal(vectors(moved), before)
    assert {file.name for file in moved.iterdir()} == FILES
    assert not any(file.is_symlink() for file in moved.iterdir())


def test_converting_twice_gives_the_same_bytes(bert_checkpoint: Path, bert_artifact: Path, tmp_path: Path) -> None:
    out = tmp_path / "again"
    convert(bert_checkpoint, out)
    for name in FILES:
        assert (out / name).read_bytes() == (bert_artifact / name).read_bytes(), name


def _without_a_tensor(folder: Path) -> None:
    tensors = load_file(folder / WEIGHTS)
    tensors.pop(min(tensors))
    save_file(tensors, folder / WEIGHTS)


def _with_a_tensor(folder: Path) -> None:
    save_file({**load_file(folder / WEIGHTS), "surprise": torch.zeros(1)}, folder / WEIGHTS)


def _reshaped(folder: Path) -> None:
    tensors = load_file(folder / WEIGHTS)
    name = min(tensors)
    save_file({**tensors, name: tensors[name].flatten()[:3].clone()}, folder / WEIGHTS)


def _manifest(**changes: Any) -> Callable[[Path], object]:
    return lambda folder: edit_json(folder / MANIFEST, **changes)


DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "no folder": (shutil.rmtree, MANIFEST),
    "no manifest": (lambda f: (f / MANIFEST).unlink(), MANIFEST),
    "manifest is a folder": (lambda f: ((f / MANIFEST).unlink(), (f / MANIFEST).mkdir()), MANIFEST),
    "manifest cut": (lambda f: os.truncate(f / MANIFEST, 100), MANIFEST),
    "manifest empty": (lambda f: os.truncate(f / MANIFEST, 0), MANIFEST),
    "manifest a list": (lambda f: (f / MANIFEST).write_text("[]"), MANIFEST),
    "manifest binary": (lambda f: (f / MANIFEST).write_bytes(b"\xff\x00"), MANIFEST),
    "later schema": (_manifest(schema=SCHEMA + 1), f"schema {SCHEMA + 1}.*convert again"),
    "no schema": (_manifest(schema=...), "schema None"),
    "schema a text": (_manifest(schema=str(SCHEMA)), f"schema '{SCHEMA}'"),
    "field missing": (_manifest(dtype=...), MANIFEST),
    "field unknown": (_manifest(surprise=1), "surprise"),
    "spec missing": (_manifest(spec=...), "spec"),
    "spec a text": (_manifest(spec="bert"), MANIFEST),
    "spec empty": (_manifest(spec={}), MANIFEST),
    "pipeline a list": (_manifest(pipeline=[]), MANIFEST),
    "pipeline unknown": (_manifest(pipeline={"pooling": "mean"}), MANIFEST),
    "tokenizer null": (_manifest(tokenizer=None), MANIFEST),
    "dtype unknown": (_manifest(dtype="nonsense"), "nonsense"),
    "dtype no dtype": (_manifest(dtype="save"), "save"),
    "length a text": (_manifest(usable_length="24"), "usable_length"),
    "no weights": (lambda f: (f / WEIGHTS).unlink(), "safetensors"),
    "weights cut": (lambda f: os.truncate(f / WEIGHTS, (f / WEIGHTS).stat().st_size - 16), WEIGHTS),
    "weights empty": (lambda f: os.truncate(f / WEIGHTS, 0), WEIGHTS),
    "weights cut in header": (lambda f: os.truncate(f / WEIGHTS, 60), WEIGHTS),
    "tensor missing": (_without_a_tensor, "tensor|parameter|weight"),
    "tensor unexpected": (_with_a_tensor, "surprise"),
    "tensor misshapen": (_reshaped, "tensor|parameter|weight"),
    "no tokenizer": (lambda f: (f / "tokenizer.json").unlink(), r"tokenizer\.json"),
    "tokenizer cut": (lambda f: os.truncate(f / "tokenizer.json", 100), r"tokenizer\.json"),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_damaged_artifacts_are_refused_by_name(artifact: Path, kind: str) -> None:
    """O3: one named error that says what is wrong, never a traceback from below."""
    damage, words = DAMAGE[kind]
    damage(artifact)
    with pytest.raises(ArtifactError, match=words):
        toolkit.load(artifact, device="cpu", mode="eager")


def test_an_existing_folder_is_left_alone(bert_checkpoint: Path, artifact: Path) -> None:
    before = (artifact / WEIGHTS).stat()
    with pytest.raises(ArtifactError, match=r"exists.*--force"):
        convert(bert_checkpoint, artifact, dtype="bfloat16")
    assert (artifact / WEIGHTS).stat() == before


def test_force_replaces_an_artifact_whole(bert_checkpoint: Path, parent: Path) -> None:
    out = parent / "out"
    convert(bert_checkpoint, out)
    (out / "parity.json").write_text("{}")
    convert(bert_checkpoint, out, dtype="bfloat16", force=True)
    assert Artifact.open(out).manifest.dtype == "bfloat16"
    assert {file.name for file in out.iterdir()} == FILES
    assert os.listdir(parent) == ["out"]


def test_force_replaces_an_artifact_without_exchange(
    bert_checkpoint: Path, parent: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On file systems that cannot swap two folders in one step."""
    monkeypatch.setattr("toolkit.artifact._exchange", lambda a, b: False)
    convert(bert_checkpoint, parent / "out")
    convert(bert_checkpoint, parent / "out", dtype="bfloat16", force=True)
    assert Artifact.open(parent / "out").manifest.dtype == "bfloat16"
    assert os.listdir(parent) == ["out"]


def test_a_failing_replacement_keeps_the_old_artifact(
    bert_checkpoint: Path, parent: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where two folders cannot be swapped and the second rename fails, the first one is taken back."""
    convert(bert_checkpoint, parent / "out")
    rename = os.rename

    def failing(source: Path, target: Path) -> None:
        if str(source).endswith(".partial"):
            raise OSError(5, "Input/output error")
        rename(source, target)

    monkeypatch.setattr("toolkit.artifact._exchange", lambda a, b: False)
    monkeypatch.setattr(os, "rename", failing)
    with pytest.raises(ArtifactError, match="Input/output error"):
        convert(bert_checkpoint, parent / "out", dtype="bfloat16", force=True)
    assert Artifact.open(parent / "out").manifest.dtype == "float32"
    assert os.listdir(parent) == ["out"]


def _folder(out: Path, _: Path) -> None:
    out.mkdir()
    (out / "precious").write_text("mine")


def _link_to_artifact(out: Path, artifact: Path) -> None:
    out.symlink_to(artifact)


@pytest.mark.parametrize(
    "make",
    [
        _folder,
        lambda out, _: out.mkdir(),
        lambda out, _: out.write_text("mine"),
        _link_to_artifact,
        lambda out, _: out.symlink_to("nowhere"),
    ],
    ids="folder empty-folder file link dangling-link".split(),
)
@pytest.mark.parametrize("force", [True, False])
def test_what_is_no_artifact_is_never_replaced(
    bert_checkpoint: Path, artifact: Path, parent: Path, make: Callable[[Path, Path], object], force: bool
) -> None:
    out = parent / "out"
    make(out, artifact)
    before = (out.lstat(), sorted(artifact.iterdir()))
    with pytest.raises(ArtifactError, match=f"{out} exists"):
        convert(bert_checkpoint, out, force=force)
    assert (out.lstat(), sorted(artifact.iterdir())) == before
    assert os.listdir(parent) == ["out"]


@pytest.mark.parametrize("place", ["out", "1_Pooling/out", "../checkpoint/out", "new/out"])
def test_out_inside_of_the_checkpoint(bert_checkpoint: Path, tmp_path: Path, place: str) -> None:
    source = shutil.copytree(bert_checkpoint, tmp_path / "checkpoint")
    before = sorted(source.rglob("*"))
    with pytest.raises(ArtifactError, match="inside the checkpoint"):
        convert(source, source / place)
    (tmp_path / "link").symlink_to(source)
    with pytest.raises(ArtifactError, match="inside the checkpoint"):
        convert(source, tmp_path / "link" / "out")
    assert sorted(source.rglob("*")) == before


@pytest.mark.parametrize("place", ["file/out", "file/deeper/out", "/proc/toolkit-out", "dangling/out"])
def test_a_parent_that_cannot_be_written(bert_checkpoint: Path, parent: Path, place: str) -> None:
    (parent / "file").write_text("mine")
    (parent / "dangling").symlink_to(parent / "nowhere" / "at" / "all")
    with pytest.raises(ArtifactError, match=r"cannot write|exists"):
        convert(bert_checkpoint, parent / place)
    assert sorted(os.listdir(parent)) == ["dangling", "file"]
    assert (parent / "file").read_text() == "mine"


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_parent_without_write_permission(bert_checkpoint: Path, parent: Path) -> None:
    parent.chmod(0o555)
    with pytest.raises(ArtifactError, match=r"cannot write.*Permission denied"):
        convert(bert_checkpoint, parent / "out")
    assert os.listdir(parent) == []


def test_missing_parents_are_made(bert_checkpoint: Path, parent: Path) -> None:
    convert(bert_checkpoint, parent / "a" / "b" / "out")
    assert {file.name for file in (parent / "a" / "b" / "out").iterdir()} == FILES
    assert os.listdir(parent / "a" / "b") == ["out"]


BROKEN: dict[str, Callable[[Path], object]] = {
    "weights cut": lambda f: os.truncate(f / WEIGHTS, (f / WEIGHTS).stat().st_size - 16),
    "weights missing": lambda f: (f / WEIGHTS).unlink(),
    "tensor missing": _without_a_tensor,
    "tokenizer broken": lambda f: (f / "tokenizer.json").write_text("{"),
    "pooling unknown": lambda f: edit_json(f / "1_Pooling" / "config.json", surprise=1),
    "activation unknown": lambda f: edit_json(f / "config.json", hidden_act="mish"),
}


@pytest.mark.parametrize("kind", BROKEN)
def test_a_failed_conversion_leaves_nothing(bert_checkpoint: Path, parent: Path, tmp_path: Path, kind: str) -> None:
    """O3: no partial artifact, no temporary sibling, and with --force the old artifact untouched."""
    source = shutil.copytree(bert_checkpoint, tmp_path / "checkpoint")
    convert(source, parent / "old")
    BROKEN[kind](source)
    for out in (parent / "new", parent / "old"):
        with pytest.raises(ToolkitError):
            convert(source, out, force=True)
        assert os.listdir(parent) == ["old"]
    assert vectors(parent / "old").isfinite().all()


def test_a_failed_conversion_leaves_no_new_parents(bert_checkpoint: Path, parent: Path, tmp_path: Path) -> None:
    source = shutil.copytree(bert_checkpoint, tmp_path / "checkpoint")
    (source / WEIGHTS).unlink()
    with pytest.raises(CheckpointError):
        convert(source, parent / "a" / "b" / "out")
    assert os.listdir(parent) == []


def test_a_parity_miss_leaves_nothing(bert_checkpoint: Path, parent: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Miss:
        passed = False

        def write(self, folder: Path) -> None:
            (folder / "parity.json").write_text("{}")

        def summary(self) -> str:
            return "states differ"

    monkeypatch.setattr("toolkit.parity.verify_folder", lambda *args, **options: Miss())
    with pytest.raises(ParityError, match="states differ; nothing was written"):
        toolkit.convert(str(bert_checkpoint), parent / "out")
    assert os.listdir(parent) == []


def _raise(error: BaseException) -> Callable[..., None]:
    def stub(*args: object, **options: object) -> None:
        raise error

    return stub


def _block_tokenizer(state: object, folder: Path) -> None:
    (folder / "tokenizer.json").mkdir()


@pytest.mark.parametrize(
    ("stub", "error", "words"),
    [
        (_raise(OSError(28, "No space left on device")), ArtifactError, "cannot write.*No space left"),
        (_block_tokenizer, ArtifactError, "cannot write"),
        (_raise(MemoryError("full")), MemoryError, "full"),
        (_raise(KeyboardInterrupt("^C")), KeyboardInterrupt, "C"),
    ],
    ids="disk-full tokenizer memory interrupt".split(),
)
def test_a_failing_write_leaves_nothing(
    bert_checkpoint: Path,
    parent: Path,
    monkeypatch: pytest.MonkeyPatch,
    stub: Callable[..., None],
    error: type[BaseException],
    words: str,
) -> None:
    monkeypatch.setattr("toolkit.conversion.save_torch_state_dict", stub)
    with pytest.raises(error, match=words):
        convert(bert_checkpoint, parent / "out")
    assert os.listdir(parent) == []


# A process that has imported everything and forks one conversion a job. A job may ask to be killed right before
# the n-th change of the file system, or to be limited in the size of the files that it writes.
FORK_SERVER = """
import json, os, resource, signal, sys
sys.path.insert(0, sys.argv[1])
import tests.conftest, toolkit, toolkit.conversion
from transformers import AutoTokenizer, PreTrainedTokenizerFast

CHANGES = {"os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.chmod", "shutil.rmtree", "shutil.copyfile"}

def work(job):
    seen = 0
    def count(event, args):
        nonlocal seen
        if event in CHANGES or (event == "open" and ".partial/" in str(args[0])):
            seen += 1
            if seen == job["step"]:
                os.kill(os.getpid(), signal.SIGKILL)
    if job["limit"]:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (job["limit"], job["limit"]))
    sys.addaudithook(count)
    try:
        toolkit.convert(job["source"], job["out"], verify=False, force=True, dtype=job["dtype"])
    except toolkit.errors.ToolkitError:
        return 2
    return 0

print("ready", flush=True)
for line in sys.stdin:
    pid = os.fork()
    if pid == 0:
        code = 3
        try:
            code = work(json.loads(line))
        finally:
            os._exit(code)
    print(pid, flush=True)
    sys.stdin.readline()
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
"""


class ForkServer:
    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self._process = process
        assert self._read() == "ready"

    def _read(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()

    def _write(self, line: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()

    def start(self, source: Path, out: Path, *, dtype: str = "bfloat16", step: int = 0, limit: int = 0) -> int:
        """Start a conversion, with force; returns its process id."""
        self._write(json.dumps({"source": str(source), "out": str(out), "dtype": dtype, "step": step, "limit": limit}))
        return int(self._read())

    def wait(self) -> int:
        """Exit status of the conversion that was started last; until then its process id stays valid."""
        self._write("wait")
        return int(self._read())


@pytest.fixture(scope="module")
def server() -> Iterator[ForkServer]:
    with subprocess.Popen(
        [sys.executable, "-c", FORK_SERVER, str(ROOT)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        cwd=ROOT,
    ) as process:
        yield ForkServer(process)
        assert process.stdin is not None
        process.stdin.close()


def settle(parent: Path) -> list[str]:
    """What is in `parent`, once temporary folders are gone; they have five seconds."""
    end = time.monotonic() + 5
    while (names := os.listdir(parent)) not in ([], ["out"]) and time.monotonic() < end:
        time.sleep(0.01)
    return names


def assert_complete(out: Path) -> None:
    assert {file.name for file in out.iterdir()} == FILES
    assert vectors(out).isfinite().all()


@pytest.mark.parametrize("replace_old", [False, True])
def test_killed_before_any_step(
    server: ForkServer, bert_checkpoint: Path, bert_artifact: Path, parent: Path, replace_old: bool
) -> None:
    """A SIGKILL right before each change of the file system: all or nothing; with --force, old or new."""
    out = parent / "out"
    found: set[str] = set()
    status, step = -1, 0
    while status != 0:
        step += 1
        if replace_old and not out.exists():
            shutil.copytree(bert_artifact, out)
        server.start(bert_checkpoint, out, step=step)
        status = server.wait()
        if replace_old:
            assert_complete(out)
        assert settle(parent) == ["out"] * out.exists(), f"step {step}"
        found.add(Artifact.open(out).manifest.dtype if out.exists() else "nothing")
        if out.exists():
            assert_complete(out)
            shutil.rmtree(out)
        assert status in (0, -signal.SIGKILL)
    assert step > 10
    assert found == {"float32" if replace_old else "nothing", "bfloat16"}


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT], ids=lambda n: n.name)
@pytest.mark.parametrize("replace_old", [False, True])
def test_killed_at_random_moments(
    server: ForkServer,
    bert_checkpoint: Path,
    bert_artifact: Path,
    parent: Path,
    replace_old: bool,
    number: signal.Signals,
) -> None:
    out = parent / "out"
    begin = time.monotonic()
    server.start(bert_checkpoint, out)
    assert server.wait() == 0
    duration = time.monotonic() - begin
    draw = random.Random(f"{replace_old} {number}")
    for attempt in range(4):
        shutil.rmtree(out, ignore_errors=True)
        if replace_old:
            shutil.copytree(bert_artifact, out)
        pid = server.start(bert_checkpoint, out)
        time.sleep(duration * (attempt + draw.random()) / 4)
        os.kill(pid, number)
        server.wait()
        if replace_old:
            assert_complete(out)
        assert settle(parent) == ["out"] * out.exists()
        if out.exists():
            assert_complete(out)


def test_the_command_is_killed_while_it_writes(bert_checkpoint: Path, parent: Path) -> None:
    command = [sys.executable, "-m", "toolkit", "convert", str(bert_checkpoint), str(parent / "out"), "--no-verify"]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        while process.poll() is None and not os.listdir(parent):
            time.sleep(0.001)
        process.kill()
    assert settle(parent) == ["out"] * (parent / "out").exists()
    if (parent / "out").exists():
        assert_complete(parent / "out")


@pytest.mark.parametrize("limit", [1, 20_000])
@pytest.mark.parametrize("replace_old", [False, True])
def test_files_that_cannot_grow(
    server: ForkServer, bert_checkpoint: Path, bert_artifact: Path, parent: Path, limit: int, replace_old: bool
) -> None:
    """A full disk or quota: a named error, nothing written, the old artifact untouched."""
    if replace_old:
        shutil.copytree(bert_artifact, parent / "out")
    server.start(bert_checkpoint, parent / "out", limit=limit)
    assert server.wait() == ArtifactError.exit_status
    assert settle(parent) == ["out"] * replace_old
    if replace_old:
        assert Artifact.open(parent / "out").manifest.dtype == "float32"
        assert_complete(parent / "out")


def test_opening_does_not_write(bert_artifact: Path) -> None:
    before = {file.name: file.stat().st_mtime_ns for file in bert_artifact.iterdir()}
    vectors(bert_artifact)
    assert {file.name: file.stat().st_mtime_ns for file in bert_artifact.iterdir()} == before


def test_no_checkpoint_error_escapes_from_an_artifact(artifact: Path) -> None:
    """The message names the artifact, not a checkpoint that the user no longer has."""
    os.truncate(artifact / WEIGHTS, 60)
    with pytest.raises(ArtifactError, match=str(artifact)) as caught:
        Artifact.open(artifact).weights({})
    assert not isinstance(caught.value, CheckpointError)
