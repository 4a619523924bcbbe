"""Looking at a client's network without moving it: gradients where it is, and what it would say with other weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from polyfed.core.message import State
from polyfed.core.nets import Net, has_batch_norm
from polyfed.core.party import Context, Party
from polyfed.core.runner import SeededDropout
from polyfed.core.samples import Samples
from polyfed.core.settings import Training
from polyfed.core.stage import Aux, Batch, Grads, Stage

Look = Callable[[Any, Tensor, Tensor], Tensor]  # network, inputs, labels -> a number


def gradients_at_rest(loss: Any, training: Training) -> Stage:
    """Return a pass over a client's data, in batches of `training`, that only adds up the gradients of `loss`."""
    still = replace(training, optimizer="sgd", momentum=0.0, weight_decay=0.0, clip=None)
    return Stage(StillLoss(loss), gradients=nothing, epochs=1, training=still, shuffle=False, sum_gradients=True)


def as_function(client: Party, data: Samples, look: Look, ctx: Context, purpose: str) -> Callable[[State], Tensor]:
    """Return what `look(net, x, y)` sees of some samples, as a function of the weights: for `torch.func`.

    BatchNorm's statistics do not move (a lone sample is predicted with them), and dropout is the same at every call:
    its draws are those of the purpose.
    """
    x, y = data.inputs().to(ctx.device), data.labels().to(ctx.device)
    module = client.main
    lone = len(y) == 1 and has_batch_norm(module)

    def seen(weights: State) -> Tensor:
        net = Net(module).replaced(weights)
        with SeededDropout(lambda: ctx.rng(purpose, client), {"main": module}):
            return look(net.eval() if lone else net.still(), x, y)

    return seen


def gradient_through_a_step(
    client: Party,
    first: tuple[Samples, Callable[[Any, Tensor, Tensor, Tensor], Tensor]],
    then: tuple[Samples, Look],
    v: Tensor,
    eta: float,
    ctx: Context,
    purpose: str,
) -> Tensor:
    """Return d then(w') / dv where w' = w - eta · grad_w first(w, v): how v should move for a step to help.

    `first` is some samples and a loss `(net, x, y, v)` on which a step is taken, `then` others and the loss that is
    measured there; the network stays as it is. By two reverse passes: torch's forward mode can be used by one thread of
    a process at a time.
    """
    w = {name: p.detach() for name, p in client.main.named_parameters() if p.requires_grad}
    measured = as_function(client, *then, ctx, purpose)

    def after_a_step(v: Tensor) -> Tensor:
        loss = as_function(client, first[0], lambda net, x, y: first[1](net, x, y, v), ctx, purpose)
        step = torch.func.grad(loss)(w)
        return measured({name: tensor - eta * step[name] for name, tensor in w.items()})

    gradient: Tensor = torch.func.grad(after_a_step)(v)
    return gradient


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
