"""Torch's fused optimizers, called as functions.

The arithmetic is torch's own, to the bit. Its optimizer *classes* load torch's compiler at their first step (one to two
seconds, and 1,400 modules), which a short run would spend in its first round for nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.optim.sgd import sgd

from polyfed.core.settings import Training

BETAS = (0.9, 0.999)
EPSILON = 1e-8

Moved = tuple[Tensor, Tensor, Tensor, Tensor]  # a parameter, its gradient, and the means of gradients and their squares


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
    moments: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)  # means of gradients and of their squares
    steps: dict[int, int] = field(default_factory=dict)

    @torch.no_grad()
    def step(self, rate: float) -> None:
        """Move every parameter that has a gradient."""
        moved, grads = with_gradients(self.parameters)
        for place in moved:
            if place not in self.moments:
                parameter = self.parameters[place]
                self.moments[place] = torch.zeros_like(parameter), torch.zeros_like(parameter)
            self.steps[place] = self.steps.get(place, 0) + 1
        parts = [(self.parameters[place], grad, *self.moments[place]) for place, grad in zip(moved, grads, strict=True)]
        fused_adam(parts, [self.steps[place] for place in moved], self.training, rate)


def fused_adam(parts: Sequence[Moved], counts: Sequence[int], training: Training, rate: float) -> None:
    """Move parameters in place, in one pass over memory; each has taken so many steps, with this one.

    torch's `adam` does the same and keeps a tensor of one number for each parameter, which it counts up one by one:
    for small networks that takes longer than the rest.
    """
    groups: dict[tuple[torch.device, torch.dtype], list[int]] = {}  # the kernel takes tensors of one kind
    for place, (parameter, *_) in enumerate(parts):
        groups.setdefault((parameter.device, parameter.dtype), []).append(place)
    move = torch._fused_adamw_ if training.optimizer == "adamw" else torch._fused_adam_
    for (device, _), places in groups.items():
        told = {
            count: torch.tensor(float(count), dtype=torch.float32, device=device)
            for count in {counts[place] for place in places}
        }
        parameters, grads, means, squares = (list(some) for some in zip(*(parts[p] for p in places), strict=True))
        move(  # type: ignore[call-overload]
            parameters,
            grads,
            means,
            squares,
            [],
            [told[counts[place]] for place in places],
            lr=rate,
            beta1=BETAS[0],
            beta2=BETAS[1],
            weight_decay=training.weight_decay,
            eps=EPSILON,
            amsgrad=False,
            maximize=False,
        )


def with_gradients(parameters: list[Tensor]) -> tuple[list[int], list[Tensor]]:
    """Return which parameters have a gradient, and the gradients."""
    found = [(place, parameter.grad) for place, parameter in enumerate(parameters) if parameter.grad is not None]
    return [place for place, _ in found], [grad for _, grad in found]


def make_optimizer(parameters: list[Tensor], training: Training) -> Sgd | Adam:
    """Return a fresh optimizer; fused kernels take one pass over memory for each step."""
    return Sgd(parameters, training) if training.optimizer == "sgd" else Adam(parameters, training)
