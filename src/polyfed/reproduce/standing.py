"""What to believe of each paper after all that was measured: its claims by verdict, computed like the verdicts."""

from __future__ import annotations

from collections.abc import Sequence

from polyfed.reproduce.entries import Entry
from polyfed.reproduce.results import Result, judged, numbers
from polyfed.reproduce.verdict import Verdict, decimals

ACCURACIES = ("local", "global", "held")  # quantities that go without saying
STANDS: tuple[Verdict, ...] = ("reproduced", "holds")


def standing(paper: str, measured: Sequence[tuple[Entry, str, Result]], entries: int) -> list[str]:
    """Return what of a paper stands, what does not and what is open, from its measured entries (of so many in all)."""
    stands: list[str] = []
    falls: list[str] = []
    open_claims = 0
    for entry, scale, result in measured:
        if entry.kind == "count":
            found = [number.judged.verdict for number in numbers(entry, result)]
            of = f"of the {len(found)} numbers of {entry.name}"
            told = (("reproduced", stands, "to the digit"), ("holds", stands, "off by at most half"))
            for verdict, said, how in (*told, ("refuted", falls, "off by more")):
                if count := found.count(verdict):  # type: ignore[arg-type]
                    said.append(f"{count} {of} {how}")
            open_claims += found.count("not resolved")
            continue
        claims = [row for row in judged(entry, scale, result) if not row.fix and row.judged.seeds]
        for row in claims:
            mean = f"{row.judged.mean:+.{decimals(row.judged.half)}f}"
            what = "" if entry.quantity in ACCURACIES else f", {entry.quantity},"
            words = f"{row.claim.words(entry.quantity)}{what} {mean} ({entry.name} {scale}, {row.case.title})"
            if row.judged.verdict in STANDS:
                stands.append(f"{words}: {row.judged.verdict}")
            elif row.judged.verdict == "refuted":
                falls.append(words)
            else:
                open_claims += 1
    return [
        f"**{paper}** ({len(measured)} of {entries} entries measured, {open_claims} of their claims not resolved)",
        "",
        f"- stands: {'; '.join(stands) or 'nothing yet'}",
        f"- does not, at the size at which it was measured: {'; '.join(falls) or 'nothing yet'}",
        "",
    ]
