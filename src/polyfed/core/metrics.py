"""Metrics by name, computed from the collected predictions of one model on one set; scikit-learn does the counting.

A metric is a function `(predictions, targets) -> float`: probabilities `[samples, classes]` and class numbers,
probabilities `[samples, labels]` and zeros and ones, or values and targets `[samples, targets]`, as NumPy arrays.
Where it does not exist (AUROC of a client that has one class only) it is None.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from polyfed.core.errors import InputError, unknown
from polyfed.core.task import Task

Function = Callable[[Any, Any], Any]
BINS = 15  # of the calibration error, as in the literature


@dataclass(frozen=True)
class Metric:
    """A metric and its name; `lower`: less of it is better."""

    name: str
    function: Function
    lower: bool = False
    own: bool = False  # a function that somebody gave

    def __call__(self, predictions: Tensor, targets: Tensor) -> float | None:
        """Return its value, or None where it does not exist."""
        given = predictions.cpu().double().numpy(), targets.cpu().numpy()
        try:
            with warnings.catch_warnings(action="ignore"):  # scikit-learn warns of what is None or counted as zero here
                found = self.function(*given)
        except Exception as error:
            if not self.own:
                raise
            raise InputError(f"The metric {self.name} failed with {type(error).__name__}: {error}.") from error
        if found is None:
            return None
        try:
            value = float(found)
        except (TypeError, ValueError) as error:
            raise InputError(f"The metric {self.name} returned {found!r}, not a number.") from error
        return value if math.isfinite(value) else None


def make_metrics(given: Sequence[str | Function], task: Task) -> tuple[Metric, ...]:
    """Return metrics by their names, or of functions; none given: those of the task.

    Raises
    ------
    InputError
        For a name that this task does not have, or one that is given twice.
    """
    known = named(task)
    found: list[Metric] = []
    for item in given or task.metrics:
        if isinstance(item, str):
            if item not in known:
                raise unknown(f"metric for {task.name}", item, known)
            metric = known[item]
        else:
            metric = Metric(getattr(item, "__name__", type(item).__name__), item, own=True)
            if metric.name in known:
                raise InputError(f"The metric function {metric.name} has the name of a known one: give it another.")
        if metric.name in [other.name for other in found]:
            raise InputError(f"The metric '{metric.name}' is given twice.")
        found.append(metric)
    return tuple(found)


def named(task: Task) -> dict[str, Metric]:
    """Return the metrics of a task by name."""
    return {name: Metric(name, function, name in LOWER) for name, function in METRICS[task.name].items()}


def score_of(task: Task, predictions: Tensor, targets: Tensor) -> float | None:
    """Return the score of a task from collected predictions."""
    return named(task)[task.score](predictions, targets)


# --- classification ---


def _accuracy(p: np.ndarray, y: np.ndarray) -> float:
    return float((p.argmax(1) == y).mean())


def _balanced_accuracy(p: np.ndarray, y: np.ndarray) -> float:
    from sklearn.metrics import balanced_accuracy_score  # type: ignore[import-untyped]

    return float(balanced_accuracy_score(y, p.argmax(1)))


def _macro_f1(p: np.ndarray, y: np.ndarray) -> float:
    from sklearn.metrics import f1_score

    return float(f1_score(y, p.argmax(1), average="macro", zero_division=0))


def _auroc(p: np.ndarray, y: np.ndarray) -> float | None:
    return _mean_auroc(p, y[:, None] == np.arange(p.shape[1]))


def _mean_auroc(p: np.ndarray, yes: np.ndarray) -> float | None:
    """Return the mean area over classes that have samples inside and outside; None if there is none such."""
    from sklearn.metrics import roc_auc_score

    mixed = [column for column in range(p.shape[1]) if 0 < yes[:, column].sum() < len(yes)]
    return float(np.mean([roc_auc_score(yes[:, c], p[:, c]) for c in mixed])) if mixed else None


def _log_loss(p: np.ndarray, y: np.ndarray) -> float:
    from sklearn.metrics import log_loss

    return float(log_loss(y, p / p.sum(1, keepdims=True), labels=np.arange(p.shape[1])))


def calibration_error(p: np.ndarray, y: np.ndarray, bins: int = BINS) -> float:
    """Return the expected calibration error: sum over bins of their share of samples times |accuracy - confidence|.

    Bins are of equal width over the probability of the predicted class. scikit-learn has no such function, and
    torchmetrics would be one more dependency for these lines.
    """
    confidence, right = p.max(1), p.argmax(1) == y
    place = np.clip(np.ceil(confidence * bins).astype(int) - 1, 0, bins - 1)  # a bin contains its upper end
    gaps = np.bincount(place, weights=right - confidence, minlength=bins)  # n_b · (accuracy - confidence)
    return float(np.abs(gaps).sum() / len(y))


# --- several labels ---


def _label_accuracy(p: np.ndarray, y: np.ndarray) -> float:
    return float(((p > 0.5) == (y > 0.5)).mean())


def _label_macro_f1(p: np.ndarray, y: np.ndarray) -> float:
    from sklearn.metrics import f1_score

    return float(np.mean([f1_score(y[:, c] > 0.5, p[:, c] > 0.5, zero_division=0) for c in range(p.shape[1])]))


def _label_auroc(p: np.ndarray, y: np.ndarray) -> float | None:
    return _mean_auroc(p, y > 0.5)


def _label_log_loss(p: np.ndarray, y: np.ndarray) -> float:
    from sklearn.metrics import log_loss

    return float(np.mean([log_loss(y[:, c] > 0.5, p[:, c], labels=[False, True]) for c in range(p.shape[1])]))


# --- values ---


def _mae(p: np.ndarray, y: np.ndarray) -> float:
    from sklearn.metrics import mean_absolute_error

    return float(mean_absolute_error(y, p))


def _rmse(p: np.ndarray, y: np.ndarray) -> float:
    from sklearn.metrics import root_mean_squared_error

    return float(root_mean_squared_error(y, p))


def _r2(p: np.ndarray, y: np.ndarray) -> float | None:
    from sklearn.metrics import r2_score

    constant = len(y) < 2 or bool((y == y[:1]).all(0).any())
    return None if constant else float(r2_score(y, p))


METRICS: Mapping[str, Mapping[str, Function]] = {
    "classification": {
        "accuracy": _accuracy,
        "balanced_accuracy": _balanced_accuracy,
        "macro_f1": _macro_f1,
        "auroc": _auroc,
        "calibration_error": calibration_error,
        "log_loss": _log_loss,
    },
    "multilabel": {
        "accuracy": _label_accuracy,
        "macro_f1": _label_macro_f1,
        "auroc": _label_auroc,
        "log_loss": _label_log_loss,
    },
    "regression": {"r2": _r2, "rmse": _rmse, "mae": _mae},
}
LOWER = ("calibration_error", "log_loss", "rmse", "mae")  # less is better
