"""Raw inputs for a trained model, as people have them: texts in a list or in a table, images of any size."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from polyfed.core.errors import InputError
from polyfed.data.columns import read_texts
from polyfed.data.decode import as_inputs, image_to_array, resize_images
from polyfed.data.tables import TABLES, is_frame

FILES = (*TABLES, ".parquet")
FAR = 2.0  # floats of images go from 0 to 1; sharpening may leave that a little


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


def given_images(raw: Any, shape: tuple[int, ...], resize: bool, what: str) -> Tensor:
    """Return images NCHW from an array or a list (arrays, images of PIL): grey ones are made color where training was.

    Parameters
    ----------
    shape
        Channels, height and width that the network takes.
    resize
        Whether training was brought to that size.

    Raises
    ------
    InputError
        If they have another shape.
    """
    size = (shape[1], shape[2])
    if isinstance(raw, list | tuple):
        arrays = [image_to_array(one, size if resize else None) if hasattr(one, "convert") else one for one in raw]
        pieces = [as_inputs((one if hasattr(one, "shape") else np.asarray(one))[None], what, "image") for one in arrays]
    else:
        pieces = [as_inputs(raw, what, "image")]
    made = []
    for piece in pieces:
        if piece.dim() == 4 and piece.shape[1] == 1 and shape[0] == 3:
            piece = piece.expand(-1, 3, -1, -1)
        piece = resize_images(piece, size) if resize and piece.dim() == 4 else piece
        check_shape(piece, shape, what)
        made.append(piece)
    return torch.cat(made) if made else torch.zeros(0, *shape)


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


def check_unit(stored: Tensor, what: str) -> None:
    """Refuse floats in the unit of bytes, where training had bytes and floats are from 0 to 1."""
    largest = float(stored.abs().max()) if stored.numel() else 0.0
    if largest > FAR:
        raise InputError(
            f"{what[0].upper()}{what[1:]} holds floats up to {largest:g}, but the network was trained on bytes "
            "and takes floats from 0 to 1: give bytes, or divide by 255."
        )


def _is_file(text: str) -> bool:
    """Tell a path from a text: one that ends like a table's file is never a text, so that a typing error shows."""
    return text.strip().lower().endswith(FILES) or os.path.isfile(text)
