"""Data that is in memory already: arrays, torch data sets, Hugging Face data sets, our own samples."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from torch import Tensor

from polyfed.core.errors import InputError
from polyfed.core.samples import Samples
from polyfed.data.dataset import Dataset
from polyfed.data.decode import as_inputs, image_to_array
from polyfed.data.labels import label_array
from polyfed.data.tables import Part, convert, table_of


def part_of(source: Any, options: Mapping[str, Any] | None = None, what: str = "the data set") -> Part:
    """Return inputs and labels of data given as an object.

    Parameters
    ----------
    source
        A pair of arrays or tensors, a map-style torch Dataset with items (input, label), a Hugging Face Dataset,
        `Samples`, or a `Dataset` of ours (its training part).
    options
        `inputs`, `label`, `columns` and `resize`, as `load` takes them.
    what
        What messages call it.

    Raises
    ------
    InputError
        If it is none of these, or its items do not fit together.
    """
    options = options or {}
    if isinstance(source, Dataset):
        part = part_of(source.train)
        return replace(part, class_names=source.class_names, columns=source.columns, features=source.features)
    if isinstance(source, Samples):
        divisor = source.scaling.divisor
        known = divisor if divisor != 1.0 else None  # 1 is what samples have when nobody said anything
        return Part(source.x[source.rows()], source.labels().numpy(), None, {}, known)
    if _is_pair(source):
        return Part(as_inputs(source[0], f"The input array of {what}"), label_array(source[1], what), None, {})
    if hasattr(source, "features") and hasattr(source, "with_format"):
        picks = {key: options[key] for key in ("inputs", "label", "columns", "resize") if key in options}
        return convert(table_of(source, what), **picks)
    items = hasattr(source, "__getitem__") and hasattr(source, "__len__") and not hasattr(source, "to_parquet")
    if items and not isinstance(source, dict | str | bytes | np.ndarray | Tensor):
        return _from_items(source, options.get("resize"), what)
    if hasattr(source, "to_parquet"):
        raise InputError(
            f"Data of type {type(source).__name__} cannot be loaded as {what}: write it to a file with to_parquet and "
            "give its path, or give its columns as a pair of arrays (inputs, labels)."
        )
    raise InputError(
        f"Data of type {type(source).__name__} cannot be loaded as {what}: give a name, a path, a pair of arrays "
        "(inputs, labels), or a map-style torch Dataset with items (input, label)."
    )


def _is_pair(source: Any) -> bool:
    """Say whether this is (inputs, labels); a list of two may also be two items (input, label)."""
    if not isinstance(source, tuple | list) or len(source) != 2:
        return False
    return isinstance(source, tuple) or all(hasattr(item, "__len__") for item in source)


def _from_items(source: Any, resize: tuple[int, int] | None, what: str) -> Part:
    """Read a map-style torch Dataset item by item, once."""
    inputs, labels, pictures = [], [], False
    for row in range(len(source)):
        item = source[row]
        if not isinstance(item, tuple | list) or len(item) < 2:
            raise InputError(
                f"Item {row} of {what} is not a pair (input, label): give such items, or a "
                "pair of arrays (inputs, labels)."
            )
        pictures = hasattr(item[0], "convert")
        inputs.append(image_to_array(item[0], resize) if pictures else _plain(item[0]))
        labels.append(_plain(item[1]).tolist())
        old, new = inputs[0].shape, inputs[-1].shape
        if (old[:2] != new[:2]) if pictures else (old != new):
            raise InputError(
                f"Item {row} of {what} has shape {new}, but item 0 has {old}: "
                "bring all items to one shape (for PIL images: resize=(height, width))."
            )
    if not inputs:
        raise InputError(f"There are no items in {what}: give at least one sample.")
    if pictures and len({image.ndim for image in inputs}) > 1:
        inputs = [np.repeat(image[:, :, None], 3, axis=2) if image.ndim == 2 else image for image in inputs]
    stacked = np.stack(inputs)
    if pictures and stacked.ndim == 4:
        stacked = stacked.transpose(0, 3, 1, 2)
    return Part(as_inputs(stacked, f"The input array of {what}"), label_array(labels, what), None, {})


def _plain(values: Any) -> np.ndarray:
    return values.detach().cpu().numpy() if isinstance(values, Tensor) else np.asarray(values)
