"""FedAvg: Communication-Efficient Learning of Deep Networks from Decentralized Data.

McMahan, Moore, Ramage, Hampson, Agüera y Arcas, AISTATS 2017. https://arxiv.org/abs/1602.05629

Each participant starts from the server's tensors, trains on its own data and returns them; the server takes the
weighted mean. With a view that is not `full` the same code averages layer by layer, by architecture, or by slices.

Deviations:
    Integer buffers (BatchNorm's batch counter) are neither sent nor averaged.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

from polyfed.core.fields import Count
from polyfed.core.message import Message, State
from polyfed.core.method import Combination, Local, Method, Plan, Step, unchanged
from polyfed.core.party import Blueprint, ClientInfo, Context, Party, load_state
from polyfed.core.stage import Stage
from polyfed.core.traffic import Traffic
from polyfed.core.views import SameArch, Shared, View, check_view, largest_first, resolve_view
from polyfed.ops.aggregate import IndexMap, Part, extract, scatter_mean

PRETRAIN = Step("pretrain", who="all")
WEIGHTS = "4*(P + [buffers == 'average']*B)"  # bytes of what is averaged
EXCHANGE = Traffic(WEIGHTS, f"{WEIGHTS} + 8")
FUSING = ("fuse", "part", "weight", "refine")  # what the mean of an entry depends on


@dataclass(frozen=True)
class FedAvg(Method):
    """Average what clients have in common.

    Parameters
    ----------
    view
        Which tensors are common: `full`, `owned` (layer-wise), `same_arch`, `prefix` (width slices), `shared:NAMES`
        (only those layers), or `auto`: `full` for one architecture, `owned` for depths of one family, otherwise, also
        for widths of one network, `same_arch`.
    weighting
        `samples`: by the number of training samples n_k; `uniform`: equal.
    buffers
        BatchNorm's running statistics: `average` them like parameters, or `local` (each client keeps its own).
    pretrain_epochs
        Before the rounds all clients train so long from the common start, and a first average is taken; 0: no such
        step.
    """

    name: ClassVar[str] = "fedavg"
    paper: ClassVar[str] = "McMahan et al. 2017"
    family: ClassVar[str] = "weights"
    sends: ClassVar[str] = "model weights and the number of samples"
    shares: ClassVar[frozenset[str]] = frozenset({"main"})
    combines: ClassVar[Mapping[str, Combination]] = {"params/main": "mean"}
    traffic: ClassVar[Mapping[str, Traffic]] = {"main": EXCHANGE, "pretrain": EXCHANGE}

    view: str = "auto"
    weighting: Literal["samples", "uniform"] = "samples"
    buffers: Literal["average", "local"] = "average"
    pretrain_epochs: Count = 0

    def check(self) -> None:
        """Refuse an unknown view."""
        check_view(self.view)

    def misfit(
        self, infos: Sequence[ClientInfo], blueprints: Mapping[str, Blueprint], input_shape: tuple[int, ...]
    ) -> str | None:
        """Return what to do when no tensor belongs to two clients: everybody would get back what it sent."""
        if self.wanted_view() != "auto" or len(blueprints) < 2:  # one that was asked for by name is taken at its word
            return None
        view = resolve_view("auto", blueprints, self.buffers == "average")
        holders: Counter[str] = Counter()
        for architecture, clients in Counter(info.architecture for info in infos).items():
            for slot in view.slots(blueprints[architecture], blueprints).values():
                holders[slot.key] += clients
        if any(clients > 1 for clients in holders.values()):
            return None
        names = ", ".join([*list(blueprints)[:5], *(["..."] if len(blueprints) > 5 else [])])
        return (
            f"weights that two clients have in common, but each of the {len(infos)} clients has an architecture of its "
            f"own ({names}), so nothing would be averaged: give clients common architectures, or use a "
            "method that exchanges something else"
        )

    def beyond_training(self) -> str | None:
        """Only weights leave (and the number of samples, which is taken as known)."""
        return None

    def own_epochs(self, epochs: int, rounds: int) -> int:
        """Count those before the rounds, too."""
        return self.pretrain_epochs + super().own_epochs(epochs, rounds)

    def plan(self) -> Plan:
        """One exchange a round, and one before the rounds if there is pre-training."""
        return Plan(before=(PRETRAIN,) if self.pretrain_epochs else ())

    def wanted_view(self) -> str:
        """Return the name of the view; methods whose other options say what is common do it here."""
        return self.view

    def policy(self, ctx: Context) -> View:
        """Return the view policy for the architectures of this federation."""
        wanted = self.wanted_view()
        policy: View = ctx.cached("view", lambda: resolve_view(wanted, ctx.blueprints, self.buffers == "average"))
        return policy

    def slots_of(self, blueprint: Blueprint, ctx: Context) -> IndexMap:
        """Return the place of each tensor of an architecture; methods whose views move look them up in each round."""
        slots: IndexMap = ctx.cached(
            ("slots", blueprint.name), lambda: self.policy(ctx).slots(blueprint, ctx.blueprints)
        )
        return slots

    def parameter_slots(self, info: ClientInfo, ctx: Context) -> IndexMap:
        """Return the places of what a client trains: buffers and frozen parameters have no gradient."""
        blueprint = ctx.blueprints[info.architecture]
        still = blueprint.buffers | blueprint.frozen
        return {name: slot for name, slot in self.slots_of(blueprint, ctx).items() if name not in still}

    def held(self, server: Party, blueprint: Blueprint, ctx: Context) -> State:
        """Return an architecture's part of the shared tensors, as a view: what is written there is shared."""
        slots = self.slots_of(blueprint, ctx).items()
        return extract(server.state, {name: slot for name, slot in slots if slot.key in server.state})

    def setup_server(self, server: Party, infos: Mapping[int, ClientInfo], ctx: Context) -> None:
        """Lay out the shared tensors; build the largest architecture to measure the global model."""
        server.state = self.policy(ctx).layout(ctx.blueprints)
        largest = self.global_architecture(ctx)
        if largest is not None and largest.build is not None:
            server.models["main"] = largest.build().to(ctx.device)
            self.refresh(server, ctx)

    def global_architecture(self, ctx: Context) -> Blueprint | None:
        """Return the architecture of the global model, or None where the shared tensors do not make one."""
        several = isinstance(self.policy(ctx), SameArch) and len(ctx.blueprints) > 1
        largest = largest_first(ctx.blueprints)[0]
        if several or isinstance(self.policy(ctx), Shared):
            return None
        return None if self.buffers == "local" and "batchnorm" in largest.properties else largest

    def refresh(self, server: Party, ctx: Context) -> None:
        """Load the shared tensors into the global model."""
        largest = self.global_architecture(ctx)
        if largest is not None and "main" in server.models:
            load_state(server.main, extract(server.state, self.slots_of(largest, ctx)))

    def slots(self, server: Party, info: ClientInfo, ctx: Context) -> IndexMap:
        """Return the client's view: it depends on its architecture only."""
        return self.slots_of(ctx.blueprints[info.architecture], ctx)

    def send(self, server: Party, info: ClientInfo, step: Step, ctx: Context) -> Message:
        """Send the client its part of the shared tensors."""
        return Message(params={"main": extract(server.state, self.slots(server, info, ctx))})

    def stage(self, client: Party, ctx: Context) -> Stage:
        """Return the local training; methods built on FedAvg change it here."""
        return Stage(self.loss)

    def local(self, client: Party, step: Step, ctx: Context) -> Local:
        """Train, then return the tensors that were received."""
        stage = self.stage(client, ctx)
        yield replace(stage, epochs=self.pretrain_epochs) if step.name == PRETRAIN.name else stage
        return self.reply(client)

    def reply(self, client: Party) -> Message:
        """Return what a client tells after its training: the tensors that it shares, and how many samples it has."""
        return Message(params={"main": self.shared(client)}, meta={"samples": len(client.train)})

    def shared(self, client: Party) -> State:
        """Return those of the client's tensors that it shares: the ones it was sent."""
        own = client.tensors()
        return {name: own[name] for name in client.inbox.params.get("main", {})}

    def weight(self, reply: Message) -> float:
        """Return a client's weight a_k in the mean."""
        return float(reply.meta["samples"]) if self.weighting == "samples" else 1.0

    def fuse(self, server: Party, replies: Mapping[int, Message], step: Step, ctx: Context) -> None:
        """Take the weighted mean of every entry over the clients that hold it."""
        scatter_mean(server.state, (self.part(server, client, reply, ctx) for client, reply in replies.items()))
        self.refresh(server, ctx)
        self.refine(server, replies, ctx)

    def fused_into(self, server: Party, info: ClientInfo, step: Step, ctx: Context) -> dict[str, str] | None:
        """Return the client's view, in methods that leave fusing as it is here."""
        return keyed(self.slots(server, info, ctx)) if unchanged(self, FedAvg, *FUSING) else None

    def refine(self, server: Party, replies: Mapping[int, Message], ctx: Context) -> None:
        """Train the average further at the server; methods that do so (and `refresh` after it) do it here."""

    def part(self, server: Party, client: int, reply: Message, ctx: Context) -> Part:
        """Return one client's contribution to the mean."""
        return Part(reply.params.get("main", {}), self.slots(server, ctx.infos[client], ctx), self.weight(reply))


def keyed(slots: IndexMap) -> dict[str, str]:
    """Return the key of the server's state that each tensor of a reply belongs to, by its name on the wire."""
    return {f"params/main/{name}": slot.key for name, slot in slots.items()}
