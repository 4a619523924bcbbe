"""Labels of any kind (names, numbers from 1, numbers with gaps) become classes 0..C-1, the same in every part."""

from __future__ import annotations

import numbers
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from polyfed.core.errors import InputError
from polyfed.data.tables import Table

LABELS = ("label", "labels", "fine_label", "target", "class", "y")  # what label columns are called
CLASSES, ALIKE = "classes whose names", "differ only by case or blanks"  # how a note on spellings begins
FEW = 8  # so many labels are listed in a note; more are counted


def label_array(labels: Any, what: str) -> np.ndarray:
    """Return labels as one row of numbers or strings, or as rows of numbers where there are several for a sample.

    Raises
    ------
    InputError
        If a label is missing, there is not one for each row, or they are neither numbers nor strings.
    """
    if labels is None:
        raise InputError(f"The labels of {what} are missing: give a pair of arrays (inputs, labels).")
    try:
        array = labels.detach().cpu().numpy() if isinstance(labels, Tensor) else np.asarray(labels)
    except ValueError as error:  # rows of different lengths
        raise InputError(f"The labels of {what} are uneven rows: give one class number per row.") from error
    if array.ndim == 2 and array.shape[1] == 1:
        array = array[:, 0]
    if array.ndim > 2:
        raise InputError(
            f"The labels of {what} have shape {array.shape}: give one class number per row; a class for every pixel "
            "(segmentation) is nothing that can be learned here."
        )
    if array.ndim not in (1, 2) or (array.ndim == 2 and array.dtype.kind not in "buif"):
        raise InputError(f"The labels of {what} have shape {array.shape}: give one class number per row.")
    if array.dtype.kind == "O":
        values = array.tolist()
        refuse_gaps([value is None or (isinstance(value, float) and np.isnan(value)) for value in values], what)
        array = np.array(values if all(isinstance(value, numbers.Real) for value in values) else list(map(str, values)))
    if array.dtype.kind not in "buifUS":
        raise InputError(f"The labels of {what} are of type {array.dtype}: give class numbers or strings.")
    return array.astype(str) if array.dtype.kind in "US" else array


def refuse_gaps(missing: Sequence[bool], what: str, where: str = "") -> None:
    """Refuse rows without a label, with the first one and how many there are."""
    if any(missing):
        number = sum(missing)
        told = f" ({number} such rows): remove these rows" if number > 1 else ": remove the row"
        raise InputError(f"Row {list(missing).index(True)} of {what} has no label{where}{told}.")


def label_columns(label: str | Sequence[str] | None, present: Collection[str]) -> list[str]:
    """Return the label columns that somebody named: one, several, or `a,b` in one text.

    Raises
    ------
    InputError
        If one is named twice.
    """
    if label is None:
        return []
    if isinstance(label, str):
        names = [label] if label in present else [name.strip() for name in label.split(",")]
    else:
        names = list(label)
    for name in names:
        if names.count(name) > 1:
            raise InputError(f"The label column '{name}' is named twice: name each once.")
    return names


def find_label(table: Table) -> str:
    """Return the column that is named like a label, or the only one whose classes have names."""
    present = table.rows.column_names
    for name in LABELS:
        if name in present:
            return name
    if len(table.class_names) == 1:
        return next(iter(table.class_names))
    raise InputError(
        f"{table.what} has no column that looks like a label; its columns are {', '.join(present)}: "
        "pass label='...' (--label NAME) with the right one."
    )


def read_labels(table: Table, names: Sequence[str]) -> np.ndarray:
    """Return one label for each row, or rows of numbers where there are several label columns."""
    found = []
    for name in names:
        column = table.rows[name]
        if column.null_count:
            refuse_gaps([value is None for value in column.to_pylist()], table.what, f" in column '{name}'")
        found.append(label_array(column.to_pylist(), table.what))
        if len(names) > 1 and (found[-1].ndim > 1 or found[-1].dtype.kind not in "buif"):
            raise InputError(
                f"The label column '{name}' of {table.what} holds no single numbers: of several label columns each "
                "holds 0 and 1 (task='multilabel') or values (task='regression')."
            )
    return found[0] if len(found) == 1 else np.stack([labels.astype(np.float64) for labels in found], axis=1)


def number_classes(
    parts: Mapping[str, np.ndarray], class_names: Sequence[str] | None = None, num_classes: int | None = None
) -> Numbered:
    """Give the classes numbers from 0, in all parts alike.

    Declared classes (by names or number) keep their numbers, whether all of them occur or not; where the labels go
    from 1 to the number of classes, they count from 1. Otherwise the classes are the labels of the first part.

    Parameters
    ----------
    parts
        The labels of each part (`label_array`) by what messages call it, the training part first.
    class_names, num_classes
        The classes, where they are known.

    Raises
    ------
    InputError
        If a label is outside the declared classes, never occurs in training, is negative or not a whole number.
    """
    _check_declared(class_names, num_classes)
    for what, labels in parts.items():
        check_single(labels, what)
    if not class_names and num_classes is None and all(labels.dtype.kind == "b" for labels in parts.values()):
        parts = {what: labels.astype(str) for what, labels in parts.items()}  # the classes are called False and True
    if any(labels.dtype.kind == "U" for labels in parts.values()):
        given = {what: labels.astype(str) for what, labels in parts.items()}
        known = np.array(class_names if class_names else np.unique(next(iter(given.values()))))
        _check_known(given, known, declared=bool(class_names))
        order = np.argsort(known)
        numbered = [order[np.searchsorted(known, labels, sorter=order)] for labels in given.values()]
        return _made(
            numbered, tuple(known.tolist()), num_classes, None if class_names else spelled_alike(known.tolist())
        )
    whole = {what: _whole_numbers(what, labels) for what, labels in parts.items()}
    everything = np.concatenate(list(whole.values()))
    classes = num_classes or (len(class_names) if class_names else None)
    if classes is None:
        return _undeclared(whole)
    if everything.min() >= 1 and everything.max() == classes:
        names = tuple(class_names or ())[:classes]
        names += tuple(str(label) for label in range(len(names) + 1, classes + 1))
        return _made([labels - 1 for labels in whole.values()], names, classes, _note(np.arange(1, classes + 1)))
    for what, labels in whole.items():
        wrong = labels >= classes
        if wrong.any():
            row = int(wrong.argmax())
            raise InputError(
                f"Label {labels[row]} in row {row} of {what} is outside 0..{classes - 1}: "
                "number the classes from 0 or pass num_classes."
            )
    return _made(list(whole.values()), tuple(class_names or ()), classes)


def are_names(parts: Sequence[np.ndarray], names: Sequence[str]) -> bool:
    """Tell whether numbers are classes by their names: grades 1 to 3 are so called, also where nobody has a 3."""
    plain = isinstance(names, list | tuple) and names and all(str(name).isdecimal() for name in names)
    if not plain or list(names) == [str(number) for number in range(len(names))]:
        return False
    known = [int(name) for name in names]
    return all(labels.dtype.kind in "iuf" and labels.ndim == 1 and np.isin(labels, known).all() for labels in parts)


def check_single(labels: np.ndarray, what: str) -> None:
    """Refuse several labels for a sample, which only other tasks have."""
    if labels.ndim != 1:
        raise InputError(
            f"The labels of {what} have shape {labels.shape}: give one class number per row (argmax of one-hot rows), "
            "or say what they are: task='multilabel' for zeros and ones, task='regression' for values."
        )


def with_names(labels: np.ndarray, class_names: Sequence[str], what: str) -> np.ndarray:
    """Return class numbers as names, so that parts with different lists of classes can be joined."""
    numbered = number_classes({what: labels}, class_names)
    return np.array([numbered.names[label] for label in numbered.parts[0].tolist()])


def joined_names(lists: Sequence[Sequence[str]]) -> tuple[str, ...]:
    """Return all class names of several lists, in the order in which they come (numbers by their value)."""
    names = list(dict.fromkeys(name for names in lists for name in names))
    return tuple(sorted(names, key=int) if all(name.isdecimal() for name in names) else names)


def spelled_alike(
    names: Sequence[str], whose: Mapping[str, Collection[str]] | None = None, what: str = CLASSES, one: str = "class"
) -> str | None:
    """Say which names differ only by case or blanks: probably one class, written in two ways.

    Parameters
    ----------
    names
        All of them.
    whose
        Which of them each party has, so that it can be said where they are.
    what, one
        What is so called, all together and one of them.
    """
    written: dict[str, list[str]] = {}
    for name in names:
        written.setdefault("".join(name.split()).casefold(), []).append(name)

    def told(name: str) -> str:
        where = [party for party, has in (whose or {}).items() if name in has]
        more = ", ..." if len(where) > FEW else ""
        return f"'{name}'" + (f" ({', '.join(where[:FEW])}{more})" if where else "")

    found = [" and ".join(map(told, same)) for same in written.values() if len(same) > 1]
    return f"{what} {ALIKE}: {', '.join(found[:FEW])} (one {one}? write it alike)" if found else None


def _check_declared(class_names: Sequence[str] | None, num_classes: int | None) -> None:
    if isinstance(class_names, str):
        raise InputError(f"class_names='{class_names}' is one text: give a list with a name for each class.")
    if num_classes is not None and (
        isinstance(num_classes, bool) or not isinstance(num_classes, numbers.Integral) or num_classes < 1
    ):
        raise InputError(f"num_classes={num_classes!r} is not possible: give a whole number of at least 1.")
    for name in class_names or ():
        if list(class_names or ()).count(name) > 1:
            raise InputError(f"class_names has '{name}' twice: give every class a name of its own.")
    if num_classes is not None and len(class_names or ()) > num_classes:
        raise InputError(f"There are {len(class_names or ())} class names but num_classes={num_classes}.")


def _check_known(parts: Mapping[str, np.ndarray], known: np.ndarray, declared: bool) -> None:
    for what, labels in parts.items():
        wrong = ~np.isin(labels, known)
        if wrong.any():
            row = int(wrong.argmax())
            label = f"'{labels[row]}'" if labels.dtype.kind == "U" else labels[row]
            if declared:
                raise InputError(f"Label {label} in row {row} of {what} is not one of the classes {', '.join(known)}.")
            raise InputError(
                f"Label {label} in row {row} of {what} never occurs in its training set, so no network can learn it: "
                "correct or remove such rows, or say which classes there are (class_names=..., or num_classes=...)."
            )


def _whole_numbers(what: str, labels: np.ndarray) -> np.ndarray:
    if labels.dtype.kind == "f":
        wrong = ~np.isfinite(labels) | (labels != np.floor(labels))
        if wrong.any():
            row = int(wrong.argmax())
            if np.isnan(labels[row]):
                refuse_gaps(np.isnan(labels).tolist(), what)
            raise InputError(
                f"Label {labels[row]} in row {row} of {what} is not a class number: give whole numbers, or "
                "say task='regression' if values are to be predicted."
            )
    labels = labels.astype(np.int64)
    if (labels < 0).any():
        row = int((labels < 0).argmax())
        raise InputError(f"Label {labels[row]} in row {row} of {what} is negative: number the classes from 0.")
    return labels


def _undeclared(parts: Mapping[str, np.ndarray]) -> Numbered:
    known = np.unique(next(iter(parts.values())))
    _check_known(parts, known, declared=False)
    if np.array_equal(known, np.arange(len(known))):
        return _made(list(parts.values()), (), len(known))
    what, rows = next((what, len(labels)) for what, labels in parts.items())
    if known[-1] - known[0] >= len(known) and 2 * len(known) > rows:
        raise InputError(
            f"The labels of {what} are {len(known)} different numbers in {rows} rows, up to {known[-1]}, which are "
            "not classes: number the classes from 0 without gaps, or pass num_classes."
        )
    names = tuple(str(label) for label in known.tolist())
    return _made([np.searchsorted(known, labels) for labels in parts.values()], names, None, _note(known))


def _note(labels: np.ndarray) -> str:
    listed = labels.tolist()
    if listed[-1] - listed[0] == len(listed) - 1:
        old = f"{listed[0]} to {listed[-1]}"
    else:
        old = ", ".join(map(str, listed[:FEW])) + (f", ... ({len(listed)} in all)" if len(listed) > FEW else "")
    return f"labels {old} are the classes 0 to {len(listed) - 1}"


def _made(
    parts: Sequence[np.ndarray], names: tuple[str, ...], classes: int | None, note: str | None = None
) -> Numbered:
    """Complete the names: a class without one is called by its number."""
    names += tuple(str(label) for label in range(len(names), classes or 0))
    tensors = tuple(torch.from_numpy(np.ascontiguousarray(labels, dtype=np.int64)) for labels in parts)
    return Numbered(tensors, names, () if note is None else (note,))


@dataclass(frozen=True)
class Numbered:
    """The class numbers of each part, the name of each class, and what a reader should know about them."""

    parts: tuple[Tensor, ...]
    names: tuple[str, ...]
    notes: tuple[str, ...]
