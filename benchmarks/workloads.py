"""The workloads: what is trained, by whom, and against which reference loop."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

import polyfed as pf
from benchmarks.reference import FedAvgLoop, Loop, MethodLoop, OwnedLoop, tensors_of
from polyfed.api import prepare
from polyfed.config import Networks
from polyfed.core.federation import Federation
from polyfed.core.settings import Execution, Settings, Training
from polyfed.models import build

CNN_MIX = ("cnn:16-32", "cnn:16-32-64", "cnn:32-64,bn", "resnet:1-1,w16,stem=pool", "resnet:1-2,w16,stem=pool")
RESNET_MIX = tuple(f"resnet{depth}:w16" for depth in (10, 14, 18, 22, 26))
MLP_MIX = tuple(f"mlp:{depth}" for depth in (1, 2, 3, 4, 5))


@dataclass(frozen=True)
class Workload:
    """One line of the benchmark table."""

    name: str
    method: str
    clients: int
    samples: int
    batch: int
    models: tuple[str, ...]
    shape: tuple[int, ...]
    target: float
    reference: str = "method"  # fedavg | owned | method
    options: dict[str, Any] = field(default_factory=dict)
    feature_dim: int | None = None
    public: int | None = None
    engines: tuple[str, ...] = ("sequential", "threads", "batched", "auto")
    test: int = 100

    def data(self) -> pf.Clients:
        """Return random images: speed does not depend on what they show."""
        rng = np.random.default_rng(0)

        def draw(n: int) -> tuple[np.ndarray, np.ndarray]:
            return rng.integers(0, 256, (n, *self.shape)).astype(np.uint8), rng.integers(0, 10, n)

        parts = [draw(self.samples) for _ in range(self.clients)]
        public = draw(self.public)[0] if self.public else None
        return pf.Clients.from_parts(parts, test=draw(self.test), num_classes=10, name=self.name, public=public, seed=0)

    def federation(self, engine: str, data: pf.Clients, workers: int | None = None) -> Federation:
        """Return a federation that is ready for its first round."""
        training = Training(batch_size=self.batch, lr=0.01)
        settings = Settings(1000, 0, training, execution=Execution(engine, workers))
        method = pf.methods.make(self.method, self.options)
        return prepare(method, data, list(self.models), settings, Networks(feature_dim=self.feature_dim))

    def contestant(self, engine: str, data: pf.Clients, workers: int | None = None) -> Callable[[], None]:
        """Return what runs one round of training and fusing (nothing is measured) with an engine."""
        federation = self.federation(engine, data, workers)
        everybody = sorted(federation.backend.infos)

        def one_round() -> None:
            federation.ctx.round += 1
            for step in federation.plan.round:
                if step.when == "always":
                    federation._exchange(step, everybody, {})

        return one_round

    def loop(self, data: pf.Clients) -> Loop:
        """Return the reference loop."""
        if self.reference == "method":
            return MethodLoop(self.federation("sequential", data))
        datasets = [tensors_of(data.client(number)[0]) for number in range(self.clients)]
        models = [self.model(number) for number in range(self.clients)]
        if self.reference == "fedavg":
            return FedAvgLoop(models[0], datasets, self.batch, 0.01)
        return OwnedLoop(models, datasets, self.batch, 0.01)

    def model(self, client: int) -> torch.nn.Module:
        """Return a client's network."""
        return build(self.models[client % len(self.models)], self.shape, 10)


FEW = ("threads", "auto")  # the long ones: the other engines' ratios are those of W2 and W4
MNIST, CIFAR = (1, 28, 28), (3, 32, 32)

WORKLOADS: Sequence[Workload] = (
    Workload("W1", "fedavg", 20, 600, 32, ("cnn2",), MNIST, 1.35, "fedavg"),
    Workload("W2", "fedproto", 20, 600, 32, CNN_MIX, MNIST, 1.35, feature_dim=64),
    Workload("W3", "fedavg", 100, 60, 10, ("mlp:1x100",), MNIST, 7.0, "fedavg"),
    Workload("W4", "fedavg", 20, 250, 32, RESNET_MIX, CIFAR, 1.35, "owned"),
    Workload("W5", "fedavg", 100, 60, 10, MLP_MIX, MNIST, 6.0, "owned"),
    Workload("W6-fedin", "fedin", 20, 250, 32, RESNET_MIX, CIFAR, 1.3, engines=FEW),
    Workload("W6-fedvtc", "fedvtc", 20, 600, 32, CNN_MIX, MNIST, 1.3, feature_dim=98, engines=FEW),
    Workload(
        "W6-fedmd-global",
        "fedmd_global",
        20,
        600,
        32,
        CNN_MIX,
        MNIST,
        1.3,
        options={"subset": 1000, "public_epochs": 0, "private_epochs": 1},
        public=1000,
        engines=FEW,
    ),
)
