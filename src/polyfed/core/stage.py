"""A stage is one piece of optimisation, described as data; whoever drives a client runs it.

The loss is pure: it sees models only through `nets`, tensors only through `batch` and `aux`, and draws no random
numbers itself (`draws` puts them into the batch). So an engine may run a stage on one live module, or the pending
stages of many clients as one batched program, and get the same numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from polyfed.core.samples import Samples
from polyfed.core.settings import Training

Aux = Mapping[str, Any]
Grads = dict[str, dict[str, Tensor]]  # model name -> parameter name -> gradient
Trainable = Mapping[str, tuple[str, ...] | None]  # model name -> prefixes of parameter names (None: all of them)


@dataclass
class Batch:
    """Some samples of a stage: inputs, labels, further columns and the random draws of this step."""

    x: Tensor
    y: Tensor
    columns: dict[str, Tensor] = field(default_factory=dict)

    def __getitem__(self, name: str) -> Tensor:
        return self.columns[name]

    def __contains__(self, name: str) -> bool:
        return name in self.columns


LossFunction = Callable[[Mapping[str, Any], Batch, Aux], Tensor]


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
    """One optimiser step on a batch: a loss (or several), and the parameters it moves.

    Attributes
    ----------
    losses
        Usually one. With several, each gradient is taken on its own and `gradients` combines them.
    trainable
        Which parameters move; everything else is frozen.
    gradients
        Pure transform `(gradients of each loss, aux) -> gradient`; needed when there are several losses.
    project
        Pure map applied to the moved parameters after the step (clamping to a range, for instance).
    training
        Learning rate and optimiser of this update; None takes the stage's.
    """

    losses: tuple[LossFunction, ...]
    trainable: Trainable
    gradients: Callable[[tuple[Grads, ...], Aux], Grads] | None = None
    project: Callable[[Grads], Grads] | None = None
    training: Training | None = None


@dataclass
class Stage:
    """What to optimise, on which data, for how long.

    Attributes
    ----------
    loss, trainable, gradients, project
        The one update of an ordinary stage. `loss` may be a tuple of losses, combined by `gradients`.
    updates
        Instead of the above: several updates stepped in turn on the same batch.
    data
        The samples; None takes the party's own training data.
    columns
        Tensors with one row for each sample of `data` (soft targets, for instance); they appear in the batch.
    aux
        Tensors that are the same for every batch (anchors, prototypes).
    draws
        Random tensors drawn for every batch from this party's stream; they appear in the batch.
    epochs, steps
        How long; both None takes the epochs of the training settings. With `steps`, data is repeated as needed.
    training
        Batch size, optimiser, learning rate; None takes the run's settings.
    shuffle
        New order each epoch (on by default).
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

    def all_updates(self) -> tuple[Update, ...]:
        """Return the updates of one batch, also for the one-loss form."""
        if self.updates:
            return self.updates
        assert self.loss is not None, "a stage needs a loss or updates"
        losses = self.loss if isinstance(self.loss, tuple) else (self.loss,)
        assert len(losses) == 1 or self.gradients is not None, "several losses need `gradients` to combine them"
        return (Update(losses, self.trainable, self.gradients, self.project),)


def is_trainable(name: str, prefixes: tuple[str, ...] | None) -> bool:
    """Tell whether a parameter is among the trainable ones: a prefix is a whole name or a leading part up to a dot."""
    return prefixes is None or any(name == p or name.startswith(p + ".") for p in prefixes)


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


def batch_plan(
    samples: int,
    batch_size: int,
    epochs: int | None,
    steps: int | None,
    rng: torch.Generator,
    shuffle: bool = True,
    join_single: bool = False,
) -> Iterator[tuple[int, Tensor]]:
    """Yield `(epoch, positions)` for every batch of a stage, see `epoch_plan`."""
    for epoch, order, sizes in epoch_plan(samples, batch_size, epochs, steps, rng, shuffle, join_single):
        for positions in order.split(sizes):
            yield epoch, positions


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


def learning_rate(training: Training, round: int, epoch: int) -> float:
    """Return the learning rate of an epoch of a stage in a round."""
    return training.lr * training.round_decay ** max(round - 1, 0) * training.decay ** (epoch // training.decay_every)


def make_optimizer(parameters: list[Tensor], training: Training) -> torch.optim.Optimizer:
    """Return a fresh optimiser; fused kernels take one pass over memory for each step."""
    common: dict[str, Any] = {"lr": training.lr, "weight_decay": training.weight_decay, "fused": True}
    if training.optimizer == "sgd":
        return torch.optim.SGD(parameters, momentum=training.momentum, **common)
    if training.optimizer == "adam":
        return torch.optim.Adam(parameters, **common)
    return torch.optim.AdamW(parameters, **common)
