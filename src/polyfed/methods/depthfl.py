"""DepthFL: Depthwise Federated Learning for Heterogeneous Clients.

Kim, Yu, Kim, Moon, ICLR 2023. https://openreview.net/forum?id=pf8RIZTMU58

One deep network has a classifier (exit) behind every stage; a client holds its first m stages and exits, as many as it
can afford, and every tensor is averaged over its holders. Deep stages see the data of few clients, so the exits of a
client teach each other, in round t = 0, 1, ...:

    L = sum_i [ CE(z_i, y) + lambda(t)/(m - 1) · sum_{j != i} KL(softmax z_j || softmax z_i) ],   i, j <= m      (1)
    lambda(t) = exp(-5 (1 - min(t, 300)/300)^2)                                                                 (2)

with the teacher z_j held fixed. FedDyn is the optimizer: a client remembers q_k, the server h, both 0 at first:

    client:  min L - <q_k, w_k> + (alpha/2) ||w_k - w||^2;    q_k <- q_k - alpha (w_k - w)                     (3)
    server:  h <- h - alpha · holders/N · (mean of w_k - w);  w <- mean of w_k - h/alpha                       (4)

Give clients their depths with the model: `resnet18:w16,exits` is the whole network, `resnet18:w16,exits=2` has two
stages. A client predicts with the mean of the logits of its exits.

Deviations:
    An exit is a mean over the map and a linear layer; the paper's have convolutions and group norm before that.
    (3) is written as one square, (alpha/2) ||w_k - (w + q_k/alpha)||^2: the same but for a constant.
    The released program adds 1e-7 to the teacher's probabilities and counts rounds from 1 in (2).
    N in (4) are all clients, also for stages that only some of them hold, as in that program.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from polyfed.core.errors import InputError
from polyfed.core.fields import Count, Positive
from polyfed.core.message import Message, State
from polyfed.core.method import Local, Step
from polyfed.core.party import ClientInfo, Context, Party, remembered
from polyfed.core.stage import Aux, Batch, Stage
from polyfed.methods.fedavg import FedAvg
from polyfed.ops.distance import kl_divergence, squared_distance


@dataclass(frozen=True)
class DepthFL(FedAvg):
    """Average nested depths of one network whose exits teach each other.

    Parameters
    ----------
    kd
        Mutual distillation of the exits, Eq. (1); False: cross-entropy of every exit alone.
    ramp, temperature
        Rounds until lambda(t) is 1 (0: from the start), and the temperature of the distillation, whose terms are
        multiplied by its square.
    feddyn, alpha
        FedDyn, Eq. (3) and (4), and its strength alpha; False averages.
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
    feddyn: bool = True
    alpha: Positive = 0.1
    extended: bool = True

    def check(self) -> None:
        """Refuse width slices: h belongs to whole tensors."""
        super().check()
        if self.view == "prefix":
            raise InputError(f"{self.name}: view 'prefix' mixes widths, here only depths differ: use scalefl.")

    # --- client ---

    def strength(self, ctx: Context) -> float:
        """Return lambda(t), Eq. (2)."""
        done = min(max(ctx.round - 1, 0), self.ramp) / self.ramp if self.ramp else 1.0
        return math.exp(-5.0 * (1.0 - done) ** 2)

    def loss(self, nets: Mapping[str, Any], batch: Batch, aux: Aux) -> Tensor:
        """Return L, Eq. (1), with the terms of FedDyn."""
        loss = self.exit_loss(nets, batch, aux) if self.extended else super().loss(nets, batch, aux)
        if "anchor" not in aux:
            return loss
        return loss + self.alpha / 2 * squared_distance(nets["main"].parameters(), aux["anchor"])

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
        """Train from w towards w + q_k/alpha, Eq. (3)."""
        aux: dict[str, Any] = {"strength": torch.tensor(self.strength(ctx))} if self.kd else {}
        if self.feddyn and ctx.phase == "round":
            w = self.received(client)
            q = remembered(client, "gradient", w)
            aux["anchor"] = {name: tensor + q[name] / self.alpha for name, tensor in w.items()}
        return Stage(self.loss, aux=aux)

    def received(self, client: Party) -> State:
        """Return the received parameters w; FedDyn leaves buffers alone."""
        sent = client.inbox.params["main"]
        return {name: sent[name].to(own.device) for name, own in client.main.named_parameters() if name in sent}

    def local(self, client: Party, step: Step, ctx: Context) -> Local:
        """Train, then renew q_k."""
        reply = yield from super().local(client, step, ctx)
        if self.feddyn and step.name == "main":
            own, w = client.tensors(), self.received(client)
            q = remembered(client, "gradient", w)
            client.memory["gradient"] = {name: q[name] - self.alpha * (own[name] - w[name]) for name in w}
        return reply

    # --- server ---

    def setup_server(self, server: Party, infos: Mapping[int, ClientInfo], ctx: Context) -> None:
        """Start from h = 0."""
        super().setup_server(server, infos, ctx)
        if self.feddyn:
            buffers = {name for blueprint in ctx.blueprints.values() for name in blueprint.buffers}
            names = [key for key in server.state if key.rpartition("::")[2] not in buffers]
            server.memory["h"] = {key: torch.zeros_like(server.state[key]) for key in names}

    @torch.no_grad()
    def fuse(self, server: Party, replies: Mapping[int, Message], step: Step, ctx: Context) -> None:
        """Take the mean over the holders of every tensor, and the step of FedDyn, Eq. (4)."""
        if not self.feddyn or step.name != "main":
            return super().fuse(server, replies, step, ctx)
        h: State = server.memory["h"]
        held = [self.slots(server, ctx.infos[client], ctx).values() for client in replies]
        holders = Counter(slot.key for slots in held for slot in slots if slot.key in h)
        before = {key: server.state[key].clone() for key in holders}
        super().fuse(server, replies, step, ctx)
        for key, w in before.items():
            h[key] -= self.alpha * holders[key] / ctx.clients * (server.state[key] - w)
            server.state[key] -= h[key] / self.alpha
        self.refresh(server, ctx)

    # --- either ---

    def predict(self, party: Party, x: Tensor, ctx: Context) -> Tensor:
        """Return the mean of the logits of all exits."""
        if not self.extended:
            return super().predict(party, x, ctx)
        model: Any = party.main
        return torch.stack(model.exits(x)).mean(0)
