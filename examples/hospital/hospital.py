"""Three hospitals: their data and their networks. Each hospital's process imports this file and takes its own part.

With PneumoniaMNIST under POLYFED_DATA the task is pneumonia on chest X-rays; otherwise it is handwritten digits.
"""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path

from torch import Tensor, nn

import polyfed as pf
from polyfed.core.samples import Samples
from polyfed.data import Clients
from polyfed.flower.sitedata import SiteData

HOSPITALS = ["north", "south", "west"]
XRAYS = (Path(os.environ.get("POLYFED_DATA", "/nonexistent")) / "pneumoniamnist").is_dir()
PUBLIC = 300  # samples without a patient behind them, which everybody may see


@cache
def everybody() -> Clients:
    """Return the data of all hospitals. In this example one file makes it; in life each has only its own."""
    data = pf.load("pneumoniamnist", limit=(1000, None)) if XRAYS else pf.load("digits", limit=(800, None))
    by, seed = pf.Dirichlet(0.5), 3 if XRAYS else 2  # each hospital sees another mix of patients
    return pf.split(data, clients=3, by=by, seed=seed, public=PUBLIC)


def _hospital(number: int) -> SiteData:
    data = everybody()
    return SiteData(
        train=data.train[number],
        test=data.test,
        num_classes=data.num_classes,
        public=data.public,
        class_names=data.class_names,
    )


def north() -> SiteData:
    """Return the data of the first hospital."""
    return _hospital(0)


def south() -> SiteData:
    """Return the data of the second hospital."""
    return _hospital(1)


def west() -> SiteData:
    """Return the data of the third hospital."""
    return _hospital(2)


def public() -> Samples:
    """Return the public samples, the same for the server and all hospitals."""
    samples = everybody().public
    assert samples is not None
    return samples


class WardNet(nn.Module):
    """The network that the first hospital has had for years; it knows nothing of polyfed."""

    def __init__(self, channels: int, classes: int) -> None:
        super().__init__()
        self.look = nn.Sequential(
            nn.Conv2d(channels, 8, 3, padding=1),
            nn.BatchNorm2d(8),
            nn.ReLU(),
            nn.Conv2d(8, 16, 3, padding=1, stride=2),
            nn.BatchNorm2d(16),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(2),
            nn.Flatten(),
        )
        self.decide = nn.Linear(64, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Return a score for each finding."""
        return self.decide(self.look(x))


def ward_net(input_shape: tuple[int, ...], num_classes: int) -> nn.Module:
    """Return the first hospital's own network, adapted by naming its last layer."""
    return pf.adapt(WardNet(input_shape[0], num_classes), head="decide", input_shape=input_shape)
