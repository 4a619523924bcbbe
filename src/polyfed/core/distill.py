"""Teach a network at the server: fit its logits to targets on unlabeled data."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from polyfed.core.message import State
from polyfed.core.party import Context, cloned, fill, load_state, state_of
from polyfed.core.passes import count_right
from polyfed.core.samples import Samples
from polyfed.core.settings import Training, training_of
from polyfed.core.stage import Aux, Batch, LossFunction, Stage, Trained
from polyfed.ops.distance import kl_divergence


def distillation_loss(nets: Mapping[str, Any], batch: Batch, aux: Aux) -> Tensor:
    """Return T²·KL(softmax(target / T) || softmax(student / T)), mean over the batch."""
    temperature = aux["temperature"]
    loss: Tensor = temperature**2 * kl_divergence(nets["main"](batch.x), batch["target"], temperature)
    return loss


def distill(
    student: nn.Module,
    data: Samples,
    targets: Tensor | Mapping[str, Tensor],
    ctx: Context,
    training: Training,
    *,
    epochs: int | None = None,
    steps: int | None = None,
    temperature: float = 1.0,
    loss: LossFunction = distillation_loss,
    cosine: bool = False,
    validation: Samples | None = None,
    every: int = 100,
    patience: int = 1000,
    name: str = "distill",
) -> Trained:
    """Train a student, in place, on targets for samples whose labels play no part.

    Parameters
    ----------
    student, data, targets
        The network is `nets["main"]` of the loss; targets have one row for each sample and appear in its batch, as
        `target` or by their names.
    training, epochs, steps
        Batch size, optimizer and rate, and how long (epochs of `training` where neither is given).
    temperature, loss
        T is `aux["temperature"]`; the loss is T²·KL(target || student) unless another is given.
    cosine
        Let the learning rate fall to zero along half a wave over the steps.
    validation, every, patience
        Labelled samples on which the student is measured every so many steps: the best one is kept, and training stops
        after so many steps without a gain.
    name
        Tells this training from others of the same round in the tree of seeds.
    """
    columns = dict(targets) if isinstance(targets, Mapping) else {"target": targets}
    planned = steps or -(-len(data) // training.batch_size) * (epochs or training.epochs)
    best: tuple[int, int, dict[str, Tensor]] = (-1, 0, {})  # right answers, at which step, the student then

    def stop(step: int) -> bool:
        nonlocal best
        if validation is None or step % every:
            return False
        right = count_right(student, validation)
        if right > best[0]:
            best = right, step, cloned(state_of(student))
        return step - best[1] >= patience

    stage = Stage(
        loss,
        data=Samples(data.x, torch.zeros_like(data.y), data.index, data.scaling),
        columns=columns,
        aux={"temperature": torch.tensor(temperature)},
        epochs=epochs,
        steps=steps,
        training=training,
        until=stop if validation is not None else None,
        rate_factor=(lambda step: (1 + math.cos(math.pi * step / planned)) / 2) if cosine else None,
    )
    trained = ctx.run(stage, {"main": student}, name)
    if best[2]:
        load_state(student, best[2])
    return trained


def distill_by(
    options: object,
    student: nn.Module,
    data: Samples,
    targets: Tensor | Mapping[str, Tensor],
    ctx: Context,
    **more: Any,
) -> float:
    """Distill as the fields of a method say, and return the mean loss. What else there is to say is as in `distill`.

    The fields are `temperature`, `distill_cosine`, `distill_steps` (None, or no such field: `distill_epochs`), and
    those of `training_of`: `distill_lr`, `distill_batch`, ...
    """
    steps = getattr(options, "distill_steps", None)
    how: dict[str, Any] = {
        "steps": steps,
        "epochs": getattr(options, "distill_epochs", None) if steps is None else None,
        "temperature": getattr(options, "temperature", 1.0),
        "cosine": getattr(options, "distill_cosine", False),
    }
    return distill(student, data, targets, ctx, training_of(options, "distill", ctx.training), **how, **more).loss


def distill_held(options: object, held: State, student: nn.Module, *lesson: Any, **more: Any) -> float:
    """Distill into shared tensors: they are the student's start, and get what it learned; else as `distill_by`."""
    load_state(student, held)
    loss = distill_by(options, student, *lesson, **more)
    put_back(student, held)
    return loss


def put_back(student: nn.Module, held: State) -> None:
    """Copy a student's tensors to their places among the shared ones."""
    own = state_of(student)
    fill(held, {name: own[name] for name in held})
