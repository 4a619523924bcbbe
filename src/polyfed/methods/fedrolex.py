"""FedRolex: Model-Heterogeneous Federated Learning with Rolling Sub-Model Extraction.

Alam, Liu, Yan, Zhang, NeurIPS 2022. https://arxiv.org/abs/2212.01548

HeteroFL, but the window of channels that a client holds moves on each round, so that every channel of the global
network is trained equally often:

    i-th channel of a client in round t  =  (t · stride + i) mod K,    i < ceil(r·K)          (1)

for every layer of K channels, the same for all clients, which keeps residual additions aligned. The global network may
be wider than every client's (`server_model`): after K rounds all of it was trained.

Deviations:
    The released program rolls the other way (`direction=-1`); all channels are covered alike.
    Its weighting `width` is by the channels of each layer, and for convolutions only; here it is by all channels that
    a client holds, for every entry. Its `updates` is by how often an entry was updated, which is one number for all
    holders of the entry and cancels out of their mean: it is `uniform` here, and `updates_width` is `width`. (Counts
    there grow while a round is averaged, so that clients that come later weigh a little more.)
    With `extraction="random"`, static BatchNorm statistics of a channel are the mean over the clients of one width that
    hold it in this round, though their other channels differ.
    Rounds are counted from 0, as in the paper: the first round is HeteroFL's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

from polyfed.build import make_blueprint
from polyfed.core.errors import InputError
from polyfed.core.fields import AtLeastOne
from polyfed.core.message import Message
from polyfed.core.method import Step, unchanged
from polyfed.core.party import Blueprint, ClientInfo, Context, Party
from polyfed.core.views import Window, contains, largest_first, uncontained
from polyfed.core.width import channels_of, drawn, rolled
from polyfed.methods.fedavg import FUSING, keyed
from polyfed.methods.heterofl import HeteroFL
from polyfed.ops.aggregate import IndexMap, Part, Slot


@dataclass(frozen=True)
class FedRolex(HeteroFL):
    """HeteroFL with windows that roll.

    Parameters
    ----------
    extraction
        `rolling`, Eq. (1); `random`: every client draws new channels for each layer in each round (layers that feed
        one residual addition draw together); `static`: HeteroFL exactly.
    stride, direction
        Channels that the window moves in a round, and which way: 1 or -1.
    server_model
        The global network as a model string (None: the widest of the clients'), such as `cnn:16-32@1` for clients of
        `cnn:16-32@0.5`. Nobody can collect static BatchNorm statistics of one that is wider than all clients': it is
        measured with `statistics="public"` or `static_bn=False`.
    weighting
        A client's weight in the mean of an entry: `uniform` (also called `updates`), `samples`, or `width` (also
        `updates_width`), the channels that it holds; for clients of one width, `width` is `uniform` exactly.
    scaler, global_rate, static_bn, statistics, mask, clip, measure
        As in HeteroFL; `global_rate` is the rate of the global network. `view` is not used.
    """

    name: ClassVar[str] = "fedrolex"
    paper: ClassVar[str] = "Alam et al. 2022"

    extraction: Literal["rolling", "random", "static"] = "rolling"
    stride: AtLeastOne = 1
    direction: Literal[1, -1] = 1
    server_model: str | None = None
    weighting: Literal["samples", "uniform", "width", "updates", "updates_width"] = "uniform"  # type: ignore[assignment]

    def check(self) -> None:
        """Refuse a view other than windows."""
        super().check()
        self.must_stay("clients hold windows of channels", view="prefix")

    def setup_server(self, server: Party, infos: Mapping[int, ClientInfo], ctx: Context) -> None:
        """Lay out the global network: the server's own, which must contain all others, or the widest."""
        if self.server_model is not None:
            spec = self.server_model
            own = make_blueprint(spec, spec, ctx.input_shape, ctx.num_classes, ctx.seed, None, "linear")
            if (client := uncontained(own, ctx.blueprints)) is not None:
                raise InputError(
                    f"{self.name}: the server's network {own.name} does not contain {client.name}: name one of the "
                    "same family, at least as wide as every client's (server_model)."
                )
            if not any(contains(client, own) for client in ctx.blueprints.values()):
                ctx.blueprints[own.name] = own
        super().setup_server(server, infos, ctx)
        if self.extraction == "random" and self.static_bn:  # clients of one width hold channels of the whole network
            widest = largest_first(ctx.blueprints)[0]
            for blueprint in ctx.blueprints.values():
                for name in blueprint.running_statistics():
                    server.state[f"{blueprint.name}::{name}"] = widest.initial[name].clone()

    def global_architecture(self, ctx: Context) -> Blueprint | None:
        """Return the widest network, unless it has BatchNorm statistics that nobody can collect."""
        widest = super().global_architecture(ctx)
        held = {info.architecture for info in ctx.infos.values()}
        if widest is None or widest.name in held or not self.static_bn or self.statistics_at_server:
            return widest
        return None if widest.running_statistics() else widest

    def part(self, server: Party, client: int, reply: Message, ctx: Context) -> Part:
        """Return one client's contribution to the mean; its weight may be its width."""
        part = super().part(server, client, reply, ctx)
        if self.weighting not in ("width", "updates_width"):
            return part
        held = ctx.blueprints[ctx.infos[client].architecture]
        return part._replace(weight=float(sum(channels_of(held.width_groups, held.shapes).values())))

    def fused_into(self, server: Party, info: ClientInfo, step: Step, ctx: Context) -> dict[str, str] | None:
        """Return the places of windows and statistics: every entry has a mean of its own, whatever its weights."""
        if self.statistics_at_server or not unchanged(self, FedRolex, *FUSING):
            return None
        return keyed(self.held_by(info, ctx))

    # --- which channels ---

    def slots_of(self, blueprint: Blueprint, ctx: Context) -> IndexMap:
        """Return the window of an architecture in this round, Eq. (1); drawn ones belong to a client."""
        if self.extraction != "rolling":
            return super().slots_of(blueprint, ctx)
        view = Window(rolled(max(ctx.round - 1, 0) * self.stride * self.direction), self.buffers == "average")
        slots: IndexMap = ctx.this_round(("window", blueprint.name), lambda: view.slots(blueprint, ctx.blueprints))
        return slots

    def slots(self, server: Party, info: ClientInfo, ctx: Context) -> IndexMap:
        """Return the client's view: the window of its width, or its own channels."""
        return self.moved(super().slots(server, info, ctx), info, ctx)

    def held_by(self, info: ClientInfo, ctx: Context) -> IndexMap:
        """Return the places of all that a client holds, in the same channels."""
        return self.moved(super().held_by(info, ctx), info, ctx)

    def moved(self, slots: IndexMap, info: ClientInfo, ctx: Context) -> IndexMap:
        """Return the same tensors at the channels that a client draws for this round, if it draws."""
        if self.extraction != "random":
            return slots
        view, level = Window(drawn(lambda group: ctx.rng(f"window/{group}", info.id))), self.level_of(info, ctx)
        own: IndexMap = ctx.this_round(("window", info.id), lambda: view.slots(level, ctx.blueprints))
        return {name: Slot(slot.key, own[name].part) for name, slot in slots.items()}

    def network_of(self, info: ClientInfo) -> str:
        """Return a name for the client's network: its own, if it draws channels."""
        return f"{info.architecture}/{info.id}" if self.extraction == "random" else super().network_of(info)
