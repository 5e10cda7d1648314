"""The result of a parity run: plain data, a table for people, JSON for programs, a page for the archive."""

import io
import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

__all__ = ["Cell", "ParityReport"]


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One comparison: a mode, an input path, and the company that the sequences ran in.

    `error` is max-abs against the float64 reference, `reference_error` what the reference library itself makes
    in the artifact's dtype, `bound` what the rule allows; `worst` names the case with the largest error.
    """

    mode: str
    path: str
    company: str
    quantity: str
    cases: int
    error: float
    reference_error: float
    bound: float
    worst: str

    @property
    def passed(self) -> bool:
        """Whether the rule holds; NaN fails."""
        return self.error <= self.bound


@dataclass(frozen=True, kw_only=True)
class ParityReport:
    """All comparisons of one artifact. `tokenizer` lists texts whose ids differ; `notes` what was not run."""

    source: str
    device: str
    dtype: str
    rule: str
    cells: tuple[Cell, ...]
    tokenizer: tuple[str, ...]
    texts: int
    notes: tuple[str, ...]
    versions: dict[str, str]

    @property
    def passed(self) -> bool:
        """Whether every comparison holds and there was at least one."""
        return not self.tokenizer and len(self.cells) > 0 and all(cell.passed for cell in self.cells)

    def summary(self) -> str:
        """One line: the verdict, and the worst miss if there is one."""
        if not self.cells:
            return "parity failed: nothing was compared"
        if self.tokenizer:
            return (
                f"parity failed: {len(self.tokenizer)} of {self.texts} texts tokenize differently ({self.tokenizer[0]})"
            )
        misses = [cell for cell in self.cells if not cell.passed]
        if not misses:
            return f"parity passed: {len(self.cells)} comparisons, tokenizer equal on {self.texts} texts"
        worst = max(misses, key=lambda cell: cell.error / cell.bound if cell.bound else cell.error)
        return (
            f"parity failed: {len(misses)} of {len(self.cells)} comparisons miss; worst {worst.quantity} in mode "
            f"{worst.mode}, path {worst.path}, {worst.company}: error {worst.error:.2e}, allowed {worst.bound:.2e} "
            f"({worst.worst})"
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain dict, for JSON."""
        data = asdict(self)
        data["cells"] = [_finite(asdict(cell)) | {"passed": cell.passed} for cell in self.cells]
        return {"passed": self.passed, "summary": self.summary()} | data

    def table(self) -> Table:
        """A rich table with one row for each mode and path: the worst of its companies."""
        title = f"parity · {self.dtype} on {self.device} · {self.rule}"
        table = Table(title=title, title_justify="left", caption="the worst of alone, batched, shuffled")
        for name in ("mode", "path", "compared"):
            table.add_column(name)
        for name in ("our error", "reference's", "allowed", ""):
            table.add_column(name, justify="right", no_wrap=True)
        rows: dict[tuple[str, str, str], Cell] = {}
        for cell in self.cells:
            counted = f"{cell.cases} × {cell.quantity}" if cell.reference_error else cell.quantity
            key = (cell.mode, cell.path, counted)
            if key not in rows or not cell.error <= rows[key].error:
                rows[key] = cell
        for key, cell in rows.items():
            verdict = "[green]ok[/]" if cell.passed else "[red]MISS[/]"
            figures = (f"{value:.1e}" for value in (cell.error, cell.reference_error, cell.bound))
            table.add_row(*key, *figures, verdict)
        return table

    def write(self, folder: Path) -> None:
        """Write `parity.json` and `parity.html` into `folder`."""
        text = json.dumps(self.to_dict(), indent=2, ensure_ascii=False, allow_nan=False)
        (folder / "parity.json").write_text(text + "\n", encoding="utf-8")
        console = Console(record=True, file=io.StringIO(), width=130)
        console.print(self.source, style="bold", markup=False)
        console.print(self.summary(), markup=False)
        console.print(self.table())
        for note in self.notes:
            console.print(note, markup=False)
        console.print("  ".join(f"{name} {number}" for name, number in self.versions.items()))
        console.save_html(str(folder / "parity.html"))


def _finite(values: dict[str, Any]) -> dict[str, Any]:
    """JSON has no infinity: an error that is not finite is written as a text."""
    return {k: str(v) if isinstance(v, float) and not math.isfinite(v) else v for k, v in values.items()}
