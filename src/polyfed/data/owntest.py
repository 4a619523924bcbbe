"""Each client's own test data, beside the common test set: a share of its rows, or a set of its own."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from polyfed.core.errors import InputError
from polyfed.core.rng import numpy_generator
from polyfed.core.samples import Samples
from polyfed.data.assemble import part_of_pictures, pictures_in
from polyfed.data.columns import Part, convert, kind_of, same_features
from polyfed.data.dataset import Dataset, check_part, how_to_resize
from polyfed.data.dealing import is_number
from polyfed.data.decode import CHANNELS, resize_images
from polyfed.data.form import Raw
from polyfed.data.labels import joined_names, with_names
from polyfed.data.objects import part_of
from polyfed.data.tables import read_table
from polyfed.data.targets import evenly

OWN = "own"  # how people ask for own test data without saying how much
OWN_SHARE = 0.2


def read_part(what: str, source: Any, first: Part | None = None, options: Mapping[str, Any] | None = None) -> Part:
    """Read one part, so that whatever is wrong with it is said about this one; tables as the first one was read."""
    options = dict(options or {})
    if first is not None and first.features:
        options["inputs"] = first.features
    if first is not None:
        options["kind"] = kind_of(first, options.get("kind"))
    if isinstance(source, str | os.PathLike):
        part = _read_path(Path(source).expanduser(), what, {key: value for key, value in options.items() if value})
    else:
        part = part_of(source, options, what)
    if options.get("resize") and not isinstance(part.inputs, Raw) and part.inputs.dim() == 4:
        part = replace(part, inputs=resize_images(part.inputs, options["resize"]))
    if first is not None:
        same_features(part.features, first.features, what)
    if len(part.inputs) == 0:
        raise InputError(f"{what[0].upper()}{what[1:]} has no samples: give it some or leave it out.")
    check_part(what, part.inputs, part.labels)
    return part


def _read_path(place: Path, what: str, picks: dict[str, Any]) -> Part:
    """Read a file, or a folder with a folder of images for each class."""
    if place.is_dir():
        groups = pictures_in(place)
        if not groups:
            raise InputError(f"The folder {place} of {what} has no folders with images, one for each class.")
        return part_of_pictures(groups, str(place), tuple(sorted(groups)), picks.get("resize"))
    if not place.is_file():
        raise InputError(f"There is no file {place} for {what}: check the path.")
    return convert(read_table([place]), **picks)


def by_name(given: Any, names: Sequence[str]) -> Any:
    """Return test sets that came by the clients' names in the clients' order; anything else as it is."""
    if not isinstance(given, Mapping) or not names:
        return given
    strange = [name for name in given if name not in names]
    if strange:
        raise InputError(f"There is a test set for '{strange[0]}', but the clients are {', '.join(names)}.")
    return [given.get(name) for name in names]


def is_list_of_parts(test: Any, clients: int) -> bool:
    """Tell a list of own test sets from one test set: a list of two arrays is a pair."""
    kinds = (tuple, Samples, Dataset, type(None), str, os.PathLike)

    def is_part(part: Any) -> bool:
        if isinstance(part, list):  # a pair of arrays may be in a list as well
            return len(part) == 2 and all(hasattr(array, "ndim") for array in part)
        return isinstance(part, kinds) or hasattr(part, "to_parquet") or hasattr(part, "write_parquet")

    if not isinstance(test, list) or not all(is_part(part) for part in test):
        return False
    pairs = all(not isinstance(part, tuple) or len(part) == 2 for part in test)
    if len(test) != clients and pairs:
        raise InputError(
            f"test has {len(test)} parts for {clients} clients: give one for each (None: it has none), or one for all."
        )
    return len(test) == clients


def refuse_own_tests(source: Any, test: Any) -> None:
    """Refuse test sets of several clients for a data set, which is not divided yet.

    Raises
    ------
    InputError
        With the two ways to have own test data.
    """
    depth = getattr(source[0], "ndim", None) if isinstance(source, tuple) and len(source) == 2 else None

    def is_set(part: Any) -> bool:
        if isinstance(part, tuple):  # arrays as deep as those of the data; an item (input, label) is less deep
            return len(part) == 2 and depth is not None and getattr(part[0], "ndim", None) == depth
        whole = isinstance(part, Samples | Dataset | str | os.PathLike)
        return whole or hasattr(part, "to_parquet") or hasattr(part, "write_parquet")

    if isinstance(test, Mapping) or (isinstance(test, list) and any(map(is_set, test))):
        raise InputError(
            f"test holds {len(test)} parts, but a data set that is not divided yet has one test set: give each "
            "client's own with its own rows (Clients.from_parts(parts, test=[...])), or let split keep a share of each "
            "client's rows (split(..., test='own'))."
        )


def held_out(read: Sequence[Part], share: float, seed: int) -> tuple[list[Part], list[Part | None]]:
    """Take a share of every client's rows as its own test set, class by class where there are classes."""
    kept: list[Part] = []
    own: list[Part | None] = []
    for client, part in enumerate(read):
        rows = np.arange(len(part.inputs))
        if len(rows) < 2:
            kept, own = [*kept, part], [*own, None]
            continue
        plain = part.labels.ndim == 1 and (part.labels.dtype.kind != "f" or len(set(part.labels.tolist())) < len(rows))
        kinds = np.unique(part.labels, return_inverse=True)[1] if plain else np.zeros(len(rows), dtype=np.int64)
        tested = evenly(kinds, share, numpy_generator(seed, "own-test", client=client))
        kept.append(_rows_of(part, np.delete(rows, tested)))
        own.append(_rows_of(part, tested))
    return kept, own


def _rows_of(part: Part, rows: np.ndarray) -> Part:
    inputs = part.inputs.take(rows) if isinstance(part.inputs, Raw) else part.inputs[torch.from_numpy(rows)]
    columns = {key: values[rows] for key, values in part.columns.items()}
    return replace(part, inputs=inputs, labels=part.labels[rows], columns=columns)


def read_own(
    own_test: Sequence[Any], read: Mapping[str, Part], options: Mapping[str, Any] | None = None
) -> list[Part | None]:
    """Read own test sets, which must look like the training data."""
    if len(own_test) != len(read):
        raise InputError(
            f"own_test has {len(own_test)} parts for {len(read)} clients: give one for each (None: it has none)."
        )
    found = []
    first, reference = next(iter(read.items()))
    for client, part in zip(read, own_test, strict=True):
        what = f"the own test set of {client}"
        made = None if part is None else read_part(what, part, reference, options)
        if made is not None and shape_of(made) not in (shape_of(reference), *_other_colors(reference)):
            raise InputError(
                f"Samples of {what} have shape {shape_of(made)}, but those of {first} have {shape_of(reference)}: "
                f"bring them to one form{how_to_resize(shape_of(reference) or ())}."
            )
        found.append(made)
    return found


def shape_of(part: Part) -> tuple[int, ...] | None:
    """Return the shape of one sample; None: its rows are not numbers yet."""
    return None if isinstance(part.inputs, Raw) else tuple(part.inputs.shape[1:])


def _other_colors(part: Part) -> list[tuple[int, ...]]:
    """Return the shapes of grey and of color images in the size of a part: one of them is made the other."""
    shape = shape_of(part) or ()
    return [(channels, *shape[1:]) for channels in CHANNELS] if len(shape) == 3 and shape[0] in CHANNELS else []


def joined(common: list[Part], own: Sequence[Part | None]) -> Part:
    """Put the common test set and own ones one behind the other: they are checked and numbered together."""
    parts = [*common, *(part for part in own if part is not None)]
    if len(parts) == 1:
        return parts[0]
    if any(part.class_names != parts[0].class_names for part in parts):
        parts = [
            replace(part, labels=with_names(part.labels, part.class_names, "a test set")) if part.class_names else part
            for part in parts
        ]
        parts[0] = replace(parts[0], class_names=joined_names([part.class_names for part in parts if part.class_names]))
    kinds = {part.labels.dtype.kind == "U" for part in parts}
    raw = [part.inputs for part in parts if isinstance(part.inputs, Raw)]
    numbers = [part.inputs for part in parts if not isinstance(part.inputs, Raw)]
    if len(kinds) > 1 or len({x.dtype for x in numbers}) > 1 or (raw and numbers):
        raise InputError("The test sets of the clients hold different kinds of inputs or labels: give one kind.")
    shapes = sorted({tuple(x.shape[1:]) for x in numbers})
    if len(shapes) > 1:
        raise InputError(
            f"Samples of the clients have different shapes ({' and '.join(map(str, shapes))}): bring them to "
            f"one{how_to_resize(shapes[0])}."
        )
    return replace(
        parts[0],
        inputs=Raw.join(raw) if raw else torch.cat(numbers),
        labels=np.concatenate([part.labels for part in parts]),
        columns={},
    )


def own_apart(data: Dataset, own: Sequence[Part | None], everything: bool) -> tuple[Dataset, list[Samples | None]]:
    """Take own test sets out of what was put together; `everything`: all of them are the common test set."""
    if not own:
        return data, []
    sizes = [0 if part is None else len(part.inputs) for part in own]
    start = first = len(data.test) - sum(sizes)
    found: list[Samples | None] = []
    for size in sizes:
        found.append(data.test.select(torch.arange(start, start + size)) if size else None)
        start += size
    return (data if everything else replace(data, test=data.test.select(torch.arange(first)))), found


def own_share(test: Any) -> float:
    """Return the share of a client's rows that its own test data takes."""
    if isinstance(test, Sequence | Mapping) and not isinstance(test, str):
        raise InputError(
            "Test sets that exist already go with parts that do: Clients.from_parts(parts, test=[...]). split takes "
            f"test='{OWN}', or a share of each client's rows."
        )
    share = OWN_SHARE if isinstance(test, str) and test == OWN else 0.0 if test is None else test
    if not is_number(share) or not 0 <= share < 1:
        raise InputError(f"test={test!r:.80} is not possible: give '{OWN}', or a share of at least 0 and below 1.")
    return float(share)
