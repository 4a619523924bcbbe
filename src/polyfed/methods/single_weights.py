"""Clients that hold single weights of one network, in whatever layer: what FIARSE and methods like it share.

The values that a client holds travel as one list, and which ones they are as a packed mask (or positions, where that is
shorter); tensors in which nothing is chosen, those of norms, travel whole. The server averages every weight over the
clients that hold it. Which weights a client gets, and how it trains with them, is the method.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from polyfed.core.choice import Choice, competing
from polyfed.core.message import Message, State
from polyfed.core.method import Combination, Local, Step
from polyfed.core.party import ClientInfo, Context, Party
from polyfed.core.places import Place
from polyfed.core.traffic import Symbol, Told, buffer_size, trained_size
from polyfed.methods.fedavg import FedAvg
from polyfed.ops.aggregate import Part, Slot
from polyfed.ops.choice import Weights

KEPT = "kept"  # under this name the kept values travel: no network of a client, so nobody takes them for a whole one
VALUES = "4*k + 4*q"  # bytes of what a client holds
MASK = "min(ceil(m/8), 4*k)"  # bytes that say which weights these are


def competitors(told: Told) -> list[int]:
    """Return how many weights compete, group by group."""
    weights: Weights = told.method.weights(told.blueprint.name, told.ctx)
    return weights.group_lengths


def others(told: Told) -> int:
    """Return how many numbers travel whole."""
    buffers = buffer_size(told.blueprint) if told.method.buffers == "average" else 0
    return trained_size(told.blueprint) + buffers - sum(competitors(told))


@dataclass(frozen=True)
class SingleWeights(FedAvg):
    """Average single weights over the clients that hold them; `chosen` says which a client gets."""

    needs: ClassVar[frozenset[str]] = frozenset({"same_arch"})
    shares: ClassVar[frozenset[str]] = frozenset({"main", KEPT})
    combines: ClassVar[Mapping[str, Combination]] = {"params/main": "mean", f"params/{KEPT}": "mean"}
    symbols: ClassVar[Mapping[str, Symbol]] = {
        "m": Symbol("weights that compete", lambda told: sum(competitors(told))),
        "q": Symbol("other parameters and float buffers, which all travel", others),
    }

    def check(self) -> None:
        """Refuse views: clients hold weights of one network."""
        super().check()
        self.must_stay("clients hold single weights of one network", view="auto")

    def weights(self, architecture: str, ctx: Context) -> Weights:
        """Return the weights that compete."""
        return competing(ctx.blueprints[architecture], by_layer=False)

    def chosen(self, server: Party, info: ClientInfo, ctx: Context) -> tuple[Choice, State]:
        """Return which weights a client gets, and what else it is told of them, by name."""
        raise NotImplementedError

    # --- server ---

    def send(self, server: Party, info: ClientInfo, step: Step, ctx: Context) -> Message:
        """Send the kept values, which they are, and all that is never masked."""
        choice, more = self.chosen(server, info, ctx)
        whole = {name: tensor for name, tensor in server.state.items() if name not in choice.weights.names}
        values = {"values": choice.values_of(server.state)}
        return Message({"main": whole, KEPT: values}, {"mask": choice.packed(), **more})

    def part(self, server: Party, client: int, reply: Message, ctx: Context) -> Part:
        """Return the places of a client's kept values, beside the tensors that are never masked."""
        choice, _ = self.chosen(server, ctx.infos[client], ctx)
        state, slots = choice.part(reply.params[KEPT]["values"])
        whole = reply.params.get("main", {})
        return Part({**whole, **state}, {name: Slot(name) for name in whole} | slots, self.weight(reply))

    def places(self, server: Party, info: ClientInfo, message: Message, ctx: Context) -> dict[str, Place]:
        """Return where kept values lie in the list of all weights that compete."""
        found = super().places(server, info, message, ctx)
        if KEPT in message.params:
            found[f"params/{KEPT}/values"] = self.chosen(server, info, ctx)[0].place(KEPT)
        return found

    # --- client ---

    def choice(self, client: Party, ctx: Context) -> Choice:
        """Return which weights the client keeps, as it was told."""
        return Choice.unpacked(self.weights(client.architecture, ctx), client.inbox.data["mask"])

    def receive(self, client: Party, step: Step, ctx: Context) -> None:
        """Put the kept values in their places; all other weights are 0."""
        super().receive(client, step, ctx)
        self.choice(client, ctx).put(client.tensors(), client.inbox.params[KEPT]["values"])

    def local(self, client: Party, step: Step, ctx: Context) -> Local:
        """Train, then return the kept values as they are now."""
        reply = yield from super().local(client, step, ctx)
        assert reply is not None
        reply.params[KEPT] = {"values": self.choice(client, ctx).values_of(client.tensors())}
        return reply
