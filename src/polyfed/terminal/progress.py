"""How far a run is and how long it will take; one plain line a round where the output is not a terminal."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

from rich.console import Console
from rich.progress import Progress

from polyfed.terminal.tables import amount, percent, say


def duration(seconds: float) -> str:
    """Return a time for people: 45 s, 3 min 20 s, 2 h 05 min."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


class RemainingTime:
    """The rounds of a run and the time until its end, from the speed that rich measures."""

    def __init__(self, rounds: int, clock: Callable[[], float] = time.perf_counter) -> None:
        self.rounds = rounds
        self.done = 0
        self.clock = clock
        self.last = clock()
        # Rounds may take hours: all of them count, not those of rich's last 30 seconds.
        self.progress = Progress(get_time=clock, speed_estimate_period=math.inf)
        # Without a total: a resumed run begins late, and only the rounds that it does itself tell its speed.
        self.task = self.progress.add_task("rounds", total=None)
        self.progress.advance(self.task, 0)  # a speed needs two moments: the start is the first

    def add(self, line: dict[str, Any]) -> None:
        """Take in the line of a finished round."""
        self.last = self.clock()
        self.done = line["round"]
        self.progress.advance(self.task, int(line["phase"] == "round"))

    def spent(self) -> float:
        """Return the seconds since the start."""
        return self.progress.tasks[0].elapsed or 0.0

    def left(self) -> float | None:
        """Return the seconds until the end (None: not known yet)."""
        speed = self.progress.tasks[0].speed
        return max(0.0, (self.rounds - self.done) / speed - (self.clock() - self.last)) if speed else None


@dataclass(frozen=True)
class Place:
    """Where a run stands among several: the how-manieth of how many, and who knows about the others."""

    number: int
    total: int
    ahead: Ahead | None = field(default=None, compare=False, repr=False)
    what: str = ""  # what tells it from the others of its method: the values that it tries

    def words(self, spent: float, left: float | None) -> str:
        """Return how long all of them will take, now that this one has come so far (empty: not known, or nothing)."""
        if self.ahead is None or left is None:
            return ""
        seconds = self.ahead.left(self.number, spent, left)
        return f"{duration(seconds)} left for all" if seconds else ""


class Ahead:
    """How long several runs will take: what is left of those at hand, and those to come, as long as earlier ones took.

    A run that is to come takes as long as those of its name did, or as those of any name; before one has ended, as long
    as those at hand are expected to.
    """

    def __init__(self, names: Sequence[str], clock: Callable[[], float] = time.perf_counter) -> None:
        self.total = len(names)
        self.rest = list(names)
        self.seconds: dict[str, list[float]] = {}
        self.clock = clock
        self.at_once = 1
        self.going: dict[int, tuple[float, float]] = {}  # by number: when it will end, and how long it takes in all

    def begin(self, name: str, at_once: int = 1) -> Place:
        """Begin the next run of a name; `at_once`: so many are going on at a time."""
        if name in self.rest:  # else it begins again, somewhere else
            self.rest.remove(name)
        self.at_once = at_once
        return Place(self.total - len(self.rest), self.total, self)

    def took(self, name: str, seconds: float) -> None:
        """Take in how long a run took."""
        self.seconds.setdefault(name, []).append(seconds)

    def left(self, number: int, spent: float, left: float) -> float:
        """Return the seconds until all have ended, from how far this one and, when last heard of, the others are."""
        now = self.clock()
        self.going[number] = (now + left, spent + left)
        every = [seconds for some in self.seconds.values() for seconds in some]
        every = every or [whole for _, whole in self.going.values()]
        lefts = [max(0.0, end - now) for end, _ in self.going.values()]
        rest = sum(fmean(self.seconds.get(name, every)) for name in self.rest)
        return max(*lefts, (sum(lefts) + rest) / self.at_once)


class Guessed(Ahead):
    """How long several runs will take, where somebody has guessed how long those to come will."""

    def __init__(self, rest: float, at_once: int = 1) -> None:
        super().__init__(())
        self.seconds_to_come, self.at_once = rest, at_once

    def left(self, number: int, spent: float, left: float) -> float:
        """Return the seconds until all have ended: what is left of this one, and those to come."""
        return max(left, (left + self.seconds_to_come) / self.at_once)


class PlainProgress:
    """An observer of a run that prints one line a round: accuracy, bytes, time left."""

    def __init__(self, console: Console, rounds: int, label: str, place: Place | None = None) -> None:
        self.console = console
        self.label = label
        self.place = place
        self.time = RemainingTime(rounds)

    def begin(self, words: str) -> None:
        """Say how the clients of this run work."""
        say(self.console, f"{self.label:<12}  {words}")

    def __call__(self, line: dict[str, Any]) -> None:
        """Print the line of a finished round."""
        self.time.add(line)
        where = f"round {line['round']:>3}/{self.time.rounds}" if line["phase"] == "round" else f"{line['phase']:<9}"
        parts = [f"{self.label:<12}", where]
        if self.place is not None:
            width = len(str(self.place.total))
            parts.insert(0, f"[{self.place.number:>{width}}/{self.place.total}]")
        if "accuracy" in line:
            accuracy = line["accuracy"]
            score = accuracy.get("score", "accuracy")
            parts.append(f"{score} {percent(accuracy['mean']):>5} %  worst {percent(accuracy['worst']):>5} %")
            if accuracy.get("global") is not None:
                parts.append(f"global {percent(accuracy['global']):>5} %")
            if "personal" in accuracy:
                parts.append(f"own {percent(accuracy['personal']['mean']):>5} %")
        elif "loss" in line:
            parts.append(f"loss {line['loss']:.3f}")
        parts.append(f"up {amount(line['bytes_up'])}  down {amount(line['bytes_down'])}")
        if "stopped" in line:
            parts.append(f"stopped: best on validation data was round {line['stopped']['best_round']}")
        if line.get("spent"):
            parts.append(f"privacy budget used up at {len(line['spent'])}")
        if line.get("missing"):
            parts.append(f"missing {len(line['missing'])}")
        left = self.time.left()
        parts.append(f"{duration(left)} left" if left else f"{self.time.spent():.1f} s")
        if self.place is not None and (words := self.place.words(self.time.spent(), left)):
            parts.append(words)
        say(self.console, "  ".join(parts))
