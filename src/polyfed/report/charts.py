"""Every chart of the report as plain data: what is drawn, not how. `draw` and `static` turn it into figures.

Charts of single clients are in `client_charts`, those of the data that they hold in `data_charts`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import fmean

from polyfed.core.errors import InputError, unknown
from polyfed.ops.estimate import estimate
from polyfed.report import statistics as numbers
from polyfed.report.chart import Axis, Chart, Level, Series, accuracy_axis
from polyfed.report.client_charts import capacity, gains
from polyfed.report.data_charts import evenness, sizes, split
from polyfed.report.runs import POOLED, REFERENCES, Point, Study
from polyfed.report.style import GRAY, Look, looks
from polyfed.report.sweeps import sweep
from polyfed.terminal.tables import amount

END, GLOBAL = "at the end", "global model"
FEW_ROUNDS = 10  # each has its tick: there is no round 1.5


def curves(study: Study, by: str = "rounds") -> Chart:
    """Accuracy by round, by bytes or by seconds, with a band from the lowest to the highest seed."""
    value: Callable[[Point], float] = {
        "rounds": lambda point: point.round,
        "bytes": lambda point: point.bytes,
        "seconds": lambda point: point.seconds,
    }[by]
    styles = looks(study.labels)
    series, levels = [], []
    for label, runs in study.runs.items():
        if by == "bytes" and all(point.bytes == 0 for run in runs for point in run.curve()):
            final = fmean(run.curve()[-1].accuracy for run in runs)
            levels.append(Level(100 * final, f"{label} (sends nothing)", styles[label]))
            continue
        steps = list(zip(*(run.curve() for run in runs), strict=False))  # seeds of a method measure the same rounds
        steps = [step for step in steps if by != "bytes" or fmean(point.bytes for point in step) > 0]
        x = [fmean(value(point) for point in step) for step in steps]
        y = [100 * fmean(point.accuracy for point in step) for step in steps]
        low = [100 * min(point.accuracy for point in step) for step in steps]
        high = [100 * max(point.accuracy for point in step) for step in steps]
        text = [
            f"{label}, round {step[0].round}: {mean:.1f} %"
            + (f" ({a:.1f} to {b:.1f})" if len(runs) > 1 else "")
            + f"<br>{amount(fmean(p.bytes for p in step))} a client, {fmean(p.seconds for p in step):.1f} s"
            for step, mean, a, b in zip(steps, y, low, high, strict=True)
        ]
        band = (low, high) if len(runs) > 1 else None
        series.append(Series(label, x, y, styles[label], band=band, text=text))
    axes = {
        "rounds": Axis("round", step=1 if max((x for one in series for x in one.x), default=0) <= FEW_ROUNDS else None),
        "bytes": _cost_axis("payload sent and received by a client", "B", [x for one in series for x in one.x if x]),
        "seconds": Axis("seconds, without measuring", "s"),
    }
    names = {"rounds": "round", "bytes": "bytes", "seconds": "time"}
    bands = "Line: mean over seeds; band: lowest to highest seed. " if any(s.band for s in series) else ""
    note = bands + "Mean accuracy of the clients' models on the common test set."
    return Chart(f"curves-{by}", f"Accuracy by {names[by]}", axes[by], Axis("accuracy", "%"), series, levels, note, 420)


def stages(study: Study) -> Chart:
    """Accuracy of the clients' models at each stage that a method names, at the end, and of the global model.

    Raises
    ------
    InputError
        When no method names a stage.
    """
    found = {label: [run.stages() for run in runs] for label, runs in study.runs.items()}
    named = [name for runs in found.values() for name in runs[0]]
    if not named:
        raise InputError("No method of these runs measures its clients at stages within a round.")
    order = [*dict.fromkeys(named), END, GLOBAL]
    styles = looks(study.labels)
    shown = [label for label, runs in found.items() if runs[0]]
    series = []
    for place, label in enumerate(shown):
        runs = study.runs[label]
        beside = min(0.1, 0.8 / len(shown)) * (place - (len(shown) - 1) / 2)  # so that intervals do not hide each other
        values = {name: [one[name] for one in found[label] if name in one] for name in found[label][0]}
        values[END] = [run.summary["accuracy"]["mean"] for run in runs]
        values[GLOBAL] = [g for run in runs if (g := run.summary["accuracy"].get("global")) is not None]
        known = {name: e for name in order if (e := estimate(values.get(name, []))) is not None}
        x, y = [order.index(name) + beside for name in known], [100 * e.mean for e in known.values()]
        half = [100 * (e.half or 0.0) for e in known.values()]
        text = [f"{label}, {name}: {e.mean:.1%}" for name, e in known.items()]
        series.append(Series(label, x, y, styles[label], "points", error_y=half, text=text))
    ticks = tuple(name.replace("_", " ") for name in order)
    note = "Mean accuracy of the clients when the stage was last measured" + (
        "; bars: 95 % t-interval over seeds." if len(study.seeds) > 1 else "."
    )
    return Chart(
        "stages",
        "Accuracy by stage",
        Axis("", ticks=ticks),
        accuracy_axis(series, study.bounded),
        series,
        [],
        note,
        340,
    )


def _cost_axis(title: str, unit: str, values: Sequence[float]) -> Axis:
    """Return an axis of costs, logarithmic where they spread so far that only that shows them all."""
    wide = bool(values) and min(values) > 0 and max(values) > 12 * min(values)
    return Axis(title, unit, log=wide, range=(min(values), max(values)) if wide else (1.0, 10.0))


def cost_frontier(study: Study, by: str = "bytes") -> Chart:
    """Accuracy against cost at the end; a line joins the methods that nobody beats at their price."""
    styles = looks(study.labels)
    rows = [row for row in numbers.leaderboard(study) if not (row.method == POOLED or (by == "bytes" and not row.cost))]
    cost = {row.method: row.cost if by == "bytes" else row.seconds for row in rows}
    accuracy = {row.method: row.accuracy for row in rows}
    kept: list[str] = []
    series = []
    for group in numbers.by_networks(study, cost):
        unbeaten = numbers.frontier([(name, cost[name], accuracy[name].mean) for name in group])
        if len(unbeaten) > 1:
            x, y = [cost[name] for name in unbeaten], [100 * accuracy[name].mean for name in unbeaten]
            series.append(Series("frontier", x, y, Look(GRAY), "steps", legend=False))
        kept += unbeaten
    order = sorted(cost, key=lambda name: cost[name])
    for place, name in enumerate(order):  # names of neighbours alternate above and below, to the inside at the ends
        half = accuracy[name].half
        price = amount(cost[name]) if by == "bytes" else f"{cost[name]:.1f} s"
        series.append(
            Series(
                name,
                [cost[name]],
                [100 * accuracy[name].mean],
                styles[name],
                "points",
                error_y=None if half is None else [100 * half],
                text=[f"{name}: {100 * accuracy[name].mean:.1f} % for {price}"],
                labels=[name] if name in kept or not study.many else None,
                above=place % 2 == 0,
                left=place > (len(order) - 1) / 2,
                legend=False,
            )
        )
    levels = [
        Level(100 * row.accuracy.mean, row.method, styles[row.method])
        for row in numbers.leaderboard(study)
        if row.method in REFERENCES and row.method not in cost
    ]
    titles = {"bytes": ("payload sent and received by a client", "B"), "seconds": ("seconds in all", "s")}
    axis = _cost_axis(*titles[by], list(cost.values()))
    note = "Up and to the left is better. Grey steps join the methods that no cheaper one with the same networks beats."
    if study.many:
        note += " Only these are named; point at another to see its name."
    if any(one.error_y for one in series):
        note += " Bars: 95 % intervals over seeds."
    everything = [*series, Series("levels", [], [level.value for level in levels])]
    return Chart(
        f"frontier-{by}", "Accuracy against cost", axis, accuracy_axis(everything, study.bounded), series, levels, note
    )


def wire(study: Study) -> Chart:
    """Bytes of a client by direction and kind, one row per method and direction."""
    found = {label: numbers.wire(study, label) for label in study.labels}
    rows = [
        (label, direction)
        for label in study.labels
        for direction in ("up", "down")
        if any(line[1] == direction for line in found[label])
    ]
    if not rows:
        raise InputError("Nothing crossed the wire in these runs.")
    rows.reverse()
    kinds = list(dict.fromkeys(kind_name(kind) for lines in found.values() for _, _, kind, _ in lines))
    styles = looks([f"kind {place}" for place in range(len(kinds))])
    series = []
    for kind, look in zip(kinds, styles.values(), strict=True):
        cells = [
            (
                size,
                rows.index((label, direction)),
                f"{label}, phase {step}, {_verb(direction)}: {kind}, {amount(size)} a client",
            )
            for label in study.labels
            for step, direction, name, size in found[label]
            if kind_name(name) == kind
        ]
        series.append(
            Series(kind, [c[0] for c in cells], [c[1] for c in cells], look, "points", text=[c[2] for c in cells])
        )
    ticks = tuple(f"{label} {_verb(direction)}" for label, direction in rows)
    x = _cost_axis("bytes of a client in all", "B", [value for one in series for value in one.x])
    note = "Messages by kind, mean over clients and seeds. Framing: names, shapes and headers around the payload."
    return Chart("wire", "What crossed the wire", x, Axis("", ticks=ticks), series, [], note, 130 + 34 * len(rows))


def _verb(direction: str) -> str:
    return "sent" if direction == "up" else "received"


def kind_name(kind: str) -> str:
    """Return what `params/main`, `data/logits` or `meta` is called for people."""
    group, _, name = kind.partition("/")
    model = "parameters" if name == "main" else f"parameters of {name}"
    return {"params": model, "meta": "single numbers"}.get(group, name or group)


KINDS: dict[str, Callable[[Study], Chart]] = {
    "curves": curves,
    "curves-bytes": lambda study: curves(study, "bytes"),
    "curves-seconds": lambda study: curves(study, "seconds"),
    "stages": stages,
    "frontier": cost_frontier,
    "frontier-seconds": lambda study: cost_frontier(study, "seconds"),
    "gains": gains,
    "tiers": capacity,
    "split": split,
    "sizes": sizes,
    "entropy": evenness,
    "wire": wire,
    "sweep": sweep,
}


def chart(study: Study, kind: str) -> Chart:
    """Return one chart of a study.

    Raises
    ------
    InputError
        For an unknown kind, or one that these runs cannot show.
    """
    if kind not in KINDS:
        raise unknown("chart", kind, KINDS)
    return KINDS[kind](study)
