"""Every registered method, in a small setting that fits its needs. A new method gets all contract tests by one line."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from polyfed.data import Clients

MIXED = ("mlp:1x16", "mlp:2x16", "cnn:4-8")
WIDTHS = ("cnn:8-16,bn@1", "cnn:8-16,bn@0.5")
DEPTHS = ("resnet10:w4", "resnet14:w4")


@dataclass(frozen=True)
class Case:
    """How the contract tests run a method."""

    method: str
    models: tuple[str, ...] = MIXED
    options: dict[str, Any] = field(default_factory=dict)
    public: bool = False
    feature_dim: int | None = None
    off: dict[str, Any] | None = None  # these options switch the method's own idea off ...
    base: str | None = None  # ... and it is then exactly this method
    base_options: dict[str, Any] = field(default_factory=dict)

    @property
    def id(self) -> str:
        return f"{self.method}-{'x'.join(sorted({m.split(':')[0] for m in self.models}))}"


CASES = [
    Case("local"),
    Case("centralized"),
    Case("fedavg", ("mlp:2x16",)),
    Case("fedavg", DEPTHS),
    Case("fedprox", ("mlp:2x16",), off={"mu": 0.0}, base="fedavg"),
    Case("fedprox", DEPTHS, off={"mu": 0.0}, base="fedavg"),
    Case("heterofl", WIDTHS),
    Case(
        "heterofl",
        ("mlp:2x16",),
        off={"mask": False, "clip": None, "static_bn": False},
        base="fedavg",
        base_options={"weighting": "uniform"},
    ),
    Case("fedproto", feature_dim=8, off={"lam": 0.0}, base="local"),
    Case("fedmd", public=True, options={"subset": 20, "public_epochs": 1, "private_epochs": 1}),
]


def synthetic(clients: int = 4, per_client: int = 18, classes: int = 3, seed: int = 0, public: bool = True) -> Clients:
    """A small image problem that can be learned: noisy class patterns, unequal clients, one of them lacking a class."""
    rng = np.random.default_rng(seed)
    patterns = rng.normal(size=(classes, 1, 8, 8)).astype(np.float32)

    def draw(n: int, labels: int = classes) -> tuple[np.ndarray, np.ndarray]:
        y = rng.integers(0, labels, n)
        return (patterns[y] + 0.5 * rng.normal(size=(n, 1, 8, 8))).astype(np.float32), y

    parts = [draw(per_client + 5 * k, classes if k else classes - 1) for k in range(clients)]
    return Clients.from_parts(
        parts, test=draw(60), num_classes=classes, name="synthetic", public=draw(40)[0] if public else None, seed=seed
    )
