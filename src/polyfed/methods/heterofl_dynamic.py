"""HeteroFL's dynamic mode: every client's width is drawn anew in each round.

Diao, Ding, Tarokh, ICLR 2021. https://arxiv.org/abs/2010.01264

All clients have the widest network. In round t client k holds the slice of level r(t, k), drawn from given proportions
(`dynamic_a1-b1-c1` in the paper); only the slice travels, in both directions. The client's network has it and zeros
elsewhere, and computes exactly what the slice computes: outside, inputs, outputs, norms and so all gradients are zero.

Deviations:
    A client is measured at its level of the round. Static BatchNorm statistics are collected for each level by the
    clients that have it in this round: those of the global network are of the last round in which somebody held a.
    Clients compute with the whole network, mostly zeros: bytes are saved here, not time.
    In the exchange of statistics clients also get the level's old ones, whose place the new ones take.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from polyfed.core.errors import InputError
from polyfed.core.message import Message, State
from polyfed.core.method import Combination, Local, Step
from polyfed.core.party import Blueprint, ClientInfo, Context, Party
from polyfed.core.stage import Aux, Batch, Stage
from polyfed.core.traffic import Symbol, Traffic, buffer_size, trained_size
from polyfed.core.views import at_rate, name_at
from polyfed.core.width import Shapes, corner_of, cut, inside, put, shapes_at
from polyfed.methods.heterofl import STATISTICS, HeteroFL, exchange_of
from polyfed.models.width import at_level, rates

SLICE, STATES = "slice", "statistics"  # what travels under these names is narrower than the client's network
EXCHANGE = exchange_of("P_r", "B_r")


@dataclass(frozen=True)
class HeteroFLDynamic(HeteroFL):
    """HeteroFL with levels that are redrawn in each round.

    Parameters
    ----------
    mix, decay
        Level letters with their proportions, such as `a1-b1-c2`, and what they mean: `heterofl`, a to e = 1, 1/2, 1/4,
        1/8, 1/16; `fedfd`, a to j = 1.0, 0.9, ... 0.1. Level a, the clients' network, must be among them. `mix="a"` is
        HeteroFL exactly.
    scaler, global_rate, static_bn, mask, clip, weighting
        As in HeteroFL; the scaler divides by the rate of the drawn level.
    """

    name: ClassVar[str] = "heterofl_dynamic"
    shares: ClassVar[frozenset[str]] = frozenset({"main", SLICE, STATES})
    combines: ClassVar[Mapping[str, Combination]] = {f"params/{SLICE}": "mean", f"params/{STATES}": "mean"}
    traffic: ClassVar[Mapping[str, Traffic]] = {
        "main": EXCHANGE,
        "pretrain": EXCHANGE,
        "statistics": Traffic("[B_r > 0]*4*(P_r + B_r)", "[B_r > 0]*(4*B_r + 8)"),
    }
    symbols: ClassVar[Mapping[str, Symbol]] = {
        "P_r": Symbol("trained parameters of the client's level in the round", lambda told: trained_size(told.level)),
        "B_r": Symbol("its float buffers", lambda told: buffer_size(told.level)),
    }

    mix: str = "a1-b1-c1-d1-e1"
    decay: Literal["heterofl", "fedfd"] = "heterofl"

    def check(self) -> None:
        """Refuse mixes without the widest level, and what belongs to fixed levels."""
        super().check()
        if max(rates(self.mix, self.decay)) < 1:
            raise InputError(f"{self.name}: the mix '{self.mix}' needs level a, the clients' network: add a1.")
        self.must_stay("other values are for 'heterofl'", view="prefix", statistics="clients", measure="slice")

    def requirements(self) -> frozenset[str]:
        """As HeteroFL, with one network for all."""
        return super().requirements() | {"same_arch"}

    def level(self, client: int, ctx: Context) -> float:
        """Return a client's level r(t, k) of this round: it follows from the seed, so that nobody has to be told."""
        choices = rates(self.mix, self.decay)
        return choices[int(torch.randint(len(choices), (), generator=ctx.rng("level", client)))]

    # --- server ---

    def setup_server(self, server: Party, infos: Mapping[int, ClientInfo], ctx: Context) -> None:
        """Add the levels to the architectures that the shared tensors are laid out for."""
        (widest,) = ctx.blueprints.values()
        levels = (at_rate(widest, rate) for rate in rates(self.mix, self.decay))
        ctx.blueprints.update({level.name: level for level in levels})
        super().setup_server(server, infos, ctx)

    def level_of(self, info: ClientInfo, ctx: Context) -> Blueprint:
        """Return the level that a client holds in this round."""
        return ctx.blueprints[name_at(info.architecture, self.level(info.id, ctx))]

    def send(self, server: Party, info: ClientInfo, step: Step, ctx: Context) -> Message:
        """Send the slice of the client's level under a name of its own; for statistics, also their places."""
        message = super().send(server, info, step, ctx).renamed("main", SLICE)
        if message.params and step.name == STATISTICS.name:
            message.params[STATES] = self.own_statistics(server, self.level_of(info, ctx))
        return message

    def fuse(self, server: Party, replies: Mapping[int, Message], step: Step, ctx: Context) -> None:
        """As HeteroFL, with the slices of this round's levels."""
        name = STATES if step.name == STATISTICS.name else SLICE
        super().fuse(server, {client: r.renamed(name, "main") for client, r in replies.items()}, step, ctx)

    # --- client ---

    def receive(self, client: Party, step: Step, ctx: Context) -> None:
        """Put the slice into the network, and zeros elsewhere."""
        put(client.tensors(), client.inbox.params.get(SLICE, {}))

    def shapes(self, client: Party, ctx: Context) -> Shapes:
        """Return the shapes of the client's level of this round."""
        widest = ctx.blueprints[client.architecture]
        return shapes_at(widest.width_groups, widest.shapes, self.level(client.id, ctx))

    def stage(self, client: Party, ctx: Context) -> Stage:
        """Tell the loss the level, for the scalers."""
        stage = super().stage(client, ctx)
        aux = {**stage.aux, "level": torch.tensor(self.level(client.id, ctx))}
        if not ctx.blueprints[client.architecture].frozen:
            return replace(stage, aux=aux)
        # Frozen layers are never zero outside, so what follows them is held there.
        aux["held"] = corner_of(client.tensors(), self.shapes(client, ctx))
        return replace(stage, aux=aux, gradients=inside)

    def loss(self, nets: Mapping[str, Any], batch: Batch, aux: Aux) -> Tensor:
        """Return HeteroFL's loss, with scalers that know the level."""
        with at_level(nets["main"].module, aux["level"]):
            return super().loss(nets, batch, aux)

    def shared(self, client: Party) -> State:
        """Return those of the client's tensors that it was sent a slice of."""
        own = client.tensors()
        return {name: own[name] for name in client.inbox.params[SLICE]}

    def local(self, client: Party, step: Step, ctx: Context) -> Local:
        """Do as in HeteroFL, and reply with the slice."""
        reply = yield from super().local(client, step, ctx)
        if reply is not None and reply.params:
            part = cut(reply.params.pop("main"), self.shapes(client, ctx))
            reply.params[STATES if step.name == STATISTICS.name else SLICE] = part
            if step.name == STATISTICS.name:
                put(client.tensors(), part)
        return reply
