"""What to measure next: what decides a claim first.

An entry's `order` says how much its claims matter (1: the paper's headline); within an order small scales come before
large ones, since they decide most for their time.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from polyfed.reproduce.entries import SCALES, Entry
from polyfed.reproduce.results import missing, read_result

LAST = 9  # an entry without an order


def queue(entries: Sequence[Entry], root: Path) -> list[tuple[Entry, str]]:
    """Return entries and scales with runs that are missing, in the order in which they are worth their time."""
    waiting = [(entry, scale) for entry in entries for scale in entry.scales if _missing(entry, scale, root)]
    return sorted(waiting, key=lambda one: (_order(*one), SCALES.index(one[1])))


def _order(entry: Entry, scale: str) -> int:
    return int(entry.option(scale, "order", LAST))


def _missing(entry: Entry, scale: str, root: Path) -> bool:
    result = read_result(root, entry, scale)
    if entry.kind in ("count", "study"):
        return result is None
    return bool(missing(entry, scale, result))
