"""Run an entry: every run is kept, finished ones are never run again, and the budget is not exceeded."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from polyfed.compare import compare, folder_of
from polyfed.config import Config
from polyfed.core.checkpoint import read_json
from polyfed.core.errors import InputError, PolyfedError, TrainingError, unknown
from polyfed.core.versions import versions
from polyfed.reproduce.cost import seconds_by_label
from polyfed.reproduce.entries import Case, Entry
from polyfed.reproduce.figures import analyzed, curves_of, draw, redraw
from polyfed.reproduce.quantities import curve_of, held_accuracy, values_of
from polyfed.reproduce.results import Measured, Result, forget, made_by, missing, read_result, write_result
from polyfed.terminal.progress import Guessed, Place

Observer = Callable[[dict[str, Any]], None]
Watch = Callable[[Config, str, Place], Sequence[Observer]]  # configuration, case, place among all runs


class OutOfBudget(PolyfedError):
    """The time is up: what is finished is kept, and the next call goes on."""


@dataclass
class Clock:
    """How much time is left; None: as much as it takes."""

    budget: float | None = None
    now: Callable[[], float] = time.monotonic
    started: float = field(default=0.0)

    def __post_init__(self) -> None:
        self.started = self.now()

    def left(self) -> float:
        """Return the seconds that are left."""
        return float("inf") if self.budget is None else self.budget - (self.now() - self.started)

    def check(self, needed: float = 0.0) -> None:
        """Stop when there is not enough time left.

        Raises
        ------
        OutOfBudget
            Always then.
        """
        if self.left() <= needed:
            raise OutOfBudget("The budget is used up: everything so far is kept; the same command goes on.")


@dataclass(frozen=True)
class Part:
    """The rows and cases of an entry that somebody wants to have; none named: all."""

    rows: tuple[str, ...] = ()
    cases: tuple[str, ...] = ()

    def of(self, runs: Sequence[tuple[Case, int, str]]) -> list[tuple[Case, int, str]]:
        """Return the runs that belong to it."""
        return [
            (case, seed, label)
            for case, seed, label in runs
            if (not self.cases or case.name in self.cases) and (not self.rows or label in self.rows)
        ]

    def check(self, entry: Entry, scale: str) -> None:
        """Refuse names that the entry does not have at this scale.

        Raises
        ------
        InputError
            For the first of them.
        """
        runs = missing(entry, scale, None)
        there = {"cases": [case.name for case, _, _ in runs], "rows": [label for _, _, label in runs]}
        for kind, known in there.items():
            for name in getattr(self, kind):
                if name not in known:
                    names = ", ".join(dict.fromkeys(known)) or "none to choose from"
                    raise InputError(f"{entry.path} at scale {scale} has {kind} {names}, not '{name}'.")


@dataclass
class Plan:
    """All runs of an entry at a scale, how many are there, and how long one takes."""

    entry: Entry
    scale: str
    result: Result
    seconds: Callable[[Config], float]  # a guess for a run that nobody has measured yet
    only: Part = field(default_factory=lambda: Part())

    def todo(self) -> list[tuple[Case, int, str]]:
        """Return the runs that are missing: case by case, seed by seed, as claims are decided."""
        return self.only.of(missing(self.entry, self.scale, self.result))

    def total(self) -> int:
        """Return how many runs there are in all, finished ones among them."""
        return len(self.only.of(missing(self.entry, self.scale, None)))

    def next(self) -> tuple[Case, list[int], list[str]]:
        """Return what to run next: a case, consecutive seeds that miss the same labels, and these labels."""
        lacking: dict[int, list[str]] = {}
        todo = self.todo()
        case = todo[0][0]
        for _, seed, label in [one for one in todo if one[0] == case]:
            lacking.setdefault(seed, []).append(label)
        seeds = [min(lacking)]
        while seeds[-1] + 1 in lacking and lacking[seeds[-1] + 1] == lacking[seeds[0]]:
            seeds.append(seeds[-1] + 1)
        return case, seeds, lacking[seeds[0]]

    def guesses(self) -> dict[tuple[str, str], float]:
        """Return the seconds of a run of each label of each case: as its other seeds took, or as calculated."""
        return {
            (case.name, label): found
            for case in self.entry.cases(self.scale)
            for label, found in seconds_by_label(self.entry, self.scale, case, self.result, self.seconds).items()
        }


def reproduce(
    entry: Entry,
    scale: str,
    root: Path,
    runs: Path,
    clock: Clock,
    seconds: Callable[[Config], float],
    watch: Watch | None = None,
    command: str = "",
    jobs: int | str = "auto",
    only: Part = Part(),  # noqa: B008 (frozen)
) -> tuple[Result, bool]:
    """Run what is missing of an entry (or a part of it) at a scale; return all measured, and whether it was finished.

    Raises
    ------
    InputError
        When the entry has no such scale, row or case, or its runs lie in `runs` with other settings.
    """
    if scale not in entry.scales:
        raise unknown(f"scale of {entry.path}", scale, entry.scales)
    only.check(entry, scale)
    result = read_result(root, entry, scale)
    if result is None or result.versions.get("polyfed") != versions()["polyfed"]:
        result = Result(entry.path, scale)  # runs of two versions are never paired
    result.command, result.versions = command or result.command, versions()
    if entry.kind in ("count", "study"):
        return _computed(entry, scale, result, root), True
    plan = Plan(entry, scale, result, seconds, only)
    for case in entry.cases(scale):  # runs of an earlier call, or of another entry with the same settings
        forget(result.case(case.name), entry.experiment(scale, case))
        _collect(entry, scale, case, result, runs)
    whole = True
    try:
        while plan.todo():
            _run(plan, *plan.next(), root, runs, clock, watch, jobs)
    except OutOfBudget:
        for case in entry.cases(scale):
            _collect(entry, scale, case, result, runs)
        whole = False
    if any(case.runs for case in result.cases.values()):
        analyzed(entry, scale, result, root, runs)
        redraw(entry, scale, result, root)
        write_result(root, entry, result)
    return result, whole


def _run(
    plan: Plan,
    case: Case,
    seeds: Sequence[int],
    labels: Sequence[str],
    root: Path,
    runs: Path,
    clock: Clock,
    watch: Watch | None,
    jobs: int | str,
) -> None:
    """Run some labels of a case with some seeds, and take in what they reach as they end."""
    entry, scale = plan.entry, plan.scale
    made = entry.experiment(scale, case)
    made = replace(made, base=replace(made.base, seed=seeds[0]))
    total = plan.total()

    def taken() -> None:
        _collect(entry, scale, case, plan.result, runs)
        write_result(root, entry, plan.result)

    def started(config: Config, place: Place) -> Sequence[Observer]:
        taken()
        guesses, todo = plan.guesses(), plan.todo()
        clock.check(guesses[case.name, config.label])
        after = sum(guesses[one.name, label] for one, _, label in todo) - guesses[case.name, config.label]
        at_once = place.ahead.at_once if place.ahead is not None else 1
        place = replace(place, number=total - len(todo) + 1, total=total, ahead=Guessed(after, at_once))
        seen = watch(config, case.name, place) if watch else ()
        return [*seen, lambda _line: clock.check()]

    try:
        compare(made, labels, len(seeds), runs / entry.folder(scale, case), started, jobs, reference=False)
    except TrainingError as error:  # a run that diverges is a result as well
        measured = plan.result.case(case.name)
        for seed in seeds:
            for label in labels:
                folder = runs / entry.folder(scale, case) / folder_of(made.config(label, seed))
                if not (folder / "result.json").is_file():
                    measured.failed.setdefault(label, {})[str(seed)] = _why(str(error), label, seed)
    taken()


def _why(told: str, label: str, seed: int) -> str:
    start = told.find(f"{label} with seed {seed} (")
    return told[start:].split("; ")[0] if start >= 0 else told


def _collect(entry: Entry, scale: str, case: Case, result: Result, runs: Path) -> None:
    """Take in every finished run of a case that the result does not have yet."""
    made = entry.experiment(scale, case)
    measured = result.case(case.name)
    measured.settings = made.dump()
    for seed in range(made.base.seed, made.base.seed + made.seeds):
        for label in made.compare:
            config = made.config(label, seed)
            folder = runs / entry.folder(scale, case) / folder_of(config)
            if measured.has(label, seed) or not (folder / "result.json").is_file() or not made_by(folder, config):
                continue
            its, ours = read_json(folder / "result.json").get("versions", {}).get("polyfed"), result.versions["polyfed"]
            if its != ours:
                raise InputError(
                    f"{folder} was run by polyfed {its or 'of an unknown version'}, and runs of two versions are never "
                    f"paired (this is {ours}): keep them elsewhere, or name another folder (--runs)."
                )
            last, of = entry.option(scale, "last", 1), entry.option(scale, "of", "global")
            values = values_of(folder, last, _target(entry, scale, case), of)
            if entry.option(scale, "held", False):
                values["held"] = held_accuracy(folder)
            measured.runs.setdefault(label, {})[str(seed)] = values
            for name, quantity in curves_of(entry, label).items():
                measured.curves.setdefault(name, {})[str(seed)] = curve_of(folder, quantity)


def _target(entry: Entry, scale: str, case: Case) -> float | None:
    """Return the accuracy of the table of rounds: of the case, or of the scale."""
    given = entry.told.get("cases", {}).get(case.name, {}).get("target")
    found = entry.told.get(scale, {}).get("target", given)
    return None if found is None else float(found)


def _computed(entry: Entry, scale: str, result: Result, root: Path) -> Result:
    """Count, or do a small experiment whole: both take a minute or two, and are not resumed."""
    from polyfed.reproduce.counts import COUNTS
    from polyfed.reproduce.studies import STUDIES

    figures: Mapping[str, Any] = {}
    if entry.kind == "count":
        counted = COUNTS[entry.told["count"]]()
        found = {name: {label: {"0": values} for label, values in labels.items()} for name, labels in counted.items()}
    else:
        options = {**entry.told.get("options", {}), **entry.told.get(scale, {}).get("options", {})}
        found, figures = STUDIES[entry.told["study"]](**options)
    result.cases = {name: Measured(runs=found[name]) for name in (case.name for case in entry.cases(scale))}
    draw(entry, scale, result, root, "", figures)
    write_result(root, entry, result)
    return result
