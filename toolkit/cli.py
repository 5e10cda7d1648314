"""The command line: parse, call one library function, print.

Results go to standard output, progress and errors to standard error. Exit status: 0 done, 1 parity failed,
2 unsupported, bad input or bad checkpoint. torch is imported by the commands, not by `--help`.
"""

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape
from rich.table import Table

from toolkit import __version__
from toolkit.cli_generate import generate
from toolkit.console import AsJson, Device, Mode, OutFolder, TextFile, err, print_json, run_on, stages
from toolkit.console import out as screen
from toolkit.errors import InputError, ParityError, ToolkitError
from toolkit.lines import pairs_of, read_lines, similarity_table

__all__ = ["app", "main"]

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # help texts hold square brackets
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Convert Hugging Face checkpoints into compiled, graph-captured modules whose numbers are proven.",
    epilog="Exit status: 0 done, 1 parity failed, 2 unsupported, bad input or bad checkpoint.",
)


def _version(value: bool) -> None:
    if value:
        print(__version__)
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    pass


@app.command()
def convert(
    model: Annotated[
        str,
        typer.Argument(metavar="MODEL", help="A hub id, a folder, or package:NAME[/subfolder].", show_default=False),
    ],
    out: Annotated[
        Path | None,
        typer.Argument(metavar="OUT", help="The folder to write; default: ./NAME-toolkit.", show_default=False),
    ] = None,
    task: Annotated[
        str,
        typer.Option(help="embed, sparse, multi-vector, rerank, classify, token-classify, generate, or auto."),
    ] = "auto",
    dtype: Annotated[str, typer.Option(help="float32, float16, bfloat16, or auto for the checkpoint's own.")] = "auto",
    device: Annotated[str, typer.Option(help="Where to verify: auto, cpu, cuda or cuda:N.")] = "auto",
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit of a hub id.")] = None,
    recipe: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="A Python file with a recipe of your own. It is executed."),
    ] = None,
    no_verify: Annotated[
        bool, typer.Option("--no-verify", help="Do not compare with the reference libraries.")
    ] = False,
    force: Annotated[bool, typer.Option("--force", help="Replace OUT if it is a converted folder.")] = False,
    normalize: Annotated[
        bool, typer.Option("--normalize", help="Scale vectors to length 1 after truncation; recorded in OUT.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Convert a checkpoint, check its numbers, and write a folder that toolkit.load takes."""
    from toolkit.conversion import convert as run

    try:
        with stages() as on_stage:
            options: dict[str, Any] = {"normalize": normalize, "device": device, "on_stage": on_stage}
            report = run(model, out, task, dtype, not no_verify, force, revision, recipe, **options)
    except ParityError as error:
        if as_json:
            print_json({"out": None, "parity": error.report.to_dict()})
        raise
    if as_json:
        print_json(report.to_dict())
        return
    for warning in report.manifest.warnings:
        err.print(f"[yellow]warning[/] {escape(warning)}", highlight=False, soft_wrap=True)
    if report.parity is not None:
        screen.print(report.parity.table())
        screen.print(report.parity.summary(), highlight=False, markup=False, soft_wrap=True)
    manifest = report.manifest
    screen.print(
        f"[bold]{escape(str(report.out))}[/]  {manifest.model_type} · {manifest.task} · {manifest.dtype} · "
        f"{len(manifest.audit)} source tensors accounted for",
        highlight=False,
        soft_wrap=True,
    )


@app.command()
def verify(
    out: OutFolder,
    source: Annotated[
        str | None,
        typer.Option(help="The checkpoint; default: what OUT was converted from.", show_default=False),
    ] = None,
    device: Device = "auto",
    mode: Annotated[list[str] | None, typer.Option(help="Check this mode only; may be repeated.")] = None,
    as_json: AsJson = False,
) -> None:
    """Compare a converted folder with transformers and sentence-transformers. Exit status 1 on a miss."""
    from toolkit.parity import verify as run

    with stages() as on_stage:
        report = run(out, source, device=device, modes=mode, on_stage=on_stage)
    if as_json:
        print_json(report.to_dict())
    else:
        screen.print(report.table())
        for note in report.notes:
            screen.print(f"[yellow]note[/] {escape(note)}", highlight=False, soft_wrap=True)
        screen.print(report.summary(), highlight=False, markup=False, soft_wrap=True)
    if not report.passed:
        raise typer.Exit(1)


@app.command()
def embed(
    out: OutFolder,
    file: TextFile = "-",
    prompt_name: Annotated[str | None, typer.Option(help="A prompt of the checkpoint to put in front.")] = None,
    prompt: Annotated[str | None, typer.Option(help="A text to put in front; empty switches prompts off.")] = None,
    truncate_dim: Annotated[int | None, typer.Option(help="Keep the first so many values.")] = None,
    normalize: Annotated[
        bool | None, typer.Option(help="Scale vectors to length 1 in the end; default: as OUT records.")
    ] = None,
    similarity: Annotated[
        bool,
        typer.Option("--similarity", help="Print a table of cosine similarities instead of the vectors."),
    ] = False,
    kind: Annotated[
        str | None,
        typer.Option(help="What the texts are to a multi-vector OUT: query or document (the default)."),
    ] = None,
    device: Device = "auto",
    mode: Mode = "auto",
    as_json: AsJson = False,
) -> None:
    """Embed texts, one a line. Prints one JSON array a line (multi-vector: of arrays), or with --json one document."""
    from toolkit.artifact import Artifact

    texts = read_lines(file)
    by_token = Artifact.open(out).manifest.task == "multi-vector"
    options: dict[str, Any] = {"prompt_name": prompt_name, "prompt": prompt}
    if by_token and (truncate_dim is not None or similarity or normalize is not None):
        raise InputError(
            "--truncate-dim, --normalize and --similarity are for one vector a text; OUT has one for each token"
        )
    if kind is not None and not by_token:
        raise InputError(f"--kind {kind} is for a multi-vector OUT; this one has one vector a text")
    options |= {"kind": kind or "document"} if by_token else {"truncate_dim": truncate_dim, "normalize": normalize}
    method = "multi_vectors" if by_token else "embed"
    doing = f"embedding {len(texts)} texts"
    vectors = run_on(out, device, mode, doing, lambda runner: getattr(runner, method)(texts, **options))
    if similarity:
        _print_similarity(texts, vectors, as_json)
    elif as_json:
        print_json({"texts": texts, "vectors": [vector.tolist() for vector in vectors]})
    else:
        for vector in vectors:
            print(json.dumps(vector.tolist()))


@app.command()
def score(
    out: OutFolder,
    file: TextFile = "-",
    raw: Annotated[bool, typer.Option("--raw", help="Print logits: do not apply the checkpoint's activation.")] = False,
    device: Device = "auto",
    mode: Mode = "auto",
    as_json: AsJson = False,
) -> None:
    """Score pairs of texts, one pair a line, separated by a tab. Prints one score a line, or one JSON document."""
    pairs = pairs_of(read_lines(file), required=True)
    scores = run_on(out, device, mode, f"scoring {len(pairs)} pairs", lambda runner: runner.score(pairs, not raw))
    if as_json:
        print_json({"pairs": pairs, "scores": scores.tolist()})
    else:
        for value in scores.tolist():
            print(json.dumps(value))


@app.command()
def classify(
    out: OutFolder, file: TextFile = "-", device: Device = "auto", mode: Mode = "auto", as_json: AsJson = False
) -> None:
    """Classify texts (or pairs, separated by a tab), one a line; or each token of the texts, if OUT does that."""
    from toolkit.artifact import Artifact

    lines = read_lines(file)
    by_token = Artifact.open(out).manifest.task == "token-classify"
    texts = lines if by_token else pairs_of(lines, required=False)
    doing = f"classifying {len(texts)} texts"
    if by_token:
        results = [
            [
                {"start": place.start, "end": place.end, "label": label, "probability": max(row)}
                for place, label, row in zip(
                    found.places or [], found.predicted, found.probabilities.tolist(), strict=True
                )
                if not place.special
            ]
            for found in run_on(out, device, mode, doing, lambda runner: runner.classify_tokens(texts))
        ]
    else:
        found = run_on(out, device, mode, doing, lambda runner: runner.classify(texts))
        results = [
            {"predicted": labels, "probabilities": dict(zip(found.labels, row, strict=True))}
            for labels, row in zip(found.predicted, found.probabilities.tolist(), strict=True)
        ]
    if as_json:
        print_json({"texts": texts, "results": results})
    else:
        for result in results:
            print(json.dumps(result, ensure_ascii=False))


app.command()(generate)


def _print_similarity(texts: list[str], vectors: Any, as_json: bool) -> None:
    from torch.nn.functional import normalize

    unit = normalize(vectors)
    matrix = (unit @ unit.T).tolist()
    if as_json:
        print_json({"texts": texts, "similarity": matrix})
        return
    screen.print(similarity_table(texts, matrix, screen.width))


@app.command()
def bench(
    out: Annotated[
        Path | None,
        typer.Argument(metavar="[OUT]", help="A folder that toolkit convert wrote.", show_default=False),
    ] = None,
    suite: Annotated[
        str | None,
        typer.Option(help="In the place of OUT, models of common sizes with random weights: encoders."),
    ] = None,
    model: Annotated[list[str] | None, typer.Option(help="Only this model of the suite; may be repeated.")] = None,
    dtype: Annotated[
        str, typer.Option(help="Of a suite's models; auto is bfloat16 on CUDA and float32 on a CPU.")
    ] = "auto",
    texts: Annotated[
        int, typer.Option(help="How many texts; their lengths are lognormal, mean about 43 tokens.", min=8)
    ] = 512,
    source: Annotated[
        str | None,
        typer.Option(help="The checkpoint for the peers; default: what OUT was converted from.", show_default=False),
    ] = None,
    device: Device = "auto",
    mode: Mode = "auto",
    packed_tokens: Annotated[
        int | None,
        typer.Option(help="Tokens of the packed batch; default: 65536 on CUDA, 2048 on a CPU.", min=64),
    ] = None,
    save: Annotated[Path | None, typer.Option(metavar="FILE", help="Also write the JSON to this file.")] = None,
    as_json: AsJson = False,
) -> None:
    """Measure an artifact beside sentence-transformers, transformers and onnxruntime, in one run; or a suite."""
    from toolkit.bench import run_bench, run_suite

    if (out is None) == (suite is None):
        raise InputError("give either a converted folder or --suite")
    if save is not None and not save.parent.is_dir():
        raise InputError(f"--save: there is no folder {save.parent}")
    with stages() as on_stage:
        if suite is not None:
            if source is not None or packed_tokens is not None:
                raise InputError("--source and --packed-tokens are for a converted folder, not for --suite")
            result = run_suite(
                suite, model or (), texts=texts, device=device, mode=mode, dtype=dtype, on_stage=on_stage
            )
        else:
            assert out is not None
            if model or dtype != "auto":
                raise InputError("--model and --dtype are for --suite, not for a converted folder")
            result = run_bench(
                out, source, texts=texts, device=device, mode=mode, packed_tokens=packed_tokens, on_stage=on_stage
            )
    if save is not None:
        save.write_text(json.dumps(result.to_dict(), indent=2) + "\n", encoding="utf-8")
    if as_json:
        print_json(result.to_dict())
    else:
        for table in result.tables():
            screen.print(table)


@app.command()
def recipes(as_json: AsJson = False) -> None:
    """List the architectures that can be converted: tasks, kinds of attention, classes, known limits."""
    from toolkit.registry import all_recipes

    entries = all_recipes()
    if as_json:
        print_json(
            [
                {
                    "model_type": entry.recipe.model_type,
                    "tasks": entry.recipe.all_tasks,
                    "attention": entry.recipe.attention_kinds,
                    "classes": entry.recipe.all_classes,
                    "reference": entry.recipe.reference,
                    "note": entry.recipe.note,
                    "origin": entry.origin,
                    "sha256": entry.digest,
                }
                for entry in entries
            ]
        )
        return
    for entry in entries:
        recipe = entry.recipe
        screen.print(f"[bold]{escape(recipe.label)}[/]  {', '.join(recipe.all_tasks)}", highlight=False, soft_wrap=True)
        lines = {
            "attention": ", ".join(recipe.attention_kinds),
            "classes": ", ".join(recipe.all_classes),
            "note": recipe.note,
            "proof": f"transformers' {recipe.reference}" if recipe.reference else "none: remote code only, never run",
            "origin": entry.origin if entry.origin != "built in" else "",
        }
        for name, text in lines.items():
            if text:
                screen.print(f"    {name:10}{escape(text)}", highlight=False, soft_wrap=True)


@app.command()
def doctor(as_json: AsJson = False) -> None:
    """Say what this machine has, which mode would be used, and how to get what is missing."""
    from toolkit.doctor import diagnose

    diagnosis = diagnose()
    if as_json:
        print_json(diagnosis.to_dict())
        return
    table = Table("", "what", "detail", "fix")
    for finding in diagnosis.findings:
        mark = "[green]✓[/]" if finding.present else "[yellow]–[/]"
        table.add_row(mark, *(escape(text) for text in (finding.name, finding.detail, finding.fix)))
    screen.print(table)
    for device, mode in diagnosis.modes.items():
        screen.print(f"toolkit.load on {device}: mode {mode}", highlight=False)


def main() -> None:
    """Entry point: run the command, print a ToolkitError on one line, exit with its status."""
    try:
        app(standalone_mode=True)
    except ToolkitError as error:
        report = getattr(error, "report", None)
        if report is not None:
            err.print(report.table())
        line = " ".join(str(error).split())
        err.print(f"[red]error[/] {escape(line)}", highlight=False, soft_wrap=True)
        sys.exit(error.exit_status)
