"""What goes wrong in the hands of people: data with other classes, functions that fail."""

from __future__ import annotations

from typing import Any

import numpy as np
from torch import nn

from polyfed.flower.sitedata import SiteData, as_site_data


def table(labels: list[Any], **more: Any) -> dict[str, Any]:
    """A site's data as arrays; the labels come in turn, so every one is there."""
    rng = np.random.default_rng(0)

    def draw(n: int) -> tuple[np.ndarray, np.ndarray]:
        return rng.normal(size=(n, 1, 8, 8)).astype(np.float32), np.array([labels[k % len(labels)] for k in range(n)])

    return {"train": draw(20), "test": draw(10), **more}


def benign_malign() -> dict[str, Any]:
    return table(["benign", "malign"])


def malign_unclear() -> dict[str, Any]:
    return table(["malign", "unclear"])


def swapped() -> dict[str, Any]:
    return table(["benign", "malign"], class_names=["malign", "benign"])


def numbers() -> SiteData:
    """Two classes without names."""
    data = as_site_data(table([0, 1]))
    return SiteData(data.train, data.test, 2)


def labels_from_one() -> SiteData:
    data = as_site_data(table([0, 1]))
    return SiteData(data.train, data.test, 1)


def too_few_names() -> SiteData:
    data = as_site_data(table([0, 1]))
    return SiteData(data.train, data.test, 2, class_names=("benign",))


def no_file() -> Any:
    return open("scans/missing.csv")


def needs_more(folder: str) -> Any:
    raise AssertionError("nobody calls this without a folder")


def nothing() -> None:
    return None


def net_without_weights() -> nn.Module:
    raise RuntimeError("weights.pt is damaged")


def net_for_other_inputs() -> nn.Module:
    return nn.Linear(3, 2)


class Featureless(nn.Module):
    """A network of which nothing but its output is known."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 3)

    def forward(self, x: Any) -> Any:
        return self.layer(x.flatten(1))
