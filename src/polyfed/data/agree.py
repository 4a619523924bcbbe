"""Sites agree on how to make numbers of their rows, without showing a row.

Each site writes down how many values its columns have, their mean and deviation, and which words occur; whoever
collects these files joins them. Mean and deviation that come out are those of all rows together, and everybody knows
all words and classes. A file is short, plain JSON: people can read what it says before it leaves.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from polyfed.core.checkpoint import read_json, write_json
from polyfed.core.errors import InputError
from polyfed.core.task import CLASSIFICATION, Regression, Task, describe, from_description
from polyfed.data.dataset import CONSTANT, Dataset
from polyfed.data.form import Column, Form
from polyfed.data.labels import spelled_alike

TOLD, AGREED = "a site's form", "the form of all sites"  # what a file is


@dataclass(frozen=True)
class Agreed:
    """How all sites make numbers of their rows."""

    form: Form
    class_names: tuple[str, ...]
    task: Task
    notes: tuple[str, ...] = ()  # what whoever collects the files should know

    def options(self) -> dict[str, Any]:
        """Return what `load` needs to read a site's rows like this."""
        task = None if self.task == CLASSIFICATION else self.task
        return {"form": self.form, "task": task, "class_names": list(self.class_names)}


def tell(data: Dataset) -> dict[str, Any]:
    """Return what a site tells about its training rows: counts, means, deviations and words, no row.

    Raises
    ------
    InputError
        If the data is no table.
    """
    if data.form.kind != "table":
        raise InputError(
            f"'{data.name}' is no table with named columns ({data.form.kind}): there is nothing to agree on. "
            "Texts need one tokenizer everywhere, images one scaling."
        )
    stored = data.train.x[data.train.rows()].numpy().astype(np.float64)
    columns = []
    for column in data.form.columns:
        told: dict[str, Any] = {"name": column.name, "kind": column.kind}
        places = data.form.places(column.name)
        if column.kind == "category":
            told["values"] = list(column.values)
        elif column.kind == "number":
            known = stored[:, places[0]][stored[:, places[1]] == 0] if column.gaps else stored[:, places[0]]
            told |= _figures(known) | {"gaps": column.gaps}
        columns.append(told)
    values = data.train.labels().numpy().T if isinstance(data.task, Regression) else ()
    return {
        "what": TOLD,
        "rows": len(data.train),
        "columns": columns,
        "class_names": list(data.class_names),
        "task": data.task.name,
        "targets": [_figures(of_one) for of_one in values],
    }


def agree(told: Mapping[str, Mapping[str, Any]]) -> Agreed:
    """Join what sites tell, by the name of each.

    Raises
    ------
    InputError
        Naming the site whose columns are others.
    """
    if not told:
        raise InputError("There is nothing to agree on: give the file of each site.")
    first, reference = next(iter(told.items()))
    kinds = {column["name"]: column["kind"] for column in reference["columns"]}
    for site, one in told.items():
        own = {column["name"]: column["kind"] for column in one["columns"]}
        if own != kinds or one["task"] != reference["task"]:
            lists = [", ".join(f"{name} ({kind})" for name, kind in found.items()) for found in (own, kinds)]
            raise InputError(
                f"{site} has the columns {lists[0]} for {one['task']}, but {first} has {lists[1]} for "
                f"{reference['task']}: all sites need the same columns of the same kind (--drop-columns, --columns)."
            )
    by_name = [{column["name"]: column for column in one["columns"]} for one in told.values()]
    columns = [_column(name, kind, [one[name] for one in by_name]) for name, kind in kinds.items()]
    notes: list[str | None] = []
    for column in (column for column in columns if column.kind == "category"):
        whose = {site: one[column.name]["values"] for site, one in zip(told, by_name, strict=True)}
        notes.append(spelled_alike(column.values, whose, f"values of '{column.name}' that", "value"))
    names: tuple[str, ...] = tuple(reference["class_names"])
    task = from_description([reference["task"], *([[], []] if reference["task"] == Regression.name else [])])
    if task == CLASSIFICATION:
        names = tuple(sorted({name for one in told.values() for name in one["class_names"]}, key=_in_order))
        notes.append(spelled_alike(names, {site: one["class_names"] for site, one in told.items()}))
    for site, one in told.items() if task != CLASSIFICATION else ():
        if len(one["class_names"]) != len(names) or (len(names) > 1 and tuple(one["class_names"]) != names):
            raise InputError(
                f"{site} has the {task.noun}s {', '.join(one['class_names'])}, but {first} has {', '.join(names)}: all "
                "sites name the same ones in the same order (--label a,b)."
            )
    if isinstance(task, Regression):
        units = [_moments([one["targets"][place] for one in told.values()]) for place in range(len(names))]
        task = Regression(tuple(center for center, _ in units), tuple(spread for _, spread in units))
    return Agreed(Form("table", tuple(columns)), names, task, tuple(note for note in notes if note is not None))


def _column(name: str, kind: str, told: Sequence[Mapping[str, Any]]) -> Column:
    if kind == "category":
        return Column(name, kind, tuple(sorted({value for one in told for value in one["values"]})))
    if kind != "number":
        return Column(name, kind)
    mean, deviation = _moments(told)
    return Column(name, kind, gaps=any(one["gaps"] for one in told), fill=mean, center=mean, spread=deviation)


def _figures(values: np.ndarray) -> dict[str, Any]:
    return {"count": len(values), "mean": float(values.mean()), "deviation": float(values.std())}


def _moments(told: Sequence[Mapping[str, Any]]) -> tuple[float, float]:
    """Return mean and deviation of all values from the counts, means and deviations of the parts."""
    count = sum(one["count"] for one in told)
    mean = sum(one["count"] * one["mean"] for one in told) / count
    variance = sum(one["count"] * (one["deviation"] ** 2 + (one["mean"] - mean) ** 2) for one in told) / count
    deviation = math.sqrt(variance)
    return mean, deviation if deviation >= CONSTANT else 1.0


def _in_order(name: str) -> tuple[bool, float, str]:
    """Order names of classes as `load` does: numbers by size, words by the alphabet."""
    whole = name.lstrip("-").isdigit()
    return not whole, float(name) if whole else 0.0, name


def write_told(data: Dataset, path: Path) -> None:
    """Write what a site tells."""
    write_json(path, tell(data))


def read_told(path: Path) -> dict[str, Any]:
    """Read what a site told."""
    return _read(path, TOLD, "made by 'polyfed form tell'")


def write_agreed(agreed: Agreed, path: Path) -> None:
    """Write what all agreed on."""
    names, task = list(agreed.class_names), describe(agreed.task)
    write_json(path, {"what": AGREED, "form": agreed.form.dump(), "class_names": names, "task": task})


def read_agreed(path: Path) -> Agreed:
    """Read what all agreed on."""
    found = _read(path, AGREED, "made by 'polyfed form agree'")
    return Agreed(Form.load(found["form"]), tuple(found["class_names"]), from_description(found["task"]))


def _read(path: Path, what: str, made: str) -> dict[str, Any]:
    if not path.is_file():
        raise InputError(f"There is no file {path}: give one {made}.")
    found = read_json(path)
    if not isinstance(found, dict) or found.get("what") != what:
        raise InputError(f"{path} is not {what}: give a file {made}.")
    return found
