"""DP-SGD: per-sample gradients, clipped, added up and blurred, on samples drawn independently at every step.

Abadi et al. 2016. The batch of a step is a Poisson sample, as the accountant assumes: each sample is in it with
probability `rate`, so batches differ in size and may be empty, and the sum is divided by the expected size.

Some methods take k gradients of one batch, in turn (two networks that teach each other). Each is shortened to the bound
and gets noise of sqrt(k) times the size: Gaussian mechanisms that see each other's results compose to one with the root
of the sum of squares, so that a step is the same event for the accountant, on one Poisson sample.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import grad_and_value, vmap

from polyfed.core.errors import InputError
from polyfed.core.nets import FunctionalNet, norms_of
from polyfed.core.party import Context, Party
from polyfed.core.privacy import Privacy, added, note, spent_of
from polyfed.core.rng import SERVER, generator
from polyfed.core.samples import Samples
from polyfed.core.stage import Batch, Grads, LossFunction, Stage, Update, batch_sizes, split_loss

AT_ONCE = 1 << 25  # gradient values that are held at once: samples are taken in so large groups


class Source:
    """Random numbers for sampling and noise: of a stream of the seed tree, or of the operating system (`rng` None).

    A stream can be repeated by whoever knows the seed, which is told to all sites: good for a simulation, and no
    protection at all in a real federation.
    """

    def __init__(self, rng: torch.Generator | None) -> None:
        self.rng = rng

    def uniform(self, count: int) -> Tensor:
        """Return numbers from [0, 1)."""
        if self.rng is not None:
            return torch.rand(count, generator=self.rng, dtype=torch.float64)
        bits = np.frombuffer(os.urandom(8 * count), dtype=np.uint64) >> np.uint64(11)
        return torch.from_numpy(bits.astype(np.float64) * 2.0**-53)

    def normal(self, shape: torch.Size) -> Tensor:
        """Return standard normal numbers.

        From the operating system: half the sum of four of Box and Muller's, so that the rounding of one of them cannot
        be read off the result (Holohan and Braghin 2021).
        """
        if self.rng is not None:
            return torch.randn(shape, generator=self.rng)
        count = math.prod(shape)
        u, v = (1 - self.uniform(4 * count)).view(4, -1), self.uniform(4 * count).view(4, -1)
        four = (-2 * u.log()).sqrt() * (2 * math.pi * v).cos()
        return (four.sum(0) / 2).view(shape).to(torch.get_default_dtype())


def is_private(stage: Stage, party: Party) -> bool:
    """Tell whether a stage learns from a client's own samples: from anything but public rows and what it was sent."""
    if party.id == SERVER or stage.received:
        return False
    return stage.data is None or party.data.public is None or not within(stage.data, party.data.public)


def within(some: Samples, others: Samples) -> bool:
    """Tell whether all rows of one view belong to another."""
    if some.x is not others.x:
        return False
    if others.index is None:
        return True
    rows = some.index if some.index is not None else torch.arange(len(some.x))
    return bool(torch.isin(rows, others.index).all())


class PrivateTraining:
    """The private form of one stage of one client."""

    def __init__(self, privacy: Privacy, stage: Stage, party: Party, ctx: Context, name: str) -> None:
        training = stage.training or ctx.training
        data = stage.data if stage.data is not None else party.train
        self.privacy, self.stage, self.party, self.ctx = privacy, stage, party, ctx
        self.source = Source(None if ctx.secure else generator(ctx.seed, f"privacy/{name}", ctx.round, party.id))
        self.samples = len(data)
        self.expected = min(training.batch_size, self.samples)
        self.rate = self.expected / self.samples
        self.in_epoch = len(batch_sizes(self.samples, training.batch_size, False))
        self.epochs = stage.epochs if stage.epochs is not None or stage.steps is not None else training.epochs
        self.steps = stage.steps if stage.steps is not None else (self.epochs or 0) * self.in_epoch
        self.planned = ctx.own_epochs * self.in_epoch
        self.multiplier = privacy.multiplier(self.rate, self.planned, ctx.releases)
        # Several gradients of one batch are one release of all of them: it is as much longer as their root.
        self.gradients = sum(len(update.losses) for update in stage.all_updates())
        self.check()
        before = spent_of(party.memory)
        self.spent = added(before, self.rate, self.multiplier, self.steps)
        privacy.check_budget(str(party), before, self.spent)

    def check(self) -> None:
        """Refuse what has no gradient of a single sample."""
        for model in {model: None for update in self.stage.all_updates() for model in update.trainable}:
            mixing = next(iter(norms_of(self.party.models[model])), None)
            if mixing is not None:
                raise InputError(
                    f"privacy: the network '{model}' of {self.party} has {type(mixing).__name__}, which mixes samples, "
                    "so that no gradient belongs to one of them: use GroupNorm or LayerNorm instead, or a network "
                    "without norms (mlp, cnn without the option bn)."
                )

    def finish(self) -> None:
        """Note what was spent."""
        note(self.party.memory, self.spent, self.privacy.delta)

    def plan(self) -> Iterator[tuple[int, Tensor, list[int]]]:
        """Yield `(epoch, positions, batch sizes)` as `epoch_plan` does; every batch is a Poisson sample."""
        left, epoch = self.steps, 0
        while left > 0:
            number = min(left, self.in_epoch)
            batches = [self.drawn() for _ in range(number)]
            yield epoch, torch.cat(batches), [len(batch) for batch in batches]
            left, epoch = left - number, epoch + 1

    def drawn(self) -> Tensor:
        """Return the positions of one Poisson sample."""
        return torch.nonzero(self.source.uniform(self.samples) < self.rate).flatten()

    def gradient(
        self,
        update: Update,
        chosen: Mapping[str, Mapping[str, Tensor]],
        batch: Batch,
        aux: Mapping[str, Any],
        number: int = 0,
    ) -> tuple[Tensor, Grads]:
        """Return the mean of a loss over a batch, and (sum of clipped gradients + noise) / expected size."""
        modules = self.party.models
        moved = {key: {name: p.detach() for name, p in group.items()} for key, group in chosen.items()}
        total = {key: {name: torch.zeros_like(p) for name, p in group.items()} for key, group in moved.items()}
        losses = []
        size = sum(p.numel() for group in moved.values() for p in group.values())
        for some in _groups(batch, max(1, AT_ONCE // max(1, size))):
            values, grads = self.per_sample(update.losses[number], modules, moved, some, aux)
            losses.append(values)
            for key, group in clipped(grads, self.privacy.max_norm, self.privacy.clipping).items():
                for name, grad in group.items():
                    total[key][name] += grad.sum(0)
        scale = self.multiplier * math.sqrt(self.gradients) * self.privacy.max_norm
        for group in total.values():
            for grad in group.values():
                noise = self.source.normal(grad.shape).to(grad)
                grad.add_(noise, alpha=scale).div_(self.expected)
        return torch.cat(losses).mean() if losses else torch.zeros(()), total

    def per_sample(
        self,
        function: LossFunction,
        modules: Mapping[str, nn.Module],
        moved: Grads,
        batch: Batch,
        aux: Mapping[str, Any],
    ) -> tuple[Tensor, Grads]:
        """Return the loss and the gradient of every sample on its own."""
        state = {
            key: (
                {n: p.detach() for n, p in module.named_parameters()},
                {n: b.detach() for n, b in module.named_buffers()},
            )
            for key, module in modules.items()
        }
        common = {n: c for n, c in batch.columns.items() if n in self.stage.draws and not _is_row(self.stage.draws[n])}
        own = {name: column for name, column in batch.columns.items() if name not in common}

        def one(moved: Grads, x: Tensor, y: Tensor, columns: dict[str, Tensor]) -> Tensor:
            nets = {
                key: FunctionalNet(modules[key], {**params, **moved.get(key, {})}, buffers)
                for key, (params, buffers) in state.items()
            }
            rows = {n: c.unsqueeze(0) for n, c in columns.items()} | common
            alone = Batch(x.unsqueeze(0), y.unsqueeze(0), rows, batch.task)
            loss, sums = split_loss(function(nets, alone, aux))
            if sums:
                raise InputError("privacy: this method adds up more than gradients in training, without noise.")
            return loss

        taken = vmap(grad_and_value(one), in_dims=(None, 0, 0, 0), randomness="same")
        try:
            grads, values = taken(moved, batch.x, batch.y, own)
        except RuntimeError as error:
            if "vmap" not in str(error) and "transform" not in str(error):
                raise
            raise InputError(
                f"privacy: a network of {self.party} does what cannot be done for one sample at a time "
                f"({str(error).split('. ')[0]}): often a buffer of its own that training changes in place; leave that "
                "out, or use a layer whose result depends on one sample only."
            ) from error
        return values.detach(), grads


def clipped(grads: Grads, max_norm: float, clipping: str) -> Grads:
    """Return gradients [samples, ...] of which no sample's is longer than `max_norm`; those not finite become zero.

    Parts that are shortened by themselves (see `part_of`) have equal bounds, whose squares add up to that of the whole.
    """
    squares: dict[tuple[str, ...], Tensor] = {}
    for key, group in grads.items():
        for name, grad in group.items():
            part = part_of(key, name, clipping)
            square = grad.flatten(1).double().pow(2).sum(1)
            squares[part] = squares[part] + square if part in squares else square
    bound = max_norm / math.sqrt(len(squares))
    factors = {}
    for part, square in squares.items():
        norms = square.sqrt()
        # A hair below the bound: rounding must not carry a gradient beyond it.
        factor = torch.where(norms > bound, bound / norms * (1 - 1e-6), 1.0)
        factors[part] = torch.where(torch.isfinite(norms), factor, 0.0)
    found: Grads = {}
    for key, group in grads.items():
        found[key] = {}
        for name, grad in group.items():
            factor = factors[part_of(key, name, clipping)].to(grad).view(-1, *(1,) * (grad.dim() - 1))
            found[key][name] = torch.where(factor > 0, grad * factor, 0.0)
    return found


def part_of(model: str, name: str, clipping: str) -> tuple[str, ...]:
    """Return the part of a gradient to which a tensor belongs: the whole, its group, or its layer."""
    if clipping == "global":
        return ()
    return model, name.partition(".")[0] if clipping == "group" else name.rpartition(".")[0]


def _groups(batch: Batch, size: int) -> Iterator[Batch]:
    """Cut a batch into groups of samples; an empty one has none."""
    for start in range(0, len(batch.y), size):
        part = slice(start, start + size)
        rows = {n: c[part] if c.dim() and len(c) == len(batch.y) else c for n, c in batch.columns.items()}
        yield Batch(batch.x[part], batch.y[part], rows, batch.task)


def _is_row(draw: Any) -> bool:
    """Tell whether a random tensor has one row for each sample."""
    return bool(draw.shape) and draw.shape[0] is None
