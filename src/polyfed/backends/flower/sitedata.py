"""A site's own model and data: named by the site, imported at the site, never sent anywhere."""

from __future__ import annotations

import hashlib
import importlib
import sys
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from polyfed.build import ModelSpec
from polyfed.core.errors import InputError
from polyfed.core.samples import Samples
from polyfed.data import Clients, Dataset, load
from polyfed.data.objects import part_of
from polyfed.data.split import split
from polyfed.models import names


@dataclass(frozen=True)
class SiteData:
    """What one site holds.

    Attributes
    ----------
    train, test, validation
        Its own samples. `test` measures the site's model; it never leaves the site either.
    public
        Samples that all sites and the server have (methods that need them say so), the same in the same order.
    num_classes, class_names
        The classes, the same at all sites.
    public_classes
        Set where the public samples have labels of their own, apart from the sites' classes.
    """

    train: Samples
    test: Samples
    num_classes: int
    validation: Samples | None = None
    public: Samples | None = None
    public_classes: int | None = None
    class_names: tuple[str, ...] = ()

    @property
    def input_shape(self) -> tuple[int, ...]:
        """The shape of one input."""
        return tuple(self.train.x.shape[1:])


def imported(name: str, option: str) -> Any:
    """Import `package.module:attribute`; the current folder counts, as with `python -m`.

    Raises
    ------
    InputError
        Naming the option and what is wrong.
    """
    module, _, attribute = name.partition(":")
    if not module or not attribute:
        raise InputError(f"{option} {name} names nothing to import: write package.module:function.")
    if "" not in sys.path:
        sys.path.insert(0, "")
    try:
        return getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise InputError(f"{option} {name} cannot be imported: {error}.") from error


def read_model(name: str) -> ModelSpec:
    """Return a model of the zoo by its string, or what the site's own code offers under `package.module:name`."""
    start = name.split(":")[0].split("@")[0]
    if start in names() or start.split("-")[0] in names():
        return name
    found: ModelSpec = imported(name, "--model")
    return found


def read_data(name: str, public: str | None = None) -> SiteData:
    """Return a site's data from its own function `package.module:name`, or a data set by name.

    The function returns `SiteData`, a `Dataset`, `Clients` with one client, or a table with `train`, `test` and
    perhaps `validation`, `public` and `num_classes`, whose parts may be pairs of arrays.
    """
    given = imported(name, "--data") if ":" in name else load(name)
    given = given() if callable(given) and not isinstance(given, Dataset) else given
    data = as_site_data(given)
    if public is not None:
        samples = read_public(public)
        data = SiteData(
            data.train, data.test, data.num_classes, data.validation, samples, data.public_classes, data.class_names
        )
    return data


def as_site_data(given: Any) -> SiteData:
    """Turn what a site's function returned into `SiteData`."""
    if isinstance(given, SiteData):
        return given
    if isinstance(given, Dataset):
        return SiteData(given.train, given.test, given.num_classes, class_names=given.class_names)
    if isinstance(given, dict) and {"train", "test"} <= given.keys():
        validation = given.get("validation")
        made = Clients.from_parts(
            [given["train"]], test=given["test"], num_classes=given.get("num_classes"), public=given.get("public")
        )
        held = None
        if validation is not None:
            part = part_of(validation)
            held = Samples(part.inputs, torch.from_numpy(np.asarray(part.labels)), None, made.train[0].scaling)
        data = as_site_data(made)
        return SiteData(data.train, data.test, data.num_classes, held, data.public, data.public_classes)
    if isinstance(given, Clients):
        if len(given) != 1:
            raise InputError(f"A site is one client, but its data has {len(given)}: return the site's own part.")
        return SiteData(
            given.train[0],
            given.test,
            given.num_classes,
            given.validation[0],
            given.public,
            given.public_classes,
            given.class_names,
        )
    raise InputError(
        f"The --data function returned a {type(given).__name__}: return polyfed.backends.flower.sitedata.SiteData, a "
        "Dataset, or a table with 'train' and 'test'."
    )


def read_public(name: str) -> Samples:
    """Return public samples: a data set `NAME:N`, or what `package.module:function` returns."""
    start, _, rest = name.partition(":")
    if rest and not rest.isdigit():
        found = imported(name, "--public")
        found = found() if callable(found) else found
        if isinstance(found, Samples):
            return found
        part = part_of(found)
        return Samples(part.inputs, torch.from_numpy(np.asarray(part.labels)))
    samples = split(load(start), clients=1, public=int(rest) if rest else 0.5, seed=0).public
    assert samples is not None
    return samples


def fingerprint(samples: Samples | None) -> str | None:
    """Return a checksum by which parties find out that they hold the same public samples."""
    if samples is None:
        return None
    digest = hashlib.sha256(repr((samples.scaling, tuple(samples.x.shape[1:]))).encode())
    for tensor in (samples.x[samples.rows()], samples.labels()):
        digest.update(f"{tensor.dtype}".encode())
        digest.update(tensor.contiguous().numpy().data)
    return digest.hexdigest()
