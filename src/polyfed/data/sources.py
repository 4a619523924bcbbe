"""`load`: data sets by name, from the Hub, from files, from arrays, from torch."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from polyfed.core.errors import InputError, unknown
from polyfed.core.rng import numpy_generator
from polyfed.core.samples import Scaling
from polyfed.data import hub
from polyfed.data.cache import Store, files_key, name_key
from polyfed.data.catalog import KNOWN, TEST_NAMES, TRAIN_NAMES, Known, folder_name, in_data_root, split_files
from polyfed.data.dataset import Dataset, build, check_part, only_classes, stratified_holdout, subset
from polyfed.data.decode import decode_images, fit_images, resize_images
from polyfed.data.labels import number_classes, with_names
from polyfed.data.objects import part_of
from polyfed.data.tables import Part, Table, convert, read_parquet, same_features

HOLDOUT = 0.2  # share of a set without a test part that becomes its test part
FILES = (".parquet", ".csv", ".tsv", ".json", ".jsonl", ".npy", ".npz", ".txt", ".zip")  # what a Hub id never ends with
PICTURES = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".ppm", ".pgm")
SOME_CLASSES = re.compile(r"(\w+(?::\w+)?)/(\d+)-(\d+)")  # fashion_mnist/5-9: the classes 5 to 9, numbered from 0
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")

PathLike = str | os.PathLike[str]


def load(
    source: Any,
    *,
    test: Any = None,
    path: PathLike | None = None,
    name: str | None = None,
    limit: int | tuple[int | None, int | None] | None = None,
    seed: int = 0,
    resize: int | tuple[int, int] | None = None,
    inputs: str | Sequence[str] | None = None,
    label: str | None = None,
    columns: str | Sequence[str] = (),
    num_classes: int | None = None,
    class_names: Sequence[str] | None = None,
    normalize: bool = True,
    cache: PathLike | bool | None = None,
) -> Dataset:
    """Load a data set.

    A name is looked for in `path`, then in `POLYFED_DATA` (`<name>/<split>.parquet`), the cache of decoded sets,
    the Hub's cache, and on the Hub. Images are decoded once and kept as bytes.

    Parameters
    ----------
    source
        A known name (see `describe_sources`), some classes of one (`fashion_mnist/5-9`), a Hub id `owner/name`,
        a parquet file, a folder of `<split>.parquet` files or of images in class folders, a pair of arrays
        `(inputs, labels)`, a torch or Hugging Face `Dataset`.
    test
        The test part, of the same kind as `source`. Without one, and where the source has none,
        a fifth of the rows is held out, by class and `seed`.
    path
        Where the files of a known name are.
    name
        What tables call the set.
    limit
        At most so many training and test rows, drawn by `seed`; a pair `(train, test)` sets them apart.
    resize
        Height and width (or one number for both) that images are brought to.
    inputs, label, columns
        Names of the input column (or of all features), the label column, and of number columns that are not features
        (tables only). A column named like an identifier, with another number in every row, is not a feature unless
        it is named (`Dataset.notes` says so).
    num_classes, class_names
        The classes, where they are not just the labels that occur in training. Labels that do not count from 0 are
        numbered from 0, with what they were as names (`Dataset.notes` says so).
    normalize
        False: inputs are only divided (bytes by 255), without mean and standard deviation.
    cache
        Folder of decoded sets (default `POLYFED_CACHE` or `~/.cache/polyfed`); False keeps nothing.

    Raises
    ------
    InputError
        If the set cannot be found, read, or used; the sentence says what to do.
    """
    size = _size(resize)
    options = {
        "resize": size,
        "inputs": inputs if inputs is None or isinstance(inputs, str) else list(inputs),
        "label": label,
        "columns": [columns] if isinstance(columns, str) else list(columns or ()) or None,
        "num_classes": num_classes,
        "class_names": class_names if class_names is None or isinstance(class_names, str) else list(class_names),
        "normalize": None if normalize else False,
    }
    options = {key: value for key, value in options.items() if value is not None}
    store = Store.at(cache)
    if isinstance(source, Dataset):
        return source if limit is None else replace(subset(source, limit, seed), recipe={"source": None})
    if isinstance(source, str) and test is not None and not Path(source).expanduser().exists():
        raise InputError(f"'{source}' brings its own test part: leave out test, or give the path of a file or folder.")
    some = SOME_CLASSES.fullmatch(source) if isinstance(source, str) else None
    if some and some[1] in KNOWN:
        whole = _known(some[1], path, options, seed, store)
        dataset = only_classes(whole, int(some[2]), int(some[3]))
    elif isinstance(source, str) and source in KNOWN:
        dataset = _known(source, path, options, seed, store)
    elif isinstance(source, str | os.PathLike) and Path(source).expanduser().exists():
        dataset = _from_path(Path(source).expanduser(), test, options, seed, store)
    elif isinstance(source, str):
        dataset = _from_hub(source, path, options, seed, store)
    elif isinstance(source, os.PathLike):
        raise InputError(f"There is no file or folder {source}: check the path.")
    else:
        dataset = _from_objects(source, test, options, seed)
    dataset = subset(dataset, limit, seed)
    recipe: dict[str, Any] = {"source": None}
    if isinstance(source, str | os.PathLike) and (test is None or isinstance(test, str | os.PathLike)):
        given = {"test": test, "path": path, "name": name, "limit": limit, "seed": seed or None, **options}
        recipe = {"source": source, **{key: value for key, value in given.items() if value is not None}}
        recipe = json.loads(json.dumps(recipe, default=os.fspath))
    return replace(dataset, name=name or dataset.name, recipe=recipe)


def _from_objects(source: Any, test: Any, options: dict[str, Any], seed: int) -> Dataset:
    train_part = part_of(source, options, "the training set of 'own data'")
    options = {**options, "inputs": train_part.features or options.get("inputs")}
    test_part = None if test is None else part_of(test, options, "the test set of 'own data'")
    return _assemble("own data", train_part, test_part, options, seed)


def _known(name: str, path: PathLike | None, options: dict[str, Any], seed: int, store: Store) -> Dataset:
    known = KNOWN[name]
    if name == "digits":
        return _cached(store, name, name_key(name, options), lambda: _digits(options, seed))
    folder = Path(path).expanduser() if path is not None else in_data_root(name)
    if folder is None:
        key = name_key(name, options)
        return _cached(store, name, key, lambda: _download(name, known, options, seed))
    train, test = split_files(folder, TRAIN_NAMES), split_files(folder, (known.test, *TEST_NAMES))
    for part, found in (("train", train), (known.test, test)):
        if not found:
            raise InputError(f"{folder} has no {part}.parquet, which the data set '{name}' needs: add it there.")
    key = files_key([*train, *test], {"name": name, **options})
    return _cached(
        store, name, key, lambda: _from_tables(name, [read_parquet(train), read_parquet(test)], options, seed, known)
    )


def _download(name: str, known: Known, options: dict[str, Any], seed: int) -> Dataset:
    assert known.hub is not None
    try:
        tables = hub.fetch(known.hub, known.config, known.revision, known.test)
    except hub.NotOnThisMachine as error:
        raise InputError(
            f"The data set '{name}' is not on this machine and could not be downloaded ({error}): put train.parquet "
            f"and {known.test}.parquet into the folder {folder_name(name)} below the one that POLYFED_DATA names, "
            "or give the path of such a folder instead of the name, "
            f"or connect to the internet so that it can be fetched once from the Hugging Face Hub ({known.hub})."
        ) from error
    return _from_tables(name, tables, options, seed, known)


def _from_hub(source: str, path: PathLike | None, options: dict[str, Any], seed: int, store: Store) -> Dataset:
    if source.endswith(FILES) or source.startswith((".", "/", "~")) or "\\" in source:
        raise InputError(f"There is no file or folder {source}: check the path.")
    if not HUB_ID.fullmatch(source):
        raise unknown("data set", source, KNOWN)
    folder = Path(path).expanduser() if path is not None else in_data_root(source)
    if folder is not None:
        return replace(_from_path(folder, None, options, seed, store), name=source)

    def fetch() -> Dataset:
        try:
            tables = hub.fetch(source)
        except hub.NotOnThisMachine as error:
            raise InputError(
                f"The data set '{source}' is not on this machine and could not be downloaded ({error}): put "
                f"train.parquet and test.parquet into the folder {source} below the one that POLYFED_DATA names, "
                "or give the path of such a folder instead of the name, "
                "or connect to the internet and check the name on the Hugging Face Hub."
            ) from error
        return _from_tables(source, tables, options, seed)

    return _cached(store, source, name_key(source, {**options, "seed": seed}), fetch)


def _from_path(source: Path, test: Any, options: dict[str, Any], seed: int, store: Store) -> Dataset:
    if test is not None and not (isinstance(test, str | os.PathLike) and Path(test).expanduser().exists()):
        raise InputError(f"There is no test file or folder {test}: give one of the same kind as {source}.")
    name = source.stem if source.is_file() else source.resolve().name
    tests = None if test is None else Path(test).expanduser()
    if source.is_file():
        return _from_files(name, [source], _files_of(tests), options, seed, store)
    train_files = split_files(source, TRAIN_NAMES)
    if train_files:
        test_files = _files_of(tests) or split_files(source, TEST_NAMES)
        return _from_files(name, train_files, test_files, options, seed, store)
    train = next((source / part for part in TRAIN_NAMES if (source / part).is_dir()), source)
    if tests is None and train is not source:
        tests = next((source / part for part in TEST_NAMES if (source / part).is_dir()), None)
    pictures = [_pictures(train), {} if tests is None else _pictures(tests)]
    if not pictures[0]:
        raise InputError(
            f"{source} holds neither train.parquet nor class folders with images: give a parquet file, a folder of "
            "<split>.parquet files, or a folder with one subfolder of images per class."
        )
    files = [file for part in pictures for group in part.values() for file in group]
    key = files_key(files, {"seed": seed, **options})
    return _cached(store, name, key, lambda: _from_pictures(name, pictures[0], pictures[1], options, seed))


def _files_of(source: Path | None) -> list[Path]:
    if source is None or source.is_file():
        return [] if source is None else [source]
    return split_files(source, (*TEST_NAMES, *TRAIN_NAMES))


def _from_files(
    name: str, train: list[Path], test: list[Path], options: dict[str, Any], seed: int, store: Store
) -> Dataset:
    key = files_key([*train, *test], {"train": len(train), "seed": seed, **options})
    files = [train, test] if test else [train]
    return _cached(store, name, key, lambda: _from_tables(name, [read_parquet(part) for part in files], options, seed))


def _cached(store: Store, name: str, key: str, make: Callable[[], Dataset]) -> Dataset:
    dataset = store.read(name, key)
    if dataset is None:
        dataset = make()
        store.write(dataset, name, key)
    return dataset


def _digits(options: dict[str, Any], seed: int) -> Dataset:
    from sklearn.datasets import load_digits  # type: ignore[import-untyped]

    content = load_digits()
    order = np.random.RandomState(0).permutation(len(content.target))  # NumPy promises this stream for good
    x = torch.from_numpy(content.images.astype(np.uint8)[order][:, None].copy())
    y = content.target[order]
    parts = [Part(x[rows], y[rows], None, {}) for rows in (slice(0, 1400), slice(1400, None))]
    return _assemble("digits", parts[0], parts[1], options, seed, Scaling(divisor=16.0))


def _from_tables(
    name: str, tables: list[Table], options: dict[str, Any], seed: int, known: Known | None = None
) -> Dataset:
    picks = {key: options.get(key) for key in ("inputs", "label", "resize")}
    for key in ("inputs", "label"):
        if known is not None and picks[key] is None and getattr(known, key) in tables[0].rows.column_names:
            picks[key] = getattr(known, key)
    parts = [convert(tables[0], columns=options.get("columns", ()), **picks)]
    picks["inputs"] = parts[0].features or picks["inputs"]  # the same features in the same order
    parts += [convert(table, columns=options.get("columns", ()), **picks) for table in tables[1:]]
    scaling = None
    if known is not None:
        options = {"num_classes": known.classes, **options} if picks["label"] == known.label else options
        channels = parts[0].inputs.shape[1]
        if known.mean and known.std and options.get("normalize", True) and len(known.mean) == channels:
            scaling = Scaling(known.mean, known.std, 255.0)
    return _assemble(name, parts[0], parts[1] if len(parts) > 1 else None, options, seed, scaling)


def _pictures(folder: Path) -> dict[str, list[Path]]:
    groups = {}
    for group in sorted(entry for entry in folder.iterdir() if entry.is_dir()):
        files = sorted(file for file in group.rglob("*") if file.suffix.lower() in PICTURES)
        if files:
            groups[group.name] = files
    return groups


def _from_pictures(
    name: str, train: dict[str, list[Path]], test: dict[str, list[Path]], options: dict[str, Any], seed: int
) -> Dataset:
    parts = []
    for what, groups in (("train", train), ("test", test)):
        if groups:
            files = [file for group in groups.values() for file in group]
            labels = np.array([label for label, group in groups.items() for _ in group])
            x = decode_images(files, f"{name} ({what})", options.get("resize"))
            parts.append(Part(x, labels, tuple(sorted(train)), {}))
    return _assemble(name, parts[0], parts[1] if len(parts) > 1 else None, options, seed)


def _assemble(
    name: str, train: Part, test: Part | None, options: dict[str, Any], seed: int, scaling: Scaling | None = None
) -> Dataset:
    """Put the parts together: hold out a test part if there is none, one number of channels, one size."""
    class_names, num_classes = options.get("class_names") or train.class_names, options.get("num_classes")
    notes = train.notes
    if test is None:
        whole = f"the training set of '{name}'"
        check_part(whole, train.inputs, train.labels)
        numbered = number_classes({whole: train.labels}, class_names, num_classes)  # before a class may lose its rows
        train, class_names = replace(train, labels=numbered.parts[0].numpy()), numbered.names
        notes += numbered.notes
        train, test = _hold_out(name, train, seed)
    elif train.class_names and test.class_names and train.class_names != test.class_names:  # numbers mean other classes
        train, test = _by_name(train, f"the training set of '{name}'"), _by_name(test, f"the test set of '{name}'")
    same_features(test.features, train.features, f"the test set of '{name}'")
    x, x_test = train.inputs, test.inputs
    if x.dim() == x_test.dim() == 4 and {x.shape[1], x_test.shape[1]} == {1, 3}:
        x, x_test = (fit_images(part, (3, *part.shape[2:]), name) for part in (x, x_test))
    if "resize" in options:
        if x.dim() != 4:
            raise InputError(f"'{name}' does not hold images, so resize={options['resize']} cannot be applied.")
        x, x_test = resize_images(x, options["resize"]), resize_images(x_test, options["resize"])
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
    )


def _by_name(part: Part, what: str) -> Part:
    assert part.class_names is not None
    return replace(part, labels=with_names(part.labels, part.class_names, what))


def _hold_out(name: str, part: Part, seed: int) -> tuple[Part, Part]:
    if len(part.labels) < 2:
        raise InputError(f"'{name}' has {len(part.labels)} samples and no test part: give test=... or more samples.")
    held = stratified_holdout(part.labels, HOLDOUT, numpy_generator(seed, "test"))
    kept = np.setdiff1d(np.arange(len(part.labels)), held)
    return tuple(  # type: ignore[return-value]
        replace(
            part,
            inputs=part.inputs[torch.from_numpy(rows)],
            labels=part.labels[rows],
            columns={key: values[rows] for key, values in part.columns.items()},
        )
        for rows in (kept, held)
    )


def _size(resize: int | tuple[int, int] | None) -> tuple[int, int] | None:
    if resize is None:
        return None
    pair = (resize, resize) if isinstance(resize, int) else tuple(resize)
    if len(pair) != 2 or any(not isinstance(side, int) or side < 1 for side in pair):
        raise InputError(f"resize={resize} is not a size: give (height, width) in pixels.")
    return pair  # type: ignore[return-value]
