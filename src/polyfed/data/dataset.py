"""What a data set is here, and every check that it must pass before anything trains on it."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from polyfed.core.errors import InputError
from polyfed.core.samples import Samples, Scaling
from polyfed.core.shape import InputShape
from polyfed.core.task import CLASSIFICATION, Regression, Task, describe
from polyfed.data.form import Form, Raw
from polyfed.data.labels import label_array
from polyfed.data.targets import make_targets

MEASURED = ("table", "features")  # kinds whose scale is measured again where rows are kept apart
CONSTANT = 1e-12  # a deviation below it is that of one value
LARGEST = float(np.finfo(np.float32).max)  # a larger number is infinite once it is stored


def build(
    name: str,
    train: tuple[Tensor, Any],
    test: tuple[Tensor, Any],
    *,
    class_names: Sequence[str] | None = None,
    num_classes: int | None = None,
    columns: Mapping[str, np.ndarray] | None = None,
    scaling: Scaling | None = None,
    divisor: float | None = None,
    normalize: bool = True,
    notes: Sequence[str] = (),
    features: Sequence[str] = (),
    task: Task = CLASSIFICATION,
    form: Form | None = None,
    learned: bool = False,
) -> Dataset:
    """Check inputs and labels and make a data set of them.

    Parameters
    ----------
    name
        What tables and messages call it.
    train, test
        Inputs as stored (images uint8 or float NCHW, or a feature table) and labels: integers or strings.
    class_names
        Names of the classes 0..C-1, where they are known.
    num_classes
        C, where it is known; otherwise the classes are the labels that occur in training.
    columns
        Further values per training row.
    scaling
        How stored values become inputs; None: per-channel mean and standard deviation of the training part.
    divisor
        What stored values are divided by, where it is known; otherwise bytes are divided by 255.
    normalize
        False leaves out mean and standard deviation.
    notes
        What was done to the data that a reader should know.
    features
        Names of the features of a table.
    task
        What the labels mean.
    form
        What the inputs are, and how raw rows became them; None: to be seen from their shape.
    learned
        The form was learned from these training rows, not given.

    Raises
    ------
    InputError
        If the parts are empty or of different lengths or shapes, if inputs are not finite, or labels not usable.
    """
    parts = {f"the training set of '{name}'": train, f"the test set of '{name}'": test}
    for part, (x, y) in parts.items():
        check_part(part, x, y)
    if train[0].shape[1:] != test[0].shape[1:]:
        raise InputError(
            f"Samples of '{name}' have shape {tuple(train[0].shape[1:])} in the training set but "
            f"{tuple(test[0].shape[1:])} in the test set: bring them to one shape (for images: resize=(height, width))."
        )
    _check_units(name, train[0], test[0])
    given = {part: label_array(labels, part) for part, (_, labels) in parts.items()}
    numbered = make_targets(given, task, class_names, num_classes, normalize)
    (train_y, test_y), names = numbered.parts, numbered.names
    for column, values in (columns or {}).items():
        if len(values) != len(train_y):
            raise InputError(f"Column '{column}' of '{name}' has {len(values)} values for {len(train_y)} rows.")
    if task == CLASSIFICATION and len(names) == 1:
        notes = (*notes, f"all labels are '{names[0]}', so that there is nothing to tell apart")
    form = form or form_of(train[0], test[0])
    measured = ["scale"] if scaling is None and normalize and form.kind in MEASURED else []
    measured += ["targets"] if isinstance(task, Regression) and not task.center and normalize else []
    if scaling is None:
        plain = Scaling(divisor=divisor or usual_divisor(train[0]))
        scaling = measure(train[0], divisor, form) if normalize else plain
    dataset = Dataset(
        name=name,
        train=Samples(train[0], train_y, scaling=scaling),
        test=Samples(test[0], test_y, scaling=scaling),
        num_classes=len(names),
        class_names=names,
        input_shape=form.shape(train[0]),
        columns=dict(columns or {}),
        fingerprint="",
        notes=(*notes, *numbered.notes),
        features=tuple(features),
        task=numbered.task,
        form=form,
        measured=(*measured, *(["fill"] if learned and any(column.gaps for column in form.columns) else [])),
    )
    return replace(dataset, fingerprint=content_hash(dataset))


def plural(task: Task) -> str:
    """Return what the outputs of a task are, in words."""
    return "classes" if task == CLASSIFICATION else f"{task.noun}s"


def form_of(x: Tensor, x_test: Tensor | None = None) -> Form:
    """Say what inputs are that came as arrays, from their shape and type."""
    if x.dtype == torch.int64:
        parts = [part for part in (x, x_test) if part is not None]
        return Form("tokens", length=x.shape[1], ids=max(int(part.max()) for part in parts if len(part)) + 1)
    return Form({4: "image", 3: "signal"}.get(x.dim(), "features"), white=white_of(x))


def white_of(x: Tensor) -> float:
    """Return what the 255 of a byte is in images of floats: 1 or 255; 0 where they are neither shares nor bytes."""
    if x.dim() != 4 or not x.is_floating_point() or not x.numel() or float(x.min()) < 0:
        return 0.0
    largest = float(x.max())
    if largest <= 1:
        return 1.0
    return 255.0 if largest <= 255 and bool((x == x.round()).all()) else 0.0


def how_to_resize(shape: Sequence[int]) -> str:
    """Return advice for samples of different shapes, where they are images."""
    return " (resize=(height, width))" if len(shape) == 3 else ""


def check_part(what: str, x: Tensor | Raw, labels: Any) -> None:
    """Refuse a part that is empty, has not one label for each input, or inputs that are not finite."""
    if len(x) == 0:
        raise InputError(f"{_capital(what)} is empty: give at least one sample.")
    if len(x) != len(labels):
        raise InputError(f"{_capital(what)} has {len(x)} inputs but {len(labels)} labels: give one for each.")
    check_finite(x, what)


def measure(x: Tensor, divisor: float | None = None, form: Form | None = None) -> Scaling:
    """Return the scaling that gives each channel (or feature) mean 0 and standard deviation 1 over these rows.

    Bytes are counted in a histogram, so that the result is exact and the same on every machine. Token ids, and what is
    0 or 1 in a table, stay as they are.
    """
    divisor = divisor or usual_divisor(x)
    if x.dtype == torch.int64:
        return Scaling()
    numbers = [] if form is None else [column for column in form.columns if column.kind == "number"]
    if numbers and all(column.spread is not None for column in numbers):  # agreed on with others
        rest = x.shape[1] - len(numbers)
        mean, spread = [column.center for column in numbers], [column.spread or 1.0 for column in numbers]
        return Scaling((*mean, *[0.0] * rest), (*spread, *[1.0] * rest), divisor)
    if form is not None and form.columns and form.numbers < x.shape[1]:
        rest = x.shape[1] - form.numbers
        part = measure(x[:, : form.numbers], divisor) if form.numbers else Scaling((), (), divisor)
        return Scaling((*part.mean, *[0.0] * rest), (*part.std, *[1.0] * rest), divisor)
    channels = x.shape[1]
    if x.dtype == torch.uint8 and channels <= 4:
        values = np.arange(256, dtype=np.float64) / divisor
        counts = np.stack([np.bincount(x[:, c].reshape(-1).numpy(), minlength=256) for c in range(channels)])
        mean = counts @ values / counts.sum(1)
        variance = (counts * (values[None] - mean[:, None]) ** 2).sum(1) / counts.sum(1)
    else:
        flat = x.numpy().reshape(len(x), channels, -1)
        mean = flat.mean(axis=(0, 2), dtype=np.float64) / divisor
        variance = flat.var(axis=(0, 2), dtype=np.float64) / divisor**2
    deviation = np.sqrt(variance)
    deviation[deviation < CONSTANT] = 1.0  # a constant channel is shifted, not divided by nothing
    return Scaling(tuple(mean.tolist()), tuple(deviation.tolist()), divisor)


def usual_divisor(x: Tensor) -> float:
    """Return what stored values are divided by when nothing else is known: bytes by 255."""
    return 255.0 if x.dtype == torch.uint8 else 1.0


def content_hash(dataset: Dataset) -> str:
    """Return a hash over everything that training can see: inputs, labels, class names, scaling and columns."""
    digest = hashlib.sha256()
    for samples in (dataset.train, dataset.test):
        _feed(digest, samples)
    digest.update(repr((dataset.class_names, dataset.train.scaling, sorted(dataset.columns))).encode())
    if dataset.task != CLASSIFICATION:
        digest.update(repr(describe(dataset.task)).encode())
    if dataset.input_shape.words or dataset.input_shape.groups:
        digest.update(repr(dataset.input_shape.dump()).encode())
    for key in sorted(dataset.columns):
        digest.update("\0".join(map(str, dataset.columns[key].tolist())).encode())
    return digest.hexdigest()


def samples_hash(samples: Samples) -> str:
    """Return a hash over inputs, labels and scaling."""
    digest = hashlib.sha256(repr(samples.scaling).encode())
    _feed(digest, samples)
    return digest.hexdigest()


def _feed(digest: hashlib._Hash, samples: Samples) -> None:
    for tensor in (samples.x, samples.y):
        rows = tensor if samples.index is None else tensor[samples.index]
        digest.update(f"{rows.dtype}{tuple(rows.shape)}".encode())
        digest.update(rows.contiguous().numpy().data)


def _capital(what: str) -> str:
    return what[0].upper() + what[1:]


def _check_units(name: str, train: Tensor, test: Tensor) -> None:
    """Refuse bytes beside floats, which no common divisor serves; whole numbers kept as floats are in one unit."""
    if train.dtype == test.dtype:
        return
    floats, whole = (train, test) if train.is_floating_point() else (test, train)
    if bool((floats == floats.round()).all()) and (floats.max() > 1 or whole.max() <= 1):
        return
    kinds = {True: "floats", False: "bytes (uint8)"}
    raise InputError(
        f"The test set of '{name}' holds {kinds[test.is_floating_point()]} but its training set holds "
        f"{kinds[train.is_floating_point()]}: give both as bytes or both as floats."
    )


def check_finite(x: Tensor | Raw, what: str) -> None:
    """Refuse inputs that are not finite, with the first such row; an empty cell of a table is none of them."""
    names: list[str] = []
    if isinstance(x, Raw):
        numbers = {name: values for name, values in x.columns.items() if values.dtype.kind == "f"}
        names = [f"'{name}'" for name in numbers]
        wrong = np.stack([np.abs(values) > LARGEST for values in numbers.values()] or [np.zeros(len(x), bool)], axis=1)
    elif x.is_floating_point():
        wrong = ~torch.isfinite(x).reshape(len(x), -1).cpu().numpy()
        names = [str(place) for place in range(wrong.shape[1])] if x.dim() == 2 else []
    else:
        return
    rows = np.flatnonzero(wrong.any(axis=1))
    if len(rows):
        where = f", in column {names[int(wrong[rows[0]].argmax())]}" if names else ""
        many = "such row" if len(rows) == 1 else "such rows"
        raise InputError(
            f"Row {rows[0]} of {what} holds a value that is NaN or infinite ({len(rows)} {many}){where}: remove or "
            f"repair {'it' if len(rows) == 1 else 'them'}."
        )


@dataclass(frozen=True)
class Dataset:
    """A data set with its official test set kept apart.

    `columns` holds further values per training row (hospital, writer), `fingerprint` is a hash of the content
    that a resumed run compares, and `recipe` says how `load` was called (`source` is None when the data came
    as objects and cannot be loaded again by name). `notes` says what was done to labels and columns,
    `features` which columns of a table the inputs are, and `form` how raw rows become inputs. `measured` says what came
    from all training rows: `scale` of the inputs, `fill` of empty cells, `targets` of a regression.
    """

    name: str
    train: Samples
    test: Samples
    num_classes: int
    class_names: tuple[str, ...]
    input_shape: InputShape
    columns: dict[str, np.ndarray]
    fingerprint: str
    recipe: dict[str, Any] = field(default_factory=lambda: {"source": None})
    notes: tuple[str, ...] = ()
    features: tuple[str, ...] = ()
    task: Task = CLASSIFICATION
    form: Form = field(default_factory=Form, repr=False)
    measured: tuple[str, ...] = ()

    def __repr__(self) -> str:
        return (
            f"Dataset({self.name}: {len(self.train)} training and {len(self.test)} test samples, "
            f"{self.num_classes} {plural(self.task)}, shape {self.input_shape}"
            f"{''.join(f'; {note}' for note in self.notes)})"
        )
