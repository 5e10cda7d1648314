"""Ours and the peers', figure by figure."""

import platform
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from toolkit.artifact import Artifact
from toolkit.batch import PackedBatch
from toolkit.bench.peers import Peers
from toolkit.bench.report import BenchResult, Measurement
from toolkit.bench.texts import lognormal_lengths, random_texts
from toolkit.errors import InputError, ParityError, UnsupportedError
from toolkit.inputs import PromptEmbeds, Row, TokenIds, check_row
from toolkit.parity.harness import find_source
from toolkit.runner import Runner, load
from toolkit.versions import library_versions

__all__ = ["compare", "difference", "hardware", "median_seconds", "run_bench"]


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
        CheckpointError: the artifact's source is not there.
        InputError: `packed_tokens` exceeds a batch.
        MissingDependencyError: a peer is not installed.
        ParityError: a peer gives other vectors, so that a comparison would mean nothing.
        UnsupportedError: the checkpoint has a default prompt.
    """
    artifact = Artifact.open(out)
    if artifact.manifest.task != "embed" or artifact.manifest.reference is None:
        raise UnsupportedError("only embedding models that transformers has a class for are measured")
    if artifact.manifest.pipeline.prompt(None, None):
        raise UnsupportedError("a checkpoint with a default prompt is not measured: not every peer would add it")
    checkpoint = find_source(artifact, source)
    on_stage("starting fresh processes to time the start-up")
    runner = load(out, device=device, mode=mode)
    if packed_tokens is not None and packed_tokens > runner.batch_tokens:
        raise InputError(f"packed_tokens = {packed_tokens}, a batch holds at most {runner.batch_tokens} tokens")
    measurements = _start_up(artifact, runner, checkpoint)
    longest = min(256, artifact.manifest.tokenizer.limit)
    chosen = random_texts(artifact, lognormal_lengths(texts, None, longest, 3.4))
    rows = runner.rows(chosen, "")
    tokens = sum(len(row) for row in rows)
    peers = Peers(checkpoint, artifact, runner.device, on_stage)

    on_stage("strings to vectors")
    ours = runner.embed(chosen)
    seconds = median_seconds(lambda: runner.embed(chosen), runner.device)
    differences: dict[str, float] = {}
    found = [("toolkit", f"mode {runner.mode}", tokens / seconds)]
    for name, setting, run in peers.encoders():
        on_stage(f"strings to vectors: {name}, {setting}")
        differences[name] = difference(name, run(chosen), ours, artifact.dtype)
        found.append((name, setting, tokens / median_seconds(lambda run=run: run(chosen), runner.device)))
    measurements += compare("strings to vectors, mixed lengths", found, "tokens/s", higher_is_better=True)

    on_stage("one short text")
    short = min(32, longest)
    one = random_texts(artifact, [short])
    found = [("toolkit", "string to vector", median_seconds(lambda: runner.embed(one), runner.device, 50) * 1e6)]
    for name, setting, run in peers.single():
        found.append((name, setting, median_seconds(lambda run=run: run(one), runner.device, 20) * 1e6))
    measurements += compare(f"one text of {short} tokens, string to vector", found, "µs", higher_is_better=False)

    on_stage("model only")
    measurements += _model_only(runner, peers, packed_tokens)
    measurements += _paths(runner)
    return BenchResult(
        artifact=artifact.manifest.source["name"],
        mode=runner.mode,
        attention=runner.attention,
        peer_attention=peers.attention,
        dtype=artifact.manifest.dtype,
        hardware=hardware(runner.device),
        versions=library_versions(),
        texts={"count": len(chosen), "tokens": tokens, "mean": tokens / len(chosen), "longest": longest},
        max_difference=differences,
        measurements=tuple(measurements),
    )


def difference(name: str, theirs: Tensor, ours: Tensor, dtype: torch.dtype) -> float:
    """Largest difference of two sets of vectors; a peer that computes something else is not worth timing."""
    difference = float((theirs - ours).abs().max())
    allowed = 1e-4 if dtype == torch.float32 else 0.05
    if not difference <= allowed:
        raise ParityError(f"{name} gives other vectors than the artifact: they differ by {difference:.2e}")
    return difference


def hardware(device: torch.device) -> str:
    """The name of the accelerator, or of the CPU with the number of threads that are used."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    info = Path("/proc/cpuinfo")
    names = [line.split(":")[1].strip() for line in info.read_text().splitlines() if line.startswith("model name")]
    name = f"{names[0] if names else platform.processor()} ({torch.backends.cpu.get_cpu_capability()})"
    return f"{name}, {torch.get_num_threads()} threads"


def median_seconds(run: Callable[[], Any], device: torch.device, repeats: int = 5) -> float:
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


def compare(
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


def _model_only(runner: Runner, peers: Peers, packed_tokens: int | None) -> list[Measurement]:
    """Token ids in, states and vectors out: a large packed batch, and one text of 32 tokens, beside transformers.

    transformers' inputs lie on the device beforehand. Ours is measured so too (the replay alone), and with
    writing the inputs and copying the outputs.
    """
    total = packed_tokens or (65536 if runner.device.type == "cuda" else 2048)
    ids = _random_ids(runner, lognormal_lengths(None, total, min(256, runner.limits.length), 3.9))
    tokens = sum(map(len, ids))
    batch = runner.pack(_checked(runner, ids))
    found = [
        (who, f"{setting}, {len(ids)} packed sequences", tokens / median_seconds(run, runner.device, 20))
        for who, setting, run in _ways(runner, batch)
    ]
    for size in peers.sizes:
        run = peers.padded(ids, size)
        found.append(("transformers", f"padded, sorted, batch {size}", tokens / median_seconds(run, runner.device, 5)))
    results = compare(f"model only, {tokens} tokens", found, "tokens/s", higher_is_better=True)
    short = min(32, runner.limits.length)
    one = _random_ids(runner, [short])
    small = runner.pack(_checked(runner, one))
    found = [
        (who, setting, median_seconds(run, runner.device, 200) * 1e6) for who, setting, run in _ways(runner, small)
    ]
    found.append(("transformers", "eager module", median_seconds(peers.padded(one, 1), runner.device, 50) * 1e6))
    return results + compare(f"model only, one text of {short} tokens", found, "µs", higher_is_better=False)


def _ways(runner: Runner, batch: PackedBatch) -> list[tuple[str, str, Callable[[], Any]]]:
    """How a packed batch can be run: the bare replay if there are graphs, and the whole of `Runner.run`."""
    whole = ("toolkit", f"mode {runner.mode}", lambda: runner.run(batch))
    if runner.graphs is None:
        return [whole]
    return [
        ("toolkit", "graph replay", runner.graphs.prepare(batch)),
        ("toolkit", "graph, inputs and outputs copied", whole[2]),
    ]


def _paths(runner: Runner) -> list[Measurement]:
    """The ids path before and after the embeds path was first used, and the embeds path, at the same size.

    Ids and embeds alternate, so that drift of the machine's clock falls on both.
    """
    ids = _random_ids(runner, lognormal_lengths(None, 512, min(256, runner.limits.length), 3.9))
    fresh = load(runner.artifact.folder, device=str(runner.device), mode=runner.mode, attention=runner.attention)
    by_ids = fresh.pack(_checked(fresh, ids))
    given = [check_row(PromptEmbeds(fresh.embed_tokens(sequence)), fresh.limits, "bench") for sequence in ids]
    by_embeds = fresh.pack(given)
    results: list[Measurement] = []
    ways = _ways(fresh, by_ids)
    before = [median_seconds(run, fresh.device, 400) for _, _, run in ways]
    for (_, setting, run_ids), off, (_, _, run_embeds) in zip(ways, before, _ways(fresh, by_embeds), strict=True):
        ids_times, embeds_times = [], []
        for _ in range(20):
            ids_times.append(median_seconds(run_ids, fresh.device, 20))
            embeds_times.append(median_seconds(run_embeds, fresh.device, 20))
        found = [
            ("toolkit", "ids path, embeds path never used", off * 1e6),
            ("toolkit", "ids path, embeds path in use", statistics.median(ids_times) * 1e6),
            ("toolkit", "embeds path", statistics.median(embeds_times) * 1e6),
        ]
        results += compare(f"paths, {by_ids.tokens} tokens, {setting}", found, "µs", higher_is_better=False)
    return results


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
    return compare("start-up, empty process to first vector", found, "s", higher_is_better=False)


def _time_process(code: str) -> float:
    """Seconds of a fresh interpreter running `code`, the second of two runs."""

    def run() -> float:
        start = time.perf_counter()
        subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=True, capture_output=True)
        return time.perf_counter() - start

    run()
    return run()
