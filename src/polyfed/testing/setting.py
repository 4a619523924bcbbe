"""How a method is checked, and the data for it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from polyfed.api import run
from polyfed.core.method import Method
from polyfed.core.settings import Training
from polyfed.data import Clients, load, split
from polyfed.result import Result
from polyfed.specs import ModelSpec
from polyfed.testing.watch import Observed, observing


@dataclass(frozen=True)
class Limit:
    """Two methods that must give the same networks, and where they do.

    Attributes
    ----------
    off, base
        A method with its idea switched off, and the one that it then is.
    models, sizes, rounds, epochs
        Where that is so, if not everywhere: the networks, the samples of each client, the rounds, the local epochs.
    besides
        How the names of tensors begin that may differ.
    """

    off: Method
    base: Method
    models: tuple[ModelSpec, ...] | None = None
    sizes: tuple[int, ...] | None = None
    rounds: int | None = None
    epochs: int | None = None
    besides: tuple[str, ...] = ()

    def where(self, public: bool) -> dict[str, Any]:
        """Return what is special about the two runs, as `Setting.run` takes it."""
        data = {"data": unequal(self.sizes, None, public)} if self.sizes else {}
        named = {"models": self.models, "rounds": self.rounds, "epochs": self.epochs}
        return {**data, **{name: value for name, value in named.items() if value is not None}}


@dataclass(frozen=True)
class Setting:
    """How a method is checked.

    Attributes
    ----------
    method, models
        As in `polyfed.run`; models of several architectures, if the method takes them.
    public, feature_dim
        Whether there is public data, and the common size of features.
    limit
        Two methods that must give the same networks: this one with its idea switched off, and the one that it then is;
        a `Limit` where that is so only in some circumstances.
    stacked
        Whether the engine `batched` can run its stages as stacks (looked at where all clients have one architecture).
    """

    method: Method
    models: tuple[ModelSpec, ...] = ("mlp:1x16", "mlp:2x16", "cnn:4-8")
    public: bool = False
    feature_dim: int | None = None
    limit: Limit | tuple[Method, Method] | None = None
    stacked: bool = True

    def run(
        self,
        rounds: int = 2,
        seed: int = 0,
        lr: float = 0.05,
        participation: float = 1.0,
        data: Clients | None = None,
        method: Method | None = None,
        models: tuple[ModelSpec, ...] | None = None,
        epochs: int = 2,
        **more: Any,
    ) -> Result:
        """Run it in its small federation, or with other data, networks or another method."""
        return run(
            method or self.method,
            data if data is not None else synthetic(per_client=8, public=self.public),
            models or self.models,
            rounds=rounds,
            training=Training(epochs=epochs, batch_size=8, lr=lr),
            seed=seed,
            participation=participation,
            feature_dim=self.feature_dim,
            checkpoint_seconds=0.0,
            # Whole clients: a method whose idea is switched off then is its base method, to the bit.
            **{"progress": False, "engine": "threads", **more},
        )

    @cached_property
    def observed(self) -> Observed:
        """The run without anything special and all that was said in it, made once: many checks look at it."""
        with observing() as observed:
            observed.result = self.run(engine="sequential")
        return observed

    @property
    def plain(self) -> Result:
        """The run without anything special: many checks compare with it."""
        return self.observed.result

    @property
    def talks(self) -> bool:
        """Whether clients tell anything."""
        return self.method.sends != "nothing" and not self.method.pools_data


def synthetic(clients: int = 4, per_client: int = 18, classes: int = 3, seed: int = 0, public: bool = True) -> Clients:
    """Return a small image problem that can be learned: noisy class patterns, unequal clients, one lacking a class."""
    rng = np.random.default_rng(seed)
    patterns = rng.normal(size=(classes, 1, 8, 8)).astype(np.float32)

    def draw(n: int, labels: int = classes) -> tuple[Any, Any]:
        y = rng.integers(0, labels, n)
        return (patterns[y] + 0.5 * rng.normal(size=(n, 1, 8, 8))).astype(np.float32), y

    parts = [draw(per_client + 5 * k, classes if k else classes - 1) for k in range(clients)]
    return Clients.from_parts(
        parts, test=draw(60), num_classes=classes, name="synthetic", public=draw(40)[0] if public else None, seed=seed
    )


def unequal(sizes: tuple[int, ...], single_class: int | None, public: bool) -> Clients:
    """Return clients of the given sizes; one of them holds samples of one class only."""
    rng = np.random.default_rng(0)

    def draw(n: int, one_class: bool = False) -> tuple[Any, Any]:
        y = np.zeros(n, dtype=np.int64) if one_class else rng.integers(0, 3, n)
        return rng.normal(size=(n, 1, 8, 8)).astype(np.float32), y

    parts = [draw(size, client == single_class) for client, size in enumerate(sizes)]
    return Clients.from_parts(parts, test=draw(30), num_classes=3, public=draw(24)[0] if public else None)


def digits(public: bool) -> Clients:
    """Return a part of the embedded digits: data with a name, so that a run can be resumed from its directory."""
    return split(load("digits", limit=(150, 60)), clients=3, by="dirichlet:1.0", seed=0, public=30 if public else None)
