"""Data that is in memory already: arrays, torch data sets, Hugging Face data sets, our own samples."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from numbers import Real
from typing import Any

import numpy as np
import torch
from torch import Tensor

from polyfed.core.errors import InputError
from polyfed.core.samples import Samples
from polyfed.data.cells import TOKENS
from polyfed.data.columns import IMAGES, TEXTS, Part, convert
from polyfed.data.dataset import Dataset
from polyfed.data.decode import as_inputs, image_to_array, stack_images
from polyfed.data.form import Raw
from polyfed.data.labels import LABELS, label_array, label_columns
from polyfed.data.tables import table_of, table_of_frame
from polyfed.data.texts import zeros_inside

MASK = "attention_mask"  # beside token ids: which of them are no padding
TABLE_OPTIONS = ("inputs", "label", "columns", "drop", "resize", "kind")


def part_of(source: Any, options: Mapping[str, Any] | None = None, what: str = "the data set") -> Part:
    """Return inputs and labels of data given as an object.

    Parameters
    ----------
    source
        A pair of arrays or tensors, a data frame, a map-style torch Dataset with items (input, label) or dictionaries,
        a Hugging Face Dataset, `Samples`, or a `Dataset` of ours (its training part).
    options
        `inputs`, `label`, `columns`, `drop`, `kind` and `resize`, as `load` takes them.
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
        named = {"class_names": source.class_names, "columns": source.columns, "features": source.features}
        return replace(part, form=source.form, **named)  # type: ignore[arg-type]
    if isinstance(source, Samples):
        divisor = source.scaling.divisor
        known = divisor if divisor != 1.0 else None  # 1 is what samples have when nobody said anything
        return Part(source.x[source.rows()], source.labels().numpy(), None, {}, known)
    if _is_pair(source):
        if _are_texts(source[0]):
            texts = np.array([str(text or "") for text in source[0]], dtype=object)
            return Part(Raw({"text": texts}, "text", named=False), label_array(source[1], what), None, {})
        if _are_pictures(source[0]):
            said: list[str] = []
            arrays = [image_to_array(i) if hasattr(i, "convert") else _plain(i) for i in source[0]]
            _check_lengths(arrays, options.get("kind"), what)
            x = stack_images(arrays, what, options.get("resize"), said)
            return Part(x, label_array(source[1], what), None, {}, notes=tuple(said))
        inputs, notes = _inputs(source[0], f"The input array of {what}", options.get("kind"))
        return Part(inputs, label_array(source[1], what), None, {}, notes=notes)
    picks = {key: options[key] for key in TABLE_OPTIONS if options.get(key)}
    if hasattr(source, "features") and hasattr(source, "with_format"):
        return convert(table_of(source, what), **picks)
    if hasattr(source, "to_parquet") or hasattr(source, "write_parquet") or hasattr(source, "column_names"):
        return convert(table_of_frame(source, what), **picks)
    items = hasattr(source, "__getitem__") and hasattr(source, "__len__")
    if items and not isinstance(source, dict | str | bytes | np.ndarray | Tensor):
        return _from_items(source, options, what)
    raise InputError(
        f"Data of type {type(source).__name__} cannot be loaded as {what}: give a name, a path, a pair of arrays "
        "(inputs, labels), or a map-style torch Dataset with items (input, label)."
    )


def _is_pair(source: Any) -> bool:
    """Say whether this is (inputs, labels); a list of two may also be two items (input, label)."""
    if not isinstance(source, tuple | list) or len(source) != 2:
        return False
    return isinstance(source, tuple) or all(hasattr(item, "__len__") for item in source)


def _are_texts(values: Any) -> bool:
    if isinstance(values, np.ndarray):
        return values.dtype.kind == "U" or (values.dtype.kind == "O" and any(isinstance(v, str) for v in values.flat))
    return isinstance(values, list | tuple) and any(isinstance(value, str) for value in values)


def _are_pictures(values: Any) -> bool:
    """Tell a list of images, which may be of different sizes, or grey and color together."""
    if not isinstance(values, list | tuple) or not len(values):
        return False
    if all(hasattr(image, "convert") for image in values):  # of PIL
        return True
    shapes = {image.shape for image in values if isinstance(image, np.ndarray | Tensor)}
    arrays = all(isinstance(image, np.ndarray | Tensor) for image in values)
    return arrays and len(shapes) > 1 and all(len(shape) in (2, 3) for shape in shapes)


def _check_lengths(signals: Sequence[np.ndarray], kind: str | None, what: str) -> None:
    """Refuse signals that differ in channels or length: unlike images, nothing here brings them to one."""
    shapes = sorted({signal.shape for signal in signals})
    if kind == "signal" and len(shapes) > 1:
        few = ", ".join(" x ".join(map(str, shape)) for shape in shapes[:3]) + (", ..." if len(shapes) > 3 else "")
        raise InputError(
            f"The signals of {what} have {len(shapes)} different shapes ({few}; channels x steps): pad or cut them to "
            "one length, with the same channels."
        )


def _inputs(values: Any, what: str, kind: str | None) -> tuple[Tensor | Raw, tuple[str, ...]]:
    """Return inputs, and what they were taken for where an array of three dimensions does not say it."""
    if kind == "tokens" and not isinstance(values, np.ndarray | Tensor):  # lists of ids may have different lengths
        ids = np.empty(len(values), dtype=object)
        ids[:] = [_plain(row).tolist() for row in values]
        return Raw({"ids": ids}, "tokens"), ()
    x = as_inputs(values, what, kind)
    if kind == "tokens" and x.dtype == torch.int64:
        return x, zeros_inside(x.numpy(), what[0].lower() + what[1:])
    if x.dim() == 3 and kind is None and x.is_floating_point():
        return x, (f"inputs are signals of {x.shape[1]} channels and {x.shape[2]} steps (kind='image' for images)",)
    return x, ()


def _from_items(source: Any, options: Mapping[str, Any], what: str) -> Part:
    """Read a map-style torch Dataset item by item, once."""
    resize = options.get("resize")
    inputs, labels, pictures = [], [], False
    kept: dict[str, list[Any]] = {}
    tokens = options.get("kind") == "tokens"
    for row in range(len(source)):
        item = source[row]
        if isinstance(item, Mapping):
            if row == 0 and all(_is_value(value) for value in item.values()):
                return _from_rows(source, options, what)
            tokens = tokens or (options.get("kind") is None and _is_tokens(item, options))
            item = _pair_of(item, options, row, what, kept)
        if not isinstance(item, tuple | list) or len(item) < 2:
            raise InputError(
                f"Item {row} of {what} is not a pair (input, label): give such items, or a "
                "pair of arrays (inputs, labels)."
            )
        pictures = hasattr(item[0], "convert")
        inputs.append(image_to_array(item[0], resize) if pictures else _plain(item[0]))
        labels.append(_plain(item[1]).tolist())
        old, new = inputs[0].shape, inputs[-1].shape
        ragged = tokens or inputs[0].dtype.kind in "iu"
        flat = len(old) == len(new) == 1
        if old != new and not (ragged and flat) and not (len(old) in (2, 3) and len(new) in (2, 3)):
            raise InputError(
                f"Item {row} of {what} has shape {new}, but item 0 has {old}: bring all items to one shape."
            )
    if not inputs:
        raise InputError(f"There are no items in {what}: give at least one sample.")
    columns = {key: np.array(values) for key, values in kept.items() if len(values) == len(labels)}
    if inputs[0].dtype.kind == "U":
        return Part(
            Raw({"text": np.array([str(i) for i in inputs], dtype=object)}, "text", named=False),
            label_array(labels, what),
            None,
            columns,
        )
    shapes = {i.shape for i in inputs}
    if pictures or (len(shapes) > 1 and all(len(shape) > 1 for shape in shapes)):
        said: list[str] = []
        _check_lengths(inputs, options.get("kind"), what)
        x = stack_images(inputs, what, resize, said)
        return Part(x, label_array(labels, what), None, columns, notes=tuple(said))
    if len(shapes) > 1 or tokens:
        ids = np.empty(len(inputs), dtype=object)
        ids[:] = [i.tolist() for i in inputs]
        return Part(Raw({"ids": ids}, "tokens"), label_array(labels, what), None, columns)
    made, notes = _inputs(np.stack(inputs), f"The input array of {what}", options.get("kind"))
    return Part(made, label_array(labels, what), None, columns, notes=notes)


def _is_value(value: Any) -> bool:
    return value is None or isinstance(value, str | bool | Real) or (hasattr(value, "ndim") and value.ndim == 0)


def _from_rows(source: Any, options: Mapping[str, Any], what: str) -> Part:
    """Read items that are rows of a table: dictionaries of numbers and words."""
    import pandas  # type: ignore[import-untyped]

    rows = [
        {key: v.item() if hasattr(v, "item") else v for key, v in source[row].items()} for row in range(len(source))
    ]
    picks = {key: options[key] for key in TABLE_OPTIONS if options.get(key)}
    return convert(table_of_frame(pandas.DataFrame(rows), what), **picks)


def _pair_of(
    item: Mapping[str, Any], options: Mapping[str, Any], row: int, what: str, kept: dict[str, list[Any]]
) -> tuple[Any, Any]:
    """Return input and label of an item that is a dictionary; its other single values are columns."""
    labels = label_columns(options.get("label"), item) or [name for name in LABELS if name in item][:1]
    named = options.get("inputs")
    known = (*IMAGES, *TOKENS, *TEXTS)
    source = (named if isinstance(named, str) else None) or next((name for name in known if name in item), None)
    for part, name in (*(("label", name) for name in labels or (None,)), ("inputs", source)):
        if name is None or name not in item:
            raise InputError(
                f"Item {row} of {what} is a dictionary with {', '.join(map(str, item))}, and it is not plain which is "
                f"the {'label' if part == 'label' else 'input'}: pass {part}='...'."
            )
    for name, value in item.items():
        if name not in (*labels, source) and _is_value(value):
            kept.setdefault(name, []).append(value)
    value = item[source]  # type: ignore[index]
    if MASK in item and source in TOKENS:
        value = _unmasked(_plain(value), _plain(item[MASK]), row, what)
    return value, item[labels[0]] if len(labels) == 1 else [_plain(item[name]).item() for name in labels]


def _is_tokens(item: Mapping[str, Any], options: Mapping[str, Any]) -> bool:
    """Tell whether the input of an item is token ids, by its name."""
    named = options.get("inputs")
    found = named if isinstance(named, str) else next((name for name in (*IMAGES, *TOKENS) if name in item), None)
    return found in TOKENS


def _unmasked(ids: np.ndarray, mask: np.ndarray, row: int, what: str) -> np.ndarray:
    """Return the ids that a mask leaves: padding is added again, as 0."""
    if ids.shape != mask.shape:
        raise InputError(
            f"Item {row} of {what} has {ids.shape[0]} token ids but a mask of {mask.shape[0]}: give one for each."
        )
    left: np.ndarray = ids[mask != 0]
    if (left == 0).any():
        raise InputError(
            f"Item {row} of {what} has a token 0 that its mask keeps, but 0 is padding here: add 1 to all token ids."
        )
    return left


def _plain(values: Any) -> np.ndarray:
    return values.detach().cpu().numpy() if isinstance(values, Tensor) else np.asarray(values)
