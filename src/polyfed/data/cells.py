"""What the cells of one column of a table hold, and the arrays that they become."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from polyfed.core.errors import InputError
from polyfed.data.decode import PICTURES, as_inputs, is_picture
from polyfed.data.form import Raw
from polyfed.data.tables import TABLES, Table, read_table

TOKENS = ("input_ids", "token_ids", "tokens", "ids")
MONTH = "(?:jan|feb|mar|apr|may|jun|jul|aug|sep|oct|nov|dec)[a-z]*"
DATE = re.compile(  # 20240113, 2024-01-13, 13.01.2024, 1/13/24, 13-Jan-24, January 13, 2024; perhaps with a time
    r"(?:(?:19|20)\d{2}(?:0[1-9]|1[0-2])(?:[0-2]\d|3[01])|\d{4}([-./ ])\d{1,2}\1\d{1,2}"
    r"|\d{1,2}([-./ ])\d{1,2}\2\d{2}(?:\d{2})?"
    rf"|\d{{1,2}}[-./ ]+{MONTH}[-.,/ ]+\d{{2}}(?:\d{{2}})?|{MONTH}[-./ ]+\d{{1,2}}[-.,/ ]+\d{{4}})"
    r"(?:[T ,]+\d{1,2}:.*)?",
    re.IGNORECASE,
)


def values_of(table: Table, name: str) -> np.ndarray:
    """Return a column of a table as numbers (NaN where there is none), yes and no, or words (None where there is none).

    Raises
    ------
    InputError
        For a column of dates, or of something else that is not a feature.
    """
    import pyarrow.types as types  # type: ignore[import-untyped]

    column = table.rows[name]
    kind = column.type
    if types.is_temporal(kind) or _are_dates(table, name):
        raise InputError(
            f"Column '{name}' of {table.what} holds dates or times, which are not features as they are: leave it out "
            f"(drop=['{name}']), or make a number of it (days since the first one, the month)."
        )
    if types.is_boolean(kind) and not column.null_count:
        return np.array(column.to_numpy())
    if name not in table.class_names and (
        types.is_integer(kind) or types.is_floating(kind) or types.is_decimal(kind) or types.is_null(kind)
    ):
        return np.array(column.cast("float64", safe=False).to_numpy(), dtype=np.float64)
    if types.is_boolean(kind) or is_words(kind) or name in table.class_names:
        words = scalars_of(table, name).tolist() if name in table.class_names else column.to_pylist()
        return np.array([None if word is None or not str(word).strip() else str(word) for word in words], dtype=object)
    raise InputError(
        f"Column '{name}' of {table.what} is of type {kind}, which is no feature: leave it out (drop=['{name}'])."
    )


def _are_dates(table: Table, name: str) -> bool:
    """Tell whether most words of a column are dates, or all numbers: 20240113 is one that is written as a number."""
    import pyarrow.types as types

    kind = table.rows.schema.field(name).type
    if name in table.class_names:
        return False
    if types.is_integer(kind) or types.is_floating(kind):
        numbers = table.rows[name].drop_null().unique().cast("float64", safe=False).to_numpy()
        days = numbers[np.isfinite(numbers)]
        year, month, day = days // 10_000, days // 100 % 100, days % 100
        likely = (year >= 1900) & (year <= 2100) & (month >= 1) & (month <= 12) & (day >= 1) & (day <= 31)
        return bool(len(days)) and bool((likely & (days == days.round())).all())
    if not is_words(kind):
        return False
    words = [str(word).strip() for word in table.rows[name].unique().to_pylist() if word is not None]
    found = [word for word in words if word]
    return 2 * sum(bool(DATE.fullmatch(word)) for word in found) > len(found)


def scalars_of(table: Table, name: str) -> np.ndarray:
    """Return a column as numbers or strings; class numbers become their names, a missing value NaN or ''."""
    import pyarrow.types as types

    column = table.rows[name]
    names = table.class_names.get(name)
    if names is not None:
        return np.array(["" if value is None or value < 0 else names[value] for value in column.to_pylist()])
    kind = column.type
    if types.is_integer(kind) or types.is_floating(kind) or types.is_boolean(kind):
        wide = "int64" if types.is_integer(kind) and column.null_count == 0 else "float64"
        return np.array(column.to_numpy() if types.is_boolean(kind) else column.cast(wide, safe=False).to_numpy())
    return np.array(["" if value is None else str(value) for value in column.to_pylist()], dtype=str)


def texts_of(table: Table, name: str) -> np.ndarray:
    """Return a column of texts; a missing one is empty."""
    return np.array(["" if text is None else text for text in table.rows[name].to_pylist()], dtype=object)


def images_of(table: Table, name: str) -> list[bytes | Path]:
    """Return a column of images, as encoded bytes or files; those that a table names may lie beside it.

    Raises
    ------
    InputError
        If a row has none.
    """
    import pyarrow.types as types

    if is_words(table.rows.schema.field(name).type):
        return [_file_of(table, name, row, value) for row, value in enumerate(table.rows[name].to_pylist())]
    blobs: list[bytes | Path] = []
    for chunk in table.rows[name].chunks:
        if not types.is_struct(chunk.type):
            blobs.extend(chunk.to_pylist())
            continue
        encoded = chunk.field("bytes").to_pylist()
        if chunk.type.get_field_index("path") >= 0:  # images of a local set may be named instead of contained
            paths = chunk.field("path").to_pylist()
            encoded = [Path(path) if blob is None and path else blob for blob, path in zip(encoded, paths, strict=True)]
        blobs.extend(encoded)
    for row, blob in enumerate(blobs):
        if blob is None or (isinstance(blob, Path) and not blob.is_file()):
            raise InputError(f"Row {row} of {table.what} has no image in column '{name}': remove the row.")
    return blobs


def _file_of(table: Table, name: str, row: int, value: str | None) -> Path:
    file = Path(value or "").expanduser()
    found = next((path for path in (table.folder / file, file) if path.is_file()), None)
    if found is None:
        told = f"names the image {value}, which is not there: correct the name" if value else "has no image"
        raise InputError(f"Row {row} of {table.what} {told} in column '{name}', or remove the row.")
    return found


def names_pictures(table: Table, name: str) -> bool:
    """Tell whether the words of a column are the names of image files."""
    if not is_words(table.rows.schema.field(name).type):
        return False
    words = [word for word in table.rows[name].unique().to_pylist() if word]
    return bool(words) and all(is_picture(word) for word in words)


def pictures_named(files: Sequence[Path]) -> list[Path | bytes]:
    """Return the image files that CSV files name: where one of them changes, the data has changed."""
    found: list[Path | bytes] = []
    for file in files:
        if file.suffix.lower() not in TABLES or not file.is_file():
            continue
        with open(file, "rb") as content:
            first = [content.readline().lower() for _ in range(2)][1]
        if any(ending.encode() in first for ending in PICTURES):
            table = read_table([file])
            for name in table.rows.column_names:
                found += images_of(table, name) if names_pictures(table, name) else []
    return found


def lists_of(table: Table, name: str, kind: str | None) -> Tensor | Raw:
    """Return a column of lists: token ids, which stay lists, or arrays."""
    rows = table.rows[name].to_pylist()
    what = f"Column '{name}' of {table.what}"
    flat = all(isinstance(value, int) for row in rows[:100] for value in (row or ()))
    if kind == "tokens" or (kind is None and flat and (name in TOKENS or len({len(row or ()) for row in rows}) > 1)):
        ids = np.empty(len(rows), dtype=object)
        ids[:] = [list(row or ()) for row in rows]
        return Raw({name: ids}, "tokens")
    try:
        return as_inputs(np.array(rows), what, kind)
    except ValueError as error:
        raise InputError(f"{what} has rows of different lengths.") from error


def is_encoded(kind: Any) -> bool:
    """Tell whether cells hold encoded images."""
    import pyarrow.types as types

    if types.is_struct(kind):
        return bool(kind.get_field_index("bytes") >= 0)
    return bool(types.is_binary(kind) or types.is_large_binary(kind))


def is_list(kind: Any) -> bool:
    """Tell whether cells hold lists."""
    import pyarrow.types as types

    kind = getattr(kind, "storage_type", kind)  # Array2D and its like are lists underneath
    return bool(types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind))


def is_words(kind: Any) -> bool:
    """Tell whether cells hold words."""
    import pyarrow.types as types

    if types.is_dictionary(kind):
        return is_words(kind.value_type)
    return bool(types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind))


def is_scalar(field: Any) -> bool:
    """Tell whether cells hold single values: numbers, yes and no, or words."""
    import pyarrow.types as types

    numbers = (types.is_integer, types.is_floating, types.is_boolean)
    texts = (types.is_string, types.is_large_string, types.is_dictionary)
    return any(test(field.type) for test in (*numbers, *texts))
