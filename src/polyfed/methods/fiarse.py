"""FIARSE: Model-Heterogeneous Federated Learning via Importance-Aware Submodel Extraction.

Wu, Wang, Wang, Liu, Su, Gao, NeurIPS 2024. https://arxiv.org/abs/2407.19389

The importance of a weight is its magnitude. A client of size r gets the k = floor(r·n) largest of the n weights,
whatever layer they are in, and the threshold theta, the magnitude of the smallest of them. It computes with

    m · w,    m = 1[kept and |w| >= theta],    and follows    g · m · c,    c = 1 + 2 theta |w| / (|w| + theta)^2    (1)

where g is the gradient at m · w: weights near the threshold move away from it, and a weight that falls below is off for
the rest of the round. The server averages every weight over the clients that kept it.

Deviations:
    What travels are the kept values, and which ones they are as a packed mask (or positions, where that is shorter);
    the released program moves dense tensors.
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
from math import prod
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from polyfed.core.choice import Choice, competing
from polyfed.core.errors import InputError
from polyfed.core.fields import NotNegative, SomeShare
from polyfed.core.message import Message
from polyfed.core.method import Combination, Local, Step
from polyfed.core.party import ClientInfo, Context, Party
from polyfed.core.places import Place
from polyfed.core.stage import Aux, Batch, Stage
from polyfed.core.traffic import Symbol, Told, Traffic, buffer_size, trained_size
from polyfed.core.views import shared_names
from polyfed.methods.fedavg import FedAvg
from polyfed.ops.aggregate import Part, Slot, part_way
from polyfed.ops.choice import Weights, flat, largest

KEPT = "kept"  # under this name the kept values travel: no network of a client, so nobody takes them for a whole one


def effective(w: Tensor, kept: Tensor, theta: Tensor) -> Tensor:
    """Return m·w, with the gradient g·m·c of Eq. (1)."""
    value = w.detach()
    size = value.abs()
    together = (size + theta).clamp_min(torch.finfo(w.dtype).tiny)  # a weight of 0 in a whole network: c = 1
    c = 1 + 2 * (theta / together) * (size / together)
    return (kept & (size >= theta)) * (value + c * (w - value))


def competitors(told: Told) -> list[int]:
    """Return how many weights compete, group by group."""
    weights: Weights = told.method.weights(told.blueprint.name, told.ctx)
    return [sum(prod(weights.shapes[name]) for name in names) for names in weights.groups]


def kept_weights(told: Told) -> int:
    """Return how many of them a client keeps."""
    share = told.method.sizes[told.client % len(told.method.sizes)]
    return sum(max(1, int(share * count + 1e-9)) for count in competitors(told))


def others(told: Told) -> int:
    """Return how many numbers travel whole."""
    buffers = buffer_size(told.blueprint) if told.method.buffers == "average" else 0
    return trained_size(told.blueprint) + buffers - sum(competitors(told))


LARGEST = Traffic("4*k + min(ceil(m/8), 4*k) + 4*q + 4*L", "4*k + 4*q + 8")


@dataclass(frozen=True)
class FIARSE(FedAvg):
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
    needs: ClassVar[frozenset[str]] = frozenset({"same_arch"})
    sends: ClassVar[str] = "the largest weights, and the number of samples"
    shares: ClassVar[frozenset[str]] = frozenset({"main", KEPT})
    combines: ClassVar[Mapping[str, Combination]] = {"params/main": "mean", f"params/{KEPT}": "mean"}
    traffic: ClassVar[Mapping[str, Traffic]] = {"main": LARGEST, "pretrain": LARGEST}
    symbols: ClassVar[Mapping[str, Symbol]] = {
        "m": Symbol("weights that compete", lambda told: sum(competitors(told))),
        "k": Symbol("those that the client keeps, floor(r*m), with scope=layer of each layer", kept_weights),
        "q": Symbol("other parameters and float buffers, which all travel", others),
        "L": Symbol("thresholds: 1, with scope=layer one for each layer", lambda told: len(competitors(told))),
    }

    weighting: Literal["samples", "uniform"] = "uniform"
    sizes: tuple[SomeShare, ...] = (1.0, 0.25, 0.0625, 0.015625)
    scope: Literal["model", "layer"] = "model"
    server_lr: NotNegative = 1.0

    def check(self) -> None:
        """Refuse no sizes, and views: clients hold weights of one network."""
        super().check()
        if not self.sizes:
            raise InputError(f"{self.name}: sizes is empty: name at least one share of the weights, such as 1.0.")
        if self.view != "auto":
            raise InputError(f"{self.name}: view must stay 'auto': clients hold the largest weights of one network.")

    def weights(self, architecture: str, ctx: Context) -> Weights:
        """Return the weights that compete."""
        return competing(ctx.blueprints[architecture], by_layer=self.scope == "layer")

    # --- server ---

    def kept(self, server: Party, info: ClientInfo, ctx: Context) -> tuple[Choice, Tensor]:
        """Return which weights a client gets, by their magnitudes now, and the threshold theta of each group."""
        size = self.sizes[info.id % len(self.sizes)]
        weights = self.weights(info.architecture, ctx)

        def choose() -> tuple[Choice, Tensor]:
            found = [largest(flat(server.state, names), size) for names in weights.groups]
            return Choice(weights, torch.cat([m for m, _ in found])), torch.stack([theta for _, theta in found])

        kept: tuple[Choice, Tensor] = ctx.cached((KEPT, size), choose)  # until the weights change, in `fuse`
        return kept

    def send(self, server: Party, info: ClientInfo, step: Step, ctx: Context) -> Message:
        """Send the kept values, which they are, the thresholds, and all that is never masked."""
        choice, theta = self.kept(server, info, ctx)
        whole = {name: tensor for name, tensor in server.state.items() if name not in choice.weights.names}
        values = {"values": choice.values_of(server.state)}
        return Message({"main": whole, KEPT: values}, {"mask": choice.packed(), "theta": theta})

    @torch.no_grad()
    def fuse(self, server: Party, replies: Mapping[int, Message], step: Step, ctx: Context) -> None:
        """Take w + eta_g (mean of w_k - w) for every weight that somebody kept."""
        (blueprint,) = ctx.blueprints.values()
        with part_way(server.state, shared_names(blueprint, buffers=False), self.server_lr):
            super().fuse(server, replies, step, ctx)
        self.refresh(server, ctx)
        ctx.forget(*((KEPT, size) for size in self.sizes))

    def part(self, server: Party, client: int, reply: Message, ctx: Context) -> Part:
        """Return the places of a client's kept values, beside the tensors that are never masked."""
        choice, _ = self.kept(server, ctx.infos[client], ctx)
        state, slots = choice.part(reply.params[KEPT]["values"])
        whole = reply.params.get("main", {})
        return Part({**whole, **state}, {name: Slot(name) for name in whole} | slots, self.weight(reply))

    def places(self, server: Party, info: ClientInfo, message: Message, ctx: Context) -> dict[str, Place]:
        """Return where kept values lie in the list of all weights that compete."""
        found = super().places(server, info, message, ctx)
        if KEPT in message.params:
            found[f"params/{KEPT}/values"] = self.kept(server, info, ctx)[0].place(KEPT)
        return found

    # --- client ---

    def choice(self, client: Party, ctx: Context) -> Choice:
        """Return which weights the client keeps."""
        return Choice.unpacked(self.weights(client.architecture, ctx), client.inbox.data["mask"])

    def receive(self, client: Party, step: Step, ctx: Context) -> None:
        """Put the kept values in their places; all other weights are 0."""
        super().receive(client, step, ctx)
        self.choice(client, ctx).put(client.tensors(), client.inbox.params[KEPT]["values"])

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

    def local(self, client: Party, step: Step, ctx: Context) -> Local:
        """Train, then return the kept values as they are now, those that fell below the threshold too."""
        reply = yield from super().local(client, step, ctx)
        assert reply is not None
        reply.params[KEPT] = {"values": self.choice(client, ctx).values_of(client.tensors())}
        return reply
