"""What to believe of each paper after all that was measured: its claims by verdict, computed like the verdicts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from polyfed.reproduce.entries import Entry
from polyfed.reproduce.results import Result, Row, current, is_stale, judged, numbers, read_result
from polyfed.reproduce.verdict import SEEDS, Verdict, between, decimals

ACCURACIES = ("local", "global", "held")  # quantities that go without saying
CAVEATS = {  # what a reader of a paper's verdicts must know
    "fedvtc": "The paper leaves much of its method open (initial deviations, latents of matching, statistics of norms "
    "when images are generated), so what fails may be our reading of it. With 128 latents (the mini) the loss has the "
    "sums of the paper's equations; at larger scales, where these diverge, means.",
}
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
            Known(
                entry,
                scale,
                result,
                tuple(judged(entry, scale, result)),
                tuple(number.judged.verdict for number in numbers(entry, result)),
            )
            for scale, result in found[:1]
        ]
    found = [(scale, current(entry, scale, result)) for scale, result in found]
    best: dict[tuple[str, str, str], tuple[str, Row]] = {}
    for scale, result in found:
        for row in judged(entry, scale, result):
            key = row.case.same or row.case.name, str(row.claim.one), str(row.claim.two)
            seeds = best[key][1].judged.seeds if key in best else -1
            if seeds < min(1, row.judged.seeds) or seeds < SEEDS <= row.judged.seeds:
                best[key] = scale, row
    told = [(s, r, tuple(row for scale, row in best.values() if scale == s)) for s, r in found]
    # A scale without a verdict is told where no other has one: something was measured.
    with_some = [Known(entry, *one) for one in told if any(row.judged.seeds for row in one[2])]
    return with_some or [Known(entry, *one) for one in told[:1]]


def once(measured: Sequence[Known]) -> list[Known]:
    """Return what is known without claims that an earlier entry of the paper has from the same runs."""
    seen: set[tuple[str, ...]] = set()
    found = []
    for one in measured:
        rows = [(row, _runs_behind(one, row)) for row in one.rows]
        found.append(replace(one, rows=tuple(row for row, key in rows if key not in seen)))
        seen.update(key for row, key in rows if row.judged.seeds)
    return found


def _runs_behind(one: Known, row: Row) -> tuple[str, ...]:
    """Return what a claim is about: the runs and the quantities that are compared."""
    entry = one.entry
    if entry.kind in ("count", "study"):
        runs = f"{entry.path} {row.case.name}"
    else:
        runs = f"{entry.folder(one.scale, row.case)} {entry.option(one.scale, 'last', 1)}"
    return runs, str(row.claim.one), str(row.claim.two)


def standing(paper: str, measured: Sequence[Known], entries: int) -> list[str]:
    """Return what of a paper stands, what does not and what is open, from what is known (of so many entries in all)."""
    stands: list[str] = []
    near: list[str] = []
    falls: list[str] = []
    open_claims = 0
    for one in measured:
        numbers, claims = _numbers(one), _claims(one)
        name = f"[{one.entry.name}]({one.entry.paper}.md#{one.entry.name}) {one.scale}{_data(one)}"
        for told, these in (
            (stands, numbers.stands + claims.stands),
            (near, numbers.near),
            (falls, numbers.falls + claims.falls),
        ):
            if these:
                told.append(f"    - {name}: {'; '.join(these)}")
        open_claims += numbers.open + claims.open
    count = len({one.entry.path for one in measured})
    caveat = [f"{CAVEATS[name]}\n" for name in {one.entry.paper for one in measured} & CAVEATS.keys()]
    return [
        f"**{paper}** ({count} of {entries} entries measured, {open_claims} of their claims and numbers open)",
        "",
        *caveat,
        *(["- stands:", *stands] if stands else ["- stands: nothing yet"]),
        *(["- computed, and near the paper's numbers:", *near] if near else []),
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
    near: list[str] = field(default_factory=list)  # numbers only
    falls: list[str] = field(default_factory=list)
    open: int = 0


def _numbers(one: Known) -> Standing:
    """Of numbers that are computed."""
    found = one.numbers
    told = Standing(open=found.count("not resolved"))
    ways = (("reproduced", told.stands, "to the digit"), ("holds", told.near, "off by at most half"))
    for verdict, said, how in (*ways, ("refuted", told.falls, "off by more than half")):
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
        paper = f", the paper's {row.gain:+.2f}" if row.gain is not None else ""
        paper = ", equal in the paper" if row.claim.equal else paper
        words = f"{row.claim.words(one.entry.quantity)}{_unsaid(one.entry, row)} {size} ({row.case.title}{paper})"
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
