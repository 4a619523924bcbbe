"""The rows of a comparison: what the runs of each method reached over all seeds, and at which cost."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

from polyfed.core.cost import DOWN, UP
from polyfed.terminal.tables import comparison_table

REFERENCE = "local"


@dataclass(frozen=True)
class Row:
    """One method over all seeds."""

    method: str
    accuracy: list[float]  # mean over clients, by seed
    worst: list[float]  # worst client, by seed
    globals: list[float]  # global model, by seed (may be empty)
    gain: list[float]  # over local training, paired by seed (empty without a reference)
    bytes_up: float  # payload of one client, mean
    bytes_down: float
    wire_up: float  # the same as serialized, with framing
    wire_down: float
    seconds: float
    took_part: list[float]  # mean over clients that took part in a round, by seed (empty: all clients did)
    differs: dict[str, Any] = field(default_factory=dict)  # settings of this row alone, by full name
    tries: int = 1  # choices of a sweep, of which validation data chose this one
    personal: list[float] = field(default_factory=list)  # on own test data, mean over clients, by seed (empty: none)
    metrics: dict[str, list[float]] = field(default_factory=dict)  # mean over clients, by seed
    score: str = "accuracy"  # what stands where accuracy is said
    reconstructed: bool = False  # its paper leaves parts open: tables mark it


class Rows(list[Row]):
    """The rows of a comparison, which know how to be shown."""

    def table(self, title: str = "comparison") -> Any:
        """Return a rich table: who gained what at which cost."""
        return comparison_table(self, title)


def summarize(results: dict[str, list[dict[str, Any]]], alone: Collection[str] = (REFERENCE,)) -> list[Row]:
    """Turn results by method and seed into rows; a gain is over the same networks under one of the labels `alone`."""
    references = {
        tuple(results[label][0]["architectures"]): [r["accuracy"]["mean"] for r in results[label]]
        for label in sorted(alone, key=lambda label: label == REFERENCE)  # it is the last, and stays
        if label in results
    }
    rows = []
    for label, runs in results.items():
        means = [r["accuracy"]["mean"] for r in runs]
        reference = references.get(tuple(runs[0]["architectures"]), []) if label not in alone else []
        clients = len(runs[0]["architectures"])
        rows.append(
            Row(
                method=label,
                accuracy=means,
                worst=[r["accuracy"]["worst"] for r in runs],
                globals=[r["accuracy"]["global"] for r in runs if r["accuracy"]["global"] is not None],
                gain=[a - b for a, b in zip(means, reference, strict=True)] if reference else [],
                bytes_up=fmean(r["cost"][f"bytes_{UP}"] for r in runs) / clients,
                bytes_down=fmean(r["cost"][f"bytes_{DOWN}"] for r in runs) / clients,
                wire_up=fmean(r["cost"][f"wire_{UP}"] for r in runs) / clients,
                wire_down=fmean(r["cost"][f"wire_{DOWN}"] for r in runs) / clients,
                seconds=fmean(r["cost"]["seconds"]["total"] for r in runs),
                took_part=_of_those_who_took_part([r["accuracy"] for r in runs]),
                personal=_known(r["accuracy"].get("personal", {}).get("mean") for r in runs),
                metrics={
                    name: _known(r["accuracy"].get("metrics", {}).get(name, {}).get("mean") for r in runs)
                    for name in runs[0]["accuracy"].get("metrics", {})
                },
                score=runs[0]["accuracy"].get("score", "accuracy"),
            )
        )
    return rows


def _known(values: Iterable[float | None]) -> list[float]:
    return [value for value in values if value is not None]


def _of_those_who_took_part(found: Sequence[dict[str, Any]]) -> list[float]:
    """Return by seed the mean over clients that took part in a round; nothing where all did in every seed."""
    if not any("took_part" in accuracy for accuracy in found):
        return []
    means = [accuracy.get("took_part", accuracy)["mean"] for accuracy in found]
    return [mean for mean in means if mean is not None]
