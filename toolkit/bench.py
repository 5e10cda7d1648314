"""Measure an artifact beside its peers, on the same texts, in the same run.

Every figure is the median of several runs after a warm-up. Peers get the best of several batch sizes; on CUDA
the peers' attention is SDPA and their dtype is the artifact's.
"""

import json
import platform
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from rich.table import Table
from torch import Tensor

from toolkit.artifact import Artifact
from toolkit.conversion import library_versions
from toolkit.inputs import PromptEmbeds, Row, TokenIds, check_row
from toolkit.parity.harness import find_source
from toolkit.runner import Runner, load

__all__ = ["BenchResult", "Measurement", "lognormal_lengths", "random_texts", "run_bench"]


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """One figure. `ratio` is ours over this one's, in speed: above 1 ours is faster."""

    what: str
    who: str
    setting: str
    value: float
    unit: str
    ratio: float


@dataclass(frozen=True, kw_only=True)
class BenchResult:
    """All figures of one run, with what they were measured on."""

    artifact: str
    mode: str
    attention: str
    dtype: str
    hardware: str
    versions: dict[str, str]
    texts: dict[str, Any]
    max_difference: dict[str, float]
    measurements: tuple[Measurement, ...]

    def to_dict(self) -> dict[str, Any]:
        """Plain dict, for JSON."""
        return asdict(self)

    def tables(self) -> list[Table]:
        """One rich table for each kind of figure."""
        tables: list[Table] = []
        for what in dict.fromkeys(m.what for m in self.measurements):
            table = Table(title=what, title_justify="left")
            for name in ("who", "setting"):
                table.add_column(name)
            for name in ("value", "unit", "toolkit is faster by"):
                table.add_column(name, justify="right")
            for m in (m for m in self.measurements if m.what == what):
                table.add_row(
                    m.who,
                    m.setting,
                    f"{m.value:,.0f}" if m.value >= 100 else f"{m.value:.3g}",
                    m.unit,
                    f"{m.ratio:.2f} ×",
                )
            tables.append(table)
        return tables


def lognormal_lengths(count: int | None, total: int | None, longest: int, mean_log: float, seed: int = 0) -> list[int]:
    """Lengths `lognormvariate(mean_log, 0.8)` clipped to 8 … longest: `count` of them, or until they fill `total`."""
    draw, lengths = random.Random(seed), []
    while count is None or len(lengths) < count:
        length = int(min(longest, max(8, draw.lognormvariate(mean_log, 0.8))))
        if total is not None:
            left = total - sum(lengths)
            if left < 8:
                break
            length = min(length, left)
        lengths.append(length)
    return lengths


def random_texts(artifact: Artifact, lengths: Sequence[int], seed: int = 0) -> list[str]:
    """Texts of whole words of the artifact's vocabulary that tokenize to these lengths, special tokens included."""
    from tokenizers import Tokenizer

    vocab = Tokenizer.from_file(str(artifact.folder / "tokenizer.json")).get_vocab()
    words = sorted(word for word in vocab if word.isascii() and word.isalpha() and word.islower() and len(word) > 2)
    draw = random.Random(seed)
    return [" ".join(draw.choice(words) for _ in range(length - 2)) for length in lengths]


def run_bench(
    out: str | Path,
    source: str | None = None,
    *,
    texts: int = 512,
    device: str = "auto",
    mode: str = "auto",
    packed_tokens: int | None = None,
    on_stage: Callable[[str], None] = lambda stage: None,
) -> BenchResult:
    """Measure an artifact and its peers.

    Args:
        out: the converted folder.
        source: the checkpoint for the peers; by default what the artifact was converted from.
        texts: number of texts; lengths are lognormal with a mean of about 43 tokens, clipped to 8 … 256.
        device: where everything runs.
        mode: our mode.
        packed_tokens: tokens of the packed batch; by default 65536 on CUDA and 2048 on a CPU.
        on_stage: called with a line of text whenever a stage begins.

    Raises:
        MissingDependencyError: the artifact's source or a peer cannot be loaded.
    """
    artifact = Artifact.open(out)
    checkpoint = find_source(artifact, source)
    on_stage("starting fresh processes to time the start-up")
    runner = load(out, device=device, mode=mode)
    measurements = _start_up(artifact, runner, checkpoint)
    longest = min(256, artifact.manifest.tokenizer.limit)
    chosen = random_texts(artifact, lognormal_lengths(texts, None, longest, 3.4))
    rows = runner.rows(chosen, "")
    tokens = sum(len(row) for row in rows)
    peers = _Peers(checkpoint, artifact, runner.device, on_stage)

    on_stage("strings to vectors")
    ours = runner.embed(chosen)
    seconds = _median(lambda: runner.embed(chosen), runner.device)
    differences: dict[str, float] = {}
    found = [("toolkit", f"mode {runner.mode}", tokens / seconds)]
    for name, setting, run in peers.encoders():
        on_stage(f"strings to vectors: {name}, {setting}")
        differences[name] = float((run(chosen) - ours).abs().max())
        found.append((name, setting, tokens / _median(lambda run=run: run(chosen), runner.device)))
    measurements += _compare("strings to vectors, mixed lengths", found, "tokens/s", higher_is_better=True)

    on_stage("one short text")
    one = random_texts(artifact, [32])
    found = [("toolkit", "string to vector", _median(lambda: runner.embed(one), runner.device, 50) * 1e6)]
    for name, setting, run in peers.single():
        found.append((name, setting, _median(lambda run=run: run(one), runner.device, 20) * 1e6))
    measurements += _compare("one text of 32 tokens, string to vector", found, "µs", higher_is_better=False)

    on_stage("model only")
    measurements += _model_only(runner, peers, packed_tokens)
    measurements += _paths(runner)
    cuda = runner.device.type == "cuda"
    return BenchResult(
        artifact=artifact.manifest.source["name"],
        mode=runner.mode,
        attention=runner.attention,
        dtype=artifact.manifest.dtype,
        hardware=torch.cuda.get_device_name() if cuda else f"{_cpu_name()}, {torch.get_num_threads()} threads",
        versions=library_versions(),
        texts={"count": len(chosen), "tokens": tokens, "mean": tokens / len(chosen), "longest": longest},
        max_difference=differences,
        measurements=tuple(measurements),
    )


def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    names = [line.split(":")[1].strip() for line in info.read_text().splitlines() if line.startswith("model name")]
    return f"{names[0] if names else platform.processor()} ({torch.backends.cpu.get_cpu_capability()})"


def _median(run: Callable[[], Any], device: torch.device, repeats: int = 5) -> float:
    """Median seconds of `run`, after two warm-up runs; the device is idle before and after each."""
    times: list[float] = []
    for number in range(repeats + 2):
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        start = time.perf_counter()
        run()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        if number >= 2:
            times.append(time.perf_counter() - start)
    return statistics.median(times)


def _compare(
    what: str, found: Sequence[tuple[str, str, float]], unit: str, *, higher_is_better: bool
) -> list[Measurement]:
    """Turn (who, setting, value) into measurements; the first is ours."""
    ours = found[0][2]
    return [
        Measurement(
            what=what,
            who=who,
            setting=setting,
            value=value,
            unit=unit,
            ratio=ours / value if higher_is_better else value / ours,
        )
        for who, setting, value in found
    ]


def _model_only(runner: Runner, peers: "_Peers", packed_tokens: int | None) -> list[Measurement]:
    """Token ids in, states out: a large packed batch, and one text of 32 tokens, beside padded transformers."""
    total = packed_tokens or (65536 if runner.device.type == "cuda" else 2048)
    longest = min(256, runner.limits.length)
    ids = _random_ids(runner, lognormal_lengths(None, total, longest, 3.9))
    tokens = sum(map(len, ids))
    batch = runner.pack(_checked(runner, ids))
    found = [
        ("toolkit", f"packed, {len(ids)} sequences", tokens / _median(lambda: runner.run(batch), runner.device, 20))
    ]
    for size in peers.sizes:
        run = peers.padded(ids, size)
        found.append(("transformers", f"padded, sorted, batch {size}", tokens / _median(run, runner.device, 5)))
    results = _compare(f"model only, {tokens} tokens", found, "tokens/s", higher_is_better=True)
    one = _random_ids(runner, [32])
    small = runner.pack(_checked(runner, one))
    found = [
        ("toolkit", f"mode {runner.mode}", _median(lambda: runner.run(small), runner.device, 200) * 1e6),
        ("transformers", "eager module", _median(peers.padded(one, 1), runner.device, 50) * 1e6),
    ]
    return results + _compare("model only, one text of 32 tokens", found, "µs", higher_is_better=False)


def _paths(runner: Runner) -> list[Measurement]:
    """The ids path before and after the embeds path was first used, and the embeds path, at the same size.

    Ids and embeds alternate, so that drift of the machine's clock falls on both.
    """
    ids = _random_ids(runner, lognormal_lengths(None, 512, min(256, runner.limits.length), 3.9))
    fresh = load(runner.artifact.folder, device=str(runner.device), mode=runner.mode, attention=runner.attention)
    by_ids = fresh.pack(_checked(fresh, ids))
    given = [check_row(PromptEmbeds(fresh.embed_tokens(sequence)), fresh.limits, "bench") for sequence in ids]
    by_embeds = fresh.pack(given)
    _median(lambda: fresh.run(by_ids), fresh.device, 50)
    off = _median(lambda: fresh.run(by_ids), fresh.device, 400)
    fresh.run(by_embeds)
    on_times, embeds_times = [], []
    for _ in range(20):
        on_times.append(_median(lambda: fresh.run(by_ids), fresh.device, 20))
        embeds_times.append(_median(lambda: fresh.run(by_embeds), fresh.device, 20))
    found = [
        ("toolkit", "ids path, embeds path never used", off * 1e6),
        ("toolkit", "ids path, embeds path in use", statistics.median(on_times) * 1e6),
        ("toolkit", "embeds path", statistics.median(embeds_times) * 1e6),
    ]
    return _compare(f"paths, {by_ids.tokens} tokens", found, "µs", higher_is_better=False)


def _random_ids(runner: Runner, lengths: Sequence[int]) -> list[list[int]]:
    draw = random.Random(2)
    return [[draw.randrange(runner.limits.vocab_size) for _ in range(length)] for length in lengths]


def _checked(runner: Runner, ids: Sequence[Sequence[int]]) -> list[Row]:
    return [check_row(TokenIds(sequence), runner.limits, "bench") for sequence in ids]


def _start_up(artifact: Artifact, runner: Runner, checkpoint: Path) -> list[Measurement]:
    """Seconds from an empty process to the first vector, imports included; compiled code may come from a cache."""
    folder, device = str(artifact.folder), str(runner.device)
    ours = "import toolkit; toolkit.load({folder!r}, device={device!r}, mode={mode!r}).embed(['warm up'])"
    theirs = (
        "from sentence_transformers import SentenceTransformer; "
        "SentenceTransformer({root!r}, device={device!r}, local_files_only=True).encode(['warm up'])"
    )
    found: list[tuple[str, str, float]] = []
    for mode in dict.fromkeys((runner.mode, "eager")):
        code = ours.format(folder=folder, device=device, mode=mode)
        found.append(("toolkit", f"mode {mode}", _time_process(code)))
    found.append(("sentence-transformers", "", _time_process(theirs.format(root=str(checkpoint), device=device))))
    return _compare("start-up, empty process to first vector", found, "s", higher_is_better=False)


def _time_process(code: str) -> float:
    """Seconds of a fresh interpreter running `code`, the second of two runs."""

    def run() -> float:
        start = time.perf_counter()
        subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=True, capture_output=True)
        return time.perf_counter() - start

    run()
    return run()


Encode = Callable[[list[str]], Tensor]


class _Peers:
    """The reference libraries on the source checkpoint."""

    def __init__(
        self, checkpoint: Path, artifact: Artifact, device: torch.device, on_stage: Callable[[str], None]
    ) -> None:
        from toolkit.parity.references import SentenceTransformersReference, TransformersReference

        self._device = device
        self.sizes = (4, 8, 16, 32, 64) if device.type == "cpu" else (32, 128, 512)
        on_stage("loading the peers")
        self._st = SentenceTransformersReference(checkpoint, artifact.dtype, device, attention="sdpa")
        self._st.limit_length(artifact.manifest.tokenizer.limit)
        self._model = TransformersReference(checkpoint, artifact.dtype, device, attention="sdpa")
        self._onnx = None
        if device.type == "cpu" and artifact.dtype == torch.float32:
            missing = [name for name in ("onnxruntime", "onnxscript") if find_spec(name) is None]
            if missing:
                on_stage(f"note: {' and '.join(missing)} not installed, onnxruntime is not measured")
            else:
                on_stage("exporting the source model to onnx for onnxruntime")
                exact = TransformersReference(checkpoint, torch.float32, device, attention="sdpa")
                self._onnx = _OnnxPeer(exact.model, artifact)

    def encoders(self) -> list[tuple[str, str, Encode]]:
        """(name, setting, texts → vectors) for batches of several sizes."""
        found: list[tuple[str, str, Encode]] = [
            ("sentence-transformers", f"batch {size}", lambda texts, size=size: self._st.vectors(texts, size))
            for size in self.sizes
        ]
        if self._onnx is not None:
            onnx = self._onnx
            found += [
                ("onnxruntime", f"sorted, batch {size}", lambda texts, size=size: onnx.vectors(texts, size))
                for size in (1, *self.sizes)
            ]
        return found

    def single(self) -> list[tuple[str, str, Encode]]:
        """(name, setting, texts → vectors) for one text."""
        found: list[tuple[str, str, Encode]] = [("sentence-transformers", "encode", lambda t: self._st.vectors(t, 1))]
        if self._onnx is not None:
            onnx = self._onnx
            found.append(("onnxruntime", "", lambda texts: onnx.vectors(texts, 1)))
        return found

    def padded(self, ids: Sequence[Sequence[int]], size: int) -> Callable[[], None]:
        """transformers over padded batches of `size`, sorted by length; tensors are on the device beforehand."""
        return self._model.padded(ids, size)


class _OnnxPeer:
    """onnxruntime on a plain export of transformers' model, with mean pooling and normalisation in numpy."""

    def __init__(self, model: Any, artifact: Artifact) -> None:
        import onnxruntime
        from tokenizers import Tokenizer

        manifest = artifact.manifest
        self._tokenizer = Tokenizer.from_file(str(artifact.folder / "tokenizer.json"))
        self._tokenizer.enable_truncation(manifest.tokenizer.limit, direction=manifest.tokenizer.side)
        self._pooling, self._normalize = manifest.pipeline.pooling, manifest.pipeline.normalize
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = torch.get_num_threads()
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "model.onnx"
            _export(model, file, manifest.usable_length)
            self._session = onnxruntime.InferenceSession(str(file), options, providers=["CPUExecutionProvider"])

    def vectors(self, texts: list[str], size: int) -> Tensor:
        import numpy as np

        ids = [encoding.ids for encoding in self._tokenizer.encode_batch_fast(texts)]
        order = sorted(range(len(ids)), key=lambda k: len(ids[k]), reverse=True)
        result = torch.empty(0)
        for start in range(0, len(order), size):
            members = order[start : start + size]
            shape = (len(members), len(ids[members[0]]))
            tokens, mask = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
            for row, member in enumerate(members):
                tokens[row, : len(ids[member])] = ids[member]
                mask[row, : len(ids[member])] = 1
            feed = {"input_ids": tokens, "attention_mask": mask, "token_type_ids": np.zeros_like(tokens)}
            states: Any = self._session.run(None, feed)[0]
            pooled = (
                states[:, 0] if self._pooling == "cls" else (states * mask[..., None]).sum(1) / mask.sum(1)[:, None]
            )
            if self._normalize:
                pooled = pooled / np.linalg.norm(pooled, axis=1, keepdims=True)
            if not len(result):
                result = torch.empty(len(texts), pooled.shape[1])
            result[members] = torch.from_numpy(pooled.astype(np.float32))
        return result


def _export(model: Any, file: Path, longest: int) -> None:
    """A plain export of transformers' model by torch.onnx's dynamo exporter, with free batch and length."""
    import contextlib
    import io
    import logging
    import warnings

    class States(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = model

        def forward(self, input_ids: Tensor, attention_mask: Tensor, token_type_ids: Tensor) -> Tensor:
            output = self.inner(input_ids=input_ids, attention_mask=attention_mask, token_type_ids=token_type_ids)
            return output.last_hidden_state

    names = ["input_ids", "attention_mask", "token_type_ids"]
    batch, length = torch.export.Dim("batch"), torch.export.Dim("length", max=longest)
    example = (torch.ones(2, 8, dtype=torch.long),) * 3
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        torch.onnx.export(
            States().eval(),
            example,
            str(file),
            dynamo=True,
            dynamic_shapes=({0: batch, 1: length},) * 3,
            input_names=names,
            output_names=["states"],
            verbose=False,
        )


def load_result(file: Path) -> dict[str, Any]:
    """Read a saved result."""
    return json.loads(file.read_text(encoding="utf-8"))
