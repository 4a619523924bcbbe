"""Result files: what was measured of an entry at a scale, in `results/reproductions/PAPER/ENTRY-SCALE.json`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from polyfed.config import Config
from polyfed.core.checkpoint import read_json, write_json
from polyfed.experiment import Experiment
from polyfed.reproduce.entries import Case, Claim, Entry
from polyfed.reproduce.quantities import Values
from polyfed.reproduce.verdict import Compared, Judged, judge, judge_each, judge_number

FOLDER = Path("results") / "reproductions"


@dataclass
class Measured:
    """The runs of one case."""

    settings: dict[str, Any] = field(default_factory=dict)  # of the whole experiment, for whoever wants to know
    runs: dict[str, dict[str, Values]] = field(default_factory=dict)  # label -> seed -> quantity -> value
    failed: dict[str, dict[str, str]] = field(default_factory=dict)  # label -> seed -> why
    curves: dict[str, dict[str, list[list[float]]]] = field(default_factory=dict)  # label -> seed -> [round, value]

    def has(self, label: str, seed: int) -> bool:
        """Tell whether a run is finished, or known to fail."""
        return str(seed) in self.runs.get(label, {}) or str(seed) in self.failed.get(label, {})

    def seeds(self) -> int:
        """Return the seeds that all labels have."""
        return min((len(seeds) for seeds in self.runs.values()), default=0)


@dataclass
class Result:
    """Everything measured of an entry at a scale."""

    entry: str
    scale: str
    command: str = ""
    versions: dict[str, str] = field(default_factory=dict)
    seconds: float = 0.0  # of all runs, each as long as it takes by itself
    cases: dict[str, Measured] = field(default_factory=dict)
    figures: list[str] = field(default_factory=list)  # pictures beside this file

    def case(self, name: str) -> Measured:
        """Return what was measured of a case (nothing yet: an empty one)."""
        return self.cases.setdefault(name, Measured())


def file_of(root: Path, entry: Entry, scale: str) -> Path:
    """Return where the result of an entry is kept."""
    return root / FOLDER / entry.paper / f"{entry.name}-{scale}.json"


def read_result(root: Path, entry: Entry, scale: str) -> Result | None:
    """Return what was measured, or None."""
    file = file_of(root, entry, scale)
    if not file.is_file():
        return None
    found = read_json(file)
    cases = {name: Measured(**case) for name, case in found.pop("cases").items()}
    return Result(cases=cases, **found)


def write_result(root: Path, entry: Entry, result: Result) -> Path:
    """Write it, whole or not at all."""
    file = file_of(root, entry, result.scale)
    result.seconds = _seconds(result.cases)
    write_json(file, asdict(result))
    return file


def _seconds(cases: Mapping[str, Measured]) -> float:
    return round(sum(v.get("seconds", 0.0) for c in cases.values() for s in c.runs.values() for v in s.values()), 1)


def forget(measured: Measured, made: Experiment) -> None:
    """Drop runs whose settings are no longer those of the entry: they are never paired with new ones."""
    then, now = measured.settings, json.loads(json.dumps(made.dump()))  # as it is read from a file
    if not then:
        return
    own = ("methods", "settings", "compare", "seeds")  # of labels, or which of them: the others concern all runs
    aside = (*own, "execution")  # an engine changes the time, not the result
    everything = _changed(*({key: value for key, value in one.items() if key not in aside} for one in (then, now)))
    for label in [*measured.runs, *measured.failed]:
        if everything or any(then[part].get(label) != now[part].get(label) for part in ("methods", "settings")):
            for kept in (measured.runs, measured.failed):
                kept.pop(label, None)  # type: ignore[attr-defined]
            for curve in [name for name in measured.curves if name.partition(", ")[0] == label]:
                measured.curves.pop(curve)


def made_by(folder: Path, config: Config) -> bool:
    """Tell whether a run has the settings that are asked for: its folder is named by a part of them only."""
    aside = ("execution", "label", "fingerprint")  # they change no number; the last is known when it has run
    asked = {key: value for key, value in json.loads(json.dumps(config.dump())).items() if key not in aside}
    return not _changed(read_json(folder / "config.json"), asked)


def current(entry: Entry, scale: str, result: Result) -> Result:
    """Return a result without the runs whose settings are no longer those of the entry; it is not changed itself."""
    if entry.kind in ("count", "study"):
        return result
    kept = {}
    for case in entry.cases(scale):
        if case.name in result.cases:
            there = result.cases[case.name]
            kept[case.name] = Measured(there.settings, dict(there.runs), dict(there.failed), dict(there.curves))
            if there.settings:
                forget(kept[case.name], entry.experiment(scale, case))
    return replace(result, cases=kept, seconds=_seconds(kept))


def missing(entry: Entry, scale: str, result: Result | None) -> list[tuple[Case, int, str]]:
    """Return the runs that a scale lacks: case by case, seed by seed, as claims are decided.

    Runs with other settings than the entry has now are missing as well. A count or a study is there or not.
    """
    found = []
    cases = {} if result is None else current(entry, scale, result).cases
    for case in entry.cases(scale) if entry.kind not in ("count", "study") else ():
        made, there = entry.experiment(scale, case), cases.get(case.name, Measured())
        for seed in range(made.base.seed, made.base.seed + made.seeds):
            found += [(case, seed, label) for label in made.compare if not there.has(label, seed)]
    return found


def runs_in_all(entry: Entry, scale: str) -> int:
    """Return how many runs a scale consists of."""
    return len(missing(entry, scale, None))


def is_stale(entry: Entry, scale: str, result: Result) -> bool:
    """Tell whether all runs of a result have other settings than the entry has now."""
    return 0 < runs_in_all(entry, scale) == len(missing(entry, scale, result))


def _changed(then: Any, now: Any) -> bool:
    """Tell whether something that both say differs; a setting that is new since is none of the old run's."""
    if isinstance(then, dict) and isinstance(now, dict):
        return any(_changed(then[key], now[key]) for key in then.keys() & now.keys())
    return bool(then != now)


@dataclass(frozen=True)
class Row:
    """A claim of an entry in a case, with its verdict."""

    case: Case
    claim: Claim
    judged: Judged
    gain: float | None  # the paper's
    fix: str = ""  # it concerns a change or a case of ours, by this name: no claim of the paper


def judged(entry: Entry, scale: str, result: Result | None) -> list[Row]:
    """Return every claim of an entry at a scale with its verdict; Holm's correction is over all of them.

    Computed numbers leave nothing to chance: their claims are judged one by one, without an interval. Claims about a
    fix or a case of ours are tested with the paper's, and told apart.
    """
    places = [(case, claim) for case in entry.cases(scale) for claim in entry.claims(case, scale)]
    tested = [_tested(entry, scale, case, claim, result) for case, claim in places]
    verdicts = [judge_each(test) for test in tested] if entry.computed else judge(tested)
    return [
        Row(case, claim, found, test.gain, _ours(entry, case, claim))
        for (case, claim), test, found in zip(places, tested, verdicts, strict=True)
    ]


def _ours(entry: Entry, case: Case, claim: Claim) -> str:
    """Return what makes a claim one of ours (nothing: it is the paper's)."""
    return entry.fixes.get(claim.one.label, entry.fixes.get(claim.two.label, case.ours))


def _tested(entry: Entry, scale: str, case: Case, claim: Claim, result: Result | None) -> Compared:
    measured = result.cases.get(case.name) if result is not None else None
    one, two = ({} if measured is None else measured.runs.get(side.label, {}) for side in (claim.one, claim.two))
    pairs = [
        (one[seed][claim.one.quantity], two[seed][claim.two.quantity])
        for seed in sorted(one, key=int)
        if claim.one.quantity in one[seed] and claim.two.quantity in two.get(seed, {})
    ]
    gain = case.gain(claim)
    sign = claim.sign if gain is None else (gain > 0) - (gain < 0)
    near = case.apart(claim) if claim.equal and not entry.swapped(scale) else None
    return Compared(tuple(a - b for a, b in pairs), gain, sign, entry.swapped(scale), near or 0.0)


@dataclass(frozen=True)
class Number:
    """A number of the paper that is computed, beside ours."""

    case: Case
    label: str
    quantity: str
    ours: float | None
    paper: float
    judged: Judged


def numbers(entry: Entry, result: Result | None) -> list[Number]:
    """Return every number of a counted table with its verdict: no seeds, nothing is drawn."""
    found = []
    for case in entry.cases():
        for quantity, labels in case.numbers.items():
            rounding = float(entry.told.get("rounding", {}).get(quantity, 0.005))  # half of the last digit printed
            for label, paper in labels.items():
                runs = result.cases.get(case.name, Measured()).runs if result is not None else {}
                ours = runs.get(label, {}).get("0", {}).get(quantity)
                verdict = judge_number(ours, paper, rounding) if ours is not None else "not resolved"
                found.append(Number(case, label, quantity, ours, paper, Judged(verdict, 0, ours)))
    return found
