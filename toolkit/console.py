"""What all commands share: consoles, common options, progress, JSON.

Results go to standard output, progress and errors to standard error.
"""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape

__all__ = ["AsJson", "Device", "Mode", "OutFolder", "TextFile", "err", "out", "print_json", "run_on", "stages"]

out = Console()
err = Console(stderr=True)

AsJson = Annotated[bool, typer.Option("--json", help="Print the result as JSON on standard output.")]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")]
Mode = Annotated[str, typer.Option(help="eager, compile, graph, or auto for the best the device has.")]
OutFolder = Annotated[
    Path, typer.Argument(metavar="OUT", help="A folder that toolkit convert wrote.", show_default=False)
]

TextFile = Annotated[
    str, typer.Argument(metavar="FILE|-", help="A UTF-8 file with one item a line; - is standard input.")
]


@contextmanager
def stages() -> Iterator[Callable[[str], None]]:
    """Show stages as they begin: a spinner on a terminal, plain lines elsewhere; always on standard error."""
    if not err.is_terminal:
        yield lambda stage: err.print(f"· {stage}", highlight=False, markup=False, soft_wrap=True)
        return
    with err.status("starting") as status:

        def show(stage: str) -> None:
            err.print(f"· {stage}", style="dim", highlight=False, markup=False)
            status.update(escape(stage))

        yield show


def print_json(data: Any) -> None:
    """Print one JSON document."""
    print(json.dumps(data, indent=2, ensure_ascii=False, default=str))


def run_on(out: Path, device: str, mode: str, doing: str, work: Callable[[Any], Any], *, prints: bool = False) -> Any:
    """Load OUT, tell what happens, and run `work` on the runner; if it `prints`, no progress is drawn meanwhile."""
    from toolkit.runner import load

    with stages() as on_stage:
        on_stage(f"loading {out}")
        runner = load(out, device=device, mode=mode)
        on_stage(f"{doing} ({runner.mode} on {runner.device}; the first batch compiles)")
        if not prints:
            return work(runner)
    return work(runner)
