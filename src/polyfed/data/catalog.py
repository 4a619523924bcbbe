"""The data sets that `load` knows by name, as a plain table, and where each of them can be found now."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from polyfed.core.plugins import plugins

if TYPE_CHECKING:
    from polyfed.data.cache import Store

TRAIN_NAMES = ("train", "training")
TEST_NAMES = ("test", "valid", "validation", "val")


@dataclass(frozen=True)
class Known:
    """One line of the table: how a data set looks on the Hub, and what is known about it."""

    hub: str | None
    classes: int
    shape: tuple[int, ...]
    rows: tuple[int, int]
    license: str
    config: str | None = None  # name of the configuration on the Hub, where there are several
    revision: str | None = None
    inputs: str = "image"
    label: str = "label"
    test: str = "test"  # name of the split that serves as test set
    mean: tuple[float, ...] | None = None  # None: computed from the training part
    std: tuple[float, ...] | None = None
    kind: str = "image"
    group: str | None = None  # the column of its natural groups: never a feature
    groups: int | None = None  # how many of them there are
    files: tuple[str, ...] = ()  # of a set that is part of this package: its training part, and its test part if any


EMBEDDED = Path(__file__).parent / "embedded"
DOMAINS = ("digits", "mnist", "svhn")

KNOWN: dict[str, Known] = {
    "digits": Known(
        hub=None,
        classes=10,
        shape=(1, 8, 8),
        rows=(1400, 397),
        license="UCI optical recognition of handwritten digits, CC BY 4.0, part of scikit-learn",
        mean=(0.0,),
        std=(1.0,),
    ),
    "opt": Known(
        hub=None,
        classes=2,
        shape=(63,),
        rows=(651, 163),
        license="Obstetrics and Periodontal Therapy trial, from R's medicaldata, MIT",
        label="preterm",
        kind="table",
        group="clinic",
        groups=4,
        files=("opt",),
    ),
    "watch": Known(
        hub=None,
        classes=7,
        shape=(6, 50),
        rows=(1953, 416),
        license="Burns et al. 2018, from seglearn, BSD 3-clause",
        inputs="signal",
        kind="signal",
        group="person",
        groups=10,
        files=("watch-train", "watch-test"),
    ),
    "mail": Known(
        hub=None,
        classes=2,
        shape=(52,),
        rows=(4837, 1209),
        license="SpamAssassin public corpus, from stdlib, CC0 1.0 (collection: PDDL 1.0)",
        inputs="text",
        kind="text",
        group="collection",
        groups=5,
        files=("mail",),
    ),
    "digit_domains": Known(
        hub=None,
        classes=10,
        shape=(1, 16, 16),
        rows=(4200, 1191),
        license="as digits, mnist and svhn (svhn: non-commercial use only)",
        group="domain",
        groups=3,
    ),
    "mnist": Known(
        hub="ylecun/mnist",
        classes=10,
        shape=(1, 28, 28),
        rows=(60000, 10000),
        license="LeCun, Cortes, Burges; commonly given as CC BY-SA 3.0",
        mean=(0.1307,),
        std=(0.3081,),
    ),
    "fashion_mnist": Known(
        hub="zalando-datasets/fashion_mnist",
        classes=10,
        shape=(1, 28, 28),
        rows=(60000, 10000),
        license="Zalando, MIT",
        mean=(0.2860,),
        std=(0.3530,),
    ),
    "cifar10": Known(
        hub="uoft-cs/cifar10",
        classes=10,
        shape=(3, 32, 32),
        rows=(50000, 10000),
        license="Krizhevsky 2009, no explicit license",
        inputs="img",
        mean=(0.4914, 0.4822, 0.4465),
        std=(0.2470, 0.2435, 0.2616),
    ),
    "cifar100": Known(
        hub="uoft-cs/cifar100",
        classes=100,
        shape=(3, 32, 32),
        rows=(50000, 10000),
        license="Krizhevsky 2009, no explicit license",
        inputs="img",
        label="fine_label",
        mean=(0.5071, 0.4865, 0.4409),
        std=(0.2673, 0.2564, 0.2762),
    ),
    "cifar100:coarse": Known(
        hub="uoft-cs/cifar100",
        classes=20,
        shape=(3, 32, 32),
        rows=(50000, 10000),
        license="Krizhevsky 2009, no explicit license",
        inputs="img",
        label="coarse_label",
        mean=(0.5071, 0.4865, 0.4409),
        std=(0.2673, 0.2564, 0.2762),
    ),
    "svhn": Known(
        hub="ufldl-stanford/svhn",
        config="cropped_digits",
        classes=10,
        shape=(3, 32, 32),
        rows=(73257, 26032),
        license="Netzer et al. 2011, non-commercial use only",
        mean=(0.4377, 0.4438, 0.4728),
        std=(0.1980, 0.2010, 0.1970),
    ),
    "tiny_imagenet": Known(
        hub="zh-plus/tiny-imagenet",
        classes=200,
        shape=(3, 64, 64),
        rows=(100000, 10000),
        license="Stanford CS231n from ImageNet, non-commercial research and education",
        test="valid",
        mean=(0.4802, 0.4481, 0.3975),
        std=(0.2770, 0.2691, 0.2821),
    ),
    "pneumoniamnist": Known(
        hub="albertvillanova/medmnist-v2",
        config="pneumoniamnist",
        revision="refs/convert/parquet",  # the main branch is a script, which `datasets` no longer runs
        classes=2,
        shape=(1, 28, 28),
        rows=(4708, 624),
        license="MedMNIST v2, CC BY 4.0, not for clinical use",
    ),
}


def folder_name(name: str) -> str:
    """Return the folder of a data set under `POLYFED_DATA` (variants such as `cifar100:coarse` share one)."""
    return name.split(":")[0]


def data_root() -> Path | None:
    """Return the folder that `POLYFED_DATA` names, if it is set."""
    value = os.environ.get("POLYFED_DATA")
    return Path(value).expanduser() if value else None


def split_files(folder: Path, names: tuple[str, ...]) -> list[Path]:
    """Return the parquet or CSV files of the first split in `names` that the folder has, whole or in pieces."""
    for name in names:
        for ending in ("parquet", "csv"):
            whole = folder / f"{name}.{ending}"
            if whole.is_file():
                return [whole]
            pieces = sorted(folder.glob(f"{name}-*.{ending}"))
            if pieces:
                return pieces
    return []


def in_data_root(name: str) -> Path | None:
    """Return the folder below `POLYFED_DATA` that holds this data set's training part, or None."""
    root = data_root()
    if root is None:
        return None
    folder = root / folder_name(name)
    return folder if split_files(folder, TRAIN_NAMES) else None


def hub_cache_folders(hub: str) -> Iterator[Path]:
    """Yield folders in which the `datasets` library keeps this Hub data set, found without importing it."""
    home = Path(os.environ.get("HF_HOME") or "~/.cache/huggingface").expanduser()
    root = Path(os.environ.get("HF_DATASETS_CACHE") or home / "datasets").expanduser()
    folder = root / hub.replace("/", "___").lower()
    if folder.is_dir() and any(folder.iterdir()):
        yield folder


def describe_sources(cache: str | os.PathLike[str] | None = None) -> list[dict[str, object]]:
    """Return one row per known data set: name, kind, classes, shape, rows, groups, where it is now, and its license.

    Parameters
    ----------
    cache
        Folder of decoded sets; as in `load`.

    Returns
    -------
    list of dict
        `found` is "embedded", "POLYFED_DATA", "cache", "Hub cache" or "not here".
    """
    from polyfed.data.cache import Store

    store = Store.at(cache)
    rows: list[dict[str, object]] = []
    for name, known in KNOWN.items():
        if name == "digit_domains":
            found = " and ".join(sorted({str(_found(part, store)) for part in DOMAINS[1:]}))
        else:
            found = _found(name, store)
        rows.append(
            {
                "name": name,
                "kind": known.kind,
                "classes": known.classes,
                "shape": known.shape,
                "rows": known.rows,
                "groups": f"{known.group} ({known.groups})" if known.group else "",
                "found": found,
                "hub": known.hub,
                "license": known.license,
            }
        )
    for name in plugins("data"):
        unknown = dict.fromkeys(("kind", "classes", "shape", "rows", "groups", "hub"))
        rows.append({"name": name, **unknown, "found": "another package", "license": ""})
    return rows


def _found(name: str, store: Store) -> str:
    """Say where a known set can be had now."""
    known = KNOWN[name]
    if known.hub is None:
        return "embedded"
    if in_data_root(name) is not None:
        return "POLYFED_DATA"
    if store.has_name(name):
        return "cache"
    return "Hub cache" if any(hub_cache_folders(known.hub)) else "not here"
