"""Robustness against the skew of labels: accuracy by the concentration alpha of the Dirichlet split (AMS Fig. 3)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from polyfed.core.errors import InputError
from polyfed.ops.estimate import estimate
from polyfed.report.runs import Run, study


def alpha_of(run: Run) -> float | None:
    """Return the alpha of the Dirichlet split of a run (None: it was split in another way).

    Raises
    ------
    InputError
        When the text of the partition cannot be read.
    """
    text = str((run.config.get("data") or {}).get("partition") or "")
    name, _, rest = text.partition(":")
    if name != "dirichlet":
        return None
    try:
        return float(rest.split(",")[0])
    except ValueError as error:
        raise InputError(f"Cannot read the alpha of the partition '{text}'.") from error


def accuracy_by_alpha(sources: Sequence[str | Path]) -> dict[str, Any]:
    """Return accuracy and interval over seeds by method and alpha, of runs that differ in alpha.

    A method with a global model is judged by it: one that fuses networks leaves the clients' own as they are.

    Raises
    ------
    InputError
        When no run was split by Dirichlet.
    """
    runs = [run for source in sources for run in study(source).all]
    found: dict[str, dict[float, list[float]]] = {}
    served: dict[str, bool] = {}
    for run in runs:
        alpha = alpha_of(run)
        if alpha is not None:
            accuracy = run.summary["accuracy"]
            value = accuracy["mean"] if accuracy.get("global") is None else accuracy["global"]
            found.setdefault(run.label, {}).setdefault(alpha, []).append(value)
            served[run.label] = accuracy.get("global") is not None
    if not found:
        raise InputError("None of these runs was split by dirichlet:ALPHA.")
    methods = {}
    for label, by_alpha in found.items():
        rows, means = [], []
        for alpha in sorted(by_alpha):
            value = estimate(by_alpha[alpha])
            assert value is not None
            rows.append({"alpha": alpha, "accuracy": value.mean, "half": value.half, "seeds": value.seeds})
            means.append(value.mean)
        of = "global model" if served[label] else "clients"
        methods[label] = {"of": of, "rows": rows, "spread": max(means) - min(means), "mean": fmean(means)}
    return {"methods": methods}


def robustness_figures(found: dict[str, Any]) -> dict[str, Any]:
    """Return the curve of accuracy over alpha, one line per method."""
    from polyfed.analysis.figures import lines

    curves, errors = {}, {}
    for label, entry in found["methods"].items():
        name = f"{label} ({entry['of']})"
        curves[name] = ([row["alpha"] for row in entry["rows"]], [100 * row["accuracy"] for row in entry["rows"]])
        errors[name] = [100 * (row["half"] or 0.0) for row in entry["rows"]]
    title = "Accuracy by the skew of labels (smaller alpha: more skew)"
    return {"alpha": lines(title, "alpha", "accuracy, %", curves, log_x=True, errors=errors)}
