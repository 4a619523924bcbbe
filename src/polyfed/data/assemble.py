"""From what was read, tables, pictures or arrays, to one data set: a test part, one size, numbered classes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from polyfed.core.errors import InputError
from polyfed.core.rng import numpy_generator
from polyfed.core.samples import Scaling
from polyfed.core.task import CLASSIFICATION, as_task
from polyfed.data.catalog import (
    Known,
)
from polyfed.data.columns import Part, convert, kind_of, same_features
from polyfed.data.dataset import Dataset, build, check_part, form_of
from polyfed.data.decode import decode_images, fit_images, is_picture, resize_images
from polyfed.data.form import Form, Raw, learn_form
from polyfed.data.labels import are_names, number_classes, spelled_alike, with_names
from polyfed.data.subsets import stratified_holdout
from polyfed.data.tables import Table
from polyfed.data.texts import Words

HOLDOUT = 0.2  # share of a set without a test part that becomes its test part


def from_tables(
    name: str, tables: list[Table], options: dict[str, Any], seed: int, known: Known | None = None
) -> Dataset:
    """Return the data set of a training table and, where there is one, a test table."""
    picks: dict[str, Any] = {key: options.get(key) for key in ("inputs", "label", "resize", "kind")}
    for key in ("inputs", "label"):
        if known is not None and picks[key] is None and getattr(known, key) in tables[0].rows.column_names:
            picks[key] = getattr(known, key)
    if known is not None and known.group is not None:
        options = {**options, "columns": [*options.get("columns", ()), known.group]}
        picks["kind"] = picks["kind"] or known.kind
    parts = [convert(tables[0], columns=options.get("columns", ()), drop=options.get("drop", ()), **picks)]
    picks["inputs"] = parts[0].features or picks["inputs"]  # the same features in the same order
    picks["kind"] = kind_of(parts[0], picks["kind"])
    for table in tables[1:]:
        present = set(table.rows.column_names)
        beside: dict[str, Any] = {
            key: [name for name in options.get(key, ()) if name in present] for key in ("columns", "drop")
        }
        parts.append(convert(table, **beside, **picks))
    scaling = None
    if known is not None:
        options = {"num_classes": known.classes, **options} if picks["label"] == known.label else options
        x = parts[0].inputs
        if known.mean and known.std and options.get("normalize", True) and isinstance(x, torch.Tensor):
            scaling = Scaling(known.mean, known.std, 255.0) if len(known.mean) == x.shape[1] else None
    return put_together(name, parts[0], parts[1] if len(parts) > 1 else None, options, seed, scaling)


def pictures_in(folder: Path) -> dict[str, list[Path]]:
    """Return the images of every class: those below a folder of its name."""
    groups = {}
    for group in sorted(entry for entry in folder.iterdir() if entry.is_dir()):
        files = sorted(file for file in group.rglob("*") if is_picture(file.name))
        if files:
            groups[group.name] = files
    return groups


def from_pictures(
    name: str, train: dict[str, list[Path]], test: dict[str, list[Path]], options: dict[str, Any], seed: int
) -> Dataset:
    """Return the data set of images by class."""
    classes, size = tuple(sorted(train)), options.get("resize")
    parts = [
        part_of_pictures(groups, f"{name} ({what})" if test else name, classes, size)
        for what, groups in (("train", train), ("test", test))
        if groups
    ]
    return put_together(name, parts[0], parts[1] if len(parts) > 1 else None, options, seed)


def part_of_pictures(
    groups: dict[str, list[Path]], what: str, classes: tuple[str, ...], resize: tuple[int, int] | None = None
) -> Part:
    """Return the images of each class, decoded."""
    files = [file for group in groups.values() for file in group]
    labels = np.array([label for label, group in groups.items() for _ in group])
    notes: list[str] = []
    x = decode_images(files, what, resize, notes)
    return Part(x, labels, classes, {}, notes=tuple(notes))


def put_together(
    name: str, train: Part, test: Part | None, options: dict[str, Any], seed: int, scaling: Scaling | None = None
) -> Dataset:
    """Put the parts together: hold out a test part if there is none, one number of channels, one size."""
    notes, task = train.notes, as_task(options.get("task"))
    if task == CLASSIFICATION and not options.get("class_names") and (told := spelled_alike(train.class_names or ())):
        notes += (told,)  # of folders; of labels it is said where they become classes
    class_names, num_classes = options.get("class_names") or train.outputs(task), options.get("num_classes")
    both = [part.labels for part in (train, test) if part is not None]
    if task == CLASSIFICATION and are_names(both, options.get("class_names") or ()):
        train = replace(train, labels=train.labels.astype(np.int64).astype(str))
        test = None if test is None else replace(test, labels=test.labels.astype(np.int64).astype(str))
    if test is None:  # what was read is more than what trains: a note counts all of it
        notes = tuple(note.replace(f"the training set of '{name}'", f"'{name}'") for note in notes)
    if test is None and task != CLASSIFICATION:
        train, test = _hold_out(name, train, seed, classes=False)
    elif test is None:
        whole = f"the training set of '{name}'"
        check_part(whole, train.inputs, train.labels)
        numbered = number_classes({whole: train.labels}, class_names, num_classes)  # before a class may lose its rows
        train, class_names = replace(train, labels=numbered.parts[0].numpy()), numbered.names
        notes += numbered.notes
        train, test = _hold_out(name, train, seed)
    elif train.class_names and test.class_names and train.class_names != test.class_names:  # numbers mean other classes
        train, test = _by_name(train, f"the training set of '{name}'"), _by_name(test, f"the test set of '{name}'")
    same_features(test.features, train.features, f"the test set of '{name}'")
    x, x_test, form, more = encoded(train, test, options, name)
    notes += more
    if x.dim() == x_test.dim() == 4 and {x.shape[1], x_test.shape[1]} == {1, 3}:
        x, x_test = (fit_images(part, (3, *part.shape[2:]), name) for part in (x, x_test))
    if "resize" in options:
        if x.dim() != 4:
            raise InputError(f"'{name}' does not hold images, so resize={options['resize']} cannot be applied.")
        x, x_test = resize_images(x, options["resize"]), resize_images(x_test, options["resize"])
        form = replace(form, resize=True)
    return build(
        name,
        (x, train.labels),
        (x_test, test.labels),
        class_names=class_names,
        num_classes=num_classes,
        columns=train.columns,
        scaling=scaling,
        divisor=train.divisor,
        normalize=options.get("normalize", True),
        notes=notes,
        features=train.features,
        task=task,
        form=form,
        learned="form" not in options,
    )


def encoded(
    train: Part, test: Part, options: dict[str, Any], name: str
) -> tuple[torch.Tensor, torch.Tensor, Form, tuple[str, ...]]:
    """Return the stored inputs of both parts, the form that training gives them, and what it does."""
    x, x_test = train.inputs, test.inputs
    if isinstance(x, Raw) != isinstance(x_test, Raw) or (isinstance(x, Raw) and x.kind != x_test.kind):  # type: ignore[union-attr]
        raise InputError(f"The test set of '{name}' holds another kind of inputs than its training set.")
    if not isinstance(x, Raw):
        assert not isinstance(x_test, Raw)
        return x, x_test, form_of(x, x_test), ()
    assert isinstance(x_test, Raw)
    whole, held = f"the training set of '{name}'", f"the test set of '{name}'"
    form: Form | None = options.get("form")
    notes: tuple[str, ...] = ()
    if form is None:
        words = Words.given(options["tokenizer"]) if "tokenizer" in options else None
        form, notes = learn_form(x, whole, words, options.get("length"))
    (made, first), (made_test, second) = form.encode(x, whole), form.encode(x_test, held)
    return made, made_test, form, (*notes, *first, *second)


def _by_name(part: Part, what: str) -> Part:
    assert part.class_names is not None
    return replace(part, labels=with_names(part.labels, part.class_names, what))


def _hold_out(name: str, part: Part, seed: int, classes: bool = True) -> tuple[Part, Part]:
    if len(part.labels) < 2:
        raise InputError(
            f"'{name}' has {len(part.labels)} samples and no test part: give test=... "
            "(--set data.test=FILE) or more samples."
        )
    labels = part.labels if classes else np.zeros(len(part.labels))
    held = stratified_holdout(labels, HOLDOUT, numpy_generator(seed, "test"))
    kept = np.setdiff1d(np.arange(len(part.labels)), held)
    return tuple(  # type: ignore[return-value]
        replace(
            part,
            inputs=part.inputs.take(rows) if isinstance(part.inputs, Raw) else part.inputs[torch.from_numpy(rows)],
            labels=part.labels[rows],
            columns={key: values[rows] for key, values in part.columns.items()},
        )
        for rows in (kept, held)
    )
