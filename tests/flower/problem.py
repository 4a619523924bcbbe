"""A small problem that the server's test and the sites' processes build alike; a site takes its own part only."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import nn

import polyfed as pf
from polyfed.data import Clients
from polyfed.flower.sitedata import SiteData

torch.set_num_threads(1)
SITES = ["north", "south", "west"]


def clients(public: bool = True) -> Clients:
    rng = np.random.default_rng(3)
    patterns = rng.normal(size=(3, 1, 8, 8)).astype(np.float32)

    def draw(n: int, labels: int = 3) -> tuple[np.ndarray, np.ndarray]:
        y = rng.integers(0, labels, n)
        return (patterns[y] + 0.5 * rng.normal(size=(n, 1, 8, 8))).astype(np.float32), y

    parts = [draw(18 + 5 * k, 3 if k else 2) for k in range(3)]
    test, shared = draw(60), draw(40)[0]
    return Clients.from_parts(parts, test=test, num_classes=3, name="problem", public=shared if public else None)


def part(number: int) -> SiteData:
    data = clients()
    return SiteData(
        data.train[number],
        data.test,
        data.num_classes,
        data.validation[number],
        data.public,
        None,
        data.class_names,
    )


def north() -> SiteData:
    return part(0)


def south() -> SiteData:
    return part(1)


def west() -> SiteData:
    return part(2)


def east() -> SiteData:
    """Somebody who comes later, with west's samples."""
    return part(2)


class Own(nn.Module):
    """Somebody's own network, made without a thought of polyfed."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Flatten(), nn.Linear(64, 12), nn.ReLU())
        self.last = nn.Linear(12, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.body(x))


def own() -> nn.Module:
    return pf.adapt(Own(), head="last", input_shape=(1, 8, 8))


def forest() -> Any:
    from sklearn.ensemble import RandomForestClassifier  # most sites have networks and need not wait for it

    return RandomForestClassifier(n_estimators=5)
