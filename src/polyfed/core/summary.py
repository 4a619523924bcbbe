"""Figures of all clients in a few: what a line of the history says about one kind of data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean, pstdev
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from polyfed.core.backend import Measure  # it needs torch, which tables do without


def over_clients(values: Sequence[float | None]) -> dict[str, Any]:
    """Return the mean of the values that exist, every value, and how many do not exist."""
    known = [value for value in values if value is not None]
    missing = len(values) - len(known)
    return {
        "mean": fmean(known) if known else None,
        "per_client": list(values),
        **({"undefined": missing} if missing else {}),
    }


def summarize(measures: Mapping[int, Measure]) -> dict[str, Any]:
    """Return mean, spread, worst, loss and every client's score, and the same of all metrics; nothing of nobody.

    A client's own data may be such that a score does not exist there: it is None, counted, and in no mean.
    """
    found = [measures[client] for client in sorted(measures)]
    if not found:
        return {}
    scores = [one.accuracy for one in found]
    known = [score for score in scores if score is not None]
    private = [one.private for one in found if one.private is not None]
    metrics = {name: over_clients([one.metrics.get(name) for one in found]) for name in found[0].metrics}
    return {
        "mean": fmean(known) if known else None,
        "std": pstdev(known) if known else None,
        "worst": min(known) if known else None,
        "loss": fmean(one.loss for one in found),
        "per_client": scores,
        **({"undefined": len(scores) - len(known)} if len(known) < len(scores) else {}),
        **({"private": fmean(private)} if private else {}),
        **({"metrics": metrics} if metrics else {}),
    }


def client_columns(accuracy: Mapping[str, Any], clients: int) -> dict[str, list[float | None]]:
    """Return the figures of every client by what they are called: the score, metrics, and those on data of its own.

    None: it was away, has no such data, or the figure does not exist there.
    """
    found = {"accuracy": accuracy}
    found |= {kind: accuracy[kind] for kind in ("personal", "validation") if accuracy.get(kind)}
    columns: dict[str, list[float | None]] = {}
    for kind, part in found.items():
        who = part.get("clients", range(clients))
        for name, values in {kind: part, **(part.get("metrics") or {})}.items():
            known = dict(zip(who, values["per_client"], strict=False))
            title = name if name == kind or kind == "accuracy" else f"{kind} {name}"
            columns[title] = [known.get(client) for client in range(clients)]
    if accuracy.get("alone"):
        columns |= _gained(accuracy, columns, clients)
    return columns


def _gained(
    accuracy: Mapping[str, Any], columns: Mapping[str, list[float | None]], clients: int
) -> dict[str, list[float | None]]:
    """Return what each client reaches by itself, and how much more together: on its own test data where it has some."""
    alone = accuracy["alone"]
    on, together = alone.get("personal") or alone, columns.get("personal") or columns["accuracy"]
    known = dict(zip(on["clients"], on["per_client"], strict=True))
    values = [known.get(client) for client in range(clients)]
    pairs = zip(together, values, strict=True)
    found = {"alone": values, "gain": [None if a is None or b is None else a - b for a, b in pairs]}
    for name, one in (on.get("metrics") or {}).items():
        known = dict(zip(on["clients"], one["per_client"], strict=True))
        found[f"alone {name}"] = [known.get(client) for client in range(clients)]
    return found
