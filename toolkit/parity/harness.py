"""Compare a converted folder with the reference libraries on its source checkpoint.

Every case runs in every mode that the device has, on each input path, alone and in company. The tokenizer is
compared first, id by id, so that a difference there is not mistaken for drift.
"""

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from toolkit.artifact import Artifact
from toolkit.checkpoint import open_checkpoint
from toolkit.devices import MODES, resolve_device
from toolkit.errors import CheckpointError, InputError, UnsupportedError
from toolkit.loaded import Loaded
from toolkit.modules import read_modules
from toolkit.parity.cases import PATHS, make_cases
from toolkit.parity.decoding import DecoderChecks
from toolkit.parity.references import TransformersReference
from toolkit.parity.report import Cell, ParityReport
from toolkit.parity.rule import TOLERANCES, bound, max_abs
from toolkit.parity.texts import TextChecks, in_company
from toolkit.runner import load
from toolkit.spec import EncoderSpec
from toolkit.toolchain import why_no_compiler
from toolkit.versions import library_versions

__all__ = ["find_source", "verify", "verify_folder"]


def verify(
    out: str | Path,
    source: str | Path | None = None,
    *,
    device: str = "auto",
    modes: Sequence[str] | None = None,
    on_stage: Callable[[str], None] = lambda stage: None,
) -> ParityReport:
    """Compare an artifact with the reference libraries, and store the report in it.

    Args:
        out: the converted folder.
        source: the checkpoint; by default what the artifact was converted from.
        device: where both run.
        modes: which modes to compare; by default all that the device has.
        on_stage: called with a line of text whenever a stage begins.

    Raises:
        CheckpointError: the source is not there, or is not what the artifact was converted from.
        MissingDependencyError: sentence-transformers is not installed.
    """
    artifact = Artifact.open(out)
    checkpoint = find_source(artifact, source)
    report = verify_folder(artifact.folder, checkpoint, device=device, modes=modes, on_stage=on_stage)
    report.write(artifact.folder)
    return report


def find_source(artifact: Artifact, source: str | Path | None) -> Path:
    """Return the checkpoint folder that an artifact was converted from, after comparing digests.

    Raises:
        CheckpointError: it is not there, or its files have changed.
    """
    recorded = artifact.manifest.source
    name = str(source) if source is not None else recorded["name"]
    try:
        checkpoint = open_checkpoint(name, recorded["revision"] if source is None else None)
    except CheckpointError as error:
        raise CheckpointError(f"the source of this artifact is not there ({error}); name it with --source") from None
    if checkpoint.sha256(recorded["modules"]) != recorded["sha256"]:
        raise CheckpointError(f"{name} is not what the artifact was converted from: its files have other digests")
    return checkpoint.root


def verify_folder(
    folder: Path,
    checkpoint: Path,
    *,
    device: str = "auto",
    modes: Sequence[str] | None = None,
    on_stage: Callable[[str], None] = lambda stage: None,
) -> ParityReport:
    """Like `verify`, for a checkpoint folder that is at hand; nothing is written."""
    where = resolve_device(device)
    artifact = Artifact.open(folder)
    dtype = artifact.dtype
    chosen, notes = _choose_modes(modes, where)
    longest = _longest(artifact.manifest.spec)
    if longest < artifact.manifest.spec.usable_length:
        notes = (*notes, f"nothing beyond {longest} tokens is compared: the reference would need too much memory")
    on_stage("loading the references")
    name = artifact.manifest.reference
    if name is None:
        raise UnsupportedError(
            f"transformers has no class for model_type {artifact.manifest.model_type!r}, and remote code is never run: "
            "there is nothing to compare with (convert with --no-verify)"
        )
    mix = _mix_folder(checkpoint) if artifact.manifest.spec.mix is not None else None
    exact = TransformersReference(checkpoint, torch.float64, torch.device("cpu"), name=name, mix=mix)
    same = TransformersReference(checkpoint, dtype, where, name=name, mix=mix)
    spec = artifact.manifest.spec
    lengths = _lengths(_longest(spec))
    cases = {path: make_cases(spec, dtype, exact.table, path, lengths) for path in PATHS}
    on_stage("running transformers on the cases")
    expected = {path: [exact.states(c.same, c.segments) for c in cases[path]] for path in cases}
    actual = {path: [same.states(c.same, c.segments) for c in cases[path]] for path in cases}
    every = [state for path in cases for state in expected[path]]
    states_error = max_abs([state for path in cases for state in actual[path]], every)[0]
    states_bound = bound(dtype, states_error, every)

    on_stage("running the reference on the texts")
    generates = artifact.manifest.task == "generate"
    texts: Any = (DecoderChecks if generates else TextChecks)(artifact, checkpoint, where, longest)

    cells: list[Cell] = []
    different: list[str] = []
    for mode in chosen:
        on_stage(f"checking mode {mode}" + (" (compiles first)" if mode != "eager" else ""))
        runner = load(folder, device=str(where), mode=mode, **texts.options)
        if mode == chosen[0]:
            different = texts.tokenizer_differences(runner)
        for path, members in cases.items():
            for company in ("alone", "batched", "shuffled"):
                ours = in_company(runner.token_states, [case.given for case in members], company)
                error, worst = max_abs(ours, expected[path])
                cells.append(
                    Cell(
                        mode=mode,
                        path=path,
                        company=company,
                        quantity="token states",
                        cases=len(members),
                        error=error,
                        reference_error=states_error,
                        bound=states_bound,
                        worst=members[worst].name,
                    )
                )
        cells += texts.compare(runner, mode)
        if mode != "eager":
            cells.append(_escapes(runner))
    return ParityReport(
        source=artifact.manifest.source["name"],
        device=str(where),
        dtype=artifact.manifest.dtype,
        rule=f"error ≤ {TOLERANCES[dtype].factor} × reference's + {TOLERANCES[dtype].floor_ulps} ulp",
        cells=tuple(cells),
        tokenizer=tuple(different),
        texts=len(texts.texts),
        notes=notes,
        versions=library_versions(),
    )


def _mix_folder(checkpoint: Path) -> str:
    """Where the checkpoint's WeightedLayerPooling lies."""
    modules = read_modules(open_checkpoint(str(checkpoint)))
    return next(folder for kind, folder in modules if kind == "WeightedLayerPooling")


def _escapes(runner: Loaded[Any]) -> Cell:
    """Batches that ran outside of a graph, and recompiles: none is allowed, or a mode was checked that did not run."""
    stats = runner.stats
    served = runner.graphs is None or stats.graph_hits > 0 < stats.embeds_graph_hits
    count = stats.eager_fallbacks + stats.recompiles + (not served)
    return Cell(
        mode=runner.mode,
        path="all",
        company="batched",
        quantity="off-graph runs",
        cases=stats.graph_hits + stats.embeds_graph_hits,
        error=float(count),
        reference_error=0.0,
        bound=0.0,
        worst=f"{stats.eager_fallbacks} fallbacks, {stats.recompiles} recompiles",
    )


def _choose_modes(modes: Sequence[str] | None, device: torch.device) -> tuple[list[str], tuple[str, ...]]:
    unknown = sorted(set(modes or ()) - set(MODES))
    if unknown:
        raise InputError(f"mode {unknown[0]!r} is unknown; use {', '.join(MODES)}")
    if modes:
        left = [mode for mode in MODES if mode not in modes]
        return list(dict.fromkeys(modes)), (f"not checked, as not asked for: {', '.join(left)}",) if left else ()
    reason = why_no_compiler(device)
    if reason is not None:
        return ["eager"], (f"modes compile and graph were not checked: {reason}",)
    return list(MODES), ()


def _longest(spec: EncoderSpec) -> int:
    """The longest sequence that the reference's float64 run on a CPU can take in reasonable memory and time.

    Within some 2 GiB for a layer's attention, and some minute or two of products for all cases together.
    """
    heads = max(attention.heads for attention in spec.attentions)
    by_memory = math.isqrt(2**31 // (3 * heads * torch.float64.itemsize))
    by_time = 2**39 // (10 * _products(spec))
    return min(spec.usable_length, by_memory, max(by_time, 64))


def _products(spec: EncoderSpec) -> int:
    """Multiplications by weights that a token takes, roughly."""
    blocks = {block.name: block for block in spec.blocks}
    total = 0
    for name in spec.schedule:
        attention, mlp = blocks[name].attention, blocks[name].mlp
        total += spec.hidden * attention.head_dim * 2 * (attention.heads + attention.kv_heads)
        times = mlp.experts.chosen if mlp.experts is not None else 1
        total += spec.hidden * mlp.width * times * (2 if mlp.gate == "none" else 3)
    return total


def _lengths(limit: int) -> list[int]:
    """1, 2, limit - 1, limit, and a spread between them."""
    spread = {max(1, round(limit * share)) for share in (0.02, 0.05, 0.1, 0.25, 0.6)}
    return sorted(length for length in {1, 2, limit - 1, limit} | spread if 1 <= length <= limit)
