"""Adaptive steps of a server: the clients' mean change taken for a gradient (FedOpt)."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

State = dict[str, Tensor]


@torch.no_grad()
def adam_step(
    state: Mapping[str, Tensor],
    change: Mapping[str, Tensor],
    moments: Mapping[str, Mapping[str, Tensor]],
    lr: float,
    beta_1: float,
    beta_2: float,
    tiny: float = 1e-3,
) -> tuple[State, dict[str, State]]:
    """Return the state after a step of FedAdam along a change, and the new moments `m` and `v`.

    `m = b1·m + (1-b1)·D`, `v = b2·v + (1-b2)·D²`, `w + lr·m / (sqrt(v) + tiny)`, without bias correction. No moments
    (`{}`) are zeros.
    """
    m, v = ({name: moments.get(kind, {}).get(name, torch.zeros_like(d)) for name, d in change.items()} for kind in "mv")
    m = {name: beta_1 * m[name] + (1 - beta_1) * d for name, d in change.items()}
    v = {name: beta_2 * v[name] + (1 - beta_2) * d.square() for name, d in change.items()}
    moved = {name: state[name] + lr * m[name] / (v[name].sqrt() + tiny) for name in change}
    return moved, {"m": m, "v": v}
