"""Encoded images and arrays of any layout become tensors: images as uint8 NCHW, features as float32."""

from __future__ import annotations

import io
import os
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from polyfed.core.errors import InputError

CHUNK = 256  # images a unit of work: large enough to hide the cost of handing it to a thread
SMALL = 4096  # below this many bytes an image decodes faster than threads can hand over the interpreter lock
CHANNELS = (1, 3)
MANY = 16  # no image has more channels behind height and width; a narrower image is no square
PICTURES = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".ppm", ".pgm")  # what their files are
LUMINANCE = (0.299, 0.587, 0.114)  # the weights that PIL uses for grey


def decode_images(
    blobs: Sequence[bytes | Path], what: str, resize: tuple[int, int] | None = None, notes: list[str] | None = None
) -> Tensor:
    """Decode encoded images (bytes or files) into one uint8 tensor NCHW.

    A set with both grey and color images becomes RGB, which `notes` says. Images are resized only when `resize` is
    given.

    Raises
    ------
    InputError
        If an image cannot be decoded (with its row), or the images have different sizes.
    """
    if not blobs:
        raise InputError(f"{what} holds no images.")
    chunks = [(start, blobs[start : start + CHUNK]) for start in range(0, len(blobs), CHUNK)]
    workers = 1 if _mean_size(blobs) < SMALL else min(len(chunks), os.cpu_count() or 1, 8)
    if workers == 1:
        pieces = [_decode_chunk(start, chunk, what, resize) for start, chunk in chunks]
    else:
        with ThreadPoolExecutor(workers) as pool:
            pieces = list(pool.map(lambda item: _decode_chunk(item[0], item[1], what, resize), chunks))
    return stack_images([image for piece in pieces for image in piece], what, resize, notes)


def stack_images(
    images: Sequence[np.ndarray], what: str, resize: tuple[int, int] | None = None, notes: list[str] | None = None
) -> Tensor:
    """Put images [H, W], [H, W, 3] or [channels, H, W] together as NCHW: grey and color together are color.

    Where the last dimension is all that the shapes have in common, it holds the channels.

    Raises
    ------
    InputError
        If they have different sizes and nobody said to which one to bring them.
    """
    starts, ends = ({image.shape[place] for image in images if image.ndim == 3} for place in (0, 2))
    behind = len(ends) == 1 and len(starts) > 1 and not starts <= set(CHANNELS)
    placed = []
    for row, image in enumerate(images):
        if image.ndim not in (2, 3):
            raise InputError(f"Image {row} of {what} has shape {image.shape}: give height and width, and channels.")
        last = image.ndim == 3 and (behind or (image.shape[2] in CHANNELS and image.shape[0] not in CHANNELS))
        placed.append(image[None] if image.ndim == 2 else image.transpose(2, 0, 1) if last else image)
    grey = sum(image.shape[0] == 1 for image in placed)
    if {image.shape[0] for image in placed} == set(CHANNELS):
        placed = [np.repeat(image, 3, axis=0) if image.shape[0] == 1 else image for image in placed]
        if notes is not None:
            notes.append(f"{grey} grey images of {what} are beside {len(placed) - grey} in color: all are color")
    channels = sorted({image.shape[0] for image in placed})
    if len(channels) > 1:
        raise InputError(f"{what} has images of {' and '.join(map(str, channels))} channels: bring them to one number.")
    sizes = Counter(image.shape[1:] for image in placed)
    if resize is not None and set(sizes) != {tuple(resize)}:
        each = [resize_images(torch.from_numpy(np.ascontiguousarray(image))[None], resize) for image in placed]
        return torch.cat(each)
    if len(sizes) > 1:
        common = ", ".join(f"{h}x{w} ({count} images)" for (h, w), count in sizes.most_common(3))
        raise InputError(f"{what} has images of {len(sizes)} different sizes, {common}: pass resize=(height, width).")
    return torch.from_numpy(np.stack(placed))


def size_of(resize: int | tuple[int, int] | None) -> tuple[int, int] | None:
    """Return the size that somebody wants images in: height and width, or one number for both."""
    if resize is None:
        return None
    pair = (resize, resize) if isinstance(resize, int) else tuple(resize)
    if len(pair) != 2 or any(not isinstance(side, int) or side < 1 for side in pair):
        raise InputError(f"resize={resize} is not a size: give (height, width) in pixels.")
    return pair  # type: ignore[return-value]


def decode_image(blob: bytes | Path, where: str, resize: tuple[int, int] | None = None) -> np.ndarray:
    """Decode one image; `where` it is, is said when that fails."""
    from PIL import Image

    try:
        with Image.open(blob if isinstance(blob, Path) else io.BytesIO(blob)) as image:
            return image_to_array(image, resize)
    except Exception as error:  # PIL reports damage with many kinds of them, and a bomb with one of its own
        raise InputError(f"{where} is not a readable image ({error}): remove or replace it.") from error


def is_picture(name: str) -> bool:
    """Tell a file of an image by its name."""
    return name.lower().endswith(PICTURES)


def image_to_array(image: Any, resize: tuple[int, int] | None = None) -> np.ndarray:
    """Turn a PIL image into uint8, [H, W] for grey and [H, W, 3] for color."""
    from PIL import Image

    if image.mode.startswith("I"):  # 16-bit grey, as in many medical sets: PIL would clip it at 255
        image = Image.fromarray((np.asarray(image).astype(np.int64) >> 8).clip(0, 255).astype(np.uint8))
    elif image.mode in ("1", "LA"):
        image = image.convert("L")
    elif image.mode not in ("L", "RGB"):
        image = image.convert("RGB")
    if resize is not None and (image.height, image.width) != resize:
        height, width = resize
        if _shrinks_evenly((image.height, image.width), resize):
            image = image.reduce((image.width // width, image.height // height))
        else:
            image = image.resize((width, height), Image.Resampling.BILINEAR)
    return np.asarray(image)


def as_inputs(x: Any, what: str, kind: str | None = None) -> Tensor:
    """Turn an array or tensor of samples into the form that is stored.

    Images NHWC, NCHW or NHW become NCHW: channels are last where the last dimension is 1 or 3 and the second is
    not, or where square images have up to 16 of them; otherwise they are first. uint8 stays uint8, and so do integer
    images within 0..255; the rest is float32. Three dimensions are grey images where they are bytes or square, else
    signals (samples, channels, time), unless `kind` says which. With `kind="tokens"` whole numbers stay what they are.
    """
    try:
        array = x.detach().cpu().numpy() if isinstance(x, Tensor) else np.asarray(x)
    except ValueError as error:
        raise InputError(f"{what} has rows of different lengths: give samples of one shape.") from error
    if array.dtype.kind not in "buif":
        raise InputError(f"{what} must be numbers, not {array.dtype}: convert the inputs to a numeric array first.")
    if array.ndim < 2:
        raise InputError(f"{what} has shape {array.shape}: give one row per sample, [samples, features] or images.")
    if kind == "tokens":
        return _ids(array, what)
    if (array.ndim == 3 and kind == "signal") or (array.ndim == 3 and kind is None and not _looks_like_images(array)):
        return torch.from_numpy(np.require(array.astype(np.float32), requirements=["C", "W"]))
    if array.ndim == 3:
        array = array[:, None]
    elif array.ndim == 4 and _channels_last(array.shape):
        array = array.transpose(0, 3, 1, 2)
    if array.dtype.kind in "iu" and array.dtype != np.uint8 and array.ndim == 4 and array.size:
        fits = array.min() >= 0 and array.max() <= 255
        array = array.astype(np.uint8 if fits else np.float32)
    elif array.dtype != np.uint8:
        with np.errstate(over="ignore"):  # becomes infinite, which the check for finite inputs names with its row
            array = array.astype(np.float32)
    return torch.from_numpy(np.require(array, requirements=["C", "W"]))


def _ids(array: np.ndarray, what: str) -> Tensor:
    """Return token ids as 64-bit integers, [samples, length]."""
    if array.ndim != 2 or array.dtype.kind not in "iu" or (array.size and array.min() < 0):
        raise InputError(
            f"{what} is not an array of token ids ({array.dtype}, shape {array.shape}): give whole numbers from 0 on, "
            "[samples, length]."
        )
    return torch.from_numpy(np.require(array.astype(np.int64), requirements=["C", "W"]))


def _looks_like_images(array: np.ndarray) -> bool:
    whole = array.dtype.kind in "iub" and (array.size == 0 or (array.min() >= 0 and array.max() <= 255))
    return whole or array.shape[1] == array.shape[2]


def fit_images(x: Tensor, shape: tuple[int, ...], what: str) -> Tensor:
    """Bring images NCHW to `shape` (channels, height, width): grey to RGB or back, then resized.

    Raises
    ------
    InputError
        If the samples are not images, or the number of channels cannot be converted.
    """
    if tuple(x.shape[1:]) == tuple(shape):
        return x
    if x.dim() != 4 or len(shape) != 3:
        raise InputError(f"{what} has samples of shape {tuple(x.shape[1:])}, which cannot be turned into {shape}.")
    channels, height, width = shape
    if x.shape[1] == 1 and channels > 1:
        x = x.expand(-1, channels, -1, -1)
    elif x.shape[1] >= 3 and channels == 1:
        weights = torch.tensor(LUMINANCE).view(1, 3, 1, 1)
        x = _round_like((x[:, :3].float() * weights).sum(1, keepdim=True), x.dtype)
    elif x.shape[1] == 4 and channels == 3:
        x = x[:, :3]
    elif x.shape[1] != channels:
        raise InputError(f"{what} has {x.shape[1]} channels, which cannot be turned into {channels}.")
    return resize_images(x, (height, width)).contiguous()


def resize_images(x: Tensor, size: tuple[int, int]) -> Tensor:
    """Resize images NCHW: the mean of the pixels when both sides shrink by whole factors, else bilinear."""
    old = (x.shape[2], x.shape[3])
    if old == size:
        return x
    pieces = []
    for piece in x.split(4096):  # in pieces, because the arithmetic needs four times the memory of uint8
        if _shrinks_evenly(old, size):
            new = functional.avg_pool2d(piece.float(), (old[0] // size[0], old[1] // size[1]))
        else:
            new = functional.interpolate(piece.float(), size, mode="bilinear", antialias=True, align_corners=False)
        pieces.append(_round_like(new, x.dtype))
    return torch.cat(pieces)


def _mean_size(blobs: Sequence[bytes | Path]) -> float:
    first = blobs[:CHUNK]
    return sum(blob.stat().st_size if isinstance(blob, Path) else len(blob) for blob in first) / len(first)


def _decode_chunk(
    start: int, blobs: Sequence[bytes | Path], what: str, resize: tuple[int, int] | None
) -> list[np.ndarray]:
    return [
        decode_image(blob, str(blob) if isinstance(blob, Path) else f"row {start + offset} of {what}", resize)
        for offset, blob in enumerate(blobs)
    ]


def _channels_last(shape: tuple[int, ...]) -> bool:
    if shape[3] not in CHANNELS:
        return shape[3] <= MANY and shape[1] == shape[2] != shape[3]
    return shape[1] not in CHANNELS


def _shrinks_evenly(old: tuple[int, int], new: tuple[int, int]) -> bool:
    return old[0] % new[0] == 0 and old[1] % new[1] == 0


def _round_like(x: Tensor, dtype: torch.dtype) -> Tensor:
    return (x + 0.5).clamp(0, 255).to(dtype) if dtype == torch.uint8 else x.to(dtype)
