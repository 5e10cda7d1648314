"""The figures of one run, as plain data and as tables."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.table import Table

__all__ = ["BenchResult", "Measurement", "measurement_tables"]


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
    peer_attention: str
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
        return measurement_tables(self.measurements)


def measurement_tables(measurements: Sequence[Measurement]) -> list[Table]:
    """One rich table for each kind of figure."""
    tables: list[Table] = []
    for what in dict.fromkeys(m.what for m in measurements):
        table = Table(title=what, title_justify="left")
        for name in ("who", "setting"):
            table.add_column(name)
        for name in ("value", "unit", "toolkit is faster by"):
            table.add_column(name, justify="right")
        for m in (m for m in measurements if m.what == what):
            value = f"{m.value:,.0f}" if m.value >= 100 else f"{m.value:.3g}"
            table.add_row(m.who, m.setting, value, m.unit, f"{m.ratio:.2f} ×")
        tables.append(table)
    return tables
