"""Charts of the data that clients hold, as plain data: classes, samples and how even they are."""

from __future__ import annotations

from collections.abc import Sequence
from math import log

from polyfed.core.errors import InputError
from polyfed.report.chart import Axis, Chart, Series
from polyfed.report.runs import Study
from polyfed.report.style import Look

MOST_CLIENTS = 100  # columns of a chart


def split(study: Study) -> Chart:
    """Bubbles: how many samples of each class each client holds (first seed)."""
    counts, names = label_counts(study)
    shown = counts[:MOST_CLIENTS]
    largest = max((value for row in shown for value in row), default=1) or 1
    cells = [(client, label, value) for client, row in enumerate(shown) for label, value in enumerate(row) if value]
    widest = max(7.0, min(26.0, 620 / max(1, len(shown))))
    bubbles = Series(
        "samples",
        [client for client, _, _ in cells],
        [label for _, label, _ in cells],
        Look("#0072b2"),
        "bubbles",
        sizes=[max(1.5, widest * (value / largest) ** 0.5) for _, _, value in cells],
        text=[f"client {client}, class {names[label]}: {value} samples" for client, label, value in cells],
        legend=False,
    )
    note = f"Area: number of samples; the largest circle is {largest} samples of one class. Seed {study.all[0].seed}."
    if len(counts) > len(shown):
        note += f" The first {len(shown)} of {len(counts)} clients."
    y = Axis("class", ticks=tuple(names)) if len(names) <= 40 else Axis("class")
    height = min(640, 120 + 24 * min(len(names), 40))
    return Chart("split", "Classes by client", _clients(study, len(shown)), y, [bubbles], [], note, height)


def sizes(study: Study) -> Chart:
    """Bars: how many training samples each client holds (first seed)."""
    run = study.all[0]
    found = run.summary["samples"][:MOST_CLIENTS]
    text = [f"client {client}: {value} samples, {run.architectures[client]}" for client, value in enumerate(found)]
    bars = Series("samples", list(range(len(found))), list(found), Look("#56b4e9"), "bars", text=text, legend=False)
    return Chart("sizes", "Samples by client", _clients(study, len(found)), Axis("samples"), [bars], [], "", 190)


def evenness(study: Study) -> Chart:
    """Bars: label entropy of each client, 1 for even classes and 0 for a single one (first seed)."""
    counts, _ = label_counts(study)
    found = [entropy(row) for row in counts[:MOST_CLIENTS]]
    text = [f"client {client}: entropy {value:.2f}" for client, value in enumerate(found)]
    bars = Series("entropy", list(range(len(found))), found, Look("#cc79a7"), "bars", text=text, legend=False)
    note = "Entropy of a client's labels relative to equal classes: 1 is even, 0 is a single class."
    return Chart(
        "entropy", "Label entropy by client", _clients(study, len(found)), Axis("entropy"), [bars], [], note, 190
    )


def label_counts(study: Study) -> tuple[list[list[int]], list[str]]:
    """Return samples by client and class, and the names of the classes, of the first seed.

    Raises
    ------
    InputError
        When the runs do not hold them.
    """
    summary = study.all[0].summary
    counts = summary.get("label_counts") or []
    if not counts or not counts[0]:
        raise InputError("These runs do not say which classes their clients hold: run them again with this version.")
    names = summary.get("class_names") or []
    return counts, list(names) if len(names) == len(counts[0]) else [str(n) for n in range(len(counts[0]))]


def _clients(study: Study, number: int) -> Axis:
    names = study.all[0].summary.get("names") or [str(client) for client in range(number)]
    return Axis("client", ticks=tuple(names[:number]) if number <= 20 else ())


def entropy(counts: Sequence[int]) -> float:
    """Return the entropy of a client's labels divided by that of equal classes: 1 even, 0 a single class."""
    total = sum(counts)
    if total == 0 or len(counts) < 2:
        return 0.0
    shares = [count / total for count in counts if count]
    return max(0.0, -sum(share * log(share) for share in shares) / log(len(counts)))
