"""Stages in which nothing moves: what the loss of a client's network looks like where it is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from polyfed.core.settings import Training
from polyfed.core.stage import Aux, Batch, Grads, Stage


def gradients_at_rest(loss: Any, training: Training) -> Stage:
    """Return a pass over a client's data, in batches of `training`, that only adds up the gradients of `loss`."""
    still = replace(training, optimizer="sgd", momentum=0.0, weight_decay=0.0, clip=None)
    return Stage(StillLoss(loss), gradients=nothing, epochs=1, training=still, shuffle=False, sum_gradients=True)


@dataclass(frozen=True)
class StillLoss:
    """A loss that does not move BatchNorm's statistics; those of equal losses are equal, so they can be stacked."""

    loss: Any

    def __call__(self, nets: Mapping[str, Any], batch: Batch, aux: Aux) -> Tensor:
        """Return the loss of the network that is held still."""
        value: Tensor = self.loss({**nets, "main": nets["main"].still()}, batch, aux)
        return value


def nothing(grads: tuple[Grads, ...], aux: Aux) -> Grads:
    """Return a gradient of zero."""
    return {model: {name: torch.zeros_like(g) for name, g in own.items()} for model, own in grads[0].items()}
