"""Two gradients that may disagree, and what to follow: FedIN's gradient alleviation.

`feature` is the gradient of the loss on other clients' features (G_IN), `local` the gradient of the client's own loss
(G_local). The step to take is the one nearest to G_IN among those that do not increase the local loss:

    min_Z ||G_IN - Z||^2  subject to  <Z, G_local> >= 0

With a = <G_local, G_local> and b = <G_local, G_IN> the dual is max_{m >= 0} -(m^2/4)·a - m·b, its maximiser
m* = max(0, -2b/a), and the solution Z = G_IN + (m*/2)·G_local. No branch depends on values: it runs under `vmap` too.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

Gradients = Mapping[str, Tensor]  # parameter name -> gradient


def inner(first: Tensor, second: Tensor) -> Tensor:
    """Return <A, B> = sum_ij A_ij·B_ij."""
    return (first * second).sum()


def multiplier(a: Tensor, b: Tensor) -> Tensor:
    """Return m* = max(0, -2b/a), the maximiser of the dual; 0 where the local gradient vanishes (a = 0)."""
    something = a > 0
    ratio = -2.0 * b / torch.where(something, a, torch.ones_like(a))
    return torch.where(something, ratio.clamp(min=0.0), torch.zeros_like(a))


def add_local(feature: Gradients, local: Gradients, m: float | Tensor) -> dict[str, Tensor]:
    """Return Z = G_IN + (m/2)·G_local (Eq. 13): the simplified rule with m = lambda, whatever the two gradients are."""
    return {name: g + m / 2 * local[name] for name, g in feature.items()}


def project(feature: Gradients, local: Gradients, scope: str = "tensor") -> dict[str, Tensor]:
    """Return the solution of the programme above (Eq. 12).

    Parameters
    ----------
    feature, local
        G_IN and G_local, of the same names.
    scope
        `tensor`: each tensor on its own; `global`: all of them as one long vector.
    """
    if scope == "tensor":
        return {
            name: g + multiplier(inner(local[name], local[name]), inner(local[name], g)) / 2 * local[name]
            for name, g in feature.items()
        }
    a = _total([inner(local[name], local[name]) for name in feature])
    b = _total([inner(local[name], g) for name, g in feature.items()])
    return add_local(feature, local, multiplier(a, b))


def _total(terms: list[Tensor]) -> Tensor:
    return torch.stack(terms).sum() if terms else torch.zeros(())
