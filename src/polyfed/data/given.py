"""Raw inputs for a trained model, as people have them: rows of a table, texts and token ids in a list or in a table."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from polyfed.core.errors import InputError, nearest
from polyfed.data.cells import TOKENS, is_words, texts_of, values_of
from polyfed.data.columns import TEXTS
from polyfed.data.form import Form, Raw
from polyfed.data.objects import MASK
from polyfed.data.tables import TABLES, Table, any_table, is_frame

FILES = (*TABLES, ".parquet")


def read_columns(source: Any, names: Sequence[str], what: str) -> dict[str, np.ndarray]:
    """Return columns of a table in any form: a file, a data frame, columns by name or rows as dictionaries.

    Raises
    ------
    InputError
        If one is missing.
    """
    table = any_table(source, what)
    _check_there(table, names, what)
    return {name: values_of(table, name) for name in names}


def read_texts(source: Any, name: str, what: str) -> np.ndarray:
    """Return the texts of a table in any form; without a name, the column named like texts or the only one of words.

    Raises
    ------
    InputError
        If there is not one such column, or it holds something else.
    """
    table = any_table(source, what)
    if not name:
        words = [field.name for field in table.rows.schema if is_words(field.type)]
        found = [known for known in TEXTS if known in words][:1] or words
        if len(found) != 1:
            raise InputError(
                f"{what[0].upper()}{what[1:]} has {len(found)} columns of words, so it is not plain which are the "
                "texts: call it 'text'."
            )
        name = found[0]
    _check_there(table, [name], what)
    column = table.rows[name]
    if not is_words(column.type) and column.null_count < len(column):
        raise InputError(f"Column '{name}' of {what} holds no texts ({column.type}): give texts.")
    return texts_of(table, name)


def given_texts(raw: Any, column: str, what: str) -> np.ndarray:
    """Return texts from a list, one text, a file, a data frame or dictionaries.

    Raises
    ------
    InputError
        If a file or column is missing, or something is no text.
    """
    import pandas  # type: ignore[import-untyped]

    if isinstance(raw, str) and not _is_file(raw):
        raw = [raw]
    rows = isinstance(raw, list | tuple) and any(isinstance(row, Mapping) for row in raw)
    if rows or isinstance(raw, str | os.PathLike | Mapping) or is_frame(raw):
        return read_texts(raw, column, what)
    texts = list(raw)
    for row, text in enumerate(texts):
        if isinstance(text, str):
            continue
        if text is None or text is pandas.NA or text != text:  # as an empty cell of a table
            texts[row] = ""
        else:
            raise InputError(f"Row {row} of {what} is no text but of type {type(text).__name__}: give texts.")
    return np.array(texts, dtype=object)


def given_ids(raw: Any, form: Form, what: str) -> tuple[Raw, tuple[str, ...]]:
    """Return token ids from an array, lists of any length, dictionaries (with a mask) or a table; and what they lose.

    Raises
    ------
    InputError
        If there are none.
    """
    if isinstance(raw, str | os.PathLike) or is_frame(raw):
        raw = any_table(raw, what).rows.to_pylist()
    elif isinstance(raw, Mapping):  # columns by name, as tokenizers give them
        raw = [dict(zip(raw, row, strict=True)) for row in zip(*raw.values(), strict=True)]
    ids = np.empty(len(raw), dtype=object)
    ids[:] = [_ids_of(row, number, what) for number, row in enumerate(raw)]
    strange = sum(any(number >= form.ids for number in row) for row in ids)
    long = sum(len(row) > form.length for row in ids)
    notes = [f"{strange} rows of {what} have ids that training does not know: they count as the unknown word"]
    notes += [f"{long} rows of {what} have more than the {form.length} ids of training and are cut"]
    return Raw({"ids": ids}, "tokens"), tuple(n for n, count in zip(notes, (strange, long), strict=True) if count)


def _ids_of(row: Any, number: int, what: str) -> list[int]:
    mask = None
    if isinstance(row, Mapping):
        name = next((name for name in TOKENS if name in row), None)
        row, mask = row.get(name), row.get(MASK)
    found = np.asarray(row)
    if found.ndim != 1 or (found.size and found.dtype.kind not in "iu"):
        raise InputError(f"Row {number} of {what} is no list of token ids: give a list of whole numbers for each row.")
    return list(found.tolist() if mask is None else found[np.asarray(mask) != 0].tolist())


def read_array(file: Path) -> np.ndarray:
    """Read a `.npy` file.

    Raises
    ------
    InputError
        If it is missing, or holds something else than numbers.
    """
    if not file.is_file():
        raise InputError(f"There is no file {file}: correct its name.")
    try:
        return np.asarray(np.load(file, allow_pickle=False))
    except (OSError, ValueError, EOFError) as error:
        raise InputError(f"{file} cannot be read as an array ({error}): write it with numpy.save.") from error


def check_shape(stored: Tensor, shape: tuple[int, ...], what: str) -> None:
    """Refuse rows of another shape than the network takes."""
    found = tuple(stored.shape[1:])
    if found == tuple(shape):
        return
    todo = ""
    if len(found) == len(shape) == 3:
        color = "" if found[0] == shape[0] else f" and {'color' if shape[0] == 3 else 'grey'}"
        todo = f": bring the images to {shape[1]}x{shape[2]}{color}"
    raise InputError(
        f"{what[0].upper()}{what[1:]} has rows of shape {found}, but the network takes {tuple(shape)}{todo}."
    )


def _check_there(table: Table, names: Sequence[str], what: str) -> None:
    missing = [name for name in names if name not in table.rows.column_names]
    if missing:
        raise InputError(
            f"{what[0].upper()}{what[1:]} has no column '{missing[0]}', which the network needs: "
            f"{nearest(missing[0], table.rows.column_names, 'its columns are')}"
        )


def _is_file(text: str) -> bool:
    """Tell a path from a text: one that ends like a table's file is never a text, so that a typing error shows."""
    return text.strip().lower().endswith(FILES) or os.path.isfile(text)
