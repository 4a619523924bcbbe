"""`polyfed reproduce`: list the papers' tables and figures, measure one, go on with the queue, write the pages."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from polyfed.cli import complete
from polyfed.terminal.tables import say

What = Annotated[
    str | None,
    typer.Argument(
        help="A paper (fedin) or an entry of it (fedin/table1); none: all.",
        autocompletion=complete.one_of(complete.entries),
    ),
]
UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0}


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command()(reproduce)


def reproduce(
    what: What = None,
    scale: Annotated[
        str | None, typer.Option(help="mini | middle | paper: run the entry at this size; none: tell about it.")
    ] = None,
    rows: Annotated[
        str, typer.Option(help="Only these rows of a table, by the names in its file: fedin,fedavg. Two make a claim.")
    ] = "",
    cases: Annotated[str, typer.Option(help="Only these cases of an entry: iid,dir05.")] = "",
    budget: Annotated[str | None, typer.Option(help="Stop before this time is over: 45s, 60m, 2h.")] = None,
    next_: Annotated[
        bool, typer.Option("--next", help="Go on with the queue (of a scale, if named): what decides a claim first.")
    ] = False,
    pages: Annotated[bool, typer.Option("--pages", help="Write docs/reproductions from the result files.")] = False,
    costs: Annotated[bool, typer.Option("--costs", help="Estimate all entries on this machine and keep it.")] = False,
    runs: Annotated[Path, typer.Option(help="Where runs are kept: the next call goes on there.")] = Path(
        "runs/reproductions"
    ),
    jobs: Annotated[str, typer.Option(help="How many runs at once: a number, or auto.")] = "auto",
    quiet: Annotated[bool, typer.Option("--quiet", help="No progress lines.")] = False,
) -> None:
    """Measure tables and figures of the papers again, and say what follows for their claims."""
    from polyfed.core.errors import InputError
    from polyfed.reproduce.cost import calibrate, write_costs
    from polyfed.reproduce.entries import find_entries, home, read_entries
    from polyfed.reproduce.pages import write_pages
    from polyfed.reproduce.queue import queue
    from polyfed.reproduce.running import Clock, Part

    root = home()
    entries = read_entries(root)
    console = Console(quiet=quiet)
    clock = Clock(parse_budget(budget))
    only = Part(_names(rows), _names(cases))
    if only != Part() and (scale is None or what is None):
        raise InputError(
            "--rows and --cases need one entry and a scale: "
            "polyfed reproduce fedin/table1 --scale mini --rows fedin,fedavg."
        )
    if costs:
        write_costs(root, entries, calibrate())
        say(console, "Wrote the estimates of this machine.")
    if pages:
        say(console, f"Wrote {len(write_pages(root))} pages to docs/reproductions")
    if costs or pages:
        return
    if next_:
        waiting = [one for one in queue(find_entries(entries, what), root) if scale in (None, one[1])]
        if not waiting:
            say(Console(), "Everything in the queue is measured.")
        for entry, size in waiting:
            try:
                whole = _measure(entry, size, root, runs, clock, jobs, console, only)
            except InputError as error:  # its data are not on this machine, say: others go on
                say(Console(), f"Left out {entry.path} at scale {size}: {error}")
                continue
            if not whole:
                say(Console(), f"The budget is used up in {entry.path} at scale {size}: the same command goes on.")
                return
        return
    chosen = find_entries(entries, what)
    if scale is None:
        _list(chosen, root)
        return
    if len(chosen) > 1:
        raise InputError(f"Name one entry to run, such as {chosen[0].path}; polyfed reproduce --next runs several.")
    if not _measure(chosen[0], scale, root, runs, clock, jobs, console, only):
        say(Console(), "The budget is used up: everything so far is kept; the same command goes on.")


def parse_budget(text: str | None) -> float | None:
    """Return seconds from `45s`, `60m` or `2h`.

    Raises
    ------
    InputError
        For anything else.
    """
    from polyfed.core.errors import InputError

    if text is None:
        return None
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([smh])", text.strip())
    if not found:
        raise InputError(f"--budget is a time such as 45s, 60m or 2h, not '{text}'.")
    return float(found[1]) * UNITS[found[2]]


def _names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(",") if name.strip())


def _list(entries: Sequence, root: Path) -> None:  # type: ignore[type-arg]
    """Print each entry with its scales: what was measured, what is left, and how long that takes on this machine."""
    from polyfed.reproduce.cost import calibrate, guess, is_timed, left, minutes_of, read_costs, stored_speed
    from polyfed.reproduce.pages import seeds_of, verdicts
    from polyfed.reproduce.results import read_result
    from polyfed.reproduce.verdict import summary

    speed, then, kept = calibrate(), stored_speed(root), read_costs(root)
    for entry in entries:
        say(Console(), f"{entry.path}  {entry.title}")
        for scale in entry.scales:
            result = read_result(root, entry, scale)
            minutes = kept.get(entry.path, {}).get(scale)  # of the machine where they were estimated
            if minutes is None or then is None or is_timed(entry, scale, result):
                minutes = minutes_of(entry, scale, root, guess(speed))
            else:
                minutes *= then.operations / speed.operations
            words = [left(entry, scale, result, minutes)]
            if result is not None:
                seeds = f"seeds {seeds_of(result)}" if not entry.computed else ""
                took = "" if entry.computed or words[0] else f"took {result.seconds / 60:.0f} min"
                words = [summary(verdicts(entry, scale, result)), seeds, took, *words]
            say(Console(), f"    {scale:<6}  {'; '.join(word for word in words if word)}")
    say(Console(), "Run one with polyfed reproduce PAPER/ENTRY --scale SCALE [--budget 60m].")


def _measure(entry, scale: str, root: Path, runs: Path, clock, jobs: str, console: Console, only) -> bool:  # type: ignore[no-untyped-def]
    """Run an entry, show the paper's numbers beside ours, and tell whether it is whole."""
    from polyfed.reproduce.cost import calibrate, guess
    from polyfed.reproduce.pages import told
    from polyfed.reproduce.running import reproduce as run_entry
    from polyfed.terminal.live import watching

    again = "the same command: finished runs are kept, this one goes on"
    command = f"polyfed reproduce {entry.path} --scale {scale}"
    with watching(console, (), None, again) as watch:
        result, whole = run_entry(
            entry,
            scale,
            root,
            runs,
            clock,
            guess(calibrate()),
            lambda config, case, place: watch(
                f"{case} {config.label} #{config.seed}", config.planned_rounds(), config.dump(), place
            ),
            command,
            jobs,
            only,
        )
    for line in told(entry, scale, result):
        say(Console(), line)
    return whole
