"""FIARSE: Model-Heterogeneous Federated Learning via Importance-Aware Submodel Extraction.

Wu, Wang, Wang, Liu, Su, Gao, NeurIPS 2024. https://arxiv.org/abs/2407.19389

The importance of a weight is its magnitude. A client of size r gets the k = floor(r·n) largest of the n weights,
whatever layer they are in, and the threshold theta, the magnitude of the smallest of them. It computes with

    m · w,    m = 1[kept and |w| >= theta],    and follows    g · m · c,    c = 1 + 2 theta |w| / (|w| + theta)^2    (1)

where g is the gradient at m · w: weights near the threshold move away from it, and a weight that falls below is off for
the rest of the round. The server averages every weight over the clients that kept it.

Deviations:
    Only kept values travel, and which ones they are (`single_weights.py`); the released program moves dense tensors.
    A whole network (r = 1) has theta = 0, hence c = 1: then this is FedAvg. The released program takes the smallest
    magnitude, which switches weights off in a whole network too.
    The mean counts the clients that kept a weight; the released program counts differences that are not zero.
    Of equal magnitudes at the threshold the first ones are kept; the released program keeps all.
    `scope="layer"` has one threshold for every layer; the released program for every residual stage.
    BatchNorm keeps running statistics, as elsewhere; they travel whole, as do all parameters of norm layers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from polyfed.core.choice import Choice, competing
from polyfed.core.errors import InputError
from polyfed.core.fields import NotNegative, SomeShare
from polyfed.core.message import Message, State
from polyfed.core.method import Step
from polyfed.core.party import ClientInfo, Context, Party
from polyfed.core.stage import Aux, Batch, Stage
from polyfed.core.traffic import Symbol, Traffic
from polyfed.core.views import shared_names
from polyfed.methods.single_weights import KEPT, MASK, VALUES, SingleWeights, competitors
from polyfed.ops.aggregate import part_way
from polyfed.ops.choice import Weights, flat, largest, share_of


def effective(w: Tensor, kept: Tensor, theta: Tensor) -> Tensor:
    """Return m·w, with the gradient g·m·c of Eq. (1)."""
    value = w.detach()
    size = value.abs()
    together = (size + theta).clamp_min(torch.finfo(w.dtype).tiny)  # a weight of 0 in a whole network: c = 1
    c = 1 + 2 * (theta / together) * (size / together)
    return (kept & (size >= theta)) * (value + c * (w - value))


LARGEST = Traffic(f"{VALUES} + {MASK} + 4*L", f"{VALUES} + 8")


@dataclass(frozen=True)
class FIARSE(SingleWeights):
    """Average the largest weights, as many as each client can hold.

    Parameters
    ----------
    sizes
        r, the share of weights that clients keep, dealt to them in turn: (1.0, 0.25) gives client 0 all, client 1 a
        quarter, client 2 all, ... `sizes=(1.0,)` is FedAvg with uniform weights exactly.
    scope
        The largest weights of the whole `model`, or the same share of each `layer`.
    server_lr
        Step eta_g of the server towards the mean; 1 takes the mean.
    weighting, buffers, pretrain_epochs
        As in FedAvg; the mean is uniform here. `view` is not used.
    """

    name: ClassVar[str] = "fiarse"
    paper: ClassVar[str] = "Wu et al. 2024"
    family: ClassVar[str] = "width"
    sends: ClassVar[str] = "the largest weights, and the number of samples"
    traffic: ClassVar[Mapping[str, Traffic]] = {"main": LARGEST, "pretrain": LARGEST}
    symbols: ClassVar[Mapping[str, Symbol]] = {
        **SingleWeights.symbols,
        "k": Symbol(
            "those that the client keeps, floor(r*m), with scope=layer of each layer",
            lambda told: sum(share_of(number, told.method.size(told.info)) for number in competitors(told)),
        ),
        "L": Symbol("thresholds: 1, with scope=layer one for each layer", lambda told: len(competitors(told))),
    }

    weighting: Literal["samples", "uniform"] = "uniform"
    sizes: tuple[SomeShare, ...] = (1.0, 0.25, 0.0625, 0.015625)
    scope: Literal["model", "layer"] = "model"
    server_lr: NotNegative = 1.0

    def check(self) -> None:
        """Refuse no sizes."""
        super().check()
        if not self.sizes:
            raise InputError(f"{self.name}: sizes is empty: name at least one share of the weights, such as 1.0.")

    def weights(self, architecture: str, ctx: Context) -> Weights:
        """Return the weights that compete."""
        return competing(ctx.blueprints[architecture], by_layer=self.scope == "layer")

    def size(self, info: ClientInfo) -> float:
        """Return a client's size r."""
        return self.sizes[info.id % len(self.sizes)]

    # --- server ---

    def kept(self, server: Party, info: ClientInfo, ctx: Context) -> tuple[Choice, Tensor]:
        """Return which weights a client gets, by their magnitudes now, and the threshold theta of each group."""
        size, weights = self.size(info), self.weights(info.architecture, ctx)

        def choose() -> tuple[Choice, Tensor]:
            found = [largest(flat(server.state, names), size) for names in weights.groups]
            return Choice(weights, torch.cat([m for m, _ in found])), torch.stack([theta for _, theta in found])

        kept: tuple[Choice, Tensor] = ctx.cached((KEPT, size), choose)  # until the weights change, in `fuse`
        return kept

    def chosen(self, server: Party, info: ClientInfo, ctx: Context) -> tuple[Choice, State]:
        """Return which weights a client gets, and the thresholds, which it is told."""
        choice, theta = self.kept(server, info, ctx)
        return choice, {"theta": theta}

    @torch.no_grad()
    def fuse(self, server: Party, replies: Mapping[int, Message], step: Step, ctx: Context) -> None:
        """Take w + eta_g (mean of w_k - w) for every weight that somebody kept."""
        (blueprint,) = ctx.blueprints.values()
        with part_way(server.state, shared_names(blueprint, buffers=False), self.server_lr):
            super().fuse(server, replies, step, ctx)
        self.refresh(server, ctx)
        ctx.forget(*((KEPT, size) for size in self.sizes))

    # --- client ---

    def stage(self, client: Party, ctx: Context) -> Stage:
        """Train the kept weights, Eq. (1); a whole network (theta = 0, c = 1) just trains."""
        choice, theta = self.choice(client, ctx), client.inbox.data["theta"]
        if bool(choice.chosen.all()):
            return super().stage(client, ctx)
        thresholds = {n: theta[place] for place, names in enumerate(choice.weights.groups) for n in names}
        return Stage(self.masked_loss, aux={"kept": choice.masks(), "theta": thresholds})

    def masked_loss(self, nets: Mapping[str, Any], batch: Batch, aux: Aux) -> Tensor:
        """Return the loss of the network with masked weights."""
        own = nets["main"].parameters()
        masked = {name: effective(own[name], kept, aux["theta"][name]) for name, kept in aux["kept"].items()}
        return self.loss({"main": nets["main"].replaced(masked)}, batch, aux)
