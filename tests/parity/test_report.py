"""The report: verdict, summary, table, JSON."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from toolkit.parity import TOLERANCES, Cell, ParityReport
from toolkit.parity.rule import bound, max_abs


def cell(**changes: object) -> Cell:
    plain = Cell(
        mode="eager", path="ids", company="alone", quantity="token states", cases=3, error=1.0,
        reference_error=0.5, bound=1.0, worst="1 tokens",
    )  # fmt: skip
    return replace(plain, **changes)


def report(*cells: Cell, **changes: object) -> ParityReport:
    plain = ParityReport(
        source="x", device="cpu", dtype="float32", rule="r", cells=cells, tokenizer=(), texts=3, notes=(), versions={}
    )
    return replace(plain, **changes)


def test_an_error_at_the_bound_passes_and_one_tokenizer_difference_fails() -> None:
    assert report(cell()).passed
    assert not report(cell(), tokenizer=("a",)).passed
    assert not report(cell(), cell(error=1.1)).passed


def test_the_summary_names_the_worst_miss() -> None:
    misses = cell(error=2.0, worst="first"), cell(error=9.0, mode="graph", worst="second"), cell(error=3.0)
    summary = report(cell(), *misses).summary()
    assert summary.startswith("parity failed: 3 of 4 comparisons miss")
    assert "mode graph" in summary
    assert "(second)" in summary


def test_the_table_shows_the_worst_company_and_the_page_the_notes(tmp_path: Path) -> None:
    several = report(
        cell(), cell(company="batched", error=9.0), cell(company="shuffled", error=0.5), notes=("unchecked",)
    )
    (row,) = zip(*(column.cells for column in several.table().columns), strict=True)
    assert row[3] == "9.0e+00"
    assert "MISS" in str(row[-1])
    (good,) = zip(*(column.cells for column in report(cell()).table().columns), strict=True)
    assert "ok" in str(good[-1])
    several.write(tmp_path)
    assert "unchecked" in (tmp_path / "parity.html").read_text(encoding="utf-8")


def test_the_table_of_tolerances_and_its_edges() -> None:
    assert {d: (t.factor, t.floor_ulps) for d, t in TOLERANCES.items()} == {
        torch.float32: (2.0, 1.0),
        torch.float16: (1.5, 0.25),
        torch.bfloat16: (1.5, 0.25),
    }
    assert bound(torch.float32, 0.0, [torch.empty(0)]) == 0
    assert max_abs([torch.ones(1)] * 2, [torch.zeros(1)] * 2) == (1.0, 0)
    assert max_abs([torch.empty(0)], [torch.empty(0)]) == (0.0, 0)
    with pytest.raises(ValueError, match="argument 2"):
        max_abs([torch.zeros(1)] * 2, [torch.zeros(1)])


def test_the_json_is_strict_and_an_empty_report_says_so(tmp_path: Path) -> None:
    """O3's mirror: no Infinity or NaN in what we write."""
    report(cell(error=float("inf"))).write(tmp_path)
    text = (tmp_path / "parity.json").read_text(encoding="utf-8")
    stored = json.loads(text, parse_constant=lambda name: pytest.fail(name))
    assert stored["cells"][0]["error"] == "inf"
    assert report().summary() == "parity failed: nothing was compared"
