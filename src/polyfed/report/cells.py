"""What a table of the report is made of: columns, cells, and numbers as people read them."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby

from polyfed.ops.estimate import Estimate
from polyfed.terminal.tables import amount

NOTHING = "\u2013"  # a dash
MINUS = "\u2212"  # as wide as a plus sign
TIMES = "\u00d7"


@dataclass(frozen=True)
class Column:
    """A heading, what it means, and whether its cells are numbers (aligned right)."""

    title: str
    help: str = ""
    number: bool = True
    group: str = ""  # a heading over several columns


@dataclass(frozen=True)
class Cell:
    """A value for machines and as people read it; `half` is what follows the ± sign."""

    text: str
    value: float | str | None = None
    half: str = ""
    half_value: float | None = None


@dataclass(frozen=True)
class Table:
    """Columns and rows."""

    name: str
    title: str
    columns: list[Column]
    rows: list[list[Cell]]
    best: frozenset[tuple[int, str]] = frozenset()  # (row, heading) of the cells that are clearly the best

    def groups(self) -> list[tuple[str, int]]:
        """Return the headings over several columns with their widths (empty: there are none)."""
        runs = [(group, len(list(columns))) for group, columns in groupby(column.group for column in self.columns)]
        return runs if any(group for group, _ in runs) else []

    def is_best(self, row: int, column: int) -> bool:
        """Whether the seeds show that a cell is the best of its column: it is printed bold."""
        return (row, self.columns[column].title) in self.best


def share(value: Estimate | None, signed: bool = False) -> Cell:
    """Return a cell of an accuracy or a difference, in percent, with its interval."""
    if value is None:
        return Cell(NOTHING)
    text = f"{100 * value.mean:+.1f}".replace("-", MINUS) if signed else f"{100 * value.mean:.1f}"
    if value.half is None:
        return Cell(text, 100 * value.mean)
    return Cell(text, 100 * value.mean, f"{100 * value.half:.1f}", 100 * value.half)


def plain(value: Estimate | None) -> Cell:
    """Return a cell of a metric in its own unit, with its interval."""
    if value is None:
        return Cell(NOTHING)
    half = "" if value.half is None else f"{value.half:.3g}"
    return Cell(f"{value.mean:.4g}".replace("-", MINUS), value.mean, half, value.half)


def size(value: float | None) -> Cell:
    """Return a cell of bytes."""
    return Cell(NOTHING) if value is None else Cell(amount(value), value)


def percent(value: float | None) -> Cell:
    """Return a cell of a single share."""
    return number(None if value is None else 100 * value, ".1f")


def word(value: str | None) -> Cell:
    """Return a cell of a name."""
    return Cell(value, value) if value else Cell(NOTHING)


def number(value: float | None, form: str, unit: str = "") -> Cell:
    """Return a cell of a plain number."""
    return Cell(NOTHING) if value is None else Cell(f"{value:{form}}{unit}".replace("-", MINUS), value)
