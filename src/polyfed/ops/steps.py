"""How far some steps of an optimizer lead, in learning rates, if every gradient is 1: FedNova's ||a_k||_1."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def effective_steps(rates: Sequence[float], momentum: float, mu: float) -> float:
    """Return ||a_k||_1: how far some steps of gradient 1 lead, in units of the first learning rate."""
    speed = way = 0.0
    for rate in rates:
        speed = momentum * speed + 1.0 - mu * rates[0] * way
        way += rate / rates[0] * speed
    return way


def effective_by_epoch(rates: Sequence[float], steps: int, momentum: float, mu: float) -> list[float]:
    """Return ||a_k||_1 after each epoch of so many steps, which may be millions: the same recurrence, as a matrix."""
    found, now = [], np.array([0.0, 0.0, 1.0])  # speed, way, 1
    for rate in rates:
        speed = np.array([momentum, -mu * rates[0], 1.0])
        way = rate / rates[0] * speed + [0.0, 1.0, 0.0]
        now = np.linalg.matrix_power(np.array([speed, way, [0.0, 0.0, 1.0]]), steps) @ now
        found.append(float(now[1]))
    return found
