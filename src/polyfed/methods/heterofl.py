"""HeteroFL: Computation and Communication Efficient Federated Learning for Heterogeneous Clients.

Diao, Ding, Tarokh, ICLR 2021. https://arxiv.org/abs/2010.01264

A client of width rate r trains the first ceil(r·c) channels of every hidden layer; the server averages every entry
over the clients that hold it. Three companions keep mixed widths compatible: a scaler, static BatchNorm, and a masked
loss. Give clients their rates with the model: `cnn:16-32-64@1,cnn:16-32-64@0.5`.

Deviations:
    Levels belong to the clients' models and are fixed; the paper's `dynamic` mode, which redraws them each round, is
    not offered.
    Static BatchNorm statistics are collected for each width on its own, by all clients of that width, in rounds whose
    models are measured; the clients fetch the fused weights for it, and both directions are counted.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from polyfed.core.message import Message
from polyfed.core.method import Local, Plan, Step
from polyfed.core.nets import TRAIN, mode
from polyfed.core.party import Blueprint, ClientInfo, Context, Party, load_state
from polyfed.core.samples import Samples
from polyfed.core.stage import Aux, Batch, Stage
from polyfed.core.views import largest_first
from polyfed.methods.fedavg import FedAvg
from polyfed.models.width import Scaler
from polyfed.ops.aggregate import IndexMap, Part, Slot, extract, scatter_mean

STATISTICS = Step("statistics", who="all", when="evaluation")


@dataclass(frozen=True)
class HeteroFL(FedAvg):
    """Average nested width slices of one network.

    Parameters
    ----------
    scaler
        Divide activations by the width rate in training, before the norm (it matters where no BatchNorm follows).
    static_bn
        BatchNorm without running statistics in training; they are collected before models are measured.
    mask
        Logits of classes that a client lacks are set to 0 in its loss, and its rows of the classifier for them do not
        enter the mean. False, with all clients at rate 1, gives FedAvg with uniform weights exactly.
    clip
        Limit of the gradient norm (None: the run's own setting).
    """

    name: ClassVar[str] = "heterofl"
    paper: ClassVar[str] = "Diao et al. 2021"
    family: ClassVar[str] = "parameters"
    sends: ClassVar[str] = "the weights of the client's width slice, and which classes it holds"

    view: str = "prefix"
    weighting: str = "uniform"
    scaler: bool = True
    static_bn: bool = True
    mask: bool = True
    clip: float | None = 1.0

    def requirements(self) -> frozenset[str]:
        """Masking needs the label sets."""
        return frozenset({"label_counts"}) if self.mask else frozenset()

    def plan(self) -> Plan:
        """Add the collection of statistics to rounds whose models are measured."""
        return Plan(round=(Step(), STATISTICS) if self.static_bn else (Step(),))

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
            for name in running_statistics(blueprint):
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
        key = "all_slots", blueprint.name
        if key not in ctx.cache:
            slots = self.policy(ctx).slots(blueprint, ctx.blueprints)
            if self.static_bn:
                slots |= {name: Slot(f"{blueprint.name}::{name}") for name in running_statistics(blueprint)}
            ctx.cache[key] = slots
        found: IndexMap = ctx.cache[key]
        return found

    def send(self, server: Party, info: ClientInfo, step: Step, ctx: Context) -> Message:
        """Send the client's slice; statistics only where they are used (for measuring)."""
        blueprint = ctx.blueprints[info.architecture]
        statistics = running_statistics(blueprint) if self.static_bn else set()
        if step.name == STATISTICS.name and not statistics:
            return Message()
        slots = self.all_slots(blueprint, ctx)
        if step.name != "evaluate":
            slots = {name: slot for name, slot in slots.items() if name not in statistics}
        return Message(params={"main": extract(server.state, slots)})

    def fuse(self, server: Party, replies: Mapping[int, Message], step: Step, ctx: Context) -> None:
        """Average slices entry by entry, or collected statistics by width."""
        if step.name == STATISTICS.name:
            with_norm = {client: reply for client, reply in replies.items() if reply.params}
            scatter_mean(
                server.state,
                (
                    Part(r.params["main"], self.all_slots(ctx.blueprints[ctx.infos[c].architecture], ctx), _batches(r))
                    for c, r in with_norm.items()
                ),
            )
            self.refresh(server, ctx)
        else:
            super().fuse(server, replies, step, ctx)

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
                slots[name] = Slot(slots[name].key, (rows, *(slice(0, n) for n in tensor.shape[1:])))
        return Part(state, slots, part.weight)

    # --- client ---

    def setup_client(self, client: Party, ctx: Context) -> None:
        """Switch the scalers of narrow networks on."""
        for module in client.main.modules():
            if isinstance(module, Scaler):
                module.active = self.scaler

    def loss(self, nets: Mapping[str, Any], batch: Batch, aux: Aux) -> Tensor:
        """Return cross-entropy with the logits of absent classes set to 0."""
        net = nets["main"].still() if self.static_bn else nets["main"]
        logits = net(batch.x)
        return F.cross_entropy(logits * aux["present"] if self.mask else logits, batch.y)

    def stage(self, client: Party, ctx: Context) -> Stage:
        """Train the slice with clipped gradients."""
        training = ctx.training if self.clip is None else replace(ctx.training, clip=self.clip)
        present = torch.tensor([float(n > 0) for n in client.train.label_counts(ctx.num_classes)])
        return Stage(self.loss, aux={"present": present} if self.mask else {}, training=training)

    def local(self, client: Party, step: Step, ctx: Context) -> Local:
        """Train and reply, or collect BatchNorm statistics with the fused weights."""
        if step.name != STATISTICS.name:
            return (yield from super().local(client, step, ctx))
        if not client.inbox.params:
            return Message()
        batches = collect_statistics(client.main, client.train, ctx.training.batch_size)
        names = running_statistics_of(client.main)
        state = client.main.state_dict()
        return Message(params={"main": {name: state[name].clone() for name in names}}, meta={"batches": batches})


def running_statistics(blueprint: Blueprint) -> set[str]:
    """Return the names of BatchNorm means and variances."""
    return {n for n in blueprint.buffers if n.endswith(("running_mean", "running_var"))}


def running_statistics_of(model: nn.Module) -> list[str]:
    """Return the names of BatchNorm means and variances of a module."""
    return [name for name, _ in model.named_buffers() if name.endswith(("running_mean", "running_var"))]


@torch.no_grad()
def collect_statistics(model: nn.Module, data: Samples, batch_size: int) -> int:
    """Replace running statistics by the arithmetic mean over batches (momentum None); return the number of batches."""
    norms = [m for m in model.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]
    momentum = [norm.momentum for norm in norms]
    for norm in norms:
        norm.reset_running_stats()
        norm.momentum = None
    batches = 0
    with mode(model, TRAIN):
        for x, _ in data.chunks(batch_size):
            if len(x) > 1 or len(data) == 1:
                model(x if len(x) > 1 else torch.cat([x, x]))
                batches += 1
    for norm, value in zip(norms, momentum, strict=True):
        norm.momentum = value
    return batches


def _batches(reply: Message) -> float:
    return float(reply.meta["batches"])
