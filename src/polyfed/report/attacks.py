"""What honest clients keep when others are malicious: attacked runs beside the same runs without attack and rule."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from polyfed.ops.estimate import Estimate, estimate
from polyfed.report.runs import Run, Study


@dataclass(frozen=True)
class Kept:
    """One method under one attack, or without any under a rule: accuracy of the honest clients, by seed."""

    label: str
    attack: str | None
    rule: str | None
    honest: Estimate | None
    clean: Estimate | None
    share: Estimate | None
    least: Estimate | None  # the same share for the honest client that keeps least


def kept(study: Study) -> list[Kept]:
    """Return a row for each method with an attack or a rule whose clean run is in the study."""
    found = []
    for label, runs in study.runs.items():
        pairs = [pair for run in runs for pair in _pairs(run, study)]
        if not pairs:
            continue
        attack, rule = _trust(runs[0])
        mine, clean = ([fmean(values) for values in side] for side in zip(*pairs, strict=True))
        shares = [a / b for a, b in zip(mine, clean, strict=True) if b]
        least = [min(a / b for a, b in zip(*pair, strict=True) if b) for pair in pairs if any(pair[1])]
        if shares:
            found.append(Kept(label, attack, rule, *map(estimate, (mine, clean, shares, least))))
    return found


def _pairs(run: Run, study: Study) -> Iterator[tuple[list[float], list[float]]]:
    """Yield the accuracies of the honest clients in a run, and of the same clients in the clean run of its seed."""
    if _trust(run) == (None, None):
        return
    for other in study.all:
        if _trust(other) == (None, None) and other.split == run.split and _same(run.config, other.config):
            bad = {client for line in run.history for client in line.get("malicious", ())}
            honest = [client for client in range(run.clients) if client not in bad]
            yield [run.per_client[client] for client in honest], [other.per_client[client] for client in honest]
            return


def _trust(run: Run) -> tuple[str | None, str | None]:
    told = run.config.get("trust", {})
    return told.get("attack"), told.get("robust")


def _same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Tell whether two runs differ in attack and rule at most."""
    apart = {"label", "trust", "checksum"}
    return {k: v for k, v in one.items() if k not in apart} == {k: v for k, v in other.items() if k not in apart}
