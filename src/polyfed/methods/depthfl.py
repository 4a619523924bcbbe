"""DepthFL: Depthwise Federated Learning for Heterogeneous Clients.

Kim, Yu, Kim, Moon, ICLR 2023. https://openreview.net/forum?id=pf8RIZTMU58

One deep network has a classifier (exit) behind every stage; a client holds its first m stages and exits, as many as it
can afford, and every tensor is averaged over its holders. Deep stages see the data of few clients, so the exits of a
client teach each other, in round t = 0, 1, ...:

    L = sum_i [ CE(z_i, y) + lambda(t)/(m - 1) · sum_{j != i} KL(softmax z_j || softmax z_i) ],   i, j <= m      (1)
    lambda(t) = exp(-5 (1 - min(t, 300)/300)^2)                                                                 (2)

with the teacher z_j held fixed. FedDyn is the optimizer (`dynamic.py`): clients and server remember where they went.

Give clients their depths with the model: `resnet18:w16,exits` is the whole network, `resnet18:w16,exits=2` has two
stages. A client predicts with the mean of the logits of its exits.

Deviations:
    An exit is a mean over the map and a linear layer; the paper's have convolutions and group norm before that.
    The released program adds 1e-7 to the teacher's probabilities and counts rounds from 1 in (2).
    FedDyn counts all clients for stages that only some of them hold, as in that program.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from polyfed.core.fields import Count, Positive
from polyfed.core.party import Context, Party
from polyfed.core.stage import Aux, Batch, Stage
from polyfed.methods.dynamic import DynamicRegularization
from polyfed.ops.distance import kl_divergence


@dataclass(frozen=True)
class DepthFL(DynamicRegularization):
    """Average nested depths of one network whose exits teach each other.

    Parameters
    ----------
    kd
        Mutual distillation of the exits, Eq. (1); False: cross-entropy of every exit alone.
    ramp, temperature
        Rounds until lambda(t) is 1 (0: from the start), and the temperature of the distillation, whose terms are
        multiplied by its square.
    feddyn, alpha
        FedDyn, and its strength alpha; False averages.
    extended
        False: only the last exit of a client is trained and asked. With `feddyn=False` that is layer-wise FedAvg with
        uniform weights exactly.
    weighting, view, buffers, pretrain_epochs
        As in FedAvg; the mean is uniform here. Pre-training is without FedDyn.
    """

    name: ClassVar[str] = "depthfl"
    paper: ClassVar[str] = "Kim et al. 2023"
    family: ClassVar[str] = "depth"
    needs: ClassVar[frozenset[str]] = frozenset({"exits", "family", "classes"})
    sends: ClassVar[str] = "the weights of the client's stages and exits, and the number of samples"

    weighting: Literal["samples", "uniform"] = "uniform"
    kd: bool = True
    ramp: Count = 300
    temperature: Positive = 1.0
    extended: bool = True

    # --- client ---

    def strength(self, ctx: Context) -> float:
        """Return lambda(t), Eq. (2)."""
        done = min(max(ctx.round - 1, 0), self.ramp) / self.ramp if self.ramp else 1.0
        return math.exp(-5.0 * (1.0 - done) ** 2)

    def loss(self, nets: Mapping[str, Any], batch: Batch, aux: Aux) -> Tensor:
        """Return L, Eq. (1), with the terms of FedDyn."""
        loss = self.exit_loss(nets, batch, aux) if self.extended else super().loss(nets, batch, aux)
        return loss + self.pull(nets, aux)

    def exit_loss(self, nets: Mapping[str, Any], batch: Batch, aux: Aux) -> Tensor:
        """Return the cross-entropy of all exits, with what each learns from the others."""
        exits: list[Tensor] = nets["main"].call("exits", batch.x)
        loss = torch.stack([F.cross_entropy(z, batch.y) for z in exits]).sum()
        if not self.kd or len(exits) == 1:
            return loss
        pairs = [(z, other.detach()) for z in exits for other in exits if other is not z]
        taught = torch.stack([kl_divergence(z, other, self.temperature) for z, other in pairs]).sum()
        weight: Tensor = aux["strength"] * self.temperature**2 / (len(exits) - 1)
        return loss + weight * taught

    def stage(self, client: Party, ctx: Context) -> Stage:
        """Train with the strength of this round, towards FedDyn's anchor."""
        aux: dict[str, Any] = {"strength": torch.tensor(self.strength(ctx))} if self.kd else {}
        return Stage(self.loss, aux=aux | self.anchor(client, ctx))

    # --- either ---

    def predict(self, party: Party, x: Tensor, ctx: Context) -> Tensor:
        """Return the mean of the logits of all exits."""
        if not self.extended:
            return super().predict(party, x, ctx)
        model: Any = party.main
        return torch.stack(model.exits(x)).mean(0)
