"""Torch's fused optimizers, called as functions.

The arithmetic is torch's own, to the bit. Its optimizer *classes* load torch's compiler at their first step (one to two
seconds, and 1,400 modules), which a short run would spend in its first round for nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.optim.adam import adam
from torch.optim.adamw import adamw
from torch.optim.sgd import sgd

from polyfed.core.settings import Training

BETAS = (0.9, 0.999)
EPSILON = 1e-8


@dataclass
class Sgd:
    """Stochastic gradient descent, with momentum where the settings ask for it."""

    parameters: list[Tensor]
    training: Training
    velocity: dict[int, Tensor | None] = field(default_factory=dict)

    @torch.no_grad()
    def step(self, rate: float) -> None:
        """Move every parameter that has a gradient."""
        moved, grads = with_gradients(self.parameters)
        if not moved:
            return
        kept = [self.velocity.get(place) for place in moved]
        sgd(
            [self.parameters[place] for place in moved],
            grads,
            kept,
            fused=True,
            weight_decay=self.training.weight_decay,
            momentum=self.training.momentum,
            lr=rate,
            dampening=0.0,
            nesterov=False,
            maximize=False,
        )
        if self.training.momentum:
            self.velocity.update(zip(moved, kept, strict=True))


@dataclass
class Adam:
    """Adam, or AdamW where the settings say so."""

    parameters: list[Tensor]
    training: Training
    moments: dict[int, tuple[Tensor, Tensor, Tensor]] = field(default_factory=dict)  # mean, square, steps

    @torch.no_grad()
    def step(self, rate: float) -> None:
        """Move every parameter that has a gradient."""
        moved, grads = with_gradients(self.parameters)
        if not moved:
            return
        for place in moved:
            if place not in self.moments:
                parameter = self.parameters[place]
                steps = torch.zeros((), dtype=torch.float32, device=parameter.device)
                self.moments[place] = torch.zeros_like(parameter), torch.zeros_like(parameter), steps
        means, squares, counts = zip(*(self.moments[place] for place in moved), strict=True)
        function = adamw if self.training.optimizer == "adamw" else adam
        function(
            [self.parameters[place] for place in moved],
            grads,
            list(means),
            list(squares),
            [],
            list(counts),
            fused=True,
            amsgrad=False,
            beta1=BETAS[0],
            beta2=BETAS[1],
            lr=rate,
            weight_decay=self.training.weight_decay,
            eps=EPSILON,
            maximize=False,
        )


def with_gradients(parameters: list[Tensor]) -> tuple[list[int], list[Tensor]]:
    """Return which parameters have a gradient, and the gradients."""
    found = [(place, parameter.grad) for place, parameter in enumerate(parameters) if parameter.grad is not None]
    return [place for place, _ in found], [grad for _, grad in found]


def make_optimizer(parameters: list[Tensor], training: Training) -> Sgd | Adam:
    """Return a fresh optimizer; fused kernels take one pass over memory for each step."""
    return Sgd(parameters, training) if training.optimizer == "sgd" else Adam(parameters, training)
