"""Draw the figures of results/trust as pictures for docs/explanation (`page.py` calls this)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt

ASSETS = Path(__file__).parents[2] / "docs" / "assets"
WORST = 30.0  # points: a cell that loses so much is as dark as any
LOOK = {"font.size": 9, "axes.spines.top": False, "axes.spines.right": False, "svg.hashsalt": "polyfed"}


def heat(
    name: str, rows: Sequence[str], columns: Sequence[str], cells: Mapping[tuple[str, str], float], title: str
) -> Path:
    """Draw points lost as a table of colors: the darker, the more; grey where nothing was measured."""
    with plt.rc_context(LOOK):
        figure, axes = plt.subplots(
            figsize=(max(4.2, 1.6 + 0.8 * len(columns)), 0.9 + 0.36 * len(rows)), layout="constrained"
        )
        values = [[cells.get((row, column), float("nan")) for column in columns] for row in rows]
        colors = plt.get_cmap("Oranges").with_extremes(bad="#dddddd")
        axes.imshow(values, cmap=colors, vmin=0, vmax=WORST, aspect="auto")
        for y, row in enumerate(values):
            for x, value in enumerate(row):
                text = f"{value:.1f}" if value == value else ""
                axes.text(x, y, text, ha="center", va="center", color="white" if value > 0.6 * WORST else "black")
        axes.set_xticks(range(len(columns)), columns, rotation=30, ha="right")
        axes.set_yticks(range(len(rows)), rows)
        axes.tick_params(length=0)
        axes.set_title(title, fontsize=9, loc="left")
        for side in axes.spines.values():
            side.set_visible(False)
        return _saved(figure, name)


def lines(name: str, series: Mapping[str, Mapping[str, float]], order: Sequence[str], x: str, y: str) -> Path:
    """Draw one line for each series over named places."""
    with plt.rc_context(LOOK):
        figure, axes = plt.subplots(figsize=(5.5, 3.2), layout="constrained")
        for number, (label, values) in enumerate(series.items()):
            at = [place for place in order if place in values]
            marker = "osD^vPX*h"[number % 9]
            axes.plot([order.index(place) for place in at], [values[place] for place in at], marker=marker, label=label)
        axes.set_xticks(range(len(order)), order)
        axes.set_xlabel(x)
        axes.set_ylabel(y)
        axes.set_ylim(0, 100)
        axes.grid(axis="y", color="#eeeeee")
        axes.legend(frameon=False, fontsize=8, loc="center left", bbox_to_anchor=(1, 0.5))
        return _saved(figure, name)


def _saved(figure: Any, name: str) -> Path:
    path = ASSETS / f"trust-{name}.svg"
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)
    return path
