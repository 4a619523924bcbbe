"""Figures of the analyses, as matplotlib objects in the style of the report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from torch import Tensor

from polyfed.report.static import LINES, MARKERS, bare, canvas
from polyfed.report.style import BAND, INK, METHODS, MUTED, SYMBOLS, looks


def _plain(axes: Any, title: str, grid: bool = True) -> None:
    axes.set_title(title, loc="left", fontsize=10.5, color=INK)
    bare(axes, grid)


def _legend(figure: Any, most: int, **options: Any) -> None:
    """Write a legend below, in as many columns as there is room for."""
    names = [name for axes in figure.axes for name in axes.get_legend_handles_labels()[1]]
    fitting = int(figure.get_figwidth() / (0.45 + 0.075 * max(map(len, names), default=1)))  # inches
    columns = max(1, min(most, fitting))
    figure.legend(loc="outside lower left", ncols=columns, frameon=False, fontsize=8.5, **options)


def lines(
    title: str,
    x_title: str,
    y_title: str,
    curves: Mapping[str, tuple[Sequence[float], Sequence[float]]],
    ticks: Sequence[str] = (),
    log: bool = False,
    log_x: bool = False,
    errors: Mapping[str, Sequence[float]] | None = None,
) -> Any:
    """Return a chart of named curves; `errors` are half widths of bands around them."""
    figure = canvas(6.4, 3.8)
    axes = figure.add_subplot()
    widths = np.linspace(2.6, 1.2, len(curves))  # a curve that lies on another one leaves its edges to be seen
    for (name, (x, y)), look, width in zip(curves.items(), looks(list(curves)).values(), widths, strict=True):
        marks = {"marker": MARKERS[look.symbol], "markersize": 4} if len(x) <= 30 else {}
        axes.plot(x, y, color=look.color, linestyle=LINES[look.dash], linewidth=width, label=name, **marks)
        half = np.asarray((errors or {}).get(name, [0.0] * len(x)))
        if half.any():
            axes.fill_between(x, np.asarray(y) - half, np.asarray(y) + half, color=look.color, alpha=BAND, linewidth=0)
    if ticks:
        axes.set_xticks(range(len(ticks)), ticks)
    elif all(float(place).is_integer() for x, _ in curves.values() for place in x):
        axes.xaxis.get_major_locator().set_params(integer=True)  # no half a round
    if log:
        axes.set_yscale("log")
    if log_x:
        axes.set_xscale("log")
    _plain(axes, title)
    axes.set_xlabel(x_title, fontsize=9, color=MUTED)
    axes.set_ylabel(y_title, fontsize=9, color=MUTED)
    _legend(figure, 3)
    return figure


def quartiles(title: str, x_title: str, y_title: str, groups: Mapping[str, Mapping[int, Sequence[float]]]) -> Any:
    """Return medians as points with bars from the first to the third quartile, one color for each group."""
    figure = canvas(6.4, 3.8)
    axes = figure.add_subplot()
    for (name, points), look in zip(groups.items(), looks(list(groups)).values(), strict=True):
        if not points:
            continue
        low, middle, high = np.asarray([points[place] for place in points]).T
        mark = {"marker": MARKERS[look.symbol], "markersize": 5, "linestyle": "none"}
        bars = np.stack([middle - low, high - middle])
        axes.errorbar(list(points), middle, bars, color=look.color, elinewidth=1.4, label=name, **mark)
    axes.set_xticks(sorted({place for points in groups.values() for place in points}))
    _plain(axes, title)
    axes.set_xlabel(x_title, fontsize=9, color=MUTED)
    axes.set_ylabel(y_title, fontsize=9, color=MUTED)
    _legend(figure, 3)
    return figure


def heat_maps(title: str, matrices: Mapping[str, Sequence[Sequence[float]]], labels: Sequence[str]) -> Any:
    """Return one square map per stage, all on the scale 0 to 1."""
    columns = min(4, len(matrices))
    rows = -(-len(matrices) // columns)
    figure = canvas(2.3 * columns + 0.7, 2.4 * rows + 0.5)
    figure.suptitle(title, x=0.01, ha="left", fontsize=11, color=INK)
    every = [figure.add_subplot(rows, columns, place + 1) for place in range(len(matrices))]
    for axes, (stage, matrix) in zip(every, matrices.items(), strict=True):
        image = axes.imshow(np.asarray(matrix), vmin=0, vmax=1, cmap="cividis")
        shown = range(len(labels)) if len(labels) <= 12 else range(0, len(labels), 5)
        axes.set_xticks(shown, [labels[place] for place in shown])
        axes.set_yticks(shown, [labels[place] for place in shown])
        _plain(axes, stage, grid=False)
    figure.colorbar(image, ax=every, shrink=0.7, label="CKA")
    return figure


def scatter(title: str, points: np.ndarray, groups: Sequence[str]) -> Any:
    """Return a cloud of points colored by group."""
    figure = canvas(5.6, 4.6)
    axes = figure.add_subplot()
    names = sorted(set(groups), key=lambda name: (len(name), name))
    owners = np.asarray(groups)
    for place, name in enumerate(names):
        color, marker = METHODS[place % len(METHODS)], MARKERS[SYMBOLS[place % len(SYMBOLS)]]
        axes.scatter(*points[owners == name].T, s=12, color=color, marker=marker, alpha=0.75, linewidths=0, label=name)
    _plain(axes, title, grid=False)
    axes.set_xticks([])
    axes.set_yticks([])
    _legend(figure, 5, markerscale=1.6)
    return figure


def bubbles(title: str, x_title: str, y_title: str, counts: np.ndarray) -> Any:
    """Return a chart with a disc for each cell of a table, its area the number there."""
    figure = canvas(7.0, 4.0)
    axes = figure.add_subplot()
    x, y = np.meshgrid(np.arange(counts.shape[0]), np.arange(counts.shape[1]), indexing="ij")
    axes.scatter(x.ravel(), y.ravel(), s=300 * counts.ravel() / counts.max(), alpha=0.6, linewidths=0)
    for axis, count in ((axes.xaxis, counts.shape[0]), (axes.yaxis, counts.shape[1])):
        axis.set_ticks(range(0, count, 1 + count // 30))  # there is no client 2.5
    _plain(axes, f"{title} (largest disc: {counts.max():,} samples)")
    axes.set_xlabel(x_title, fontsize=9, color=MUTED)
    axes.set_ylabel(y_title, fontsize=9, color=MUTED)
    return figure


def histogram(title: str, x_title: str, y_title: str, values: Sequence[float], edges: Sequence[float]) -> Any:
    """Return how many values fall between each two edges."""
    figure = canvas(6.4, 3.2)
    axes = figure.add_subplot()
    axes.hist(values, bins=list(edges), color=METHODS[0], edgecolor="white", linewidth=0.8)
    _plain(axes, title)
    axes.yaxis.get_major_locator().set_params(integer=True)
    axes.set_xlabel(x_title, fontsize=9, color=MUTED)
    axes.set_ylabel(y_title, fontsize=9, color=MUTED)
    return figure


def label_probabilities(
    title: str, points: np.ndarray, labels: np.ndarray, names: Sequence[str], panels: Mapping[str, np.ndarray]
) -> Any:
    """Return the same points once for each network: the color is their label, its strength the label's probability.

    `panels` holds, for each network, the probability `[N]` that it gives to the right label of each point.
    """
    figure = canvas(3.0 * len(panels), 3.6)
    figure.suptitle(title, x=0.01, ha="left", fontsize=11, color=INK)
    for place, (heading, sure) in enumerate(panels.items()):
        axes = figure.add_subplot(1, len(panels), place + 1)
        for label, name in enumerate(names):
            own = labels == label
            look = {"color": METHODS[label], "marker": MARKERS[SYMBOLS[label]], "linewidths": 0, "s": 16}
            axes.scatter(*points[own].T, alpha=sure[own].clip(0.15, 1.0), **look)
            axes.scatter([], [], label=name if place == 0 else None, **look)  # the legend shows the full color
        _plain(axes, heading, grid=False)
    figure.legend(loc="outside lower left", ncols=len(names), frameon=False, fontsize=8.5)
    return figure


def image_grid(title: str, rows: Mapping[str, Tensor]) -> Any:
    """Return images in rows with names; each `[n, channels, height, width]` in [0, 1]."""
    count = max(len(images) for images in rows.values())
    figure = canvas(0.8 * count + 1.4, 0.85 * len(rows) + 0.6)
    figure.suptitle(title, x=0.01, ha="left", fontsize=10.5, color=INK)
    for row, (name, images) in enumerate(rows.items()):
        for place, image in enumerate(images):
            axes = figure.add_subplot(len(rows), count, row * count + place + 1)
            picture = image.permute(1, 2, 0).numpy()
            axes.imshow(picture if picture.shape[2] == 3 else picture[:, :, 0], vmin=0, vmax=1, cmap="gray")
            axes.set_xticks([])
            axes.set_yticks([])
            for side in ("top", "right", "left", "bottom"):
                axes.spines[side].set_visible(False)
            if place == 0:
                axes.set_ylabel(name, rotation=0, ha="right", va="center", fontsize=9, color=MUTED)
    return figure
