"""Measure a party's predictions: inference mode, large batches."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from polyfed.core.backend import Measure
from polyfed.core.layout import channels_last
from polyfed.core.method import Method
from polyfed.core.metrics import score_of
from polyfed.core.nets import EVAL, mode
from polyfed.core.party import Context, Party
from polyfed.core.rng import generator
from polyfed.core.samples import Samples, Scaling
from polyfed.core.settings import Settings
from polyfed.core.task import Task

CHUNK = 128  # rows at once: a convolution's maps then stay in the cache, which is worth 1.7x
PREPARED_VALUES = 64_000_000  # test sets up to so many input values are scaled once for all models


@dataclass(frozen=True)
class Tally:
    """Counts over some samples; they add up to a measure. `kept` are predictions and targets, where something asks."""

    right: float = 0
    private: int = 0
    loss: float = 0.0
    samples: int = 0
    further: bool = False
    kept: tuple[tuple[Tensor, Tensor], ...] = ()

    def __add__(self, other: Tally) -> Tally:
        return Tally(
            self.right + other.right,
            self.private + other.private,
            self.loss + other.loss,
            self.samples + other.samples,
            self.further or other.further,
            self.kept + other.kept,
        )

    def measure(self, ctx: Context) -> Measure:
        """Return shares and means, and what is computed from all predictions together."""
        n = self.samples
        score: float | None = self.right / n
        metrics: dict[str, float | None] = {}
        if self.kept:
            predictions, targets = (torch.cat(parts) for parts in zip(*self.kept, strict=True))
            metrics = {metric.name: metric(predictions, targets) for metric in ctx.metrics}
            if not counts_right(ctx.task):
                score = score_of(ctx.task, predictions, targets)
        return Measure(score, self.loss / n, n, self.private / n if self.further else None, metrics)


def measure(method: Method, party: Party, data: Samples, ctx: Context) -> Measure:
    """Return the task's score and loss of a party's predictions on some samples, and the metrics asked for.

    Scores beyond the clients' classes belong to classes of the public data: no sample is one of them.
    """
    return total(measure_chunks(method, party, data, range(chunk_count(data)), ctx), ctx)


def total(tallies: Iterable[Tally], ctx: Context) -> Measure:
    """Add up tallies, one after the other: the sum of the losses then does not depend on who measured which."""
    whole = Tally()
    for tally in tallies:
        whole = whole + tally
    return whole.measure(ctx)


def chunk_count(data: Samples) -> int:
    """Return the number of pieces in which a data set is measured."""
    return -(-len(data) // CHUNK)


def prepared(data: Samples) -> Samples:
    """Return the same samples with the scaling applied, if they are few enough: for measuring many models."""
    if data.scaling == Scaling() and data.index is None:
        return data
    if len(data) * data.x[:1].numel() > PREPARED_VALUES:
        return data
    return replace(data, x=data.inputs(), y=data.labels(), index=None, scaling=Scaling())


def measure_chunks(method: Method, party: Party, data: Samples, chunks: range, ctx: Context) -> list[Tally]:
    """Measure some of the pieces of a data set."""
    modes = [mode(module, EVAL) for module in party.models.values()]
    with channels_last(party.models, ctx.input_shape):
        for block in modes:
            block.__enter__()
        try:
            return [_chunk(method, party, data, number, ctx) for number in chunks]
        finally:
            for block in modes:
                block.__exit__(None, None, None)


@torch.inference_mode()
def _chunk(method: Method, party: Party, data: Samples, number: int, ctx: Context) -> Tally:
    rows = torch.arange(number * CHUNK, min((number + 1) * CHUNK, len(data)))
    with ctx.own_draws(f"own/predict/{number}", party):
        scores = method.predict(party, data.inputs(rows).to(ctx.device), ctx).float()
    target = data.labels(rows).to(ctx.device)
    task = ctx.task
    further = scores.shape[1] > ctx.num_classes
    own = scores[:, : ctx.num_classes]
    keep = bool(ctx.metrics) or not counts_right(task)
    return Tally(
        task.right(scores, target) or 0,
        int(task.right(own, target) or 0) if further else 0,
        task.total_loss(scores, target),
        len(rows),
        further,
        ((task.predictions(own).cpu(), target.cpu()),) if keep else (),
    )


def counts_right(task: Task) -> bool:
    """Tell whether the score of a task is a share of right answers, which needs no collected predictions."""
    return type(task).right is not Task.right


def few(test: Samples, settings: Settings) -> Samples:
    """Return the test samples that models are measured on before the end: a fixed draw, or all."""
    wanted = settings.evaluation.samples
    if wanted is None or wanted >= len(test):
        return test
    order = torch.randperm(len(test), generator=generator(settings.seed, "evaluate-samples"))
    return test.select(order[:wanted].sort().values)
