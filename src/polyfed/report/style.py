"""One look for all charts: colors that color-blind readers can tell apart (Okabe and Ito), symbols, and dashes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from polyfed.report.runs import LOCAL, POOLED

FONT = 'system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif'

# Colors on a light page -> on a dark page. The keys are what figures contain; the page swaps them in the dark.
INK, MUTED, GRID, SURFACE = "#1c2530", "#5b6775", "#e4e8ec", "#ffffff"
GRAY, BLACK = "#77818d", "#2b323b"
METHODS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
DARK = {
    INK: "#e8ebef",
    MUTED: "#a3adb9",
    GRID: "#2d3540",
    SURFACE: "#181d24",
    GRAY: "#98a2ae",
    BLACK: "#d5dae0",
    "#0072b2": "#3d9be0",
    "#d55e00": "#f0783c",
    "#009e73": "#1fc49a",
    "#cc79a7": "#e3a5c8",
    "#e69f00": "#f2b93b",
    "#56b4e9": "#9ad4f5",
}
TIERS = (("#edb24a", "#ffd27a"), ("#cf5f78", "#ee7f96"), ("#553c99", "#a08be3"))  # smallest to largest network
SYMBOLS = ("circle", "square", "diamond", "triangle-up", "cross", "star", "hexagon", "triangle-down")
DASHES = ("solid", "dash", "dashdot")
BAND = 0.16  # opacity of a band over seeds


@dataclass(frozen=True)
class Look:
    """How a series is drawn."""

    color: str = INK
    symbol: str = "circle"
    dash: str = "solid"


def looks(labels: Sequence[str]) -> dict[str, Look]:
    """Give every method its own look; the references are grey and dotted, whatever else is there."""
    found = {LOCAL: Look(GRAY, "circle", "dot"), POOLED: Look(BLACK, "square", "dot")}
    for place, label in enumerate(label for label in labels if label not in found):
        found[label] = Look(
            METHODS[place % len(METHODS)], SYMBOLS[place % len(SYMBOLS)], DASHES[place // len(METHODS) % len(DASHES)]
        )
    return {label: found[label] for label in labels}


def tier_colors(number: int) -> list[str]:
    """Return colors from the smallest to the largest network (also known to the dark page)."""
    colors = []
    for place in range(number):
        at = place / max(1, number - 1)
        colors.append(_between([light for light, _ in TIERS], at))
        DARK[colors[-1]] = _between([dark for _, dark in TIERS], at)
    return colors


def faded(color: str, opacity: float = BAND) -> str:
    """Return a transparent version of a color."""
    red, green, blue = _parts(color)
    return f"rgba({red},{green},{blue},{opacity})"


def dark_colors() -> dict[str, str]:
    """Return what replaces what on a dark page, transparent versions included."""
    return {**DARK, **{faded(light): faded(dark, 0.22) for light, dark in DARK.items()}}


def _between(anchors: Sequence[str], at: float) -> str:
    place = at * (len(anchors) - 1)
    left = min(int(place), len(anchors) - 2)
    pairs = zip(_parts(anchors[left]), _parts(anchors[left + 1]), strict=True)
    mixed = (round(a + (b - a) * (place - left)) for a, b in pairs)
    return "#" + "".join(f"{value:02x}" for value in mixed)


def _parts(color: str) -> tuple[int, int, int]:
    return int(color[1:3], 16), int(color[3:5], 16), int(color[5:7], 16)
