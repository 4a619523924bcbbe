"""Task vectors, what training added to a network's tensors: put together by weights, which validation data may choose.

A network x and its task vectors tau_j make x + sum_j lambda_j tau_j.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from polyfed.core.message import State
from polyfed.core.party import Context, cloned
from polyfed.core.passes import count_right
from polyfed.core.samples import Samples
from polyfed.core.settings import Training
from polyfed.core.stage import Aux, Batch, Stage
from polyfed.core.uploads import ready_network

LEARNING = Training(epochs=5, batch_size=64, optimizer="adamw", lr=0.05)  # of learned weights


def merged(start: State, tasks: Sequence[State], row: Sequence[float]) -> State:
    """Return x + sum_j lambda_j tau_j."""
    state = cloned(start)
    for task, weight in zip(tasks, row, strict=True):
        for name, tensor in state.items():
            tensor.add_(task[name], alpha=weight)
    for name, tensor in state.items():
        if name.endswith("running_var"):
            tensor.clamp_min_(0)  # weights may be of any sign
    return state


def row_of(lam: Sequence[float] | None, place: int, present: Sequence[bool]) -> list[float]:
    """Return the given weights of the tasks that are present; those of the others go to them in proportion.

    `lam` are M weights for all students, or M² row by row, of which the student has the row `place` (None: 1/M each).
    """
    tasks = len(present)
    lam = lam or (1 / tasks,) * tasks
    mine = lam if len(lam) == tasks else lam[place * tasks : (place + 1) * tasks]
    row = [weight for weight, here in zip(mine, present, strict=True) if here]
    if len(row) == tasks:
        return row
    total = sum(row)
    return [weight * sum(mine) / total if total else 0.0 for weight in row]


def best_row(
    name: str, start: State, tasks: Sequence[State], data: Samples, validation: Samples, ctx: Context, draws: int
) -> list[float]:
    """Return the best of drawn weights on validation data; the first of equals, which is the uniform one.

    `name` is the architecture; BatchNorm's statistics are collected on `data` where they are not part of the state.
    """
    rows = candidate_rows(len(tasks), draws, ctx.rng(f"candidates/{name}"))
    networks = (ready_network(name, merged(start, tasks, row), data, ctx) for row in rows)
    scores = [count_right(network, validation) for network in networks]
    return rows[scores.index(max(scores))]


def candidate_rows(tasks: int, draws: int, rng: torch.Generator) -> list[list[float]]:
    """Return the uniform weights, and draws of Beta(1, 100)^e for e = 1, 5, 10, ascending and normalized."""
    rows = [[1 / tasks] * tasks]
    for power in (1, 5, 10):
        for _ in range(draws):
            uniform = torch.rand(tasks, generator=rng, dtype=torch.float64)
            beta = -torch.expm1(torch.log1p(-uniform) / 100)  # the inverse of 1 - (1 - b)^100
            weight = (power * (beta.log() - beta.log().max())).exp().sort().values
            rows.append((weight / math.fsum(weight.tolist())).tolist())
    return rows


def learned_row(
    name: str, start: State, tasks: Sequence[State], data: Samples, validation: Samples, ctx: Context
) -> list[float]:
    """Return softmax weights that were trained, with one scale of the logits, on validation data."""
    weights = Weights(len(tasks)).to(ctx.device)
    stage = Stage(
        merge_loss,
        {"weights": None},
        data=validation,
        aux={"start": start, "tasks": {key: torch.stack([task[key] for task in tasks]) for key in start}},
        training=replace(LEARNING, batch_size=min(LEARNING.batch_size, len(validation))),
    )
    ctx.run(stage, {"main": ready_network(name, start, data, ctx), "weights": weights}, f"merge/{name}")
    row: list[float] = weights.logits.detach().softmax(0).tolist()
    return row


class Weights(nn.Module):
    """Weights of the tasks before their softmax, and a scale of the merged network's logits."""

    def __init__(self, tasks: int) -> None:
        super().__init__()
        self.logits = nn.Parameter(torch.zeros(tasks))
        self.scale = nn.Parameter(torch.ones(()))


def merge_loss(nets: Mapping[str, Any], batch: Batch, aux: Aux) -> Tensor:
    """Return the cross-entropy of the merged network."""
    weights = nets["weights"].parameters()
    row = weights["logits"].softmax(0)
    state = {name: tensor + torch.tensordot(row, aux["tasks"][name], 1) for name, tensor in aux["start"].items()}
    return F.cross_entropy(weights["scale"] * nets["main"].replaced(state).eval()(batch.x), batch.y)
