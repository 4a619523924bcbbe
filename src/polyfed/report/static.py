"""Charts as matplotlib figures: PNG, SVG and PDF for papers."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from polyfed.core.errors import InputError
from polyfed.report.chart import Axis, Chart, Series
from polyfed.report.style import BAND, GRID, INK, MUTED

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

FORMATS = ("png", "svg", "pdf")
WIDTH = 6.4  # inches: about the text width of a page
PIXELS = 90  # of a chart's height on screen in one inch of paper
MARKERS = {
    "circle": "o",
    "square": "s",
    "diamond": "D",
    "triangle-up": "^",
    "triangle-down": "v",
    "cross": "P",
    "star": "*",
    "hexagon": "h",
    "line-ns": "|",
}
LINES = {"solid": "-", "dash": "--", "dashdot": "-.", "dot": ":"}


def canvas(width: float, height: float) -> Any:
    """Return an empty figure, its sizes in inches.

    Raises
    ------
    InputError
        When matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise InputError("Static figures need matplotlib: pip install 'polyfed[plots]'.") from error
    return Figure(figsize=(width, height), layout="constrained")


def bare(axes: Axes, grid: bool = True) -> None:
    """Take frame and tick marks away; thin lines help the eye, where wanted."""
    axes.tick_params(which="both", length=0, labelsize=8.5, labelcolor=MUTED)
    for side in ("top", "right", "left", "bottom"):
        axes.spines[side].set_visible(False)
    if grid:
        axes.grid(color=GRID, linewidth=0.8)
        axes.set_axisbelow(True)


def to_matplotlib(chart: Chart) -> Figure:
    """Return a static figure.

    Raises
    ------
    InputError
        When matplotlib is not installed.
    """
    figure: Figure = canvas(WIDTH, max(1.8, chart.height / PIXELS))
    axes = figure.add_subplot()
    for series in chart.series:
        _draw(axes, series)
    for level in chart.levels:
        axes.axhline(level.value, color=level.look.color, linestyle=":", linewidth=1.2)
        at: dict[str, Any] = {"xycoords": ("axes fraction", "data"), "ha": "left", "va": "bottom"}
        axes.annotate(_letters(level.name), (0, level.value), fontsize=8, color=level.look.color, **at)
    _axis(axes, axes.xaxis, chart.x, "x")
    _axis(axes, axes.yaxis, chart.y, "y")
    bare(axes)
    axes.set_title(_letters(chart.title), loc="left", fontsize=11, color=INK)
    if any(series.legend for series in chart.series):
        figure.legend(loc="outside lower left", ncols=4, frameon=False, fontsize=8.5)
    return figure


def save(figure: Any, path: Path) -> Path:
    """Write a figure; the ending of the name says how. The same figure gives the same file.

    Raises
    ------
    InputError
        For an unknown ending.
    """
    kind = path.suffix.removeprefix(".").lower()
    if kind not in FORMATS:
        raise InputError(f"A figure is written as {', '.join(FORMATS)}, not as '{path.suffix}'.")
    from matplotlib import rc_context

    path.parent.mkdir(parents=True, exist_ok=True)
    metadata: dict[str, Any] = {"svg": {"Date": None}, "pdf": {"CreationDate": None}}.get(kind, {})
    with rc_context({"svg.hashsalt": "polyfed", "pdf.fonttype": 42}):
        figure.savefig(path, dpi=200, metadata=metadata)
    return path


def _letters(text: str) -> str:
    """Return text that matplotlib shows letter by letter: a pair of dollar signs would be read as a formula."""
    return text.replace("$", r"\$")


def _axis(axes: Axes, which: Any, axis: Axis, letter: str) -> None:
    from matplotlib.ticker import EngFormatter, FuncFormatter, MultipleLocator

    getattr(axes, f"set_{letter}label")(axis.title, fontsize=9, color=MUTED)
    if axis.log:
        getattr(axes, f"set_{letter}scale")("log")
    if axis.unit == "B":
        which.set_major_formatter(EngFormatter("B"))
    elif axis.unit:
        which.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g} {axis.unit}"))
    if axis.ticks:
        which.set_ticks(range(len(axis.ticks)), [_letters(tick.replace("<br>", "\n")) for tick in axis.ticks])
        getattr(axes, f"set_{letter}lim")(-0.6, len(axis.ticks) - 0.4)
    if axis.step:
        which.set_major_locator(MultipleLocator(axis.step))
    if axis.limits:
        getattr(axes, f"set_{letter}lim")(*axis.limits)
    if axis.zero:
        {"x": axes.axvline, "y": axes.axhline}[letter](0, color=MUTED, linewidth=1)


def _draw(axes: Axes, series: Series) -> None:
    color, marker = series.look.color, MARKERS[series.look.symbol]
    name = _letters(series.name) if series.legend else None
    if series.kind == "bars":
        axes.bar(series.x, series.y, color=color, width=0.65, label=name)
    elif series.kind == "bubbles":
        areas = [(size * 72 / PIXELS) ** 2 for size in series.sizes or []]
        axes.scatter(series.x, series.y, s=areas, color=color, alpha=0.85, linewidths=0, label=name)
    elif series.kind == "points":
        mean = series.look.symbol == "line-ns"
        options: dict[str, Any] = {"markersize": 14 if mean else 5, "markeredgewidth": 1.8 if mean else 0.5}
        options["markeredgecolor"] = color if mean else "white"
        errors: dict[str, Any] = {"xerr": series.error_x, "yerr": series.error_y, "elinewidth": 1.1, "capsize": 2}
        axes.errorbar(series.x, series.y, fmt=marker, color=color, label=name, **options, **errors)
        for x, y, text in zip(series.x, series.y, series.labels or [], strict=False):
            offset = (-5 if series.left else 5, 5 if series.above else -5)
            side: dict[str, Any] = {"ha": "right" if series.left else "left", "va": "bottom" if series.above else "top"}
            axes.annotate(_letters(text), (x, y), offset, textcoords="offset points", fontsize=8.5, color=color, **side)
    elif series.kind == "steps":
        axes.step(series.x, series.y, where="post", color=color, linestyle="-", linewidth=1.1, label=name)
    else:
        if series.band is not None:
            axes.fill_between(series.x, *series.band, color=color, alpha=BAND, linewidth=0)
        line: dict[str, Any] = {"linestyle": LINES[series.look.dash], "linewidth": 1.6, "markersize": 3.5}
        axes.plot(series.x, series.y, color=color, marker=marker, label=name, **line)
