"""What the report is made of: finished runs, read from their directories or taken from memory, grouped by method."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from polyfed.core.checkpoint import read_json
from polyfed.core.errors import InputError
from polyfed.core.rundir import RunDirectory
from polyfed.terminal.tables import RECONSTRUCTION, marked

if TYPE_CHECKING:
    from polyfed.result import Result

LOCAL, POOLED = "local", "centralized"  # the two references: training alone, and all data in one place
REFERENCES = (LOCAL, POOLED)
MANY = 12  # methods that a chart or a table shows at once
DEPTH = 3  # folders below a given one in which runs are looked for (a comparison keeps METHOD/seed-N)


@dataclass(frozen=True)
class Point:
    """The state of a run after a measured round."""

    round: int
    accuracy: float  # mean over clients
    worst: float
    bytes: float  # payload sent and received by a client so far, mean over clients
    seconds: float  # so far, without measuring


@dataclass(frozen=True)
class Run:
    """One finished run: the content of its `config.json`, `history.jsonl` and `result.json`."""

    label: str
    seed: int
    summary: dict[str, Any]
    history: list[dict[str, Any]]
    config: dict[str, Any]
    path: Path | None = None

    @cached_property
    def per_client(self) -> list[float]:
        """Final accuracy of every client; of one that was away, the last one measured."""
        final = list(self.summary["accuracy"]["per_client"])
        if len(final) == self.clients:
            return final
        known = dict.fromkeys(range(self.clients), fmean(final))
        for line in self.history:
            accuracy = line.get("accuracy", {})
            known.update(
                zip(accuracy.get("clients", range(self.clients)), accuracy.get("per_client", []), strict=False)
            )
        return list(known.values())

    @property
    def idle(self) -> int:
        """How many of the measured clients never took part in a round."""
        accuracy = self.summary["accuracy"]
        return len(accuracy["per_client"]) - len(accuracy["took_part"]["clients"]) if "took_part" in accuracy else 0

    @property
    def clients(self) -> int:
        """How many clients there are."""
        return len(self.summary["architectures"])

    @cached_property
    def architectures(self) -> list[str]:
        """The network of every client."""
        return list(self.summary["architectures"])

    @property
    def trained_alone(self) -> bool:
        """Whether nothing was exchanged: a reference for methods with the same networks."""
        return bool((self.config.get("method") or {}).get("name", self.label) == LOCAL)

    @property
    def family(self) -> str:
        """What kind of method it is; of one that is not installed here, nothing is known."""
        return self._of_class("family")

    @property
    def reconstructed(self) -> bool:
        """Whether the paper of its method leaves so much open that this is a reconstruction."""
        return self._of_class("paper").endswith(RECONSTRUCTION)

    def _of_class(self, name: str) -> str:
        from polyfed import methods

        try:
            return str(getattr(methods.find(str((self.config.get("method") or {}).get("name", ""))), name))
        except InputError:
            return ""

    @property
    def split(self) -> tuple[int, str]:
        """What two runs must share for their difference to mean something: seed and data split."""
        return self.seed, str(self.config.get("fingerprint", ""))

    def per_client_bytes(self, direction: str) -> float:
        """Return the payload that a client sent (`up`) or received (`down`), mean over clients."""
        return float(self.summary["cost"][f"bytes_{direction}"]) / self.clients

    def per_client_wire(self, direction: str) -> float:
        """Return the same as serialized: payload and framing."""
        if not self.summary["cost"]["bytes_up"] and not self.summary["cost"]["bytes_down"]:
            return 0.0  # the empty messages of a method that exchanges nothing need not be sent
        return float(self.summary["cost"][f"wire_{direction}"]) / self.clients

    def curve(self) -> list[Point]:
        """Return the measured rounds with what had been spent until then."""
        spent = list(accumulate(line["bytes_up"] + line["bytes_down"] for line in self.history))
        times = accumulate(line["seconds"]["total"] - line["seconds"].get("evaluate", 0.0) for line in self.history)
        points: dict[int, Point] = {}
        for line, total, seconds in zip(self.history, spent, times, strict=True):
            if "accuracy" not in line:
                continue
            measured = line["accuracy"]["per_client"]  # some clients may have been away
            values = measured if "clients" in line["accuracy"] else self._of_clients(measured)
            number = int(line["round"])  # a phase after the rounds replaces the last round's point
            points[number] = Point(number, fmean(values), min(values), total / self.clients, seconds)
        return list(points.values())

    def stages(self) -> dict[str, float]:
        """Return the mean accuracy of the clients at each stage that the method names, as last measured."""
        return {
            name: part["mean"]
            for line in self.history
            for name, part in line.get("stages", {}).items()
            if part.get("mean") is not None
        }

    def _of_clients(self, values: Sequence[float]) -> Sequence[float]:
        """Give every client the value of its architecture where all data was in one place."""
        if len(values) == self.clients:
            return values
        order = list(dict.fromkeys(self.architectures))
        return [values[order.index(architecture)] for architecture in self.architectures]


@dataclass
class Study:
    """Runs to be looked at together."""

    runs: dict[str, list[Run]]  # by method, each sorted by seed
    experiment: dict[str, Any] | None = None  # of a comparison: what `polyfed compare` was asked
    notes: list[str] = field(default_factory=list)  # what the reader must know about these runs
    sweep: list[dict[str, Any]] = field(default_factory=list)  # every try of a sweep; `runs` are those chosen

    @property
    def tries(self) -> int:
        """How many tries each method of a sweep had (0: there was none)."""
        return max(Counter(one["method"] for one in self.sweep).values(), default=0)

    @property
    def labels(self) -> list[str]:
        """The methods, references included."""
        return list(self.runs)

    @property
    def many(self) -> bool:
        """Whether there are so many methods that a reader wants them by family, and fewer of them in a chart."""
        return len(self.runs) > MANY

    def family(self, label: str) -> str:
        """Return what kind of method a label stands for."""
        return self.runs[label][0].family

    def named(self, label: str) -> str:
        """Return a label as people read it in a table: with a mark where the method is a reconstruction."""
        return marked(label, self.runs[label][0].reconstructed)

    @property
    def bounded(self) -> bool:
        """Whether what is called accuracy lies between 0 and 1."""
        return all("score" not in run.summary["accuracy"] for run in self.all)

    @property
    def contenders(self) -> list[str]:
        """The methods that exchange something: neither training alone nor all data in one place."""
        return [label for label in self.runs if label not in REFERENCES]

    @property
    def all(self) -> list[Run]:
        """Every run."""
        return [run for runs in self.runs.values() for run in runs]

    @property
    def seeds(self) -> list[int]:
        """All seeds."""
        return sorted({run.seed for run in self.all})

    def networks(self, label: str) -> tuple[str, ...]:
        """Return the network of every client of a method."""
        return tuple(self.runs[label][0].architectures)

    def alone(self, label: str) -> str | None:
        """Return the label under which the same networks were trained alone; None for these and where there is none."""
        found = [one for one in self.runs if self.runs[one][0].trained_alone]
        if label in found:
            return None
        same = [one for one in found if self.networks(one) == self.networks(label)]
        return LOCAL if LOCAL in same else next(iter(same), None)

    def partner(self, run: Run, label: str) -> Run | None:
        """Return the run of another method on the same split with the same seed."""
        return next((other for other in self.runs.get(label, []) if other.split == run.split), None)


def study(source: Any) -> Study:
    """Return a study of whatever was given: a path, a result, or several of them.

    Raises
    ------
    InputError
        When there is no finished run in it.
    """
    if isinstance(source, Study):
        return source
    items = [source] if isinstance(source, str | Path) or not isinstance(source, Iterable) else list(source)
    runs: list[Run] = []
    notes: list[str] = []
    experiment: dict[str, Any] | None = None
    order: list[str] = []
    sweep: list[dict[str, Any]] = []
    for item in items:
        if isinstance(item, str | Path):
            path = Path(item)
            found, unfinished = _read(path)
            runs += found
            notes += [f"{folder} is not finished and was left out." for folder in unfinished]
            if (path / "comparison.json").is_file():
                comparison = read_json(path / "comparison.json")
                experiment = comparison["experiment"] if len(items) == 1 else None
                order += [row["method"] for row in comparison["rows"]]
                sweep += comparison.get("sweep", [])
                chosen = [path / one["folder"] for one in comparison.get("sweep", []) if one["chosen"]]
                runs += [read_run(file.parent) for folder in chosen for file in sorted(folder.glob("*/result.json"))]
        else:
            runs.append(from_result(item))
    if not runs:
        where = ", ".join(str(item) for item in items) or "nothing"
        stopped = f" ({len(notes)} are not finished: continue them with 'polyfed resume')" if notes else ""
        raise InputError(f"No finished run in {where}{stopped}: name the --out of a run or a comparison.")
    return replace(_group(runs, order, experiment, notes), sweep=sweep)


def from_result(result: Result) -> Run:
    """Return a run from a result in memory."""
    summary = json.loads(json.dumps(result.summary(), default=str))
    return Run(result.method, result.seed, summary, result.history, dict(result.config), result.directory)


def read_run(path: Path) -> Run:
    """Read one run directory."""
    config = read_json(path / "config.json")
    lines = RunDirectory(path).history()
    summary = read_json(path / "result.json")
    return Run(config.get("label", summary["method"]), summary["seed"], summary, lines, config, path)


def _read(path: Path) -> tuple[list[Run], list[Path]]:
    """Return the finished runs in a folder and the folders of unfinished ones."""
    if not path.exists():
        raise InputError(f"There is no {path}: name the --out of a run or a comparison.")
    folders = [path] if (path / "config.json").is_file() else []
    for depth in range(1, DEPTH + 1):
        folders += sorted(file.parent for file in path.glob("/".join(["*"] * depth) + "/config.json"))
    finished = [folder for folder in folders if (folder / "result.json").is_file()]
    return [read_run(folder) for folder in finished], [folder for folder in folders if folder not in finished]


def _group(runs: list[Run], order: list[str], experiment: dict[str, Any] | None, notes: list[str]) -> Study:
    grouped: dict[str, list[Run]] = {}
    for run in runs:
        label = run.label
        if any(other.split == run.split for other in grouped.get(label, [])):  # the same method twice: two rows
            label = f"{run.label} ({run.path.name if run.path else len(grouped)})"
        grouped.setdefault(label, []).append(run)

    def place(label: str) -> tuple[int, int]:
        known = order.index(label) if label in order else len(order)
        return {LOCAL: 0, POOLED: 2}.get(label, 1), known

    ordered = {label: sorted(grouped[label], key=lambda run: run.seed) for label in sorted(grouped, key=place)}
    scores = dict.fromkeys(str(run.summary["accuracy"].get("score", "accuracy")) for run in runs)
    if [*scores] != ["accuracy"]:
        notes.append(
            f"The task is {' and '.join(dict.fromkeys(str(run.summary.get('task')) for run in runs))}: what is called "
            f"accuracy here is {' or '.join(scores)} in percent (R²: the share of the variance that is explained)."
        )
    splits = {frozenset(run.split for run in found) for found in ordered.values()}
    if len(splits) > 1:
        notes.append(
            "Not all methods ran on the same seeds and splits: differences between two methods use the runs they share."
        )
    return Study(ordered, experiment, notes)
