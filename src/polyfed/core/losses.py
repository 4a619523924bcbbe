"""The losses of a stage: their exact mean and the first that is not a number, in memory that does not grow."""

from __future__ import annotations

from collections.abc import Sequence
from math import fsum, isfinite

import torch
from torch import Tensor

WAITING = 256  # losses that are added up at once


def exact_parts(values: Sequence[float]) -> list[float]:
    """Return a few numbers whose sum is that of the values without any rounding."""
    parts: list[float] = []
    while rest := fsum([*values, *(-part for part in parts)]):
        parts.append(rest)
    return parts


class Losses:
    """What is kept of the losses of all steps of a stage, instead of the losses themselves.

    A tensor that is kept for each step does not only take its own place: it lies between the large ones that come and
    go, and memory in pieces cannot be used again.
    """

    def __init__(self) -> None:
        self.number = 0
        self.bad: tuple[int, float] | None = None  # place and value of the first loss that is not finite
        self._parts: list[float] = []  # their sum is that of all losses added up so far
        self._waiting: list[Tensor | float] = []

    def add(self, loss: Tensor | float) -> None:
        """Take in the loss of the next step."""
        if isinstance(loss, Tensor) and loss.device.type == "cpu":
            loss = loss.item()  # elsewhere reading a value means to wait for the device: many are read at once
        self._waiting.append(loss)
        self.number += 1
        if len(self._waiting) == WAITING:
            self._add_up()

    def mean(self) -> float:
        """Return the mean of all losses, rounded once; 0 if there are none."""
        self._add_up()
        return fsum(self._parts) / self.number if self.number else 0.0

    def _add_up(self) -> None:
        waiting, self._waiting = self._waiting, []
        tensors = [loss for loss in waiting if isinstance(loss, Tensor)]
        values: list[float] = torch.stack(tensors).tolist() if tensors else [*map(float, waiting)]
        if self.bad is not None:
            return
        if all(map(isfinite, values)):
            self._parts = exact_parts([*self._parts, *values])
            return
        place = next(place for place, value in enumerate(values) if not isfinite(value))
        self.bad = self.number - len(values) + place, values[place]
