"""The gradient penalty of adversarial training: a score should change by one for every step between fake and real."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def between(real: Tensor, fake: Tensor, place: Tensor) -> Tensor:
    """Return inputs on the way from fake to real ones, each at its own place in [0, 1]."""
    place = place.view(-1, *(1,) * (real.dim() - 1))
    return place * real + (1 - place) * fake


def gradient_penalty(score: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Return mean (||grad_x D(x)|| - 1)² with D = sigmoid(score); the norm is that of a sample's whole slope."""
    slope: Tensor = torch.func.grad(lambda at: score(at).sigmoid().sum())(x).flatten(1)
    return (slope.square().sum(1).add(1e-12).sqrt() - 1).square().mean()
