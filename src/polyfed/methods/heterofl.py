"""HeteroFL: Computation and Communication Efficient Federated Learning for Heterogeneous Clients.

Diao, Ding, Tarokh, ICLR 2021. https://arxiv.org/abs/2010.01264

A client of width rate r trains the first ceil(r·c) channels of every hidden layer; the server averages every entry
over the clients that hold it. Three companions keep mixed widths compatible: a scaler, static BatchNorm, and a masked
loss. Give clients their rates with the model: `cnn:16-32-64@1,cnn:16-32-64@0.5`.

Deviations:
    Levels belong to the clients' models and are fixed; the paper's `dynamic` mode, which redraws them each round, is a
    method of its own, `heterofl_dynamic`.
    Static BatchNorm statistics are collected for each width on its own, by all clients of that width, in rounds whose
    models are measured; the clients fetch the fused weights for it, and both directions are counted. They are those of
    the network as it predicts: without scaler and dropout. With `statistics="public"` the server collects them itself.
    A single sample counts twice in a batch of statistics, since it has no variance by itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from polyfed.core.errors import InputError
from polyfed.core.fields import Positive, SomeShare
from polyfed.core.message import Message, State
from polyfed.core.method import Local, Plan, Step, unchanged
from polyfed.core.party import Blueprint, ClientInfo, Context, Party, is_running_statistic, load_state
from polyfed.core.places import Place
from polyfed.core.stage import Aux, Batch, Stage, batch_sizes
from polyfed.core.statistics import collect_statistics
from polyfed.core.task import CLASSIFICATION
from polyfed.core.traffic import Traffic
from polyfed.core.views import largest_first
from polyfed.methods.fedavg import FUSING, FedAvg, keyed
from polyfed.models.width import activate_scalers
from polyfed.ops.aggregate import Index, IndexMap, Part, Slot, extract, scatter_mean

STATISTICS = Step("statistics", who="all", when="evaluation")


def exchange_of(parameters: str, buffers: str) -> Traffic:
    """Return the bytes of a slice that has so many parameters and float buffers, and of it with a number of samples."""
    slice_bytes = f"4*({parameters} + [not static_bn and buffers == 'average']*{buffers})"
    return Traffic(slice_bytes, f"{slice_bytes} + 8")


SLICE = exchange_of("P", "B")
SLICED = SLICE.down


@dataclass(frozen=True)
class HeteroFL(FedAvg):
    """Average nested width slices of one network.

    Parameters
    ----------
    scaler, global_rate
        Divide activations by r / global_rate in training, before the norm (it matters where no BatchNorm follows);
        global_rate is the width rate of the widest clients.
    static_bn, statistics
        BatchNorm without running statistics in training; they are collected before models are measured, by the
        `clients` on their data or by the server on the `public` data (no labels needed, nothing more to send).
        `static_bn=False` averages running statistics entry by entry, also over unlike widths.
    mask
        Logits of classes that a client lacks are set to 0 in its loss, and its rows of the classifier for them do not
        enter the mean. False, with all clients at rate 1, `clip=None` and `static_bn=False`, gives FedAvg with uniform
        weights exactly.
    clip
        Limit of the gradient norm (None: the run's own setting).
    measure
        The model of a client that is measured: its `slice` of the fused network, or its `own` as last trained, before
        the next download (with static BatchNorm it keeps statistics of its own data, and needs statistics="public").
    """

    name: ClassVar[str] = "heterofl"
    paper: ClassVar[str] = "Diao et al. 2021"
    family: ClassVar[str] = "width"
    sends: ClassVar[str] = (
        "the weights of the client's width slice, BatchNorm's statistics, and the number of samples of each class"
    )
    traffic: ClassVar[Mapping[str, Traffic]] = {
        "main": SLICE,
        "pretrain": SLICE,
        "statistics": Traffic("[B > 0]*4*P", "[B > 0]*(4*B + 8)"),
    }

    view: str = "prefix"
    weighting: Literal["samples", "uniform"] = "uniform"
    scaler: bool = True
    global_rate: SomeShare = 1.0
    static_bn: bool = True
    statistics: Literal["clients", "public"] = "clients"
    mask: bool = True
    clip: Positive | None = 1.0
    measure: Literal["slice", "own"] = "slice"

    def check(self) -> None:
        """Refuse a collection of statistics that would overwrite the models to be measured."""
        super().check()
        if self.measure == "own" and self.static_bn and self.statistics == "clients":
            raise InputError(
                f"{self.name}: measure='own' with static BatchNorm needs statistics='public': to collect statistics, "
                "clients would replace their own models."
            )

    def requirements(self) -> frozenset[str]:
        """Widths of one network; masking needs the label sets, statistics at the server public data."""
        needs = {"width", "family"} | ({"label_counts"} if self.mask else set())
        return frozenset(needs | {"public", "builds"} if self.statistics_at_server else needs)

    @property
    def statistics_at_server(self) -> bool:
        """Whether the server collects BatchNorm statistics."""
        return self.static_bn and self.statistics == "public"

    def plan(self) -> Plan:
        """Add the collection of statistics to rounds whose models are measured."""
        plan = super().plan()
        if not self.static_bn or self.statistics_at_server:
            return plan
        return replace(plan, before=(*plan.before, STATISTICS) if plan.before else (), round=(*plan.round, STATISTICS))

    def global_architecture(self, ctx: Context) -> Blueprint | None:
        """Return the widest network: it can be measured, since its statistics are collected."""
        return largest_first(ctx.blueprints)[0] if self.static_bn else super().global_architecture(ctx)

    # --- server ---

    def setup_server(self, server: Party, infos: Mapping[int, ClientInfo], ctx: Context) -> None:
        """Lay out the slices; statistics of every width are kept apart, since their inputs differ."""
        super().setup_server(server, infos, ctx)
        if not self.static_bn:
            return
        for blueprint in ctx.blueprints.values():
            for name in blueprint.running_statistics():
                server.state.pop(name, None)
                server.state[f"{blueprint.name}::{name}"] = blueprint.initial[name].clone()
        self.refresh(server, ctx)

    def refresh(self, server: Party, ctx: Context) -> None:
        """Load the fused slices, and the statistics of the widest network, into the global model."""
        largest = self.global_architecture(ctx)
        if largest is not None and "main" in server.models:
            slots = self.all_slots(largest, ctx)
            load_state(server.main, extract(server.state, {n: s for n, s in slots.items() if s.key in server.state}))

    def all_slots(self, blueprint: Blueprint, ctx: Context) -> IndexMap:
        """Return the places of slices and, with static BatchNorm, of this width's own statistics."""
        statistics = blueprint.running_statistics() if self.static_bn else frozenset()
        return self.slots_of(blueprint, ctx) | {name: Slot(f"{blueprint.name}::{name}") for name in statistics}

    def own_statistics(self, server: Party, blueprint: Blueprint) -> State:
        """Return the statistics that are kept for one width."""
        return {name: server.state[f"{blueprint.name}::{name}"] for name in blueprint.running_statistics()}

    def level_of(self, info: ClientInfo, ctx: Context) -> Blueprint:
        """Return the width that a client holds; methods that redraw it say so here."""
        return ctx.blueprints[info.architecture]

    def held_by(self, info: ClientInfo, ctx: Context) -> IndexMap:
        """Return the places of all that a client holds: its width of the network, and that width's statistics."""
        return self.all_slots(self.level_of(info, ctx), ctx)

    def slots(self, server: Party, info: ClientInfo, ctx: Context) -> IndexMap:
        """Return the client's view: its width of the network."""
        return self.slots_of(self.level_of(info, ctx), ctx)

    def send(self, server: Party, info: ClientInfo, step: Step, ctx: Context) -> Message:
        """Send the client's slice; statistics only where they are used (for measuring)."""
        if step.name == "evaluate" and self.measure == "own":
            return Message()
        blueprint = self.level_of(info, ctx)
        statistics = blueprint.running_statistics() if self.static_bn else set()
        if step.name == STATISTICS.name and not statistics:
            return Message()
        slots = self.held_by(info, ctx)
        if step.name != "evaluate":
            slots = {name: slot for name, slot in slots.items() if name not in statistics}
        return Message(params={"main": extract(server.state, slots)})

    def fuse(self, server: Party, replies: Mapping[int, Message], step: Step, ctx: Context) -> None:
        """Average slices entry by entry (and go on training, in methods that do), or statistics by width."""
        if step.name == STATISTICS.name:
            with_norm = {client: reply for client, reply in replies.items() if reply.params}
            scatter_mean(
                server.state,
                (
                    Part(reply.params["main"], self.held_by(ctx.infos[client], ctx), _batches(reply))
                    for client, reply in with_norm.items()
                ),
            )
            self.refresh(server, ctx)
            return
        super().fuse(server, replies, step, ctx)
        if self.statistics_at_server:
            self.collect_on_public(server, ctx)

    def fused_into(self, server: Party, info: ClientInfo, step: Step, ctx: Context) -> dict[str, str] | None:
        """Return the places of slices and statistics, unless the server works with the whole network afterwards."""
        if self.statistics_at_server or not unchanged(self, HeteroFL, *FUSING):
            return None
        return keyed(self.held_by(info, ctx))

    def collect_on_public(self, server: Party, ctx: Context) -> None:
        """Collect statistics on the public data: of the global network, and of all widths if slices are measured."""
        parts = []
        for blueprint, slots in self.measured(ctx):
            statistics = blueprint.running_statistics()
            model = ctx.replica(blueprint.name)
            load_state(model, extract(server.state, {n: s for n, s in slots.items() if n not in statistics}))
            collect_statistics(model, server.public, ctx.training.batch_size)
            own = model.state_dict()
            parts.append(Part({name: own[name].clone() for name in statistics}, slots, 1.0))
        scatter_mean(server.state, parts)
        self.refresh(server, ctx)

    def measured(self, ctx: Context) -> list[tuple[Blueprint, IndexMap]]:
        """Return the networks with statistics that will be measured, and their places."""
        widest, clients = self.global_architecture(ctx), ctx.infos.values() if self.measure == "slice" else ()
        found = {self.network_of(info): (self.level_of(info, ctx), self.held_by(info, ctx)) for info in clients}
        if widest is not None:
            found[widest.name] = widest, self.all_slots(widest, ctx)
        return [(blueprint, slots) for blueprint, slots in found.values() if blueprint.running_statistics()]

    def network_of(self, info: ClientInfo) -> str:
        """Return a name for the network that a client holds: clients with the same hold the same entries."""
        return info.architecture

    def part(self, server: Party, client: int, reply: Message, ctx: Context) -> Part:
        """Leave out the classifier rows of classes that the client lacks."""
        part = super().part(server, client, reply, ctx)
        counts = ctx.infos[client].label_counts
        if not self.mask or counts is None or all(counts):
            return part
        rows = torch.tensor([c for c, n in enumerate(counts) if n])
        state, slots = dict(part.state), dict(part.slots)
        for name, tensor in part.state.items():
            if name.split(".")[0] == "head" and tensor.shape[0] == len(counts):
                state[name] = tensor[rows]
                slots[name] = Slot(slots[name].key, rows_of(slots[name].part, rows, tensor.shape))
        return Part(state, slots, part.weight)

    def places(self, server: Party, info: ClientInfo, message: Message, ctx: Context) -> dict[str, Place]:
        """Leave out the same rows where replies are compared."""
        found = super().places(server, info, message, ctx)
        counts = info.label_counts
        if not self.mask or counts is None or all(counts):
            return found
        rows = torch.tensor([c for c, n in enumerate(counts) if n])
        for name, tensor in message.tensors():
            if name in found and name.rpartition("/")[2].split(".")[0] == "head" and tensor.shape[0] == len(counts):
                part = rows_of(found[name].part, rows, tensor.shape)
                found[name] = replace(found[name], part=part, rows=rows)
        return found

    # --- client ---

    def setup_client(self, client: Party, ctx: Context) -> None:
        """Switch the scalers of narrow networks on."""
        activate_scalers(client.main, self.scaler, self.global_rate)

    def own_loss(self, nets: Mapping[str, Any], batch: Batch, aux: Aux) -> tuple[Tensor, Tensor]:
        """Return the logits of a batch, and cross-entropy with those of absent classes set to 0."""
        net = nets["main"].still() if self.static_bn else nets["main"]
        logits = net(batch.x)
        return logits, batch.loss(masked(logits, aux))

    def loss(self, nets: Mapping[str, Any], batch: Batch, aux: Aux) -> Tensor:
        """Return the loss alone; methods with a term of their own on the same logits take both."""
        return self.own_loss(nets, batch, aux)[1]

    def stage(self, client: Party, ctx: Context) -> Stage:
        """Train the slice with clipped gradients."""
        training = ctx.training if self.clip is None else replace(ctx.training, clip=self.clip)
        return Stage(self.loss, aux=self.present(client, ctx), training=training)

    def numbers(self, info: ClientInfo, ctx: Context) -> dict[str, tuple[float, float]]:
        """Return how many batches its statistics are over: they weigh by it."""
        batches = len(batch_sizes(info.samples, ctx.training.batch_size, join_single=True))
        return {"batches": (batches, batches)}

    def present(self, client: Party, ctx: Context) -> dict[str, Tensor]:
        """Return which classes a client has, where they are masked; other tasks have no classes to be absent."""
        if not self.mask or ctx.task != CLASSIFICATION:
            return {}
        return {"present": torch.tensor([float(n > 0) for n in client.train.label_counts(ctx.num_classes)])}

    def local(self, client: Party, step: Step, ctx: Context) -> Local:
        """Train and reply, or collect BatchNorm statistics with the fused weights."""
        if step.name != STATISTICS.name:
            reply = yield from super().local(client, step, ctx)
            if self.measure == "own" and self.static_bn:
                collect_statistics(client.main, client.train, ctx.training.batch_size)
            return reply
        if not client.inbox.params:
            return Message()
        batches = collect_statistics(client.main, client.train, ctx.training.batch_size)
        state = client.main.state_dict()
        names = [name for name in state if is_running_statistic(name)]
        return Message(params={"main": {name: state[name].clone() for name in names}}, meta={"batches": batches})


def masked(logits: Tensor, aux: Aux) -> Tensor:
    """Return the logits, those of absent classes set to 0 if they are masked."""
    return logits * aux["present"] if "present" in aux else logits


def rows_of(part: Index | None, rows: Tensor, shape: torch.Size) -> Index:
    """Return the place of some rows of a tensor, given the place of all of it; rows are never sliced otherwise."""
    if part is None or isinstance(part[-1], slice):
        return (rows, *(slice(0, n) for n in shape[1:]))
    return (rows.view(-1, *(1,) * (len(shape) - 1)), *part[1:])


def _batches(reply: Message) -> float:
    return float(reply.meta["batches"])
