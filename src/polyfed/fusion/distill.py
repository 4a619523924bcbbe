"""Distil a fused predictor into one small model, with unlabeled data or with inputs made from the networks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from polyfed.core.alone import train_alone
from polyfed.core.errors import InputError
from polyfed.core.rng import generator, seeded
from polyfed.core.samples import Samples
from polyfed.core.settings import Training
from polyfed.core.stage import Aux, Batch, Stage
from polyfed.fusion.chain import sample_inputs
from polyfed.fusion.impressions import class_similarity, impressions, last_weight_name, soft_targets
from polyfed.models import build
from polyfed.ops.distance import kl_divergence

CHUNK = 512  # inputs at once


def distill(
    teacher: nn.Module,
    student: nn.Module,
    public: Samples | None,
    networks: Sequence[nn.Module],
    counts: Tensor | None,
    input_shape: Sequence[int] | None,
    options: Distillation,
    seed: int = 0,
) -> nn.Module:
    """Fit a student to the scores of a fused predictor, T²·KL(teacher || student), on public or made inputs."""
    temperature = options.temperature or (20.0 if public is None else 2.0)
    with torch.enable_grad():
        data = public if public is not None else made_inputs(networks, counts, input_shape, options, seed)
    with torch.no_grad():
        target = torch.cat([teacher(x) for x, _ in data.chunks(CHUNK)])
    stage = Stage(
        distillation_loss,
        data=data,
        columns={"target": target},
        aux={"temperature": torch.tensor(temperature)},
        epochs=options.epochs,
    )
    training = Training(options.epochs, options.batch_size, "adam", options.lr)
    with torch.enable_grad():  # the caller may be in the middle of predicting
        train_alone(student, stage, training, seed, "distill")
    return student.eval()


def distillation_loss(nets: Mapping[str, Any], batch: Batch, aux: Aux) -> Tensor:
    """Return T²·KL(softmax(scores / T) || softmax(student / T))."""
    temperature = aux["temperature"]
    loss: Tensor = temperature**2 * kl_divergence(nets["main"](batch.x), batch["target"], temperature)
    return loss


def made_inputs(
    networks: Sequence[nn.Module],
    counts: Tensor | None,
    input_shape: Sequence[int] | None,
    options: Distillation,
    seed: int,
) -> Samples:
    """Make inputs from each network for the classes it was trained on (without counts: for all classes)."""
    made = []
    for place, network in enumerate(networks):
        rng = generator(seed, "impressions", 0, place)
        weight = dict(network.named_parameters())[last_weight_name(network)].detach()
        known = torch.arange(len(weight)) if counts is None else torch.nonzero(counts[place]).flatten()
        shape = input_shape or tuple(sample_inputs(network).shape[1:])
        targets = soft_targets(class_similarity(weight), known.tolist(), options.impressions, (1.0, 0.1), rng)
        made.append(impressions(network.eval(), targets, shape, rng, steps=options.impression_steps))
    x = torch.cat(made)
    return Samples(x, torch.zeros(len(x), dtype=torch.long))


def make_student(
    wanted: str | nn.Module, shape: Sequence[int] | None, classes: int | None, like: nn.Module, seed: int
) -> nn.Module:
    """Return the student itself, or build it from its string for the inputs and classes of the networks."""
    if isinstance(wanted, nn.Module):
        return wanted
    shape = shape or tuple(sample_inputs(like).shape[1:])
    if classes is None:
        raise InputError("The number of classes cannot be read off the networks: give distill_into as a module.")
    with seeded(seed, "init/student"):
        return build(wanted, shape, classes)


@dataclass(frozen=True)
class Distillation:
    """How a fused predictor is distilled into one model; None: 2 with data, 20 without.

    `impressions` inputs are made for each network and class it knows when there is no public data, in
    `impression_steps` steps.
    """

    temperature: float | None = None
    epochs: int = 20
    lr: float = 1e-3
    batch_size: int = 64
    impressions: int = 20
    impression_steps: int = 1000
