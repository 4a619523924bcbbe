"""Data sets that are known by name (`catalog.py`): from a folder, from this package, or downloaded once."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from polyfed.core.errors import InputError
from polyfed.core.samples import Scaling
from polyfed.data import hub
from polyfed.data.assemble import from_tables, put_together
from polyfed.data.cache import Store, files_key, name_key
from polyfed.data.catalog import (
    DOMAINS,
    EMBEDDED,
    KNOWN,
    TEST_NAMES,
    TRAIN_NAMES,
    Known,
    folder_name,
    in_data_root,
    split_files,
)
from polyfed.data.columns import Part
from polyfed.data.dataset import Dataset
from polyfed.data.decode import fit_images
from polyfed.data.subsets import subset
from polyfed.data.tables import read_table

PathLike = str | os.PathLike[str]


def by_name(name: str, path: PathLike | None, options: dict[str, Any], seed: int, store: Store) -> Dataset:
    """Return the data set of a known name.

    Raises
    ------
    InputError
        If it is not on this machine and cannot be downloaded.
    """
    known = KNOWN[name]
    if name == "digits":
        return store.kept(name, name_key(name, options), lambda: _digits(options, seed))
    if name == "digit_domains":
        return domains(DOMAINS, options, seed, store)
    if known.files:
        tables = [[EMBEDDED / f"{file}.parquet"] for file in known.files]
        key = files_key([file for part in tables for file in part], {"name": name, "seed": seed, **_plain(options)})
        return store.kept(
            name, key, lambda: from_tables(name, [read_table(part) for part in tables], options, seed, known)
        )
    folder = Path(path).expanduser() if path is not None else in_data_root(name)
    if folder is None:
        key = name_key(name, options)
        return store.kept(name, key, lambda: _download(name, known, options, seed))
    train, test = split_files(folder, TRAIN_NAMES), split_files(folder, (known.test, *TEST_NAMES))
    for part, found in (("train", train), (known.test, test)):
        if not found:
            raise InputError(f"{folder} has no {part}.parquet, which the data set '{name}' needs: add it there.")
    key = files_key([*train, *test], {"name": name, **options})
    return store.kept(name, key, lambda: from_tables(name, [read_table(train), read_table(test)], options, seed, known))


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
    return from_tables(name, tables, options, seed, known)


def _digits(options: dict[str, Any], seed: int) -> Dataset:
    from sklearn.datasets import load_digits  # type: ignore[import-untyped]

    content = load_digits()
    order = np.random.RandomState(0).permutation(len(content.target))  # NumPy promises this stream for good
    x = torch.from_numpy(content.images.astype(np.uint8)[order][:, None].copy())
    y = content.target[order]
    parts = [Part(x[rows], y[rows], None, {}) for rows in (slice(0, 1400), slice(1400, None))]
    return put_together("digits", parts[0], parts[1], options, seed, Scaling(divisor=16.0))


def _plain(options: dict[str, Any]) -> dict[str, Any]:
    """Leave out what no key can hold."""
    return {key: value for key, value in options.items() if key not in ("tokenizer", "form")}


def domains(names: Sequence[str], options: dict[str, Any], seed: int, store: Store) -> Dataset:
    """Put sets of the same classes together, as many samples of each, as grey images of 16x16 pixels.

    The column `domain` says where a training row comes from: the labels mean the same, the images look different.
    """
    sets = [by_name(name, None, {}, seed, store) for name in names]
    numbers = [min(len(part) for part in parts) for parts in zip(*((s.train, s.test) for s in sets), strict=True)]
    sets = [subset(whole, (numbers[0], numbers[1]), seed) for whole in sets]
    parts = []
    for part in ("train", "test"):
        images, labels = [], []
        for whole in sets:
            samples = getattr(whole, part)
            x = samples.x[samples.rows()].float() * (255 / samples.scaling.divisor)
            images.append(fit_images(x, (1, 16, 16), whole.name).round().clamp(0, 255).to(torch.uint8))
            labels.append(samples.labels().numpy())
        parts.append(Part(torch.cat(images), np.concatenate(labels), None, {}))
    parts[0] = replace(parts[0], columns={"domain": np.repeat(list(names), numbers[0])})
    return put_together("digit_domains", parts[0], parts[1], {"num_classes": 10, **options}, seed)
