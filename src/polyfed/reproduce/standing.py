"""What to believe of each paper after all that was measured: its claims by verdict, computed like the verdicts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from polyfed.reproduce.entries import Entry
from polyfed.reproduce.results import Result, Row, current, is_stale, judged, numbers, read_result
from polyfed.reproduce.verdict import SEEDS, Verdict, between, decimals

ACCURACIES = ("local", "global", "held")  # quantities that go without saying
STANDS: tuple[Verdict, ...] = ("reproduced", "holds")


@dataclass(frozen=True)
class Known:
    """What a scale of an entry says: claims that no larger scale has tested, or the verdicts on computed numbers."""

    entry: Entry
    scale: str
    result: Result
    rows: tuple[Row, ...]
    numbers: tuple[Verdict, ...] = ()

    @property
    def verdicts(self) -> list[Verdict]:
        """Those on the paper's claims; a fix of ours makes none."""
        return [*self.numbers, *(row.judged.verdict for row in self.rows if not row.fix and row.judged.seeds)]


def known(entry: Entry, root: Path) -> list[Known]:
    """Return what an entry's results say, the largest scale first, each claim once.

    A claim counts at the largest scale that has enough seeds for it; before any has, at the largest that has some.
    Runs with earlier settings count nowhere.
    """
    found = [(scale, result) for scale in entry.scales if (result := read_result(root, entry, scale)) is not None]
    found = [(scale, result) for scale, result in reversed(found) if not is_stale(entry, scale, result)]
    if entry.kind == "count":
        return [
            Known(entry, scale, result, (), tuple(number.judged.verdict for number in numbers(entry, result)))
            for scale, result in found[:1]
        ]
    found = [(scale, current(entry, scale, result)) for scale, result in found]
    best: dict[tuple[str, str, str], tuple[str, Row]] = {}
    for scale, result in found:
        for row in judged(entry, scale, result):
            key = row.case.name, str(row.claim.one), str(row.claim.two)
            seeds = best[key][1].judged.seeds if key in best else -1
            if seeds < min(1, row.judged.seeds) or seeds < SEEDS <= row.judged.seeds:
                best[key] = scale, row
    told = [(s, r, tuple(row for scale, row in best.values() if scale == s)) for s, r in found]
    # A scale without a verdict is told where no other has one: something was measured.
    with_some = [Known(entry, *one) for one in told if any(row.judged.seeds for row in one[2])]
    return with_some or [Known(entry, *one) for one in told[:1]]


def standing(paper: str, measured: Sequence[Known], entries: int) -> list[str]:
    """Return what of a paper stands, what does not and what is open, from what is known (of so many entries in all)."""
    stands: list[str] = []
    falls: list[str] = []
    open_claims = 0
    for one in measured:
        of_it = _numbers(one) if one.entry.kind == "count" else _claims(one)
        name = f"[{one.entry.name}]({one.entry.paper}.md#{one.entry.name}) {one.scale}{_data(one)}"
        for told, these in ((stands, of_it.stands), (falls, of_it.falls)):
            if these:
                told.append(f"    - {name}: {'; '.join(these)}")
        open_claims += of_it.open
    count = len({one.entry.path for one in measured})
    return [
        f"**{paper}** ({count} of {entries} entries measured, {open_claims} of their claims and numbers open)",
        "",
        *(["- stands:", *stands] if stands else ["- stands: nothing yet"]),
        *(["- does not, at the size at which it was measured:", *falls] if falls else ["- does not: nothing yet"]),
        "",
    ]


def _data(one: Known) -> str:
    """Return which data were used, where they are not the paper's: claims are headed as in the paper."""
    if one.entry.kind in ("count", "study") or not one.entry.swapped(one.scale):
        return ""
    return f" (on {one.entry.experiment(one.scale, one.entry.cases(one.scale)[0]).base.data.source})"


@dataclass
class Standing:
    """What stands and what does not of an entry, in words, and how many claims are open."""

    stands: list[str] = field(default_factory=list)
    falls: list[str] = field(default_factory=list)
    open: int = 0


def _numbers(one: Known) -> Standing:
    """Of numbers that are computed."""
    found = one.numbers
    told = Standing(open=found.count("not resolved"))
    ways = (("reproduced", told.stands, "to the digit"), ("holds", told.stands, "off by at most half"))
    for verdict, said, how in (*ways, ("refuted", told.falls, "off by more")):
        if count := found.count(verdict):  # type: ignore[arg-type]
            said.append(f"{count} of {len(found)} numbers {how}")
    return told


def _claims(one: Known) -> Standing:
    """Of claims that are measured; those that a fix of ours makes are not the paper's."""
    told = Standing()
    for row in one.rows:
        if row.fix or not row.judged.seeds:
            continue
        ends = row.judged.ends
        size = f"{row.judged.mean:+.{decimals(row.judged.half)}f}" if ends is None else between(ends)
        words = f"{row.claim.words(one.entry.quantity)}{_unsaid(one.entry, row)} {size} ({row.case.title})"
        if row.judged.verdict in STANDS:
            told.stands.append(f"{words} {row.judged.verdict}")
        elif row.judged.verdict == "refuted":
            told.falls.append(words)
        else:
            told.open += 1
    return told


def _unsaid(entry: Entry, row: Row) -> str:
    """Return the entry's quantity, where a claim is about it, so that its words leave it out, and it is no accuracy."""
    about = entry.quantity in (row.claim.one.quantity, row.claim.two.quantity)
    return f", {entry.quantity}," if about and entry.quantity not in ACCURACIES else ""
