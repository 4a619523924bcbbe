"""Distil a fused predictor into one small model, with unlabeled data or with inputs made from the networks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from polyfed.core.alone import train_alone
from polyfed.core.distill import distillation_loss
from polyfed.core.errors import InputError
from polyfed.core.rng import generator, seeded
from polyfed.core.samples import Samples
from polyfed.core.settings import Training
from polyfed.core.stage import Stage
from polyfed.fusion.chain import sample_inputs
from polyfed.fusion.impressions import impressions_of
from polyfed.fusion.networks import scores_on
from polyfed.models import build


def distill(
    teacher: nn.Module,
    student: nn.Module,
    networks: Sequence[nn.Module],
    public: Samples | None,
    counts: Tensor | None,
    input_shape: Sequence[int] | None,
    options: Distillation,
    seed: int = 0,
) -> nn.Module:
    """Fit a student, in place, to the scores of a fused predictor; see `distillation_stage`."""
    rngs = [generator(seed, "impressions", 0, place) for place in range(len(networks))]
    stage = distillation_stage(teacher, networks, public, counts, input_shape, options, rngs)
    assert stage.training is not None
    with torch.enable_grad():  # the caller may be in the middle of predicting
        train_alone(student, stage, stage.training, seed, "distill")
    return student.eval()


def distillation_stage(
    teacher: nn.Module,
    networks: Sequence[nn.Module],
    public: Samples | None,
    counts: Tensor | None,
    input_shape: Sequence[int] | None,
    options: Distillation,
    rngs: Sequence[torch.Generator],
) -> Stage:
    """Return the training of a student, `nets["main"]`: T²·KL(teacher || student) on public or made inputs.

    Parameters
    ----------
    teacher
        The fused predictor, in prediction mode.
    networks, counts, rngs
        What inputs are made from where there are no public ones: see `impressions_of`.
    """
    data = public
    if data is None:
        data = impressions_of(networks, counts, input_shape, options.impressions, options.impression_steps, rngs)
    temperature = options.temperature or (20.0 if public is None else 2.0)
    return Stage(
        distillation_loss,
        data=data,
        columns={"target": scores_on(teacher, data)},
        aux={"temperature": torch.tensor(temperature)},
        epochs=options.epochs,
        training=Training(options.epochs, options.batch_size, "adam", options.lr),
    )


def make_student(
    wanted: str | nn.Module,
    shape: Sequence[int] | None,
    classes: int | None,
    seed: int = 0,
    like: nn.Module | None = None,
) -> nn.Module:
    """Return the student itself, or build it from its string for the inputs (None: those of `like`) and classes."""
    if isinstance(wanted, nn.Module):
        return wanted
    if shape is None:
        assert like is not None, "a shape, or a network that has one"
        shape = tuple(sample_inputs(like).shape[1:])
    if classes is None:
        raise InputError("The number of classes cannot be read off the networks: give distill_into as a module.")
    with seeded(seed, "init/student"):
        return build(wanted, shape, classes)


@dataclass(frozen=True)
class Distillation:
    """How a fused predictor is distilled into one model, with Adam; a temperature of None: 2 with data, 20 without.

    `impressions` inputs are made for each network and class it knows when there is no public data, in
    `impression_steps` steps.
    """

    temperature: float | None = None
    epochs: int = 20
    lr: float = 1e-3
    batch_size: int = 64
    impressions: int = 20
    impression_steps: int = 1000
