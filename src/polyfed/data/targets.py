"""What is to be predicted, for each task: class numbers, zeros and ones, or values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from polyfed.core.errors import InputError
from polyfed.core.task import CLASSIFICATION, Regression, Task
from polyfed.data.labels import number_classes


@dataclass(frozen=True)
class Targets:
    """The targets of each part, a name for each output, the task, and what a reader should know."""

    parts: tuple[Tensor, ...]
    names: tuple[str, ...]
    task: Task
    notes: tuple[str, ...] = ()


def make_targets(
    parts: Mapping[str, np.ndarray],
    task: Task,
    names: Sequence[str] | None = None,
    number: int | None = None,
    normalize: bool = True,
) -> Targets:
    """Turn the labels of all parts into what a task learns.

    Parameters
    ----------
    parts
        Labels (`label_array`) by what messages call them, the training part first.
    task
        What they mean.
    names, number
        Of the classes, labels or targets, where they are known.
    normalize
        Let a regression learn targets of mean 0 and standard deviation 1 over the training part, unless it says
        otherwise.

    Raises
    ------
    InputError
        Naming the part and the row that does not fit the task.
    """
    if task == CLASSIFICATION:
        numbered = number_classes(parts, names, number)
        return Targets(numbered.parts, numbered.names, task, numbered.notes)
    rows = {what: _columns(what, values, task) for what, values in parts.items()}
    first = next(iter(rows.values()))
    width = first.shape[1]
    for what, values in rows.items():
        if values.shape[1] != width:
            raise InputError(f"Rows of {what} have {values.shape[1]} {task.noun}s, but {width} are expected.")
    for count, said in ((number, "num_classes"), (len(names) if names else None, "class_names")):
        if count is not None and count != width:
            raise InputError(f"{said} speaks of {count} {task.noun}s, but rows have {width}.")
    if isinstance(task, Regression):
        task = with_units(task, first) if normalize or task.center else task
    called = tuple(names or ()) or tuple(str(column) for column in range(width))
    return Targets(tuple(torch.from_numpy(values.astype(np.float32)) for values in rows.values()), called, task)


def unlabeled(samples: int, task: Task, outputs: int) -> Tensor:
    """Return the targets of samples that have none (public data as inputs alone)."""
    if task == CLASSIFICATION:
        return torch.full((samples,), -1)
    return torch.full((samples, outputs), float("nan"))


def groups(targets: Tensor, task: Task) -> np.ndarray:
    """Return class numbers by which rows are dealt or held out evenly; without classes all rows are of one group."""
    return targets.numpy() if task == CLASSIFICATION else np.zeros(len(targets), dtype=np.int64)


def evenly(kinds: np.ndarray, share: float, rng: np.random.Generator) -> np.ndarray:
    """Return sorted rows, a share of all in total and of each kind within one; at least one, and never all."""
    wanted = min(max(1, round(share * len(kinds))), len(kinds) - 1)
    order = np.lexsort((rng.random(len(kinds)), kinds))  # by kind, at random within
    steps = (np.arange(wanted) + rng.random()) * len(kinds) / wanted
    return np.sort(order[np.minimum(steps.astype(np.int64), len(kinds) - 1)])


def _columns(what: str, values: np.ndarray, task: Task) -> np.ndarray:
    """Return numbers `[rows, outputs]`."""
    if values.dtype.kind not in "buif":
        raise InputError(f"The labels of {what} are words, but task='{task.name}' needs numbers.")
    table = values.astype(np.float64).reshape(len(values), -1)
    fits = np.isfinite(table) if isinstance(task, Regression) else np.isin(table, (0.0, 1.0))
    if not fits.all():
        row, column = (int(place[0]) for place in np.nonzero(~fits))
        needs = "a finite number" if isinstance(task, Regression) else "0 or 1"
        raise InputError(
            f"Row {row} of {what} has {table[row, column]:g} as {task.noun} {column}: task='{task.name}' needs {needs}."
        )
    return table


def with_units(task: Regression, train: np.ndarray) -> Regression:
    """Return a regression that learns targets of mean 0 and deviation 1 over these rows, unless it says otherwise."""
    if task.center and len(task.center) != train.shape[1]:
        raise InputError(f"Regression has {len(task.center)} centers, but rows have {train.shape[1]} targets.")
    if task.center:
        return task
    deviation = train.std(axis=0)
    deviation[deviation < 1e-12] = 1.0  # a constant target is shifted, not divided by nothing
    return replace(task, center=tuple(train.mean(axis=0).tolist()), spread=tuple(deviation.tolist()))
