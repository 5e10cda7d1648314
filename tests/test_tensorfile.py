import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from toolkit.errors import CheckpointError
from toolkit.tensorfile import iter_pickled, parse_json, read_header, read_tensor, refuse_lfs_pointer

DATA = bytes(range(32))
LFS_POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 90868376\n"


def entry(shape: Any, offsets: Any, dtype: Any = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


A, B = entry([2, 2], [0, 16]), entry([4], [16, 32])
VALID = {"__metadata__": {"format": "pt"}, "a": A, "b": B}


def pack(header: Any, data: bytes = DATA, length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return (len(text) if length is None else length).to_bytes(8, "little") + text + data


def write(folder: Path, content: bytes) -> Path:
    file = folder / "model.safetensors"
    file.write_bytes(content)
    return file


@contextmanager
def deadline(seconds: float = 2.0) -> Iterator[None]:
    begin = time.perf_counter()
    yield
    assert time.perf_counter() - begin < seconds


def test_valid_file_reads_like_safetensors(tmp_path: Path) -> None:
    file = write(tmp_path, pack(VALID))
    header = read_header(file)
    assert list(header) == ["a", "b"]
    assert header["a"].shape == (2, 2)
    assert header["b"].dtype == torch.float32
    for name, expected in load_file(file).items():
        assert torch.equal(read_tensor(header[name]), expected)


MALFORMED = {
    "header length 2^63": (pack(VALID, length=2**63), r"model.safetensors: the header claims 9223372036854775808"),
    "header longer than the file": (pack(VALID, length=10_000), r"model.safetensors: the header claims 10000"),
    "zero bytes": (b"", r"model.safetensors: 0 bytes is too short"),
    "seven bytes": (b"\1" + b"\0" * 6, r"model.safetensors: 7 bytes is too short"),
    "Git-LFS pointer": (LFS_POINTER, r"model.safetensors is a Git-LFS pointer.*git lfs pull"),
    "JSON array": (pack([VALID]), r"model.safetensors header: the JSON holds a list"),
    "JSON string": (pack("a"), r"model.safetensors header: the JSON holds a str"),
    "no JSON": (pack(b"{'a': 1}"), r"model.safetensors header: not valid JSON"),
    "empty header": (pack(b"", b""), r"model.safetensors header: not valid JSON"),
    "not UTF-8": (pack(b'{"\xff": 1}'), r"model.safetensors header: not valid JSON"),
    "long number": (
        pack(b'{"a":{"dtype":"F32","shape":[' + b"9" * 5000 + b'],"data_offsets":[0,32]}}'),
        r"model.safetensors header: not valid JSON",
    ),
    "deep list": (
        pack(b'{"a":' + b"[" * 1_000_000 + b"]" * 1_000_000 + b"}"),
        r"model.safetensors header: .*nested too deeply",
    ),
    "deep object": (
        pack(b'{"a":' * 1_000_000 + b"1" + b"}" * 1_000_000),
        r"model.safetensors header: .*nested too deeply",
    ),
    "duplicate tensor": (
        pack(b'{"a":%s,"a":%s}' % (json.dumps(A).encode(), json.dumps(B).encode())),
        r"model.safetensors header: .*'a' appears twice",
    ),
    "duplicate key of an entry": (
        pack(b'{"a":{"dtype":"F32","shape":[8],"shape":[2],"data_offsets":[0,32]}}'),
        r"model.safetensors header: .*'shape' appears twice",
    ),
    "metadata no map": (pack({**VALID, "__metadata__": 3}), r"model.safetensors.*__metadata__"),
    "metadata no strings": (pack({**VALID, "__metadata__": {"x": 1}}), r"model.safetensors.*__metadata__"),
    "entry no object": (pack({"a": A, "b": [16, 32]}), r"tensor 'b': the header entry must hold"),
    "entry with an extra key": (pack({"a": A, "b": {**B, "x": 1}}), r"tensor 'b': the header entry must hold"),
    "entry without offsets": (pack({"a": A, "b": {"dtype": "F32", "shape": [4]}}), r"tensor 'b': .*must hold"),
    "unknown dtype": (pack({"a": A, "b": entry([4], [16, 32], "F31")}), r"tensor 'b': unknown dtype 'F31'"),
    "dtype no string": (pack({"a": A, "b": entry([4], [16, 32], ["F32"])}), r"tensor 'b': unknown dtype \['F32'\]"),
    "offsets swapped": (pack({"a": A, "b": entry([4], [32, 16])}), r"tensor 'b': data_offsets \[32, 16\]"),
    "offsets negative": (pack({"a": entry([2, 2], [-16, 0]), "b": B}), r"tensor 'a': data_offsets \[-16, 0\]"),
    "one offset": (pack({"a": A, "b": entry([4], [16])}), r"tensor 'b': data_offsets \[16\]"),
    "offsets of floats": (pack({"a": A, "b": entry([4], [16.0, 32.0])}), r"tensor 'b': data_offsets \[16.0, 32.0\]"),
    "overlap": (pack({"a": A, "b": entry([4], [8, 24])}, DATA[:24]), r"tensor 'b' overlaps .*offset 8, expected 16"),
    "same range twice": (pack({"a": A, "b": entry([4], [0, 16])}, DATA[:16]), r"tensor 'b' overlaps"),
    "gap": (pack({"a": A, "b": entry([3], [20, 32])}), r"tensor 'b' leaves a gap .*offset 20, expected 16"),
    "gap at the start": (pack({"b": B}), r"tensor 'b' leaves a gap .*offset 16, expected 0"),
    "past the end": (pack({"a": A, "b": entry([8], [16, 48])}), r"model.safetensors: .*48 bytes.*holds 32"),
    "last 16 bytes cut": (pack(VALID)[:-16], r"model.safetensors: .*32 bytes.*holds 16: truncated"),
    "trailing bytes": (pack(VALID) + b"\0" * 8, r"model.safetensors: .*32 bytes.*holds 40"),
    "shape smaller than the range": (pack({"a": A, "b": entry([3], [16, 32])}), r"tensor 'b': shape \[3\] of F32"),
    "shape larger than the range": (pack({"a": A, "b": entry([5], [16, 32])}), r"tensor 'b': shape \[5\] of F32"),
    "dtype wider than the range": (pack({"a": A, "b": entry([4], [16, 32], "F64")}), r"tensor 'b': shape \[4\] of F64"),
    "bytes 2^64 + 16 wrap to 16": (pack({"a": A, "b": entry([4, 2**60 + 1], [16, 32])}), r"tensor 'b': shape"),
    "product 2^126": (pack({"a": A, "b": entry([2**62, 2**62, 4], [16, 32])}), r"tensor 'b': shape"),
    "product of zero that overflows": (
        pack({"a": A, "b": B, "z": entry([2**62, 2**62, 0], [32, 32])}),
        r"tensor 'z': shape",
    ),
    "dim 2^64": (pack({"a": A, "b": entry([2**64], [16, 32])}), r"tensor 'b': shape \[18446744073709551616\]"),
    "dims negative": (pack({"a": A, "b": entry([-2, -2], [16, 32])}), r"tensor 'b': shape \[-2, -2\]"),
    "dim a bool": (pack({"a": A, "b": entry([True, 4], [16, 32])}), r"tensor 'b': shape \[True, 4\]"),
    "dim a float": (pack({"a": A, "b": entry([4.0], [16, 32])}), r"tensor 'b': shape \[4.0\]"),
    "dim NaN": (pack({"a": A, "b": entry([float("nan")], [16, 32])}), r"tensor 'b': shape \[nan\]"),
    "shape a string": (pack({"a": A, "b": entry("4", [16, 32])}), r"tensor 'b': shape '4'"),
}


@pytest.mark.parametrize(("content", "message"), MALFORMED.values(), ids=MALFORMED.keys())
def test_malformed_safetensors_is_one_named_error(tmp_path: Path, content: bytes, message: str) -> None:
    """O3: each defect is named, in bounded time, before any tensor is read."""
    file = write(tmp_path, content)
    with deadline(), pytest.raises(CheckpointError, match=message):
        read_header(file)


def test_many_huge_dims_cost_no_time(tmp_path: Path) -> None:
    """O3: a product of big integers grows with the square of their number; the message stays short, too."""
    file = write(tmp_path, pack({"a": entry([2**62] * 40_000, [0, 32])}))
    with deadline(1.0), pytest.raises(CheckpointError, match="tensor 'a': shape") as caught:
        read_header(file)
    assert len(str(caught.value)) < 1000


def test_header_that_would_fill_the_memory_is_refused_unread(tmp_path: Path) -> None:
    """O3: the file is as long as its header claims (sparse), so only the cap on headers can refuse it."""
    file = write(tmp_path, (300_000_000).to_bytes(8, "little"))
    os.truncate(file, 300_000_008)
    with deadline(), pytest.raises(CheckpointError, match=r"model.safetensors: the header claims 300000000"):
        read_header(file)


ACCEPTED = {
    "no metadata": {"a": A, "b": B},
    "metadata null": {**VALID, "__metadata__": None},
    "zero-size in the middle": {"a": A, "z": entry([0, 3], [16, 16]), "b": B},
    "zero-size at the end": {"a": A, "b": B, "z": entry([7, 0], [32, 32])},
    "scalar": {"a": A, "s": entry([], [16, 20]), "b": entry([3], [20, 32])},
    "header out of order": {"b": B, "a": A},
}


@pytest.mark.parametrize("header", ACCEPTED.values(), ids=ACCEPTED.keys())
def test_unusual_but_valid_files_are_read(tmp_path: Path, header: dict[str, Any]) -> None:
    """H3: metadata may be absent and a tensor may be empty."""
    file = write(tmp_path, pack(header))
    infos = read_header(file)
    assert set(infos) == set(header) - {"__metadata__"}
    for name, expected in load_file(file).items():
        assert infos[name].shape == tuple(expected.shape)
        assert torch.equal(read_tensor(infos[name]), expected)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b'{"a": 1, "b": {"c": 1, "c": 2}}', "x.json: .*'c' appears twice"),
        (b"[]", "x.json: the JSON holds a list"),
        (b"null", "x.json: the JSON holds a NoneType"),
        (b"\xff\xfe", "x.json: not valid JSON"),
        (b"", "x.json: not valid JSON"),
        (b'{"a":' + b"[" * 200_000, "x.json: .*nested too deeply"),
    ],
)
def test_parse_json_names_file_and_defect(data: bytes, message: str) -> None:
    """O3: the same reader serves headers, configs and indexes."""
    with pytest.raises(CheckpointError, match=message):
        parse_json(data, "x.json")


def test_only_the_start_of_a_file_makes_an_lfs_pointer(tmp_path: Path) -> None:
    file = write(tmp_path, b"x" + LFS_POINTER)
    refuse_lfs_pointer(file)
    file.write_bytes(LFS_POINTER)
    with pytest.raises(CheckpointError, match=r"model\.safetensors is a Git-LFS pointer"):
        refuse_lfs_pointer(file)


class Payload:
    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Callable[[str], object], tuple[str]]:
        return os.mkdir, (str(self.marker),)


def save(file: Path, content: object, *, legacy: bool = False) -> Path:
    torch.save(content, file, _use_new_zipfile_serialization=not legacy)
    return file


@pytest.mark.parametrize("legacy", [False, True], ids=["zip", "legacy"])
def test_pickled_payload_is_never_executed(tmp_path: Path, legacy: bool) -> None:
    """O2: weights-only, whatever the container; the marker would appear if the reduce call ran."""
    marker = tmp_path / "marker"
    file = save(tmp_path / "w.bin", {"a": torch.ones(2), "x": Payload(marker)}, legacy=legacy)
    with pytest.raises(CheckpointError, match=r"w\.bin: refused by torch's weights-only loader") as caught:
        list(iter_pickled(file))
    assert not marker.exists()
    assert "`weights_only` set to `False`" not in str(caught.value), "advises the user to run the payload"
    torch.load(file, weights_only=False)
    assert marker.exists(), "the payload must be a live one"


@pytest.mark.parametrize("legacy", [False, True], ids=["zip", "legacy"])
def test_pickled_tensors_are_read(tmp_path: Path, legacy: bool) -> None:
    content = {"a": torch.randn(3, 4), "b": torch.randn(4).half(), "n": torch.arange(5)}
    found = dict(iter_pickled(save(tmp_path / "w.bin", content, legacy=legacy)))
    assert {info.name: info.dtype for info in found} == {name: tensor.dtype for name, tensor in content.items()}
    assert {info.name: info.shape for info in found} == {name: tuple(t.shape) for name, t in content.items()}
    for info, tensor in found.items():
        assert torch.equal(tensor, content[info.name])


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "make",
    [
        lambda: 3,
        lambda: None,
        lambda: {"inner": torch.ones(2)},
        lambda: torch.eye(2).to_sparse(),
        lambda: torch.eye(2).to_sparse_csr(),
        lambda: torch.ones(2, dtype=torch.complex64),
        lambda: torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8),
        lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
        lambda: torch.ones(2, device="meta"),
    ],
    ids=["int", "None", "dict", "sparse", "sparse-csr", "complex", "quantized", "nested", "meta"],
)
def test_pickled_entry_that_is_no_plain_tensor(tmp_path: Path, make: Callable[[], object]) -> None:
    """O3: what is no dense tensor with values is refused by name, not read in part."""
    file = save(tmp_path / "w.bin", {"a": torch.ones(2), "odd": make()})
    with pytest.raises(CheckpointError, match=r"w\.bin: entry 'odd' is no plain tensor"):
        list(iter_pickled(file))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ([torch.ones(2)], "holds a list, expected a dict"),
        (torch.ones(2), "holds a Tensor, expected a dict"),
        ({7: torch.ones(2)}, "entry 7 is no plain tensor"),
    ],
)
def test_pickled_file_that_is_no_state_dict(tmp_path: Path, content: object, message: str) -> None:
    with pytest.raises(CheckpointError, match=r"w\.bin: " + message):
        list(iter_pickled(save(tmp_path / "w.bin", content)))


@pytest.mark.parametrize("keep", [0, 1, 8, 0.5, 0.99])
@pytest.mark.parametrize("legacy", [False, True], ids=["zip", "legacy"])
def test_truncated_pickle(tmp_path: Path, keep: float, legacy: bool) -> None:
    """O3: a file cut anywhere is an error that names it."""
    file = save(tmp_path / "w.bin", {"a": torch.ones(400)}, legacy=legacy)
    whole = file.read_bytes()
    file.write_bytes(whole[: keep if isinstance(keep, int) else int(len(whole) * keep)])
    with pytest.raises(CheckpointError, match=r"w\.bin: refused by torch's weights-only loader"):
        list(iter_pickled(file))


def test_pickled_lfs_pointer(tmp_path: Path) -> None:
    file = tmp_path / "w.bin"
    file.write_bytes(LFS_POINTER)
    with pytest.raises(CheckpointError, match=r"w\.bin is a Git-LFS pointer"):
        list(iter_pickled(file))
