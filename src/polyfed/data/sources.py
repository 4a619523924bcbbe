"""`load`: data sets by name, from the Hub, from files, from arrays, from torch."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from polyfed.core.errors import InputError, unknown
from polyfed.core.own_code import imported, is_reference, own_code
from polyfed.core.plugins import plugins
from polyfed.core.task import CLASSIFICATION, Task, as_task
from polyfed.data import hub
from polyfed.data.assemble import from_pictures, from_tables, pictures_in, put_together
from polyfed.data.cache import Store, files_key, name_key
from polyfed.data.catalog import (
    KNOWN,
    TEST_NAMES,
    TRAIN_NAMES,
    in_data_root,
    split_files,
)
from polyfed.data.cells import pictures_named
from polyfed.data.columns import kind_of
from polyfed.data.dataset import Dataset
from polyfed.data.decode import size_of
from polyfed.data.form import Form
from polyfed.data.named import PathLike, by_name
from polyfed.data.objects import part_of
from polyfed.data.owntest import refuse_own_tests
from polyfed.data.subsets import only_classes, subset
from polyfed.data.tables import read_table

FILES = (".parquet", ".csv", ".tsv", ".json", ".jsonl", ".npy", ".npz", ".txt", ".zip")  # what a Hub id never ends with
SOME_CLASSES = re.compile(r"(\w+(?::\w+)?)/(\d+)-(\d+)")  # fashion_mnist/5-9: the classes 5 to 9, numbered from 0
KINDS = ("image", "signal", "table", "text", "tokens")
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


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
    label: str | Sequence[str] | None = None,
    columns: str | Sequence[str] = (),
    drop: str | Sequence[str] = (),
    kind: str | None = None,
    tokenizer: Any = None,
    length: int | None = None,
    form: Form | None = None,
    num_classes: int | None = None,
    class_names: Sequence[str] | None = None,
    normalize: bool = True,
    cache: PathLike | bool | None = None,
    task: Task | str | None = None,
) -> Dataset:
    """Load a data set.

    A name is looked for in `path`, then in `POLYFED_DATA` (`<name>/<split>.parquet`), the cache of decoded sets,
    the Hub's cache, and on the Hub. Images are decoded once and kept as bytes.

    Parameters
    ----------
    source
        A known name (see `describe_sources`), some classes of one (`fashion_mnist/5-9`), a Hub id `owner/name`,
        a parquet or CSV file (one of its columns may name image files), a folder of `<split>.parquet` or `<split>.csv`
        files or of images in class folders, a data frame, a pair of arrays `(inputs, labels)`, a torch `Dataset` (with
        items `(input, label)` or dictionaries), a Hugging Face `Dataset`, or `package.module:function`, which returns
        one of these (or a table with `train` and `test`).
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
    inputs, label, columns, drop
        Names of the input column (or of all features), the label column (or several: of a multi-label task, or of a
        regression with several targets), of columns that are kept beside the features (to group by), and of columns
        that are left out (tables only). Columns are numbers, yes and no, or words; a
        column named like an identifier is not a feature unless it is named (`Dataset.notes` says so).
    kind
        What the inputs are, where it is not plain: `image`, `signal` (samples, channels, time), `tokens` (whole numbers
        that stay what they are), `text`, `table`.
    tokenizer, length
        Of texts: a function from text to ids, a Hugging Face tokenizer, or where one is (a tokenizer.json, a folder
        with one, `package.module:name`; None: the words of the training texts, by frequency); and how many ids a text
        has, the rest is cut or padding (None: as many as the longest has, at most 256).
    form
        How another data set makes numbers of its rows (`Dataset.form`), for data that is to fit it.
    num_classes, class_names
        The classes, where they are not just the labels that occur in training. Labels that do not count from 0 are
        numbered from 0, with what they were as names (`Dataset.notes` says so).
    normalize
        False: inputs are only divided (bytes by 255), without mean and standard deviation.
    task
        What is to be learned: `classification` (as by default), `multilabel` (rows of zeros and ones), `regression`
        (one or several values a row).
    cache
        Folder of decoded sets (default `POLYFED_CACHE` or `~/.cache/polyfed`); False keeps nothing.

    Raises
    ------
    InputError
        If the set cannot be found, read, or used; the sentence says what to do.
    """
    size = size_of(resize)
    options = {
        "resize": size,
        "inputs": inputs if inputs is None or isinstance(inputs, str) else list(inputs),
        "label": label if label is None or isinstance(label, str) else list(label),
        "columns": [columns] if isinstance(columns, str) else list(columns or ()) or None,
        "drop": [drop] if isinstance(drop, str) else list(drop or ()) or None,
        "kind": _kind(kind),
        "tokenizer": os.fspath(tokenizer) if isinstance(tokenizer, os.PathLike) else tokenizer,
        "length": length,
        "num_classes": num_classes,
        "class_names": class_names if class_names is None or isinstance(class_names, str) else list(class_names),
        "normalize": None if normalize else False,
        "task": None if as_task(task) == CLASSIFICATION else task,
    }
    options = {key: value for key, value in options.items() if value is not None}
    objects = form is not None or not isinstance(options.get("tokenizer", ""), str)  # no recipe holds them
    store = Store.at(False if objects or "tokenizer" in options else cache)
    options |= {} if form is None else {"form": form}
    if isinstance(source, Dataset):
        return source if limit is None else replace(subset(source, limit, seed), recipe={"source": None})
    refuse_own_tests(source, test)
    if isinstance(source, str) and test is not None and not Path(source).expanduser().exists():
        raise InputError(f"'{source}' brings its own test part: leave out test, or give the path of a file or folder.")
    some = SOME_CLASSES.fullmatch(source) if isinstance(source, str) else None
    if some and some[1] in KNOWN:
        whole = by_name(some[1], path, options, seed, store)
        dataset = only_classes(whole, int(some[2]), int(some[3]))
    elif isinstance(source, str) and source in KNOWN:
        dataset = by_name(source, path, options, seed, store)
    elif isinstance(source, str) and source in plugins("data"):
        dataset = _from_package(source)
    elif isinstance(source, str | os.PathLike) and Path(source).expanduser().exists():
        dataset = _from_path(Path(source).expanduser(), test, options, seed, store)
    elif isinstance(source, str) and is_reference(source):
        dataset = _from_own_code(source, test, options, seed)
    elif isinstance(source, str):
        dataset = _from_hub(source, path, options, seed, store)
    elif isinstance(source, os.PathLike):
        raise InputError(f"There is no file or folder {source}: check the path.")
    else:
        dataset = _from_objects(source, test, options, seed)
    dataset = subset(dataset, limit, seed)
    recipe: dict[str, Any] = {"source": None}
    named = isinstance(source, str | os.PathLike) and (test is None or isinstance(test, str | os.PathLike))
    if named and not objects and not isinstance(task, Task):
        given = {"test": test, "path": path, "name": name, "limit": limit, "seed": seed or None, **options}
        recipe = {"source": source, **{key: value for key, value in given.items() if value is not None}}
        recipe = json.loads(json.dumps(recipe, default=os.fspath))
    return replace(dataset, name=name or dataset.name, recipe=recipe)


def call(source: str) -> Any:
    """Return what `package.module:function` gives, or names.

    Raises
    ------
    InputError
        If it cannot be imported, or fails.
    """
    found = imported(source, "--data")
    with own_code(f"--data {source}"):
        return found() if callable(found) and not isinstance(found, Dataset) else found


def _from_own_code(source: str, test: Any, options: dict[str, Any], seed: int) -> Dataset:
    found = call(source)
    if isinstance(found, Dataset):
        return found
    if hasattr(found, "own_tests"):  # Clients, of a layer above
        raise InputError(f"--data {source} gives clients, which are divided already: use them with run or compare.")
    if isinstance(found, dict) and {"train", "test"} <= found.keys():
        told = {key: found[key] for key in ("num_classes", "class_names", "task") if found.get(key) is not None}
        return _from_objects(found["train"], found["test"], {**options, **told}, seed)
    return _from_objects(found, test, options, seed)


def _from_package(name: str) -> Dataset:
    """Load a data set that another package offers: a function without arguments."""
    dataset = plugins("data")[name]()
    if not isinstance(dataset, Dataset):
        raise InputError(
            f"The data set '{name}' of another package is a {type(dataset).__name__}, not a polyfed.Dataset."
        )
    return replace(dataset, name=dataset.name or name)


def _from_objects(source: Any, test: Any, options: dict[str, Any], seed: int) -> Dataset:
    train_part = part_of(source, options, "the training set of 'own data'")
    options = {**options, "inputs": train_part.features or options.get("inputs")}
    if (kind := kind_of(train_part, options.get("kind"))) is not None:
        options["kind"] = kind
    test_part = None if test is None else part_of(test, options, "the test set of 'own data'")
    return put_together("own data", train_part, test_part, options, seed)


def _from_hub(source: str, path: PathLike | None, options: dict[str, Any], seed: int, store: Store) -> Dataset:
    if source.endswith(FILES) or source.startswith((".", "/", "~")) or "\\" in source:
        raise InputError(f"There is no file or folder {source}: check the path.")
    if not HUB_ID.fullmatch(source):
        raise unknown("data set", source, [*KNOWN, *plugins("data")])
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
        return from_tables(source, tables, options, seed)

    return store.kept(source, name_key(source, {**options, "seed": seed}), fetch)


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
    pictures = [pictures_in(train), {} if tests is None else pictures_in(tests)]
    if not pictures[0]:
        raise InputError(
            f"{source} holds neither train.parquet nor class folders with images: give a parquet file, a folder of "
            "<split>.parquet files, or a folder with one subfolder of images per class."
        )
    files = [file for part in pictures for group in part.values() for file in group]
    key = files_key(files, {"seed": seed, **options})
    return store.kept(name, key, lambda: from_pictures(name, pictures[0], pictures[1], options, seed))


def _files_of(source: Path | None) -> list[Path]:
    if source is None or source.is_file():
        return [] if source is None else [source]
    return split_files(source, (*TEST_NAMES, *TRAIN_NAMES))


def _from_files(
    name: str, train: list[Path], test: list[Path], options: dict[str, Any], seed: int, store: Store
) -> Dataset:
    named = [file for file in pictures_named([*train, *test]) if isinstance(file, Path)]
    key = files_key([*train, *test, *named], {"train": len(train), "seed": seed, **options})
    files = [train, test] if test else [train]
    return store.kept(name, key, lambda: from_tables(name, [read_table(part) for part in files], options, seed))


def _kind(kind: str | None) -> str | None:
    if kind is not None and kind not in KINDS:
        raise unknown("kind of inputs", kind, KINDS)
    return kind
