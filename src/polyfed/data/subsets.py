"""Parts of a data set: so many rows, some of the classes, a feature set aside, rows held out."""

from __future__ import annotations

from dataclasses import replace
from numbers import Integral

import numpy as np
import torch

from polyfed.core.errors import InputError
from polyfed.core.rng import numpy_generator
from polyfed.core.samples import Samples
from polyfed.core.task import CLASSIFICATION
from polyfed.data.dataset import Dataset, content_hash
from polyfed.data.form import notes_without


def subset(dataset: Dataset, limit: int | tuple[int | None, int | None] | None, seed: int) -> Dataset:
    """Return a seeded random subset of at most so many training and test rows (one number holds for both).

    Raises
    ------
    InputError
        If a limit is below one.
    """
    if limit is None:
        return dataset
    pair = tuple(limit) if isinstance(limit, tuple | list) else (limit, limit)
    for number in pair if len(pair) == 2 else (-1,):
        if number is not None and (isinstance(number, bool) or not isinstance(number, Integral) or number < 1):
            raise InputError(f"limit={limit!r} is not possible: give a number of rows of at least 1, or two of them.")
    train, test = pair
    train_rows = _draw_rows(len(dataset.train), train, seed, 0)
    test_rows = _draw_rows(len(dataset.test), test, seed, 1)
    smaller = replace(
        dataset,
        train=_copy_rows(dataset.train, train_rows),
        test=_copy_rows(dataset.test, test_rows),
        columns={key: values[train_rows] for key, values in dataset.columns.items()},
    )
    return replace(smaller, fingerprint=content_hash(smaller))


def only_classes(dataset: Dataset, first: int, last: int) -> Dataset:
    """Return the samples of the classes `first` to `last`, numbered from 0.

    Raises
    ------
    InputError
        If there are no such classes.
    """
    if dataset.task != CLASSIFICATION:
        raise InputError(
            f"'{dataset.name}' with task='{dataset.task.name}' has no classes to choose {first}-{last} from."
        )
    if not 0 <= first <= last < dataset.num_classes:
        raise InputError(
            f"'{dataset.name}' has the classes 0 to {dataset.num_classes - 1}, so {first}-{last} is not possible."
        )
    parts = []
    kept_rows = np.empty(0, dtype=np.int64)
    for samples in (dataset.train, dataset.test):
        labels = samples.labels()
        kept = torch.nonzero((labels >= first) & (labels <= last)).flatten()
        kept_rows = kept.numpy() if samples is dataset.train else kept_rows
        rows = samples.rows(kept)
        parts.append(replace(samples, x=samples.x[rows], y=samples.y[rows] - first, index=None))
    smaller = replace(
        dataset,
        name=f"{dataset.name}/{first}-{last}",
        train=parts[0],
        test=parts[1],
        num_classes=last - first + 1,
        class_names=dataset.class_names[first : last + 1],
        columns={key: values[kept_rows] for key, values in dataset.columns.items()},
    )
    return replace(smaller, fingerprint=content_hash(smaller))


def set_aside(dataset: Dataset, column: str) -> Dataset:
    """Return the data set with a feature as a further column instead: what groups the rows is nothing to learn from."""
    if column in dataset.columns or column not in dataset.features:
        return dataset
    if len(dataset.features) == 1:
        raise InputError(f"'{column}' is the only feature of '{dataset.name}': nothing is left to learn from.")
    form, values, _, kept = dataset.form.without(column, dataset.train.x, dataset.test.x)
    old = dataset.train.scaling
    scaling = old
    if len(old.mean) == dataset.train.x.shape[1]:
        places = kept.tolist()
        scaling = replace(old, mean=tuple(old.mean[p] for p in places), std=tuple(old.std[p] for p in places))
    train = replace(dataset.train, x=dataset.train.x[:, kept].contiguous(), scaling=scaling)
    smaller = replace(
        dataset,
        train=train,
        test=replace(dataset.test, x=dataset.test.x[:, kept].contiguous(), scaling=scaling),
        columns={**dataset.columns, column: values},
        features=tuple(name for name in dataset.features if name != column),
        form=form,
        input_shape=form.shape(train.x),
        notes=(*notes_without(dataset.notes, column), f"column '{column}' divides the rows and is no feature"),
    )
    return replace(smaller, fingerprint=content_hash(smaller))


def stratified_holdout(labels: np.ndarray, fraction: float, rng: np.random.Generator) -> np.ndarray:
    """Return sorted rows to hold out: `fraction` of each class, by whole samples, at least one row in all.

    A class with a single sample stays with the rest.
    """
    taken = []
    for label in np.unique(labels):
        rows = rng.permutation(np.flatnonzero(labels == label))
        taken.append(rows[: min(round(fraction * len(rows)), len(rows) - 1)])
    held = np.concatenate(taken)
    if len(held) == 0:
        held = rng.permutation(len(labels))[:1]
    return np.sort(held)


def _draw_rows(total: int, limit: int | None, seed: int, stream: int) -> np.ndarray:
    if limit is None or limit >= total:
        return np.arange(total)
    return np.sort(numpy_generator(seed, "limit", stream).permutation(total)[:limit])


def _copy_rows(samples: Samples, rows: np.ndarray) -> Samples:
    """Copy the rows, so that a small subset does not keep the whole set in memory."""
    if len(rows) == len(samples):
        return samples
    index = samples.rows(torch.from_numpy(rows))
    return replace(samples, x=samples.x[index], y=samples.y[index], index=None)
