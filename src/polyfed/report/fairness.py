"""Who gains and who loses: clients and architectures beside local training."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from polyfed.ops.estimate import Estimate, estimate
from polyfed.report.runs import Run, Study
from polyfed.report.statistics import known


@dataclass(frozen=True)
class Tier:
    """All clients with one architecture."""

    architecture: str
    parameters: int | None
    accuracy: Estimate
    gain: Estimate | None


@dataclass(frozen=True)
class Fairness:
    """How evenly a method serves its clients."""

    method: str
    worst_tier: str
    worst_tier_accuracy: float
    spread: float  # best minus worst tier
    jain: float  # of the clients' accuracies: 1 when all are equal, 1/n when one has everything
    lost: float | None  # share of clients that would have been better off alone
    worst_loss: float | None  # the lowest gain of any client


def architectures(study: Study) -> list[str]:
    """Return the architectures, smallest first."""
    sizes: dict[str, int] = {}
    for run in study.all:
        parameters = run.summary.get("parameters") or [0] * run.clients
        sizes.update(zip(run.architectures, parameters, strict=True))
    return sorted(sizes, key=lambda name: sizes[name])


def tiers(study: Study, label: str) -> list[Tier]:
    """Return accuracy and gain of a method by architecture, smallest architecture first."""
    found = []
    for name in architectures(study):
        accuracy, gain, parameters = [], [], None
        for run in study.runs[label]:
            members = [client for client, kind in enumerate(run.architectures) if kind == name]
            if not members:
                continue
            parameters = (run.summary.get("parameters") or [None] * run.clients)[members[0]]
            accuracy.append(fmean(run.per_client[client] for client in members))
            alone = study.partner(run, study.alone(label) or "")
            if alone is not None:
                gain.append(fmean(run.per_client[client] - alone.per_client[client] for client in members))
        if accuracy:
            found.append(Tier(name, parameters, known(accuracy), estimate(gain)))
    return found


def client_gains(study: Study, label: str) -> list[tuple[Run, int, float]]:
    """Return (run, client, gain over training alone) of every client in every seed."""
    return [
        (run, client, value - alone.per_client[client])
        for run in study.runs[label]
        if (alone := study.partner(run, study.alone(label) or "")) is not None
        for client, value in enumerate(run.per_client)
    ]


def fairness(study: Study, label: str) -> Fairness:
    """Return how evenly a method serves its clients."""
    found = tiers(study, label)
    worst = min(found, key=lambda tier: tier.accuracy.mean)
    best = max(tier.accuracy.mean for tier in found)
    gains = [gain for _, _, gain in client_gains(study, label)]
    return Fairness(
        method=label,
        worst_tier=worst.architecture,
        worst_tier_accuracy=worst.accuracy.mean,
        spread=best - worst.accuracy.mean,
        jain=fmean(jain(run.per_client) for run in study.runs[label]),
        lost=sum(gain < 0 for gain in gains) / len(gains) if gains else None,
        worst_loss=min(gains, default=None),
    )


def jain(values: Sequence[float]) -> float:
    """Return Jain's index (sum x)² / (n · sum x²): 1 for equal values; all zeros count as equal."""
    squares = sum(value * value for value in values)
    return sum(values) ** 2 / (len(values) * squares) if squares else 1.0
