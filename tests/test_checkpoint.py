import os
import shutil
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import huggingface_hub.constants
import pytest
import torch
from safetensors.torch import load_file, save_file

import toolkit.checkpoint
from tests.tiny import edit_json, write_json
from toolkit.checkpoint import Checkpoint, open_checkpoint
from toolkit.conversion import convert
from toolkit.errors import CheckpointError

LFS_POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 570\n"
WORD = "embeddings.word_embeddings.weight"
FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
INDEX = "model.safetensors.index.json"
COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def folder(bert_checkpoint: Path, tmp_path: Path) -> Path:
    return shutil.copytree(bert_checkpoint, tmp_path / "bert")


@pytest.fixture
def sharded(folder: Path) -> Path:
    return shard(folder)


def shard(folder: Path, *, pickled: bool = False) -> Path:
    """Replace the single weight file by two shards and their index."""
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    stem, ending = ("pytorch_model", "bin") if pickled else ("model", "safetensors")
    weight_map: dict[str, str] = {}
    for number in (0, 1):
        file = f"{stem}-0000{number + 1}-of-00002.{ending}"
        part = {name: tensors[name] for name in sorted(tensors)[number::2]}
        weight_map |= dict.fromkeys(part, file)
        save(part, folder / file)
    write_json(folder / f"{stem}.{ending}.index.json", {"metadata": {"total_size": 1}, "weight_map": weight_map})
    return folder


def save(tensors: dict[str, torch.Tensor], file: Path) -> None:
    torch.save(tensors, file) if file.suffix == ".bin" else save_file(tensors, file)


def weight_map(folder: Path) -> dict[str, str]:
    return Checkpoint(source="x", root=folder).json(INDEX)["weight_map"]


def converted(source: Path, out: Path) -> dict[str, torch.Tensor]:
    convert(str(source), out, verify=False)
    return load_file(out / "model.safetensors")


def assert_identical(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)


# Sources


def test_folder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = open_checkpoint(str(folder))
    assert (checkpoint.root, checkpoint.revision) == (folder, None)
    assert checkpoint.config["model_type"] == "bert"
    assert WORD in checkpoint.tensors.info
    assert checkpoint.weight_files() == [folder / "model.safetensors"]
    assert set(checkpoint.sha256()) == {"config.json", "model.safetensors"}
    monkeypatch.setenv("HOME", str(folder.parent))
    assert open_checkpoint("~/bert").root == folder


def test_file_instead_of_a_folder(folder: Path) -> None:
    with pytest.raises(CheckpointError, match=r"model\.safetensors is a file: give the folder"):
        open_checkpoint(str(folder / "model.safetensors"))


@pytest.mark.parametrize(
    "source",
    [
        "",
        " ",
        "./nowhere",
        "/nowhere/at/all",
        "a/b/c",
        "https://huggingface.co/a/b",
        "$MODEL",
        "nul\0byte",
        "x" * 5000,
        "~no-such-user-here/model",
        "org/..",
        "a--b/c",
        "ü/x",
    ],
)
def test_nonsense_source(source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    go_offline(monkeypatch, tmp_path)
    with pytest.raises(CheckpointError, match=r"is no existing folder, hub id, or package:|cannot get"):
        open_checkpoint(source)


@pytest.mark.parametrize("source", ["folder", "package:shipped/model"])
def test_revision_of_a_local_checkpoint(source: str, folder: Path, package: Path) -> None:
    with pytest.raises(CheckpointError, match=r"--revision is for hub ids"):
        open_checkpoint(str(folder) if source == "folder" else source, revision="main")


@pytest.fixture
def package(bert_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An importable package `shipped` with a checkpoint in it; importing it leaves a marker."""
    root = tmp_path / "site" / "shipped"
    shutil.copytree(bert_checkpoint, root / "model")
    shutil.copytree(bert_checkpoint, tmp_path / "site" / "outside")
    (root / "__init__.py").write_text(f"import os\nos.mkdir({str(tmp_path / 'imported')!r})\n")
    monkeypatch.syspath_prepend(tmp_path / "site")
    return root


def test_package(package: Path, tmp_path: Path) -> None:
    """O2: the package's files are found without running any of its code."""
    checkpoint = open_checkpoint("package:shipped/model")
    assert checkpoint.root == package / "model"
    assert checkpoint.config["model_type"] == "bert"
    convert("package:shipped/model", tmp_path / "out", verify=False)
    assert not (tmp_path / "imported").exists()
    assert "shipped" not in sys.modules
    __import__("shipped")
    assert (tmp_path / "imported").exists(), "the marker must be a live one"
    del sys.modules["shipped"]


def test_package_itself_is_the_checkpoint(package: Path) -> None:
    shutil.copyfile(package / "model" / "config.json", package / "config.json")
    assert open_checkpoint("package:shipped").config["model_type"] == "bert"


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("package:no_such_package_here", "package 'no_such_package_here' is not installed"),
        ("package:no_such_package_here/model", "package 'no_such_package_here' is not installed"),
        ("package:specless", "package 'specless' is not installed"),
        ("package:shipped/absent", "package 'shipped' has no folder 'absent'"),
        ("package:shipped/model/config.json", "package 'shipped' has no folder 'model/config.json'"),
        ("package:shipped/../outside", "leaves the checkpoint folder: refused"),
        ("package:shipped/model/../../outside", "leaves the checkpoint folder: refused"),
        ("package:shipped//etc", "leaves the checkpoint folder: refused"),
        ("package:shipped/link", "link that leaves the checkpoint folder: refused"),
        ("package:shipped.model", "write package:NAME"),
        ("package:", "write package:NAME"),
        ("package:../outside", "write package:NAME"),
    ],
)
def test_package_that_is_refused(
    source: str, message: str, package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (package / "link").symlink_to(package.parent / "outside")
    monkeypatch.setitem(sys.modules, "specless", types.ModuleType("specless"))
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(source)
    assert not (tmp_path / "imported").exists()


# The hub's cache


def go_offline(monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(cache))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    go_offline(monkeypatch, tmp_path / "hub")
    return tmp_path / "hub"


def fill_cache(cache: Path, source: Path, repo: str = "models--org--tiny") -> Path:
    """Lay a checkpoint out as the hub's cache does: a snapshot of links into `blobs/`."""
    snapshot, blobs = cache / repo / "snapshots" / COMMIT, cache / repo / "blobs"
    blobs.mkdir(parents=True)
    (cache / repo / "refs").mkdir()
    (cache / repo / "refs" / "main").write_text(COMMIT)
    for number, file in enumerate(sorted(path for path in source.rglob("*") if path.is_file())):
        blob, link = blobs / f"{number:040x}", snapshot / file.relative_to(source)
        shutil.copyfile(file, blob)
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(os.path.relpath(blob, link.parent))
    return snapshot


@pytest.mark.parametrize("revision", [None, "main", COMMIT])
def test_hub_id_from_the_cache(cache: Path, folder: Path, tmp_path: Path, revision: str | None) -> None:
    snapshot = fill_cache(cache, folder)
    checkpoint = open_checkpoint("org/tiny", revision)
    assert (checkpoint.root, checkpoint.revision) == (snapshot, COMMIT)
    report = convert("org/tiny", tmp_path / "hub-out", verify=False, revision=revision)
    assert report.manifest.source["revision"] == COMMIT
    assert_identical(load_file(tmp_path / "hub-out" / "model.safetensors"), converted(folder, tmp_path / "out"))


def test_sharded_hub_id_from_the_cache(cache: Path, folder: Path, tmp_path: Path) -> None:
    single = converted(folder, tmp_path / "single")
    fill_cache(cache, shard(folder))
    convert("org/tiny", tmp_path / "hub-out", verify=False)
    assert_identical(load_file(tmp_path / "hub-out" / "model.safetensors"), single)


@pytest.mark.parametrize("repo", ["org/absent", "absent"])
def test_hub_id_out_of_reach(cache: Path, repo: str) -> None:
    with pytest.raises(CheckpointError, match=f"cannot get '{repo}' from the hub .*HF_HUB_OFFLINE") as caught:
        open_checkpoint(repo)
    assert "\n" not in str(caught.value)


def test_hub_without_a_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(CheckpointError, match="cannot get 'org/absent' from the hub") as caught:
        open_checkpoint("org/absent")
    assert "\n" not in str(caught.value)


def test_hub_revision_that_is_not_cached(cache: Path, folder: Path) -> None:
    fill_cache(cache, folder)
    with pytest.raises(CheckpointError, match="cannot get 'org/tiny' from the hub"):
        open_checkpoint("org/tiny", "v2")


def test_hub_repository_without_weights(cache: Path, folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    fill_cache(cache, folder)
    with pytest.raises(CheckpointError, match=r"org/tiny has no weights.*model\.safetensors"):
        open_checkpoint("org/tiny")


def test_hub_shard_that_cannot_be_fetched(cache: Path, sharded: Path) -> None:
    (sharded / SECOND).unlink()
    fill_cache(cache, sharded)
    with pytest.raises(CheckpointError, match=SECOND):
        _ = open_checkpoint("org/tiny").tensors


@pytest.mark.parametrize("target", ["other repository", "refs", "deeper in blobs", "cache's neighbour"])
def test_snapshot_link_that_leaves_its_own_blobs(cache: Path, folder: Path, target: str) -> None:
    """O2: the exception for the hub's cache covers the repository's own blobs and nothing else."""
    snapshot = fill_cache(cache, folder)
    repository = snapshot.parent.parent
    goal = {
        "other repository": cache / "models--org--other" / "blobs" / "0",
        "refs": repository / "refs" / "0",
        "deeper in blobs": repository / "blobs" / "x" / "0",
        "cache's neighbour": cache.parent / "blobs" / "0",
    }[target]
    goal.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(folder / "model.safetensors", goal)
    (snapshot / "model.safetensors").unlink()
    (snapshot / "model.safetensors").symlink_to(goal)
    with pytest.raises(CheckpointError, match=r"model\.safetensors is a link that leaves"):
        _ = open_checkpoint(str(snapshot)).tensors


# Weight files and their index


def test_shards_equal_the_single_file(folder: Path, tmp_path: Path) -> None:
    single = converted(folder, tmp_path / "single")
    shard(folder)
    assert_identical(converted(folder, tmp_path / "sharded"), single)
    assert [path.name for path in open_checkpoint(str(folder)).weight_files()] == [FIRST, SECOND]
    assert set(open_checkpoint(str(folder)).sha256()) == {"config.json", FIRST, SECOND}


@pytest.mark.parametrize("legacy", [False, True], ids=["zip", "legacy"])
def test_pickled_equals_safetensors(folder: Path, tmp_path: Path, legacy: bool) -> None:
    single = converted(folder, tmp_path / "single")
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    torch.save(tensors, folder / "pytorch_model.bin", _use_new_zipfile_serialization=not legacy)
    assert_identical(converted(folder, tmp_path / "pickled"), single)


def test_sharded_pickled_equals_safetensors(folder: Path, tmp_path: Path) -> None:
    single = converted(folder, tmp_path / "single")
    shard(folder, pickled=True)
    assert_identical(converted(folder, tmp_path / "pickled"), single)


class Payload:
    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Callable[[str], object], tuple[str]]:
        return os.mkdir, (str(self.marker),)


@pytest.mark.parametrize("kind", ["single", "sharded"])
def test_safetensors_is_preferred_over_pickled(folder: Path, tmp_path: Path, kind: str) -> None:
    """O2: where both are there, the pickle is not even opened."""
    single = converted(folder, tmp_path / "single")
    if kind == "sharded":
        shard(folder)
    (folder / "pytorch_model.bin").write_bytes(b"no pickle at all")
    write_json(folder / "pytorch_model.bin.index.json", {"weight_map": {WORD: "../x"}})
    assert_identical(converted(folder, tmp_path / "out"), single)


def test_pickled_payload_leaves_nothing_behind(folder: Path, tmp_path: Path) -> None:
    """O2: the reduce call never runs, and no partial artifact stays on disk."""
    tensors: dict[str, Any] = dict(load_file(folder / "model.safetensors"))
    (folder / "model.safetensors").unlink()
    torch.save({**tensors, "x": Payload(tmp_path / "marker")}, folder / "pytorch_model.bin")
    (tmp_path / "outs").mkdir()
    with pytest.raises(CheckpointError, match=r"pytorch_model\.bin: refused"):
        convert(str(folder), tmp_path / "outs" / "out", verify=False)
    assert not (tmp_path / "marker").exists()
    assert not list((tmp_path / "outs").iterdir())


def test_no_weights_at_all(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"has no weights: neither model\.safetensors nor pytorch_model\.bin"):
        _ = open_checkpoint(str(folder)).tensors


def move_tensor(folder: Path) -> None:
    edit_json(folder / INDEX, weight_map={**weight_map(folder), WORD: other_shard(folder)})


def other_shard(folder: Path) -> str:
    return SECOND if weight_map(folder)[WORD] == FIRST else FIRST


def forget_tensor(folder: Path) -> None:
    edit_json(folder / INDEX, weight_map={name: file for name, file in weight_map(folder).items() if name != WORD})


def promise_tensor(folder: Path) -> None:
    edit_json(folder / INDEX, weight_map={**weight_map(folder), "pooler.more": FIRST})


def store_twice(folder: Path) -> None:
    own, other = weight_map(folder)[WORD], other_shard(folder)
    save({**load_file(folder / other), WORD: load_file(folder / own)[WORD]}, folder / other)


def add_single(folder: Path) -> None:
    save(load_file(folder / FIRST), folder / "model.safetensors")


def cut_shard(folder: Path) -> None:
    (folder / SECOND).write_bytes((folder / SECOND).read_bytes()[:-16])


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda folder: (folder / SECOND).unlink(), f"{SECOND} is listed in {INDEX} and missing"),
        (move_tensor, rf"tensor '{WORD}' is not in model-\S+, where {INDEX} says it is"),
        (promise_tensor, f"tensor 'pooler.more' is not in {FIRST}, where {INDEX} says it is"),
        (forget_tensor, rf"tensor '{WORD}' is in model-\S+ but not in {INDEX}"),
        (store_twice, rf"tensor '{WORD}' is stored twice, in {FIRST} and in {SECOND}"),
        (add_single, rf"both model\.safetensors and {INDEX} are there and disagree"),
        (cut_shard, f"{SECOND}: .*truncated"),
        (lambda folder: (folder / SECOND).write_bytes(LFS_POINTER), f"{SECOND} is a Git-LFS pointer"),
        (lambda folder: (folder / INDEX).write_bytes(LFS_POINTER), f"{INDEX} is a Git-LFS pointer"),
        (lambda folder: (folder / INDEX).write_bytes(b'{"a":' + b"[" * 200_000), f"{INDEX}: .*nested too deeply"),
        (lambda folder: write_json(folder / INDEX, []), f"{INDEX}: the JSON holds a list"),
        (lambda folder: write_json(folder / INDEX, {}), f"{INDEX}: weight_map must map"),
        (lambda folder: write_json(folder / INDEX, {"weight_map": [FIRST]}), f"{INDEX}: weight_map must map"),
        (lambda folder: write_json(folder / INDEX, {"weight_map": {WORD: 1}}), f"{INDEX}: weight_map must map"),
        (lambda folder: os.truncate(folder / INDEX, 200_000_001), f"{INDEX}: 200000001 bytes is too large"),
    ],
    ids=[
        "shard missing",
        "tensor in another shard",
        "tensor in no shard",
        "tensor not in the index",
        "tensor in both shards",
        "single file beside the index",
        "shard truncated",
        "shard LFS pointer",
        "index LFS pointer",
        "index nested",
        "index array",
        "index empty",
        "index map a list",
        "index map of numbers",
        "index huge",
    ],
)
def test_shards_and_index_contradict(sharded: Path, damage: Callable[[Path], object], message: str) -> None:
    """O3: the index is the authority; any disagreement names the tensor or the file."""
    damage(sharded)
    with pytest.raises(CheckpointError, match=message):
        _ = open_checkpoint(str(sharded)).tensors


def test_index_that_repeats_a_tensor(sharded: Path) -> None:
    """O3: which of the two shards is meant cannot be known."""
    (sharded / INDEX).write_text(f'{{"weight_map": {{"{WORD}": "{FIRST}", "{WORD}": "{SECOND}"}}}}')
    with pytest.raises(CheckpointError, match=rf"{INDEX}: .*'{WORD}' appears twice"):
        _ = open_checkpoint(str(sharded)).tensors


def forbid_opening(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path) -> None:
        raise AssertionError(f"{path} was opened")

    monkeypatch.setattr(toolkit.checkpoint, "read_header", refuse)
    monkeypatch.setattr(toolkit.checkpoint, "iter_pickled", refuse)


@pytest.mark.parametrize("pickled", [False, True], ids=["safetensors", "pickled"])
@pytest.mark.parametrize("escape", ["absolute", "parent", "parent in the middle", "link", "link to a folder"])
def test_shard_outside_is_refused_before_it_is_opened(
    folder: Path, monkeypatch: pytest.MonkeyPatch, escape: str, pickled: bool
) -> None:
    """O2: the target is a good shard, so nothing but the check of its name can refuse it."""
    shard(folder, pickled=pickled)
    index = next(folder.glob("*.index.json"))
    shards = sorted({*Checkpoint(source="x", root=folder).json(index.name)["weight_map"].values()})
    outside = folder.parent / "outside"
    outside.mkdir()
    shutil.move(folder / shards[1], outside / shards[1])
    name = {
        "absolute": str(outside / shards[1]),
        "parent": f"../outside/{shards[1]}",
        "parent in the middle": f"x/../../outside/{shards[1]}",
        "link": "link",
        "link to a folder": f"linked/{shards[1]}",
    }[escape]
    (folder / "link").symlink_to(outside / shards[1])
    (folder / "linked").symlink_to(outside)
    edit_json(index, weight_map={WORD: shards[0], "pooler.dense.bias": name})
    forbid_opening(monkeypatch)
    with pytest.raises(CheckpointError, match="leaves the checkpoint folder: refused"):
        _ = open_checkpoint(str(folder)).tensors


def test_name_that_leaves_and_comes_back(cache: Path, folder: Path) -> None:
    """O2: a name is refused for what it says; the exception for the hub's blobs is for links only."""
    snapshot = fill_cache(cache, folder)
    for name in ("../bert/config.json", str(folder / "config.json"), "1_Pooling/../config.json"):
        with pytest.raises(CheckpointError, match="leaves the checkpoint folder: refused"):
            open_checkpoint(str(folder)).has(name)
    with pytest.raises(CheckpointError, match="leaves the checkpoint folder: refused"):
        open_checkpoint(str(snapshot)).has(f"../../blobs/{0:040x}")


def test_nothing_is_fetched_for_an_index_with_an_escaping_name(sharded: Path) -> None:
    """O2: also where the good shard comes first and is still to be downloaded."""
    fetched: list[str] = []
    (sharded / FIRST).unlink()
    edit_json(sharded / INDEX, weight_map={WORD: FIRST, "pooler.dense.bias": f"x/../../outside/{SECOND}"})
    with pytest.raises(CheckpointError, match="leaves the checkpoint folder: refused"):
        _ = Checkpoint(source="org/tiny", root=sharded, _fetch=fetched.append).tensors
    assert fetched == []


@pytest.mark.parametrize("name", ["model.safetensors", "config.json"])
def test_link_out_of_the_folder(folder: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """O2: a link is judged by where it ends, before anything is read through it."""
    outside = shutil.move(folder / name, folder.parent / name)
    (folder / name).symlink_to(outside)
    forbid_opening(monkeypatch)
    with pytest.raises(CheckpointError, match=f"{name} is a link that leaves the checkpoint folder: refused"):
        convert(str(folder), folder.parent / "out", verify=False)


def test_link_inside_the_folder_is_followed(folder: Path, tmp_path: Path) -> None:
    single = converted(folder, tmp_path / "single")
    shutil.move(folder / "model.safetensors", folder / "real.safetensors")
    (folder / "model.safetensors").symlink_to("real.safetensors")
    assert_identical(converted(folder, tmp_path / "linked"), single)


def test_checkpoint_folder_that_is_a_link(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(folder)
    assert open_checkpoint(str(tmp_path / "link")).tensors.info


@pytest.mark.parametrize("name", ["model.safetensors", "config.json"])
def test_link_to_itself(folder: Path, name: str) -> None:
    (folder / name).unlink()
    (folder / name).symlink_to(name)
    with pytest.raises(CheckpointError, match=name):
        convert(str(folder), folder.parent / "out", verify=False)


# config.json


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, r"config\.json is missing from"),
        (LFS_POINTER, r"config\.json is a Git-LFS pointer"),
        (b"", r"config\.json: not valid JSON"),
        (b'[{"model_type": "bert"}]', r"config\.json: the JSON holds a list"),
        (b'{"model_type": "bert", "model_type": "roberta"}', r"config\.json: .*'model_type' appears twice"),
        (b'{"model_type": "bert", "id2label": {"0": "a", "0": "b"}}', r"config\.json: .*'0' appears twice"),
        (b'{"hidden_size": 40}', r"config\.json: the field model_type is missing"),
        (b'{"model_type": 7}', r"config\.json: the field model_type is missing or no string"),
        (b'{"model_type": null}', r"config\.json: the field model_type is missing or no string"),
        ('{"model_type": "bert"}'.encode("utf-16"), r"config\.json: not valid JSON"),
        (b'{"model_type": "b\xe9rt"}', r"config\.json: not valid JSON"),
    ],
    ids=[
        "missing",
        "LFS pointer",
        "empty",
        "array",
        "duplicate key",
        "duplicate key inside",
        "no model_type",
        "model_type a number",
        "model_type null",
        "utf-16",
        "latin-1",
    ],
)
def test_config_that_is_refused(folder: Path, content: bytes | None, message: str) -> None:
    """O3: the config is as little trusted as the weights."""
    if content is None:
        (folder / "config.json").unlink()
    else:
        (folder / "config.json").write_bytes(content)
    with pytest.raises(CheckpointError, match=message):
        convert(str(folder), folder.parent / "out", verify=False)
    assert not (folder.parent / "out").exists()
