"""Public data: samples that the server and every client may see, brought to the clients' input shape."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from polyfed.core.errors import InputError
from polyfed.core.rng import numpy_generator
from polyfed.core.samples import Samples, Scaling
from polyfed.core.task import CLASSIFICATION
from polyfed.data.columns import same_features
from polyfed.data.dataset import Dataset, check_part, samples_hash, usual_divisor
from polyfed.data.decode import fit_images
from polyfed.data.form import Raw
from polyfed.data.objects import part_of
from polyfed.data.sources import load
from polyfed.data.targets import make_targets, unlabeled


@dataclass(frozen=True)
class Public:
    """The public samples, their number of classes, and the training rows they take from the clients (if any)."""

    samples: Samples | None
    classes: int | None
    rows: np.ndarray
    recipe: Any  # what to write into a recipe; None when there is no public set or it came as an object
    fingerprint: str = ""


def make_public(data: Dataset, public: Any, seed: int) -> Public:
    """Make the public set of a split.

    Parameters
    ----------
    data
        The clients' data set.
    public
        None; a number or a fraction of training rows to hold out from the clients; a name with an optional number
        of rows (`cifar100:5000`); a `Dataset`, `Samples`, a pair of arrays, an array of inputs, or a torch Dataset.
    seed
        Which rows are drawn.

    Raises
    ------
    InputError
        If nothing would be left for the clients, or the samples cannot be brought to the clients' shape.
    """
    if isinstance(public, os.PathLike) and not Path(public).expanduser().exists():
        raise InputError(f"There is no file or folder {public}: check the path.")
    if isinstance(public, str | os.PathLike):
        public = _read(os.fspath(public))
    if isinstance(public, np.generic):
        public = public.item()
    if public is None:
        return Public(None, None, np.empty(0, dtype=np.int64), None)
    if isinstance(public, int | float):
        return _held_out(data, public, seed)
    recipe, number, source = None, None, public
    if isinstance(public, tuple) and len(public) == 2 and isinstance(public[0], str):
        name, number = public
        if name == data.recipe["source"]:
            raise InputError(
                f"The public set '{name}' is the clients' own data set, so they would share rows: "
                "give public=N to hold N rows out from the clients."
            )
        recipe = name if number is None else f"{name}:{number}"
        size = data.input_shape[1:] if len(data.input_shape) == 3 else None
        source = load_public(name, resize=size, inputs=data.features or None, form=data.form if _is_raw(data) else None)
    if isinstance(source, np.ndarray | torch.Tensor):  # inputs alone: nothing is known of their classes
        source = (source, np.full(source.shape[:1], -1))
    classes: int | None
    if isinstance(source, Dataset):
        samples, classes, fingerprint = source.train, source.num_classes, source.fingerprint
        if source.task.name != data.task.name or (data.task != CLASSIFICATION and classes != data.num_classes):
            # What they are labeled with is not what the clients learn: only the inputs count.
            y, classes = unlabeled(len(samples), data.task, data.num_classes), None
            samples = replace(samples, x=samples.x[samples.rows()], y=y, index=None)
        same_features(source.features, data.features, "the public set")
    else:
        samples, classes = _from_object(source, data)
        fingerprint = samples_hash(samples)
    if number is not None and number > len(samples):
        raise InputError(f"The public set '{recipe}' has only {len(samples)} rows: ask for at most that many.")
    if number is not None:
        samples = samples.select(torch.from_numpy(drawn_rows(len(samples), number, seed)))
    empty = np.empty(0, dtype=np.int64)
    return Public(_like(data, samples), classes, empty, recipe, f"{fingerprint}:{number}:{seed}")


def drawn_rows(total: int, number: int, seed: int) -> np.ndarray:
    """Return which rows of so many are public, in order: the same for all parties."""
    return np.sort(numpy_generator(seed, "public").permutation(total)[:number])


def load_public(name: str, **how: Any) -> Dataset:
    """Load a public set: no row of a single file is held out for a test, which public samples do not have."""
    return load(name, test=name if Path(name).expanduser().is_file() else None, **how)


def _is_raw(data: Dataset) -> bool:
    return data.form.kind in ("table", "text", "tokens")


def _from_object(source: Any, data: Dataset) -> tuple[Samples, int | None]:
    """Return samples and their number of classes; labels that are all -1 say that there are none to be learned."""
    what = "the public set"
    kind = "tokens" if data.form.kind == "tokens" else None
    part = part_of(source, {"inputs": data.features, "kind": kind}, what)
    check_part(what, part.inputs, part.labels)
    labels, x = part.labels, part.inputs
    x = data.form.encode(x, what)[0] if isinstance(x, Raw) else x
    if x.dtype != data.train.x.dtype and torch.int64 in (x.dtype, data.train.x.dtype):
        raise InputError("The public set and the clients' data are not both token ids: give one kind of inputs.")
    scaling = Scaling(divisor=part.divisor or usual_divisor(x))
    if labels.dtype.kind in "if" and (labels == -1).all():
        return Samples(x, unlabeled(len(labels), data.task, data.num_classes), scaling=scaling), None
    expected = None if data.task == CLASSIFICATION else data.num_classes
    numbered = make_targets({what: labels}, data.task, part.class_names, expected)
    return Samples(x, numbered.parts[0], scaling=scaling), len(numbered.names)


def _read(text: str) -> Any:
    """Read `500`, `0.1`, `NAME` or `NAME:N`."""
    try:
        return float(text) if "." in text else int(text)
    except ValueError:
        pass
    name, colon, number = text.rpartition(":")
    if colon and number.isdigit():
        if int(number) < 1:
            raise InputError(f"The public set '{text}' would be empty: ask for at least 1 row.")
        return name, int(number)
    return text, None


def _held_out(data: Dataset, public: float, seed: int) -> Public:
    total = len(data.train)
    number = public if isinstance(public, int) else round(public * total)
    if isinstance(public, bool) or (isinstance(public, float) and not 0 < public < 1):
        raise InputError(f"public={public} is not possible: give a number of rows, or a fraction between 0 and 1.")
    if not 1 <= number < total:
        raise InputError(
            f"public={public} takes {number} of {total} training rows: give at least 1 and leave some to the clients."
        )
    rows = drawn_rows(total, number, seed)
    return Public(data.train.select(torch.from_numpy(rows)), data.num_classes, rows, public)


def _like(data: Dataset, samples: Samples) -> Samples:
    """Bring samples to the clients' shape and to the clients' scaling."""
    if tuple(samples.x.shape[1:]) != data.input_shape:
        x = fit_images(samples.x[samples.rows()], data.input_shape, "The public set")
        samples = replace(samples, x=x, y=samples.labels(), index=None)
    scaling = data.train.scaling
    if len(data.input_shape) == 3:  # images may be kept in other units: bytes of 0..255 or 0..16, floats of 0..1
        scaling = replace(scaling, divisor=_divisor_of_images(data.train, samples))
    return replace(samples, scaling=scaling)


def _divisor_of_images(private: Samples, public: Samples) -> float:
    """Return what brings public images to the unit that the clients' images have after division."""
    if private.x.dtype == public.x.dtype:
        return private.scaling.divisor if public.x.is_floating_point() else public.scaling.divisor
    whose, floats = ("clients'", private) if private.x.is_floating_point() else ("public", public)
    low, high = float(floats.x.min()), float(floats.x.max())
    if low < 0 or high > 1:
        raise InputError(
            f"The {whose} images are floats from {low:g} to {high:g} and the others are bytes, so they cannot be "
            "brought to one unit: give floats from 0 to 1, or bytes (uint8) for both."
        )
    return public.scaling.divisor
