"""Raw inputs for a trained model, as people have them: texts in a list or in a table, images of any size."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import numpy as np

from polyfed.core.errors import InputError
from polyfed.data.columns import read_texts
from polyfed.data.tables import TABLES, is_frame

FILES = (*TABLES, ".parquet")


def given_texts(raw: Any, column: str, what: str) -> np.ndarray:
    """Return texts from a list, one text, a file, a data frame or dictionaries.

    Raises
    ------
    InputError
        If a file or column is missing, or something is no text.
    """
    if isinstance(raw, str) and not _is_file(raw):
        raw = [raw]
    rows = isinstance(raw, list | tuple) and any(isinstance(row, Mapping) for row in raw)
    if rows or isinstance(raw, str | os.PathLike | Mapping) or is_frame(raw):
        return read_texts(raw, column, what)
    texts = list(raw)
    for row, text in enumerate(texts):
        if text is None or text != text:  # as an empty cell of a table
            texts[row] = ""
        elif not isinstance(text, str):
            raise InputError(f"Row {row} of {what} is no text but of type {type(text).__name__}: give texts.")
    return np.array(texts, dtype=object)


def _is_file(text: str) -> bool:
    """Tell a path from a text: one that ends like a table's file is never a text, so that a typing error shows."""
    return text.strip().lower().endswith(FILES) or os.path.isfile(text)
