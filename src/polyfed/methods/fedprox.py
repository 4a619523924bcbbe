"""FedProx: Federated Optimization in Heterogeneous Networks.

Li, Sahu, Zaheer, Sanjabi, Talwalkar, Smith, MLSys 2020. https://arxiv.org/abs/1812.06127

A quadratic penalty pulls the local iterate towards the received model, so that clients with skewed data drift less;
clients may do partial work and still count.

Deviations:
    Means are weighted by samples and all selected clients reply, as in FedAvg: the paper draws clients by their samples
    and takes plain means.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from polyfed.core.fields import NotNegative, Share
from polyfed.core.party import Context, Party
from polyfed.core.stage import Aux, Batch, Stage
from polyfed.methods.fedavg import FedAvg
from polyfed.ops.distance import squared_distance


@dataclass(frozen=True)
class FedProx(FedAvg):
    """FedAvg with a proximal term.

    Parameters
    ----------
    mu
        Weight of the penalty (mu/2)·||w - w0||^2; 0 gives FedAvg exactly.
    straggler_share
        Share of the participants that do only U{1..E} epochs; 0: everybody does all.
    """

    name: ClassVar[str] = "fedprox"
    paper: ClassVar[str] = "Li et al. 2020"

    mu: NotNegative = 0.1
    straggler_share: Share = 0.0

    def loss(self, nets: Mapping[str, Any], batch: Batch, aux: Aux) -> Tensor:
        """Return L_k(w) = CE + (mu/2)·||w - w0||^2, over trainable parameters."""
        loss = super().loss(nets, batch, aux)
        if self.mu == 0:
            return loss
        return loss + self.mu / 2 * squared_distance(nets["main"].parameters(), aux["anchor"])

    def stage(self, client: Party, ctx: Context) -> Stage:
        """Train against the received weights w0 as the anchor."""
        aux = {"anchor": self.anchor(client)} if self.mu else {}
        return Stage(self.loss, aux=aux, epochs=self.epochs(client, ctx))

    def anchor(self, client: Party) -> dict[str, Tensor]:
        """Return the received parameters w0; buffers are not penalised."""
        received = client.inbox.params["main"]
        return {name: received[name] for name, _ in client.main.named_parameters() if name in received}

    def epochs(self, client: Party, ctx: Context) -> int | None:
        """Return the work of this client in this round: None for all of it."""
        if self.straggler_share == 0:
            return None
        rng = ctx.rng("straggler", client)
        slow = float(torch.rand(1, generator=rng)) < self.straggler_share
        return int(torch.randint(1, ctx.training.epochs + 1, (1,), generator=rng)) if slow else None
