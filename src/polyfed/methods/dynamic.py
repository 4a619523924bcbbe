"""FedDyn's regularisation, the optimizer of DepthFL: "Federated Learning Based on Dynamic Regularization".

Acar, Zhao, Matas Navarro, Mattina, Whatmough, Saligrama, ICLR 2021. https://arxiv.org/abs/2111.04263

A client remembers q_k, the server h, both 0 at first:

    client:  min L - <q_k, w_k> + (alpha/2) ||w_k - w||^2;    q_k <- q_k - alpha (w_k - w)                     (1)
    server:  h <- h - alpha · holders/N · (mean of w_k - w);  w <- mean of w_k - h/alpha                       (2)

Deviations:
    (1) is written as one square, (alpha/2) ||w_k - (w + q_k/alpha)||^2: the same but for a constant.
    N in (2) are all clients, also for tensors that only some of them hold, as in DepthFL's released program.
    Pre-training is without it, and buffers have the plain mean.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from polyfed.core.errors import InputError
from polyfed.core.fields import Positive
from polyfed.core.message import Message, State
from polyfed.core.method import Local, Step
from polyfed.core.party import ClientInfo, Context, Party, remembered
from polyfed.core.stage import Aux
from polyfed.methods.fedavg import FedAvg
from polyfed.ops.distance import squared_distance


@dataclass(frozen=True)
class DynamicRegularization(FedAvg):
    """FedAvg with FedDyn's memories; a loss adds `pull`, a stage has what `anchor` returns in its `aux`.

    Parameters
    ----------
    feddyn, alpha
        FedDyn, Eq. (1) and (2), and its strength alpha; False averages.
    """

    feddyn: bool = True
    alpha: Positive = 0.1

    def check(self) -> None:
        """Refuse width slices: h belongs to whole tensors."""
        super().check()
        if self.view == "prefix":
            raise InputError(f"{self.name}: view 'prefix' mixes widths, here only depths differ: use scalefl.")

    # --- client ---

    def received(self, client: Party) -> State:
        """Return the received parameters w; FedDyn leaves buffers alone."""
        sent = client.inbox.params["main"]
        return {name: sent[name].to(own.device) for name, own in client.main.named_parameters() if name in sent}

    def anchor(self, client: Party, ctx: Context) -> dict[str, Any]:
        """Return what the loss is pulled to, w + q_k/alpha, for the `aux` of a stage; nothing before the rounds."""
        if not self.feddyn or ctx.phase != "round":
            return {}
        w = self.received(client)
        q = remembered(client, "gradient", w)
        return {"anchor": {name: tensor + q[name] / self.alpha for name, tensor in w.items()}}

    def pull(self, nets: Mapping[str, Any], aux: Aux) -> Tensor | float:
        """Return the square of Eq. (1), where there is an anchor."""
        if "anchor" not in aux:
            return 0.0
        return self.alpha / 2 * squared_distance(nets["main"].parameters(), aux["anchor"])

    def local(self, client: Party, step: Step, ctx: Context) -> Local:
        """Train, then renew q_k, Eq. (1)."""
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
        """Take the mean over the holders of every tensor, and the step of Eq. (2)."""
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
