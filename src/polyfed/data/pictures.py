"""Images for a trained model, as people have them: files, a folder, a table, arrays, dictionaries, a `Dataset`."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from polyfed.core.errors import InputError
from polyfed.core.samples import Scaling
from polyfed.data.columns import IMAGES
from polyfed.data.decode import PICTURES, as_inputs, decode_image, image_to_array, is_picture, resize_images
from polyfed.data.given import check_shape
from polyfed.data.tables import any_table, is_frame

FAR = 2.0  # floats of images go from 0 to 1; sharpening may leave that a little


def picture_files(place: Path) -> list[Path]:
    """Return an image file, or those below a folder, in the order of their names.

    Raises
    ------
    InputError
        If there are none.
    """
    if not place.is_dir():
        return [place]
    files = sorted(file for file in place.rglob("*") if is_picture(file.name) and file.is_file())
    if not files:
        raise InputError(f"There are no images in the folder {place}: their files end with {', '.join(PICTURES)}.")
    return files


def given_images(raw: Any, shape: tuple[int, ...], resize: bool, what: str) -> Tensor:
    """Return images NCHW; grey ones are made color where training was.

    Parameters
    ----------
    raw
        An array; one image, or many in a list, a table or a map-style `Dataset`: arrays, files, encoded bytes, images
        of PIL, or dictionaries that hold one; a folder, with all that is below it.
    shape
        Channels, height and width that the network takes.
    resize
        Whether training was brought to that size.

    Raises
    ------
    InputError
        If they have another shape, or are no images.
    """
    size = (shape[1], shape[2])
    images = one_by_one(raw, "image", what)
    if isinstance(images, list):
        arrays = [_array(image, row, size if resize else None, what) for row, image in enumerate(images)]
        pieces = [as_inputs(_channels_first(array, shape[0])[None], what, "image") for array in arrays]
    else:
        pieces = [as_inputs(images, what, "image")]
    made = []
    for piece in pieces:
        if piece.dim() == 4 and piece.shape[1] == 1 and shape[0] == 3:
            piece = piece.expand(-1, 3, -1, -1)
        piece = resize_images(piece, size) if resize and piece.dim() == 4 else piece
        check_shape(piece, shape, what)
        made.append(piece)
    return torch.cat(made) if made else torch.zeros(0, *shape)


def _channels_first(array: np.ndarray, channels: int) -> np.ndarray:
    last = array.ndim == 3 and array.shape[2] == channels != array.shape[0]
    return array.transpose(2, 0, 1) if last else array


def in_unit(stored: Tensor, scaling: Scaling, white: float, what: str) -> tuple[Tensor, tuple[str, ...]]:
    """Return values in the unit of training, and what was done for that: 255 of a byte may be 1 of a float.

    Parameters
    ----------
    white
        What the 255 of a byte was in training, where that had floats (`Form.white`).

    Raises
    ------
    InputError
        If they are in another unit, or nobody knows in which one.
    """
    largest = float(stored.abs().max()) if stored.numel() else 0.0
    floats, divisor = stored.is_floating_point(), scaling.divisor
    shares = floats and largest <= 1.0 and bool((stored != stored.round()).any())
    found = f"{what[0].upper()}{what[1:]} holds {'floats' if floats else 'bytes'} up to {largest:g}"
    if divisor == 255.0 and floats and largest > FAR:
        raise InputError(
            f"{found}, but the network was trained on bytes and takes floats from 0 to 1: give bytes, or divide by 255."
        )
    if divisor == 1.0 and white == 1.0 and floats and largest > FAR:
        raise InputError(f"{found}, but the network was trained on floats from 0 to 1: divide by 255, or give bytes.")
    if divisor == 1.0 and not floats and white == 0.0:
        mean, deviation = (", ".join(f"{number:.3g}" for number in part) for part in (scaling.mean, scaling.std))
        raise InputError(
            f"{found}, but the network was trained on floats in another unit (mean {mean}, deviation {deviation}): "
            "give floats, made as those of training were."
        )
    whole = white if divisor == 1.0 else divisor  # of training that had neither 0..1 nor bytes of 255
    if divisor != 255.0 and whole > 1.0 and (shares or largest > whole):
        raise InputError(f"{found}, but the values of training go to {whole:g}: give them in that unit.")
    if divisor == 1.0 and not floats and white == 1.0:
        return stored.float() / 255.0, ("bytes are divided by 255, as training had floats from 0 to 1",)
    return stored, ()


def one_by_one(raw: Any, kind: str, what: str) -> Any:
    """Return images (signals, rows of numbers) in a list, or all of them as one array, from whatever holds them.

    Raises
    ------
    InputError
        If a file is missing, or it is not plain what is meant.
    """
    if isinstance(raw, str | os.PathLike):
        place = Path(raw).expanduser()
        if not place.exists():
            raise InputError(f"There is no file or folder {raw}: correct its name.")
        if kind == "image" and (place.is_dir() or is_picture(place.name)):
            return picture_files(place)
        rows = any_table(place, what).rows.to_pylist()
        return [_beside(_picked(row, number, kind, what), place.parent) for number, row in enumerate(rows)]
    if hasattr(raw, "convert") or isinstance(raw, bytes):
        return [raw]
    if isinstance(raw, Mapping):
        found = _picked(raw, 0, kind, what)
        return found if isinstance(found, list) or getattr(found, "ndim", 0) > 3 else [found]
    if hasattr(raw, "iloc") and is_frame(raw):  # of pandas: cells may be images, which Arrow has no type for
        raw = raw.to_dict("records")
    elif is_frame(raw):
        raw = any_table(raw, what).rows.to_pylist()
    if isinstance(raw, np.ndarray) and raw.dtype.kind in "OUS":
        raw = raw.tolist()
    if isinstance(raw, np.ndarray | Tensor) or not hasattr(raw, "__getitem__"):
        return raw
    items = raw if hasattr(raw, "__iter__") else (raw[row] for row in range(len(raw)))
    return [_picked(item, row, kind, what) for row, item in enumerate(items)]


def _picked(item: Any, row: int, kind: str, what: str) -> Any:
    """Return the input of an item: of a dictionary or a row the one that there is, of (image, label) the first."""
    if isinstance(item, tuple) and len(item) > 1 and (hasattr(item[0], "convert") or getattr(item[0], "ndim", 0) > 0):
        return item[0]
    if not isinstance(item, Mapping) or _is_encoded(item):
        return item
    named = [name for name in IMAGES if item.get(name) is not None]
    large = [name for name, value in item.items() if _is_large(value)]
    files = [name for name, value in item.items() if isinstance(value, str) and is_picture(value)]
    found = named[:1] or large or files
    if len(found) != 1:
        raise InputError(
            f"Row {row} of {what} has {', '.join(map(str, item))}, and it is not plain which is the {kind}: call it "
            f"'{kind}'."
        )
    return item[found[0]]


def _is_large(value: Any) -> bool:
    return isinstance(value, bytes | list | Mapping) or hasattr(value, "convert") or getattr(value, "ndim", 0) > 1


def _is_encoded(item: Mapping[str, Any]) -> bool:
    """Tell an image as Hugging Face keeps it: its bytes, or where they are."""
    return "bytes" in item and set(item) <= {"bytes", "path"}


def _beside(image: Any, folder: Path) -> Any:
    """Return a file that a table names: it may lie beside the table."""
    if isinstance(image, Mapping) and image.get("bytes") is None and image.get("path"):
        image = image["path"]
    return folder / image if isinstance(image, str) and (folder / image).is_file() else image


def _array(image: Any, row: int, size: tuple[int, int] | None, what: str) -> np.ndarray:
    """Return one image as an array; what has to be decoded is brought to its size then."""
    if isinstance(image, Mapping):
        image = image.get("bytes") or image.get("path")
    if image is None:
        raise InputError(f"Row {row} of {what} has no image: remove the row.")
    if isinstance(image, str | os.PathLike) and not Path(image).expanduser().is_file():
        raise InputError(f"There is no file {image} (row {row} of {what}): correct its name.")
    if isinstance(image, str | os.PathLike | bytes):
        where = f"row {row} of {what}" if isinstance(image, bytes) else str(image)
        return decode_image(image if isinstance(image, bytes) else Path(image).expanduser(), where, size)
    if hasattr(image, "convert"):
        return image_to_array(image, size)
    return image.detach().cpu().numpy() if isinstance(image, Tensor) else np.asarray(image)
