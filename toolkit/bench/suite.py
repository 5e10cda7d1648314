"""Several architectures side by side: models of common sizes with random weights, beside sentence-transformers.

Speed does not depend on the values of weights, so nothing has to be downloaded. Every library gets the same
checkpoint, the same texts and the same dtype, in the same run.
"""

import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from rich.table import Table
from torch import Tensor

from toolkit.artifact import DTYPES
from toolkit.bench.measure import compare, difference, hardware, median_seconds
from toolkit.bench.models import SUITES, Shape, write_checkpoint
from toolkit.bench.report import Measurement, measurement_tables
from toolkit.bench.texts import lognormal_lengths, random_texts
from toolkit.conversion import convert
from toolkit.devices import resolve_device
from toolkit.errors import InputError, UnsupportedError
from toolkit.parity.loading import flash_attentions
from toolkit.parity.references import CrossEncoderReference, SentenceTransformersReference
from toolkit.runner import Runner, load
from toolkit.versions import library_versions

__all__ = ["SuiteResult", "SuiteRun", "run_suite"]


@dataclass(frozen=True, kw_only=True)
class SuiteRun:
    """One model of a suite, ours and the peers'. `not_measured` says why a setting of a peer is missing."""

    model: str
    task: str
    parameters: int
    mode: str
    attention: str
    texts: dict[str, Any]
    max_difference: dict[str, float]
    not_measured: dict[str, str]
    measurements: tuple[Measurement, ...]


@dataclass(frozen=True, kw_only=True)
class SuiteResult:
    """All figures of one run of a suite, with what they were measured on."""

    suite: str
    dtype: str
    hardware: str
    versions: dict[str, str]
    runs: tuple[SuiteRun, ...]

    def to_dict(self) -> dict[str, Any]:
        """Plain dict, for JSON."""
        return asdict(self)

    def tables(self) -> list[Table]:
        """One rich table for each model."""
        return [table for run in self.runs for table in measurement_tables(run.measurements)]


def run_suite(
    suite: str,
    models: Sequence[str] = (),
    *,
    texts: int = 512,
    device: str = "auto",
    mode: str = "auto",
    dtype: str = "auto",
    on_stage: Callable[[str], None] = lambda stage: None,
) -> SuiteResult:
    """Measure the models of a suite: strings to vectors, or pairs of strings to scores.

    Args:
        suite: its name; "encoders" is the one there is.
        models: only these of its models; by default all.
        texts: number of texts or pairs for each model.
        device: where everything runs.
        mode: our mode.
        dtype: of all models; "auto" is bfloat16 on CUDA and float32 on a CPU.
        on_stage: called with a line of text whenever a stage begins.

    Raises:
        InputError: no such suite, or no such model in it.
        MissingDependencyError: sentence-transformers is not installed.
        ParityError: a peer gives other results, so that a comparison would mean nothing.
    """
    shapes = SUITES.get(suite)
    if shapes is None:
        raise InputError(f"no suite named {suite!r}; there is: {', '.join(SUITES)}")
    unknown = [name for name in models if name not in {shape.name for shape in shapes}]
    if unknown:
        raise InputError(f"no model {unknown[0]!r} in it; the suite has: {', '.join(shape.name for shape in shapes)}")
    where = resolve_device(device)
    chosen = ("bfloat16" if where.type == "cuda" else "float32") if dtype == "auto" else dtype
    if chosen not in DTYPES:
        raise InputError(f"dtype {dtype!r} is not supported; use auto, {', '.join(DTYPES)}")
    runs = [
        measure_shape(shape, texts=texts, device=where, mode=mode, dtype=chosen, on_stage=on_stage)
        for shape in shapes
        if not models or shape.name in models
    ]
    return SuiteResult(
        suite=suite, dtype=chosen, hardware=hardware(where), versions=library_versions(), runs=tuple(runs)
    )


def measure_shape(
    shape: Shape,
    *,
    texts: int,
    device: torch.device,
    mode: str,
    dtype: str,
    on_stage: Callable[[str], None] = lambda stage: None,
) -> SuiteRun:
    """Make one model, convert it, and measure it beside its peers."""
    with tempfile.TemporaryDirectory() as folder:
        source, out = Path(folder) / "source", Path(folder) / "out"
        on_stage(f"{shape.name}: making a checkpoint with random weights")
        parameters = write_checkpoint(shape, source, getattr(torch, dtype))
        convert(str(source), out, shape.task, dtype, verify=False)
        on_stage(f"{shape.name}: toolkit")
        runner = load(out, device=str(device), mode=mode)
        items = _items(runner, shape.task, texts)
        run = _ours(runner, shape.task)
        tokens = _count_tokens(runner, shape.task, items)
        ours = run(items)
        found = [("toolkit", f"mode {runner.mode}", tokens / median_seconds(lambda: run(items), device))]
        differences: dict[str, float] = {}
        failed: dict[str, str] = {}
        for setting, load_peer in _peers(shape.task, source, runner, on_stage).items():
            on_stage(f"{shape.name}: sentence-transformers, {setting}")
            try:
                peer = load_peer()
                theirs = peer(items, _BATCH_SIZES[device.type][-1])
            except (RuntimeError, ValueError, ImportError, UnsupportedError) as error:
                failed[setting] = f"{type(error).__name__}: {(str(error).strip().splitlines() or ['no message'])[0]}"
                on_stage(f"note: not measured ({failed[setting]})")
                continue
            differences[setting] = difference(
                f"sentence-transformers, {setting}", _comparable(theirs), _comparable(ours), runner.artifact.dtype
            )
            for size in _BATCH_SIZES[device.type]:
                seconds = median_seconds(partial(peer, items, size), device, 3)
                found.append(("sentence-transformers", f"{setting}, batch {size}", tokens / seconds))
        what = f"{shape.name}, {_WHAT[shape.task]}, {len(items)} of mixed lengths"
        return SuiteRun(
            model=shape.name,
            task=shape.task,
            parameters=parameters,
            mode=runner.mode,
            attention=runner.attention,
            texts={"count": len(items), "tokens": tokens, "mean": tokens / len(items)},
            max_difference=differences,
            not_measured=failed,
            measurements=tuple(compare(what, found, "tokens/s", higher_is_better=True)),
        )


_WHAT = {"embed": "strings to vectors", "rerank": "pairs of strings to scores"}
_BATCH_SIZES = {"cuda": (64, 128, 256, 512, 2048), "cpu": (8, 32)}

Peer = Callable[[list[Any], int], Tensor]


def _items(runner: Runner, task: str, count: int) -> list[Any]:
    """Texts of lognormal length; for a reranker a short query and a longer passage each."""
    longest = min(256, runner.artifact.manifest.tokenizer.limit)
    if task != "rerank":
        return random_texts(runner.artifact, lognormal_lengths(count, None, longest, 3.4))
    queries = random_texts(runner.artifact, lognormal_lengths(count, None, 32, 2.3))
    passages = random_texts(runner.artifact, lognormal_lengths(count, None, longest, 4.4, seed=1), seed=1)
    return list(zip(queries, passages, strict=True))


def _ours(runner: Runner, task: str) -> Callable[[list[Any]], Tensor]:
    return runner.score if task == "rerank" else runner.embed


def _count_tokens(runner: Runner, task: str, items: list[Any]) -> int:
    return sum(len(row) for row in runner.rows(items, "", pairs="only" if task == "rerank" else "no"))


def _peers(
    task: str, source: Path, runner: Runner, on_stage: Callable[[str], None]
) -> Mapping[str, Callable[[], Peer]]:
    """setting → what loads sentence-transformers' model in that setting."""
    if task == "rerank":  # the library packs no sequence classifier
        return {"padded, SDPA": lambda: _cross_encoder(source, runner)}
    peers: dict[str, Callable[[], Peer]] = {"padded, SDPA": partial(_encoder, source, runner, "sdpa")}
    flash = flash_attentions() if runner.device.type == "cuda" else []
    if not flash:
        on_stage("note: no flash attention for transformers here, sentence-transformers is measured padded only")
    for name in flash:
        peers[f"unpadded, {name.replace('_', ' ')}"] = partial(_encoder, source, runner, name)
    return peers


def _encoder(source: Path, runner: Runner, attention: str) -> Peer:
    reference = SentenceTransformersReference(source, runner.artifact.dtype, runner.device, attention)
    reference.limit_length(runner.artifact.manifest.tokenizer.limit)
    if attention != "sdpa":
        reference.require_unpadded()
    return reference.vectors


def _cross_encoder(source: Path, runner: Runner) -> Peer:
    reference = CrossEncoderReference(source, runner.artifact.dtype, runner.device, "sdpa")
    reference.limit_length(runner.artifact.manifest.tokenizer.limit)
    return reference.scores


def _comparable(results: Tensor) -> Tensor:
    """Vectors at length 1, so that one bound on differences fits every model; scores as they are."""
    return F.normalize(results, dim=-1) if results.dim() == 2 else results
