"""A chart as plain data: axes, series and levels, before anything is drawn."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from polyfed.report.style import Look


@dataclass(frozen=True)
class Axis:
    """An axis: `unit` is %, B, s or nothing; `ticks` name the positions 0, 1, 2, ..."""

    title: str
    unit: str = ""
    log: bool = False
    ticks: tuple[str, ...] = ()
    zero: bool = False  # draw a line at zero
    range: tuple[float, float] = (1.0, 10.0)  # of the values; used where the axis is logarithmic
    limits: tuple[float, float] | None = None  # what is shown; None: whatever fits
    step: int | None = None  # between two ticks; None: whatever fits


@dataclass(frozen=True)
class Series:
    """One entry of the legend: lines, points, bars or bubbles."""

    name: str
    x: list[float]
    y: list[float]
    look: Look = field(default_factory=Look)
    kind: str = "lines"  # lines | points | bars | bubbles | steps
    band: tuple[list[float], list[float]] | None = None  # lowest and highest, around y
    error_x: list[float] | None = None  # half widths
    error_y: list[float] | None = None
    sizes: list[float] | None = None  # diameters of bubbles in pixels
    text: list[str] | None = None  # shown when the pointer is on a point
    labels: list[str] | None = None  # written beside the points
    above: bool = True  # where: above or below the point,
    left: bool = True  # left or right of it
    legend: bool = True


@dataclass(frozen=True)
class Level:
    """A dashed horizontal line with a name: a reference."""

    value: float
    name: str
    look: Look


@dataclass(frozen=True)
class Chart:
    """A chart, ready to be drawn."""

    name: str
    title: str
    x: Axis
    y: Axis
    series: list[Series]
    levels: list[Level] = field(default_factory=list)
    note: str = ""  # what the reader must know to read it
    height: int = 380


def accuracy_axis(series: Sequence[Series], bounded: bool) -> Axis:
    """Return an axis of accuracies that never leaves 0 to 100 %, however wide an interval of few seeds is."""
    ends = [
        value + side * half
        for one in series
        for value, half in zip(one.y, one.error_y or [0.0] * len(one.y), strict=True)
        for side in (-1, 1)
    ]
    if not ends:
        return Axis("")
    lowest = max(0.0, min(ends)) if bounded else min(ends)  # R² has no lower end
    return Axis("accuracy", "%", limits=(lowest - 3, min(100.0, max(ends)) + 3))
