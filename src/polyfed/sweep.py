"""Sweeps: several values of settings and hyper-parameters, with the same number of tries for every method.

Values are chosen on the clients' validation data and reported on test data; every run is kept.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import islice, pairwise, product
from typing import TYPE_CHECKING, Any

from polyfed.command import to_text
from polyfed.core.errors import InputError, unknown
from polyfed.experiment import SWEPT, Experiment

if TYPE_CHECKING:
    from polyfed.core.method import Method

LONGEST = 120  # letters of a folder


@dataclass(frozen=True)
class Try:
    """One method with one choice of the swept values."""

    label: str
    options: dict[str, Any]  # hyper-parameters of the method
    settings: dict[str, Any]  # settings by full name

    @property
    def values(self) -> dict[str, Any]:
        """The swept values as people read them: `method.lam`, `training.lr`."""
        return {**{f"method.{name}": value for name, value in self.options.items()}, **self.settings}

    def of(self, experiment: Experiment) -> Experiment:
        """Return the experiment with these values for this label."""
        methods, settings = experiment.methods, experiment.settings
        return replace(
            experiment,
            methods={**methods, self.label: {**methods.get(self.label, {}), **self.options}},
            settings={**settings, self.label: {**settings.get(self.label, {}), **self.settings}},
        )

    def folder(self) -> str:
        """Return a name for a folder that tells the values."""
        text = ",".join(f"{name.rpartition('.')[2]}={to_text(value)}" for name, value in self.values.items())
        return re.sub(r"[^\w.=,+-]+", "-", text)[:LONGEST]


def tries(experiment: Experiment, labels: Sequence[str]) -> list[Try]:
    """Return what every method tries: as many choices as the largest grid has, for each of them.

    A method that has not all of the swept options gets further values of those it has, between the given ones.

    Raises
    ------
    InputError
        When an option is nobody's, or a method has nothing to try.
    """
    methods = {label: experiment.config(label).method for label in labels}
    grids = {label: _grid(experiment.sweep, label, method) for label, method in methods.items()}
    for key in experiment.sweep:
        _check_owner(key, methods)
    number = max(math.prod(len(values) for values in grid.values()) for grid in grids.values())
    found = []
    for label, grid in grids.items():
        choices = list(islice(_choices(grid), number))
        if len(choices) < number:
            raise InputError(
                f"Every method of a sweep gets the same number of tries, but {label} has {len(choices)} where the "
                f"largest grid has {number}: sweep two or more numbers that {label} has as well, such as "
                "--sweep lr=0.01,0.1."
            )
        for choice in choices:
            options = {key: value for (kind, key), value in choice.items() if kind == "option"}
            settings = {key: value for (kind, key), value in choice.items() if kind == "setting"}
            found.append(Try(label, options, settings))
    return found


def check_measured(experiment: Experiment, labels: Sequence[str]) -> None:
    """Refuse a sweep whose choice nothing could be based on.

    Raises
    ------
    InputError
        Without validation data, or with a method that is judged by a model which no client can validate.
    """
    if not experiment.base.data.validation:
        raise InputError(
            "A sweep chooses on validation data, never on test data: keep some apart with --validation 0.2."
        )
    for label in labels:
        if experiment.config(label).method.outcome == "server":
            raise InputError(
                f"{label} is judged by its fused network, which is measured on test data only: nothing honest could "
                "choose its values. Leave it out of the sweep."
            )


def best(found: Mapping[str, Sequence[Sequence[float]]]) -> dict[str, int]:
    """Return which try of each label has the highest mean over seeds; of equal ones the first."""
    means = {label: [sum(values) / len(values) for values in each] for label, each in found.items()}
    return {label: values.index(max(values)) for label, values in means.items()}


def _check_owner(key: str, methods: Mapping[str, Method]) -> None:
    """Refuse an option of a method that nobody has, or of a label that does not run."""
    owner, _, option = key.rpartition(".")
    if owner in SWEPT:
        return
    if owner != "method" and owner not in methods:
        raise unknown("owner of a swept option", owner, ["method", *SWEPT, *methods])
    asked = methods.values() if owner == "method" else [methods[owner]]
    known = {item.name for method in asked for item in fields(method)}
    if option not in known:
        raise unknown(f"swept option of {'any method' if owner == 'method' else owner}", option, known or {"(none)"})


Key = tuple[str, str]  # ("option" or "setting", its name)


def _grid(sweep: Mapping[str, tuple[Any, ...]], label: str, method: Method) -> dict[Key, tuple[Any, ...]]:
    """Return the values of all that one method has; its own (`LABEL.lam`) go before those of all (`method.lam`)."""
    grid: dict[Key, tuple[Any, ...]] = {}
    known = {item.name for item in fields(method)}
    for wanted in ("setting", "method", label):
        for key, values in sweep.items():
            owner, _, name = key.rpartition(".")
            if wanted == "setting" and owner in SWEPT:
                grid[("setting", key)] = values
            elif owner == wanted and name in known:
                grid[("option", name)] = values
    return grid


def _choices(grid: Mapping[Key, tuple[Any, ...]]) -> Iterator[dict[Key, Any]]:
    """Yield the grid, then further choices: the first axis of numbers refined, with all values of the others."""
    for values in product(*grid.values()):
        yield dict(zip(grid, values, strict=True))
    axis = next((key for key, values in grid.items() if _numbers(values)), None)
    if axis is None:
        return
    others = {key: values for key, values in grid.items() if key != axis}
    for value in between(grid[axis]):
        for rest in product(*others.values()):
            further = {axis: value, **dict(zip(others, rest, strict=True))}
            yield {key: further[key] for key in grid}


def _numbers(values: Sequence[Any]) -> bool:
    return len(values) > 1 and all(isinstance(v, int | float) and not isinstance(v, bool) for v in values)


def between(values: Sequence[float]) -> Iterator[float]:
    """Yield numbers between the given ones, the widest gaps first halved: by ratio where all are above zero.

    Examples
    --------
    >>> [round(value, 4) for value in islice(between([0.01, 1.0]), 3)]
    [0.1, 0.03162, 0.3162]
    """
    whole, ratio = all(isinstance(value, int) for value in values), min(values) > 0
    points = sorted(set(values))
    while True:
        middles = [math.sqrt(a * b) if ratio else (a + b) / 2 for a, b in pairwise(points)]
        fresh = [round(middle) if whole else float(f"{middle:.4g}") for middle in middles]
        fresh = [value for value in dict.fromkeys(fresh) if value not in points]
        if not fresh:
            return
        yield from fresh
        points = sorted({*points, *fresh})
