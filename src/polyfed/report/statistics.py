"""The numbers of the report, from runs: means and intervals, gains, rounds to a target, the cost frontier."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from math import ceil, floor
from statistics import fmean
from typing import Any

from polyfed.ops.estimate import Estimate, estimate
from polyfed.report.runs import POOLED, Run, Study

Measure = Callable[[Run], float | None]  # of a finished run (None: it has no such value)
BASELINE = "fedavg"  # what the "speed" of a method is compared with, where it took part
NUMBERED = re.compile(r"^params/(?:([a-z]+)-)?\d+$")  # other clients' networks, candidates


@dataclass(frozen=True)
class Standing:
    """One row of the leaderboard."""

    method: str
    seeds: int
    accuracy: Estimate
    took_part: Estimate | None  # mean over the clients that took part in a round (None: all did)
    worst: Estimate
    decile: Estimate
    shared: Estimate | None  # the global model, where the method makes one
    gain: Estimate | None  # over training alone, paired by seed and split
    gap: Estimate | None  # to all data in one place, paired likewise
    up: float  # payload sent by a client in all
    down: float
    wire: float  # sent and received by a client in all, with framing
    memory: float
    seconds: float

    @property
    def cost(self) -> float:
        """Payload sent and received by a client."""
        return self.up + self.down


def leaderboard(study: Study) -> list[Standing]:
    """Return one row per method, in the order of the study."""
    return [_standing(study, label, runs) for label, runs in study.runs.items()]


def over_alone(study: Study, label: str) -> Estimate | None:
    """Return what a method gained over training the same networks alone; None where they were not."""
    alone = study.alone(label)
    return None if alone is None else difference(study, label, alone)


def _standing(study: Study, label: str, runs: Sequence[Run]) -> Standing:
    return Standing(
        method=label,
        seeds=len(runs),
        accuracy=known(_values(runs, mean_accuracy)),
        took_part=estimate(_values(runs, of_those_who_took_part)) if any(run.idle for run in runs) else None,
        worst=known(_values(runs, worst_client)),
        decile=known(_values(runs, of_worst_decile)),
        shared=estimate(_values(runs, global_model)),
        gain=over_alone(study, label),
        gap=None if label == POOLED else difference(study, label, POOLED),
        up=fmean(run.per_client_bytes("up") for run in runs),
        down=fmean(run.per_client_bytes("down") for run in runs),
        wire=fmean(run.per_client_wire("up") + run.per_client_wire("down") for run in runs),
        memory=max(run.summary["cost"]["peak_memory"] for run in runs),
        seconds=fmean(run.summary["cost"]["seconds"]["total"] for run in runs),
    )


def known(values: Sequence[float]) -> Estimate:
    """Return mean and interval of values of which there is at least one."""
    found = estimate(values)
    assert found is not None
    return found


# --- who is better ---


def mean_accuracy(run: Run) -> float | None:
    """Return the mean over all clients."""
    return float(run.summary["accuracy"]["mean"])


def of_those_who_took_part(run: Run) -> float | None:
    """Return the mean over the clients that took part in a round."""
    accuracy = run.summary["accuracy"]
    mean: float | None = accuracy.get("took_part", accuracy)["mean"]
    return mean


def worst_client(run: Run) -> float | None:
    """Return the lowest accuracy of any client."""
    return min(run.per_client)


def of_worst_decile(run: Run) -> float | None:
    """Return the mean of the worst tenth of the clients."""
    return worst_decile(run.per_client)


def global_model(run: Run) -> float | None:
    """Return the accuracy of the server's own model, where the method makes one."""
    found: float | None = run.summary["accuracy"].get("global")
    return found


def on_own_data(run: Run) -> float | None:
    """Return the mean over clients on their own test data, where they have some."""
    found: float | None = run.summary["accuracy"].get("personal", {}).get("mean")
    return found


def metric(name: str) -> Measure:
    """Return what reads the mean of a metric over clients, in its own unit."""

    def read(run: Run) -> float | None:
        found: float | None = run.summary["accuracy"].get("metrics", {}).get(name, {}).get("mean")
        return found

    return read


def metric_names(study: Study) -> list[str]:
    """Return the metrics that were measured beside the score."""
    return list(dict.fromkeys(name for run in study.all for name in run.summary["accuracy"].get("metrics", {})))


def over_seeds(study: Study, label: str, measure: Measure) -> Estimate | None:
    """Return a figure of a method over its seeds."""
    return estimate(_values(study.runs[label], measure))


def _values(runs: Sequence[Run], measure: Measure) -> list[float]:
    return [value for run in runs if (value := measure(run)) is not None]


def difference(study: Study, label: str, other: str, measure: Measure = mean_accuracy) -> Estimate | None:
    """Return how much better a method is than another, paired by seed and split (None: they share no run)."""
    pairs = [(run, study.partner(run, other)) for run in study.runs.get(label, [])]
    values = [(measure(run), measure(partner)) for run, partner in pairs if partner is not None]
    return estimate([one - two for one, two in values if one is not None and two is not None])


def ahead(study: Study, label: str, other: str, measure: Measure = mean_accuracy) -> bool:
    """Tell whether the seeds show that a method is better than another; else their order is open.

    Its paired difference must be above zero with its whole interval; without shared seeds the two intervals must not
    overlap. A single seed shows nothing.
    """
    paired = difference(study, label, other, measure)
    if paired is not None and paired.half is not None:
        return paired.low > 0
    one, two = (estimate(_values(study.runs[name], measure)) for name in (label, other))
    if one is None or two is None or one.half is None or two.half is None:
        return False
    return one.low > two.high


def winner(study: Study, measure: Measure = mean_accuracy) -> str | None:
    """Return the method that is ahead of all others that exchange something (None: the order is open)."""
    rivals = [label for label in study.contenders if _values(study.runs[label], measure)]
    for label in rivals if len(rivals) > 1 else ():
        if all(ahead(study, label, other, measure) for other in rivals if other != label):
            return label
    return None


def worst_decile(values: Sequence[float]) -> float:
    """Return the mean of the worst tenth of the clients (at least one)."""
    return fmean(sorted(values)[: ceil(len(values) / 10)])


# --- per client and per architecture ---


# --- rounds to a target ---


@dataclass(frozen=True)
class Reached:
    """When a method first reached a target accuracy: means over the seeds that did."""

    method: str
    target: float
    reached: int  # seeds
    seeds: int
    rounds: float | None
    bytes: float | None
    seconds: float | None
    speed: float | None  # rounds of the baseline divided by rounds of the method


def targets(study: Study) -> list[float]:
    """Return up to three round accuracies (steps of five points) at or below the best method's final accuracy."""
    labels = study.contenders or study.labels
    best = max(fmean(run.summary["accuracy"]["mean"] for run in study.runs[label]) for label in labels)
    top = floor(best * 20 + 1e-9)
    step = max(1, top // 5)
    return [value / 20 for value in (top - 2 * step, top - step, top) if value > 0]


def rounds_to(study: Study, target: float) -> list[Reached]:
    """Return for every method when it reached the target."""
    firsts = {label: [_first(run, target) for run in runs] for label, runs in study.runs.items()}
    rounds = {label: [p.round for p in found if p is not None] for label, found in firsts.items()}
    label = baseline(study)
    base = fmean(rounds[label]) if label and len(rounds[label]) == len(firsts[label]) else None
    rows = []
    for label, found in firsts.items():
        points = [point for point in found if point is not None]
        mean = fmean(rounds[label]) if points else None
        everywhere = len(points) == len(found)
        rows.append(
            Reached(
                method=label,
                target=target,
                reached=len(points),
                seeds=len(found),
                rounds=mean,
                bytes=fmean(point.bytes for point in points) if points else None,
                seconds=fmean(point.seconds for point in points) if points else None,
                speed=base / mean if base and mean and everywhere else None,
            )
        )
    return rows


def baseline(study: Study) -> str | None:
    """Return the method that speeds are relative to: FedAvg, else the first one that exchanges something."""
    if BASELINE in study.runs:
        return BASELINE
    return next(iter(study.contenders), None)


def _first(run: Run, target: float) -> Any:
    return next((point for point in run.curve() if point.round > 0 and point.accuracy >= target), None)


# --- cost ---


def frontier(rows: Sequence[tuple[str, float, float]]) -> list[str]:
    """Return the names that nobody beats: of (name, cost, accuracy), no other is as cheap and better, or cheaper.

    Examples
    --------
    >>> frontier([("a", 1.0, 0.5), ("b", 2.0, 0.4), ("c", 3.0, 0.9)])
    ['a', 'c']
    """
    kept: list[str] = []
    best = float("-inf")
    for name, _, accuracy in sorted(rows, key=lambda row: (row[1], -row[2])):
        if accuracy > best:
            kept.append(name)
            best = accuracy
    return kept


def by_networks(study: Study, labels: Iterable[str]) -> list[list[str]]:
    """Return labels in groups with the same networks: only within these a price is a fair one."""
    groups: dict[tuple[str, ...], list[str]] = {}
    for label in labels:
        groups.setdefault(study.networks(label), []).append(label)
    return list(groups.values())


def beaten_by(rows: Sequence[tuple[str, float, float]]) -> dict[str, str | None]:
    """Return for each of (name, cost, accuracy) the best one that is no dearer and better, or cheaper and as good.

    Examples
    --------
    >>> beaten_by([("a", 1.0, 0.5), ("b", 2.0, 0.4), ("c", 3.0, 0.9), ("d", 2.0, 0.5)])
    {'a': None, 'b': 'a', 'c': None, 'd': 'a'}
    """
    found: dict[str, str | None] = {}
    for name, cost, accuracy in rows:
        better = [
            (other_accuracy, -other_cost, other)
            for other, other_cost, other_accuracy in rows
            if other_cost <= cost and other_accuracy >= accuracy and (other_cost < cost or other_accuracy > accuracy)
        ]
        found[name] = max(better)[2] if better else None
    return found


def wire(study: Study, label: str) -> list[tuple[str, str, str, float]]:
    """Return (phase, direction, kind, bytes of a client) of everything a method sent, mean over seeds.

    What is not payload is `framing` (names, shapes, headers), of all phases together. Networks that are told apart by a
    number only are one kind.
    """
    runs = study.runs[label]
    totals: dict[tuple[str, str, str], float] = {}
    for run in runs:
        for key, size in run.summary["cost"]["kinds"].items():
            step, direction, kind = key.split("/", 2)
            kind = NUMBERED.sub(lambda found: f"params/{found[1] or 'other clients'}", kind)
            totals[step, direction, kind] = totals.get((step, direction, kind), 0.0) + size / run.clients / len(runs)
    for direction in ("up", "down"):
        framing = fmean(run.per_client_wire(direction) - run.per_client_bytes(direction) for run in runs)
        if framing:
            totals["all", direction, "framing"] = framing
    return [(*key, size) for key, size in totals.items()]
