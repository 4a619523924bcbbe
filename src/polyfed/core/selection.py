"""Choosing a round: by validation data, never by test data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from polyfed.core.task import Task

Line = Mapping[str, Any]


def worth(validation: Mapping[str, Any], task: Task) -> float | None:
    """Return how good a summary of validation data is, more being better: the mean score, or the loss turned round."""
    value: float | None = validation.get("mean") if task.selects == "score" else -validation["loss"]
    return value


def best_line(history: Sequence[Line], task: Task) -> Line | None:
    """Return the line of the round that is best on validation data, of equal ones the first (None: nobody knows)."""
    best, found = None, None
    for line in history:
        validation = line.get("accuracy", {}).get("validation")
        value = worth(validation, task) if validation and line["phase"] == "round" else None
        if value is not None and (best is None or value > best):
            best, found = value, line
    return found


@dataclass(frozen=True)
class Patience:
    """When to stop: after so many rounds without a better result on validation data (None: never)."""

    rounds: int | None
    task: Task

    def over(self, history: Sequence[Line], number: int, validation: Mapping[str, Any]) -> dict[str, Any] | None:
        """Return why the run stops after this round, as its history tells it; None where it goes on."""
        if self.rounds is None:
            return None
        best = best_line(
            [*history, {"phase": "round", "round": number, "accuracy": {"validation": validation}}], self.task
        )
        if best is None or number - best["round"] < self.rounds:
            return None
        return {"reason": "patience", "patience": self.rounds, "best_round": best["round"]}
