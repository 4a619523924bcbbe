"""FedRolex: Model-Heterogeneous Federated Learning with Rolling Sub-Model Extraction.

Alam, Liu, Yan, Zhang, NeurIPS 2022. https://arxiv.org/abs/2212.01548

HeteroFL, but the window of channels that a client holds moves on each round, so that every channel of the global
network is trained equally often:

    i-th channel of a client in round t  =  (t · stride + i) mod K,    i < ceil(r·K)          (1)

for every layer of K channels, the same for all clients, which keeps residual additions aligned.

Deviations:
    The released program rolls the other way (`direction=-1`); all channels are covered alike.
    It weighs biases and the classifier by how often they were updated; here every entry has the plain mean over its
    holders, as everywhere else.
    `extraction="random"` draws for all clients of a width together, not for each client.
    The global network is as wide as the widest client; the paper's may be wider than every client.
    Rounds are counted from 0, as in the paper: the first round is HeteroFL's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from polyfed.core.errors import InputError
from polyfed.core.fields import AtLeastOne
from polyfed.core.party import Blueprint, Context
from polyfed.core.views import Window
from polyfed.core.width import Channels, rolled
from polyfed.methods.heterofl import HeteroFL
from polyfed.ops.aggregate import IndexMap


@dataclass(frozen=True)
class FedRolex(HeteroFL):
    """HeteroFL with windows that roll.

    Parameters
    ----------
    extraction
        `rolling`, Eq. (1); `random`: new channels for each layer width in each round, the same for all clients of a
        width; `static`: HeteroFL exactly.
    stride, direction
        Channels that the window moves in a round, and which way: 1 or -1.
    scaler, global_rate, static_bn, statistics, mask, clip, measure, weighting
        As in HeteroFL. `view` is not used.
    """

    name: ClassVar[str] = "fedrolex"
    paper: ClassVar[str] = "Alam et al. 2022"

    extraction: Literal["rolling", "random", "static"] = "rolling"
    stride: AtLeastOne = 1
    direction: Literal[1, -1] = 1

    def check(self) -> None:
        """Refuse a view other than windows."""
        super().check()
        if self.view != "prefix":
            raise InputError(f"{self.name}: view must stay 'prefix': clients hold windows of channels.")

    def slots_of(self, blueprint: Blueprint, ctx: Context) -> IndexMap:
        """Return the window of an architecture in this round."""
        if self.extraction == "static":
            return super().slots_of(blueprint, ctx)
        view = Window(self.channels(blueprint, ctx), self.buffers == "average")
        slots: IndexMap = ctx.this_round(("window", blueprint.name), lambda: view.slots(blueprint, ctx.blueprints))
        return slots

    def channels(self, blueprint: Blueprint, ctx: Context) -> Channels:
        """Return which channels of a layer an architecture holds in this round, Eq. (1)."""
        if self.extraction == "rolling":
            return rolled(max(ctx.round - 1, 0) * self.stride * self.direction)

        def drawn(group: str, full: int, count: int) -> Tensor:
            order = torch.randperm(full, generator=ctx.rng(f"window/{blueprint.name}/{full}"))
            return order[:count].sort().values

        return drawn
