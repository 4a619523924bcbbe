"""What a sweep tried: a chart and a table."""

from __future__ import annotations

from collections import Counter

from polyfed.command import to_text
from polyfed.core.errors import InputError
from polyfed.report.chart import Axis, Chart, Series
from polyfed.report.runs import Study
from polyfed.report.style import looks


def sweep(study: Study) -> Chart:
    """Show for each swept value the best mean validation accuracy of a method's tries with it.

    Raises
    ------
    InputError
        When these runs are no sweep.
    """
    if not study.sweep:
        raise InputError("These runs are no sweep.")
    tried = {(key, to_text(value)): value for one in study.sweep for key, value in one["values"].items()}
    keys = list(dict.fromkeys(key for key, _ in tried))
    ticks = sorted(tried, key=lambda tick: (keys.index(tick[0]), _order(tried[tick])))
    styles = looks(study.labels)
    series = []
    for place, label in enumerate(study.labels):
        beside = min(0.1, 0.6 / len(study.labels)) * (place - (len(study.labels) - 1) / 2)
        x, y, text = [], [], []
        for number, (key, value) in enumerate(ticks):
            tries = [o for o in study.sweep if o["method"] == label and to_text(o["values"].get(key)) == value]
            if not tries:
                continue
            best = max(tries, key=lambda one: sum(one["validation"]))
            x.append(number + beside)
            y.append(100 * sum(best["validation"]) / len(best["validation"]))
            text.append(f"{label}, {words(best['values'])}: {y[-1]:.1f} %" + (", chosen" if best["chosen"] else ""))
        series.append(Series(label, x, y, styles[label], "points", text=text))
    names = tuple(f"{key.rpartition('.')[2]} {value}" for key, value in ticks)
    note = "Each point: the best try of a method with this value, whatever its other values; mean over clients" + (
        " and seeds." if len(study.seeds) > 1 else "."
    )
    return Chart(
        "sweep", "What was tried", Axis("", ticks=names), Axis("validation accuracy", "%"), series, [], note, 380
    )


def rows(study: Study) -> list[tuple[str, str, list[float], list[float], bool]]:
    """Return every try: method, values, validation and test accuracy by seed, chosen; the best of a method first."""
    ordered = sorted(study.sweep, key=lambda one: (study.labels.index(one["method"]), -sum(one["validation"])))
    return [(one["method"], words(one["values"]), one["validation"], one["accuracy"], one["chosen"]) for one in ordered]


def equal(study: Study) -> dict[str, int]:
    """Return how many tries of a method were as good on validation data as the one taken, where it was not alone."""
    means = [(one["method"], sum(one["validation"]) / len(one["validation"])) for one in study.sweep]
    taken = {method: mean for (method, mean), one in zip(means, study.sweep, strict=True) if one["chosen"]}
    counts = Counter(method for method, mean in means if method in taken and mean == taken[method])
    return {method: number for method, number in counts.items() if number > 1}


def words(values: dict[str, object]) -> str:
    """Return values for people: `lam 0.1, lr 0.05`."""
    return ", ".join(f"{key.rpartition('.')[2]} {to_text(value)}" for key, value in values.items())


def _order(value: object) -> tuple[int, float, str]:
    number = isinstance(value, int | float)
    return (0, float(value), "") if number else (1, 0.0, str(value))  # type: ignore[arg-type]
