"""A stage is one piece of optimization, described as data; whoever drives a client runs it.

The loss is pure: it sees models only through `nets`, tensors only through `batch` and `aux`, and draws no random
numbers itself (`draws` puts them into the batch). So an engine may run a stage on one live module, or the pending
stages of many clients as one batched program, and get the same numbers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from polyfed.core.losses import Losses
from polyfed.core.samples import Samples
from polyfed.core.settings import Training
from polyfed.core.task import CLASSIFICATION, Task

Aux = Mapping[str, Any]
Grads = dict[str, dict[str, Tensor]]  # model name -> parameter name -> gradient
Trainable = Mapping[str, tuple[str, ...] | None]  # model name -> prefixes of parameter names (None: all of them)


@dataclass
class Batch:
    """Some samples of a stage: inputs, labels (or targets), further columns and the random draws of this step."""

    x: Tensor
    y: Tensor
    columns: dict[str, Tensor] = field(default_factory=dict)
    task: Task = CLASSIFICATION

    def loss(self, outputs: Tensor) -> Tensor:
        """Return the task's loss of these outputs: cross-entropy where classes are learned."""
        return self.task.loss(outputs, self.y)

    def __getitem__(self, name: str) -> Tensor:
        return self.columns[name]

    def __contains__(self, name: str) -> bool:
        return name in self.columns


Sums = dict[str, Tensor]
LossFunction = Callable[[Mapping[str, Any], Batch, Aux], Tensor | tuple[Tensor, Sums]]


@dataclass(frozen=True)
class Draw:
    """A random tensor drawn anew for every batch; None in the shape stands for the batch size."""

    shape: tuple[int | None, ...]
    kind: str = "normal"  # normal | uniform

    def sample(self, batch_size: int, rng: torch.Generator) -> Tensor:
        """Draw it for one batch."""
        shape = tuple(batch_size if n is None else n for n in self.shape)
        return torch.randn(shape, generator=rng) if self.kind == "normal" else torch.rand(shape, generator=rng)


@dataclass(frozen=True)
class Update:
    """One optimizer step on a batch: a loss (or several), and the parameters it moves.

    Attributes
    ----------
    losses
        Usually one. With several, each gradient is taken on its own and `gradients` combines them. A loss may return a
        pair: itself, and named tensors that are added up over the steps of the stage (`Trained.sums`).
    trainable
        Which parameters move; everything else is frozen.
    gradients
        Pure transform `(gradients of each loss, aux) -> gradient`; needed when there are several losses.
    project
        Pure map applied to the moved parameters after the step (clamping to a range, for instance).
    training
        Learning rate and optimizer of this update; None takes the stage's.
    l1
        Weight of the L1 norm of the moved parameters: its gradient, their signs, is added to that of the losses, which
        do not tell of it (as with weight decay).
    """

    losses: tuple[LossFunction, ...]
    trainable: Trainable
    gradients: Callable[[tuple[Grads, ...], Aux], Grads] | None = None
    project: Callable[[Grads], Grads] | None = None
    training: Training | None = None
    l1: float = 0.0


@dataclass
class Stage:
    """What to optimise, on which data, for how long.

    Attributes
    ----------
    loss, trainable, gradients, project, l1
        The one update of an ordinary stage. `loss` may be a tuple of losses, combined by `gradients`.
    updates
        Instead of the above: several updates stepped in turn on the same batch.
    data, received
        The samples; None takes the party's own training data. `received`: they were made of what the party was sent
        alone, so that learning from them tells nothing of its own.
    columns
        Tensors with one row for each sample of `data` (soft targets, for instance); they appear in the batch.
    aux
        Tensors that are the same for every batch (anchors, prototypes).
    draws
        Random tensors drawn for every batch from this party's stream; they appear in the batch.
    epochs, steps
        How long; both None takes the epochs of the training settings. With `steps`, data is repeated as needed.
    training
        Batch size, optimizer, learning rate; None takes the run's settings.
    shuffle
        New order each epoch (on by default).
    sum_gradients
        Add up the gradients of the first loss, as they are before `gradients`, clipping and the optimizer
        (`Trained.gradients`).
    targets
        For clients whose model is no network (see `core/learner.py`): what to answer on `data`, as outputs or as class
        numbers, one for each sample. None: its labels.
    key
        Names all losses and what becomes of their gradients among all methods, with the values of the fields that they
        use (`("prox", self.mu)`). In a comparison stages with equal keys, starts, data, aux and settings are trained
        once; the plain loss of the task needs no key.
    until, rate_factor
        At the server: called with the number of steps after each of them, True ends the stage; and what the learning
        rate is multiplied by at step 0, 1, ...
    """

    loss: LossFunction | tuple[LossFunction, ...] | None = None
    trainable: Trainable = field(default_factory=lambda: {"main": None})
    gradients: Callable[[tuple[Grads, ...], Aux], Grads] | None = None
    project: Callable[[Grads], Grads] | None = None
    updates: tuple[Update, ...] = ()
    data: Samples | None = None
    columns: dict[str, Tensor] = field(default_factory=dict)
    aux: Aux = field(default_factory=dict)
    draws: dict[str, Draw] = field(default_factory=dict)
    epochs: int | None = None
    steps: int | None = None
    training: Training | None = None
    shuffle: bool = True
    sum_gradients: bool = False
    targets: Tensor | None = None
    key: Hashable | None = None
    until: Callable[[int], bool] | None = None
    rate_factor: Callable[[int], float] | None = None
    received: bool = False
    l1: float = 0.0

    def all_updates(self) -> tuple[Update, ...]:
        """Return the updates of one batch, also for the one-loss form."""
        if self.updates:
            return self.updates
        assert self.loss is not None, "a stage needs a loss or updates"
        losses = self.loss if isinstance(self.loss, tuple) else (self.loss,)
        assert len(losses) == 1 or self.gradients is not None, "several losses need `gradients` to combine them"
        return (Update(losses, self.trainable, self.gradients, self.project, l1=self.l1),)


@dataclass(frozen=True)
class Trained:
    """What a finished stage tells: `trained = yield Stage(...)` at a client, `ctx.run(Stage(...), ...)` at the server.

    Attributes
    ----------
    loss
        The mean of all losses.
    steps
        Optimizer steps of the first update.
    rates
        The sum of their learning rates.
    sums
        What the losses gave beside themselves, added up over the steps.
    gradients
        The sum of the first loss's gradients, where the stage asked for it.
    """

    loss: float = 0.0
    steps: int = 0
    rates: float = 0.0
    sums: Sums = field(default_factory=dict)
    gradients: Grads = field(default_factory=dict)


class Totals:
    """Collects what `Trained` tells, step by step."""

    def __init__(self) -> None:
        self.losses = Losses()
        self.steps = 0
        self.rates = 0.0
        self.sums: Sums = {}
        self.gradients: Grads = {}

    def step(self, rate: float) -> None:
        """Count a step of the first update."""
        self.steps += 1
        self.rates += rate

    def add(self, sums: Mapping[str, Tensor]) -> None:
        """Add what a loss gave beside itself."""
        for name, value in sums.items():
            self.sums[name] = self.sums[name] + value.detach() if name in self.sums else value.detach().clone()

    def add_gradients(self, grads: Grads) -> None:
        """Add the gradients of one step."""
        for model, group in grads.items():
            mine = self.gradients.setdefault(model, {})
            for name, grad in group.items():
                mine[name] = mine[name].add_(grad) if name in mine else grad.detach().clone()

    def trained(self) -> Trained:
        """Return what was collected."""
        return Trained(self.losses.mean(), self.steps, self.rates, self.sums, self.gradients)


def split_loss(value: Tensor | tuple[Tensor, Sums]) -> tuple[Tensor, Sums]:
    """Return what a loss function gave as the loss and its sums."""
    return value if isinstance(value, tuple) else (value, {})


def is_trainable(name: str, prefixes: tuple[str, ...] | None) -> bool:
    """Tell whether a parameter is among the trainable ones: a prefix is a whole name or a leading part up to a dot."""
    return prefixes is None or any(name == p or name.startswith(p.removesuffix(".") + ".") for p in prefixes)


def epoch_plan(
    samples: int,
    batch_size: int,
    epochs: int | None,
    steps: int | None,
    rng: torch.Generator,
    shuffle: bool = True,
    join_single: bool = False,
) -> Iterator[tuple[int, Tensor, list[int]]]:
    """Yield `(epoch, order, batch sizes)` for every epoch of a stage: the same for all engines.

    Every sample is used once an epoch, in a new order each time. With `steps`, the last epoch is cut short.
    """
    left = steps
    epoch = 0
    sizes = batch_sizes(samples, batch_size, join_single)
    while sizes and (left is None or left > 0) and (epochs is None or epoch < epochs):
        order = torch.randperm(samples, generator=rng) if shuffle else torch.arange(samples)
        used = sizes if left is None else sizes[:left]
        yield epoch, order[: sum(used)], used
        left = None if left is None else left - len(used)
        epoch += 1


def batch_sizes(samples: int, batch_size: int, join_single: bool) -> list[int]:
    """Return the sizes of one epoch's batches.

    With `join_single` (networks with BatchNorm), a last batch of one sample joins the batch before it: a lone sample
    has no batch statistics, but it is never dropped.
    """
    full, rest = divmod(samples, batch_size)
    sizes = [batch_size] * full + ([rest] if rest else [])
    if join_single and rest == 1 and full:
        sizes[-2:] = [batch_size + 1]
    return sizes


def split_batches(order: Tensor, batch_size: int, join_single: bool) -> list[Tensor]:
    """Cut one epoch's order into batches."""
    return list(order.split(batch_sizes(len(order), batch_size, join_single)))


def learning_rate(training: Training, round: int, epoch: int, rounds: int = 0) -> float:
    """Return the learning rate of an epoch of a stage in a round (1, 2, ... of `rounds`)."""
    done = max(round - 1, 0)  # rounds before this one
    rate = training.lr * training.round_decay**done * training.decay ** (epoch // training.decay_every)
    if training.schedule == "cosine" and rounds:
        rate *= (1 + math.cos(math.pi * done / rounds)) / 2
    for milestone in training.milestones:
        rate *= training.milestone_decay if done >= milestone else 1.0
    if training.warm_up:
        rate *= min(1.0, (done + 1) / (training.warm_up + 1))
    return rate


def learning_rates(stage: Stage, trained: Trained, training: Training, round: int, rounds: int = 0) -> list[float]:
    """Return the learning rate of every step that a finished stage took, by the run's training."""
    epochs, steps = stage.epochs or training.epochs, trained.steps
    return [learning_rate(training, round, number * epochs // steps, rounds) for number in range(steps)]


def turns_by_epoch(stage: Stage, training: Training) -> Iterator[Stage]:
    """Yield stages of one update and one epoch each, for updates that take turns every epoch instead of every batch.

    Each has the learning rate that its epoch would have.
    """
    for epoch in range(training.epochs):
        for update in stage.updates:
            own = update.training or training
            alone = replace(own, lr=own.lr * own.decay ** (epoch // own.decay_every), decay=1.0)
            yield replace(stage, updates=(replace(update, training=alone),), epochs=1)
