"""The losses of a stage: exact, and in memory that does not grow with its steps."""

import gc
import random
import tracemalloc
from dataclasses import dataclass, field
from math import fsum
from typing import ClassVar

import numpy as np
import pytest
import torch
from torch.nn import functional as F

import polyfed as pf
from polyfed.core.losses import WAITING, Losses
from polyfed.core.method import Method
from polyfed.core.stage import Stage
from polyfed.data import Clients

EARLY, LATE = 600, 1800  # steps


@dataclass(frozen=True)
class Watched(Method):
    """Notes how many tensors and how much memory Python holds at two of the steps of one long stage."""

    name: ClassVar[str] = "watched"
    found: dict = field(default_factory=dict, compare=False)

    def loss(self, nets, batch, aux):
        self.found["calls"] = calls = self.found.get("calls", 0) + 1
        if calls in (EARLY, LATE):
            gc.collect()
            tensors = sum(issubclass(type(thing), torch.Tensor) for thing in gc.get_objects())
            self.found[calls] = tensors, tracemalloc.get_traced_memory()[0]
        return F.cross_entropy(nets["main"](batch.x), batch.y)

    def local(self, client, step, ctx):
        yield Stage(self.loss, steps=LATE)


@pytest.mark.long
@pytest.mark.parametrize(("engine", "clients"), [("sequential", 1), ("batched", 3)])
def test_memory_does_not_grow_with_the_steps_of_a_stage(engine, clients):
    rng = np.random.default_rng(0)
    parts = [(rng.normal(size=(4, 1, 2, 2)).astype(np.float32), np.array([0, 1, 0, 1])) for _ in range(clients)]
    method = Watched()
    tracemalloc.start()
    try:
        pf.run(method, Clients.from_parts(parts, test=parts[0]), ["mlp:1x4"], rounds=1, engine=engine, workers=1)
    finally:
        tracemalloc.stop()
    (tensors, memory), (later, more) = method.found[EARLY], method.found[LATE]
    assert later - tensors < 20
    assert more - memory < 40_000  # bytes; a float for each step and client takes 32


@pytest.mark.parametrize("kind", [float, torch.tensor])
@pytest.mark.parametrize("number", [0, 1, WAITING - 1, WAITING, 3 * WAITING + 1])
def test_the_mean_is_rounded_once_however_many_there_are(kind, number):
    draw = random.Random(0)
    values = [draw.uniform(-1, 1) * 10.0 ** draw.randint(-20, 20) for _ in range(number)]
    losses = Losses()
    for value in values:
        losses.add(float(value) if kind is float else torch.tensor(value, dtype=torch.float64))
    assert losses.mean() == (fsum(values) / number if number else 0.0)
    assert (losses.number, losses.bad) == (number, None)


@pytest.mark.parametrize("place", [0, 5, WAITING - 1, WAITING, 2 * WAITING + 3])
def test_the_first_loss_that_is_not_finite_is_remembered(place):
    losses = Losses()
    for step in range(3 * WAITING):
        losses.add(float("inf") if step == place else float("nan") if step > place else 1.0)
    losses.mean()
    assert losses.bad == (place, float("inf"))
