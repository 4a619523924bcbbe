"""Charts of clients: who gains and who loses, and what a larger network is good for."""

from __future__ import annotations

from polyfed.core.errors import InputError
from polyfed.ops.estimate import Estimate
from polyfed.report import fairness as clients
from polyfed.report import statistics as numbers
from polyfed.report.chart import Axis, Chart, Series, accuracy_axis
from polyfed.report.runs import LOCAL, Study
from polyfed.report.style import BLACK, SYMBOLS, Look, looks, tier_colors

MOST_POINTS = 1000  # points of one method in a chart of clients: more are thinned evenly by rank


def gains(study: Study) -> Chart:
    """Gain of every client over training alone, one row per method, colored by network size."""
    labels = [label for label in study.labels if study.alone(label) is not None]
    if not labels:
        raise InputError(f"Gains need runs of '{LOCAL}' with the same networks: add it to the comparison.")
    names = clients.architectures(study)
    points: dict[str, list[tuple[float, float, str]]] = {name: [] for name in names}
    averages: list[tuple[float, int, Estimate]] = []
    thinned = False
    for row, label in enumerate(reversed(labels)):
        found = sorted(clients.client_gains(study, label), key=lambda item: item[2])
        if not found:
            continue
        step = max(1, -(-len(found) // MOST_POINTS))
        thinned |= step > 1
        for place, (run, client, gain) in enumerate(found[::step]):
            offset = 0.52 * (place * 0.618034 % 1 - 0.5)  # spread evenly, the same at every drawing
            text = (
                f"{label}: client {client} (seed {run.seed}), {run.architectures[client]}<br>"
                f"{100 * gain:+.1f} points, now {100 * run.per_client[client]:.1f} %"
            )
            points[run.architectures[client]].append((100 * gain, row + offset, text))
        mean = numbers.over_alone(study, label)
        if mean is not None:
            averages.append((100 * mean.mean, row, mean))
    series = [
        Series(
            name,
            [p[0] for p in points[name]],
            [p[1] for p in points[name]],
            Look(color, SYMBOLS[place % len(SYMBOLS)]),
            "points",
            text=[p[2] for p in points[name]],
        )
        for place, (name, color) in enumerate(zip(names, tier_colors(len(names)), strict=True))
        if points[name]
    ]
    errors = [100 * (mean.half or 0.0) for _, _, mean in averages]
    series.append(
        Series(
            "mean",
            [x for x, _, _ in averages],
            [y for _, y, _ in averages],
            Look(BLACK, "line-ns"),
            "points",
            error_x=errors if any(errors) else None,
            text=[f"mean gain {x:+.1f} points" for x, _, _ in averages],
        )
    )
    note = "One point per client and seed, colored by network from smallest to largest; left of zero a client lost."
    note += " Each method shows at most a thousand clients, spread evenly by rank." if thinned else ""
    axis = Axis("gain over training alone, percentage points", zero=True)
    height = 130 + 62 * len(labels)
    return Chart(
        "gains", "Gain of each client", axis, Axis("", ticks=tuple(reversed(labels))), series, [], note, height
    )


def capacity(study: Study) -> Chart:
    """Accuracy of each method by architecture, smallest network first."""
    names = clients.architectures(study)
    styles = looks(study.labels)
    width = 0.7 / max(1, len(study.labels))
    series = []
    for place, label in enumerate(study.labels):
        found = clients.tiers(study, label)
        offset = (place - (len(study.labels) - 1) / 2) * width
        series.append(
            Series(
                label,
                [names.index(tier.architecture) + offset for tier in found],
                [100 * tier.accuracy.mean for tier in found],
                styles[label],
                "points",
                error_y=[100 * (tier.accuracy.half or 0.0) for tier in found] if len(study.runs[label]) > 1 else None,
                text=[
                    f"{label}, {tier.architecture}: {100 * tier.accuracy.mean:.1f} %"
                    + (f"<br>{100 * tier.gain.mean:+.1f} points over training alone" if tier.gain else "")
                    for tier in found
                ],
            )
        )
    sizes = {tier.architecture: tier.parameters for label in study.labels for tier in clients.tiers(study, label)}
    ticks = tuple(f"{name}<br>{count(sizes[name])}" if sizes.get(name) else name for name in names)
    note = "Networks from the smallest to the largest; mean over their clients" + (
        ", bars: 95 % intervals over seeds." if any(one.error_y for one in series) else "."
    )
    return Chart(
        "tiers",
        "Accuracy by network",
        Axis("", ticks=ticks),
        accuracy_axis(series, study.bounded),
        series,
        [],
        note,
        620 if study.many else 380,  # their names stand above
    )


def count(parameters: int | None) -> str:
    """Return a number of parameters for people."""
    if not parameters:
        return ""
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if parameters >= size:
            return f"{parameters / size:.3g}{unit} parameters"
    return f"{parameters} parameters"
