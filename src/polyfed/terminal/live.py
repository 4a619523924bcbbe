"""The terminal view of a long run: what is done, how good it is, what it cost, how long it will take.

On a terminal a few lines are redrawn in place (they fit any width and survive resizing); elsewhere there is one plain
line a round. Ctrl-C lets the round finish, saves a checkpoint, and stops; a second one stops at once.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

from rich.console import Console, ConsoleOptions, RenderResult
from rich.live import Live
from rich.table import Table
from rich.text import Text

from polyfed.terminal.progress import Place, PlainProgress, RemainingTime, duration
from polyfed.terminal.stopping import Stopped, Stopper, stoppable
from polyfed.terminal.tables import amount, percent

BLOCKS = "\u2581\u2582\u2583\u2584\u2585\u2586\u2587\u2588"  # one eighth to full
SECONDS = 0.25  # between two redraws


def sparkline(values: list[float], width: int) -> str:
    """Return values as small bars from the lowest to the highest, the latest at the right.

    Examples
    --------
    >>> len(sparkline([0.1, 0.5, 0.9], 10))
    3
    """
    shown = values[-width:] if width > 0 else []
    if not shown:
        return ""
    low, high = min(shown), max(shown)
    if high == low:
        return BLOCKS[0] * len(shown)
    return "".join(BLOCKS[round((value - low) / (high - low) * (len(BLOCKS) - 1))] for value in shown)


class View:
    """What is known about the run that is going on; drawn anew at every refresh."""

    def __init__(
        self,
        rounds: int,
        label: str,
        clock: Callable[[], float] = time.perf_counter,
        stopper: Stopper | None = None,
        names: Sequence[str] = (),
        place: Place | None = None,
    ) -> None:
        self.label = label
        self.place = place  # among the runs of a comparison
        self.names = names  # of the clients, where they have any
        self.time = RemainingTime(rounds, clock)
        self.means: list[float] = []
        self.latest: dict[str, Any] = {}
        self.bytes = [0, 0]
        self.stopper = stopper
        self.work = ""  # how its clients do it

    def add(self, line: dict[str, Any]) -> None:
        """Take in the line of a finished round."""
        self.time.add(line)
        self.bytes[0] += line["bytes_up"]
        self.bytes[1] += line["bytes_down"]
        if "accuracy" in line:
            self.latest = line["accuracy"]
            self.means.append(line["accuracy"]["mean"])

    def head(self, width: int) -> Text:
        """Return the line of this run: how far it is and how long it will take."""
        done, rounds = self.time.done, self.time.rounds
        share = done / rounds if rounds else 0.0
        cells = max(4, min(40, width - 46))
        bar = Text("\u2501" * round(cells * share), style="cyan") + Text(
            "\u2501" * (cells - round(cells * share)), style="bright_black"
        )
        left = self.time.left()
        head = Text.assemble((self.label, "bold"), f"  round {done}/{rounds}  ", bar)
        head.append(f"  {duration(left)} left" if left is not None else "  starting")
        if self.stopper is not None and self.stopper.asked:
            head.append("  stopping after this round", style="yellow")
        head.truncate(width, overflow="ellipsis")
        return head

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Draw for the width that the terminal has now."""
        width = options.max_width
        if self.place is not None:
            words = self.place.words(self.time.spent(), self.time.left())
            whole = Text(f"run {self.place.number} of {self.place.total}" + (f", {words}" if words else ""))
            whole.truncate(width, overflow="ellipsis")
            yield whole
        yield self.head(width)
        grid = Table.grid(padding=(0, 2))
        grid.add_column(style="bright_black", no_wrap=True, min_width=8)
        grid.add_column(no_wrap=True, overflow="ellipsis")
        if self.means:
            values = self.latest.get("per_client") or [self.latest["mean"]]
            who = self.latest.get("clients", range(len(values)))  # some may have been away
            names = [self.names[client] if self.names else f"client {client}" for client in who]
            best, worst = names[values.index(max(values))], names[values.index(min(values))]
            line = Text(f"{percent(self.latest['mean'])} %  ")
            line.append(sparkline(self.means, max(0, min(40, width - 24))), style="cyan")
            grid.add_row(self.latest.get("score", "accuracy"), line)
            shown = f"best {percent(max(values))} % ({best})  worst {percent(min(values))} % ({worst})"
            if self.latest.get("global") is not None:
                shown += f"  global {percent(self.latest['global'])} %"
            if "personal" in self.latest:
                shown += f"  own test data {percent(self.latest['personal']['mean'])} %"
            grid.add_row("clients", Text(shown))  # names of sites are no markup
        if self.work:
            grid.add_row("engine", Text(self.work))
        grid.add_row("bytes", f"sent {amount(self.bytes[0])}  received {amount(self.bytes[1])}")
        yield grid


class Board:
    """The runs that are going on: one in full, or several with a line each; a run that ended stays above them."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self.views: list[View] = []
        self.live: Live | None = None

    def add(self, view: View) -> None:
        """Show one more."""
        self.views.append(view)
        if self.live is None:
            self.live = Live(self, console=self.console, refresh_per_second=1 / SECONDS, transient=True)
            self.live.start(refresh=True)

    def refresh(self) -> None:
        """Draw what is new."""
        if self.live is not None:
            self.live.refresh()

    def remove(self, view: View) -> None:
        """Leave the last state of a run on the screen, above those that go on."""
        if view not in self.views:
            return
        self.views.remove(view)
        if self.live is not None and not self.views:
            self.live.stop()
            self.live = None
        self.console.print(view)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Draw for the width that the terminal has now."""
        if len(self.views) == 1:
            yield self.views[0]
            return
        places = [view.place for view in self.views if view.place is not None]
        if places:
            latest = max(places, key=lambda place: place.number)
            told = [view.place.words(view.time.spent(), view.time.left()) for view in self.views if view.place]
            words = next((one for one in reversed(told) if one), "")  # the last knows how far the others are
            done = latest.number - len(places)
            yield Text(f"{done} of {latest.total} runs done, {len(places)} at once" + (f", {words}" if words else ""))
        for view in self.views:
            yield view.head(options.max_width)


class LiveProgress:
    """An observer of a run that redraws a view on a terminal, and prints plain lines elsewhere."""

    def __init__(
        self,
        console: Console,
        rounds: int,
        label: str,
        stopper: Stopper | None = None,
        names: Sequence[str] = (),
        place: Place | None = None,
        board: Board | None = None,
    ) -> None:
        self.view = View(rounds, label, stopper=stopper, names=names, place=place)
        self.board: Board | None = None
        self.plain = PlainProgress(console, rounds, label, place)
        if console.is_terminal and not console.is_dumb_terminal and not console.quiet:
            self.board = board or Board(console)
            self.board.add(self.view)

    def close(self) -> None:
        """Stop redrawing; the last state stays on the screen."""
        if self.board is not None:
            self.board.remove(self.view)

    def begin(self, words: str) -> None:
        """Say how the clients of this run work."""
        if self.board is None:
            self.plain.begin(words)
        else:
            self.view.work = words

    def __call__(self, line: dict[str, Any]) -> None:
        """Show a finished round."""
        if self.board is None:
            self.plain(line)
            return
        self.view.add(line)
        self.board.refresh()


@contextmanager
def showing(wanted: bool | None, rounds: int, label: str) -> Iterator[list[Callable[[dict[str, Any]], None]]]:
    """Show a run that Python code starts inside the block on the error stream.

    Parameters
    ----------
    wanted
        None: only where the error stream is a terminal, and in a notebook (there as plain lines).
    rounds, label
        Of the run.

    Yields
    ------
    list
        The observers of the run: none where nothing is shown.
    """
    if not (_somebody_looks() if wanted is None else wanted):
        yield []
        return
    view = LiveProgress(Console(stderr=True, force_jupyter=False), rounds, label)
    try:
        yield [view]
    finally:
        view.close()


def _somebody_looks() -> bool:
    return Console().is_jupyter or (sys.stderr is not None and sys.stderr.isatty())


def showing_several() -> Callable[[str, int, Place], list[Callable[[dict[str, Any]], None]]]:
    """Return what shows runs that Python code starts together, by label, rounds and place, where somebody looks."""
    if not _somebody_looks():
        return lambda label, rounds, place: []
    console = Console(stderr=True, force_jupyter=False)
    board = Board(console)
    return lambda label, rounds, place: [LiveProgress(console, rounds, label, place=place, board=board)]


class Watch(Protocol):
    """Called with what a run that starts is: returns its observers."""

    def __call__(
        self, label: str, rounds: int, config: Mapping[str, Any], place: Place | None = None
    ) -> list[Callable[[dict[str, Any]], None]]:
        """Show this run from now on."""


@contextmanager
def watching(console: Console, log: Sequence[str], out: Path | None, again: str | None) -> Iterator[Watch]:
    """Show the runs started inside the block, send them to trackers, and let Ctrl-C stop them cleanly.

    Parameters
    ----------
    console
        Where progress goes.
    log
        Names of trackers.
    out
        Directory of the run; trackers write below it (`log`), or below `runs/log` where there is none.
    again
        How to go on after a stop; None: nothing is kept.

    Yields
    ------
    Watch
        Call it with label, rounds and configuration of a run that starts, and its place among several: it returns the
        observers of that run.
    """
    from polyfed.terminal.trackers import check, make

    for kind in log:
        check(kind)
    opened: list[Any] = []
    folder = out / "log" if out else Path("runs") / "log"
    board = Board(console)

    def close() -> None:
        while opened:
            opened.pop().close()

    with stoppable(console) as stopper:

        def watch(
            label: str, rounds: int, config: Mapping[str, Any], place: Place | None = None
        ) -> list[Callable[[dict[str, Any]], None]]:
            view = LiveProgress(console, rounds, label, stopper, config.get("sites", ()), place, board)
            stopper.running = True
            made: list[Any] = [view, *(make(kind, folder, label, config) for kind in log)]
            opened.extend(made)
            return [*made, stopper]

        try:
            yield watch
        except Stopped as stopped:
            close()
            kept = f" Go on with {again}." if again else " Nothing is kept: use --out DIR to be able to go on."
            raise Stopped(f"{stopped}{kept}") from None
        finally:
            close()
