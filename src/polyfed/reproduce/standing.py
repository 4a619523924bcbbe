"""What to believe of each paper after all that was measured: its claims by verdict, computed like the verdicts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from polyfed.reproduce.entries import Entry
from polyfed.reproduce.results import Result, judged, numbers
from polyfed.reproduce.verdict import Verdict, between, decimals

ACCURACIES = ("local", "global", "held")  # quantities that go without saying
STANDS: tuple[Verdict, ...] = ("reproduced", "holds")


def standing(paper: str, measured: Sequence[tuple[Entry, str, Result]], entries: int) -> list[str]:
    """Return what of a paper stands, what does not and what is open, from its measured entries (of so many in all)."""
    stands: list[str] = []
    falls: list[str] = []
    open_claims = 0
    for entry, scale, result in measured:
        of_it = _numbers(entry, result) if entry.kind == "count" else _claims(entry, scale, result)
        name = f"[{entry.name}]({entry.paper}.md#{entry.name}) {scale}"
        for told, these in ((stands, of_it.stands), (falls, of_it.falls)):
            if these:
                told.append(f"    - {name}: {'; '.join(these)}")
        open_claims += of_it.open
    return [
        f"**{paper}** ({len(measured)} of {entries} entries measured, {open_claims} of their claims not resolved)",
        "",
        *(["- stands:", *stands] if stands else ["- stands: nothing yet"]),
        *(["- does not, at the size at which it was measured:", *falls] if falls else ["- does not: nothing yet"]),
        "",
    ]


@dataclass
class Standing:
    """What stands and what does not of an entry, in words, and how many claims are open."""

    stands: list[str] = field(default_factory=list)
    falls: list[str] = field(default_factory=list)
    open: int = 0


def _numbers(entry: Entry, result: Result) -> Standing:
    """Of numbers that are computed."""
    found = [number.judged.verdict for number in numbers(entry, result)]
    told = Standing(open=found.count("not resolved"))
    ways = (("reproduced", told.stands, "to the digit"), ("holds", told.stands, "off by at most half"))
    for verdict, said, how in (*ways, ("refuted", told.falls, "off by more")):
        if count := found.count(verdict):  # type: ignore[arg-type]
            said.append(f"{count} of {len(found)} numbers {how}")
    return told


def _claims(entry: Entry, scale: str, result: Result) -> Standing:
    """Of claims that are measured; those that a fix of ours makes are not the paper's."""
    told = Standing()
    for row in judged(entry, scale, result):
        if row.fix or not row.judged.seeds:
            continue
        ends = row.judged.ends
        size = f"{row.judged.mean:+.{decimals(row.judged.half)}f}" if ends is None else between(ends)
        what = "" if entry.quantity in ACCURACIES else f", {entry.quantity},"
        words = f"{row.claim.words(entry.quantity)}{what} {size} ({row.case.title})"
        if row.judged.verdict in STANDS:
            told.stands.append(f"{words} {row.judged.verdict}")
        elif row.judged.verdict == "refuted":
            told.falls.append(words)
        else:
            told.open += 1
    return told
