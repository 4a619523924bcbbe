"""SCAFFOLD: Stochastic Controlled Averaging for Federated Learning.

Karimireddy, Kale, Mohri, Reddi, Stich, Suresh, ICML 2020. https://arxiv.org/abs/1910.06378

Every client keeps a control variate c_k, an estimate of its own gradient; the server keeps c, the mean of all of them.
Local steps follow g - c_k + c, which takes away the drift of clients towards their own data.

Deviations:
    Replies carry the trained weights, not their difference to the received ones: the same numbers in the mean.
    The paper's option II reads the new c_k off the distance travelled, which is a gradient only for plain SGD. With
    momentum, weight decay, clipping or Adam the mean of the gradients themselves is used (`option="gradient"`; equal
    to option II for plain SGD at one learning rate, which II weighs them by), and option II is refused.
    Option I is the mean over batches, as the steps of an epoch take them: a smaller last batch counts like the others.
    With clients of several depths or widths every entry of c has the mean over the clients that hold it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch

from polyfed.core.errors import InputError
from polyfed.core.fields import NotNegative
from polyfed.core.looking import gradients_at_rest
from polyfed.core.message import Message, State, grouped
from polyfed.core.method import Combination, Local, Step
from polyfed.core.party import ClientInfo, Context, Party, remembered
from polyfed.core.stage import Aux, Grads, Stage
from polyfed.core.traffic import Traffic
from polyfed.methods.fedavg import WEIGHTS, FedAvg
from polyfed.ops.aggregate import extract, part_of, part_way


@dataclass(frozen=True)
class Scaffold(FedAvg):
    """FedAvg with control variates.

    Parameters
    ----------
    option
        The new c_k: `II`, from the distance travelled; `gradient`, the mean of the gradients of the local steps; `I`,
        the gradient of the client's loss at the received weights (a pass over its data more); `auto`, II for plain SGD
        and `gradient` otherwise.
    server_lr
        Step eta_g of the server towards the mean; 1 takes the mean. The first round is then that of FedAvg exactly.
    weighting, view, buffers, pretrain_epochs
        As in FedAvg; the mean is uniform here. Pre-training is FedAvg's, without control variates.
    """

    name: ClassVar[str] = "scaffold"
    paper: ClassVar[str] = "Karimireddy et al. 2020"
    sends: ClassVar[str] = "model weights, the change of a control variate of the same size, the number of samples"
    combines: ClassVar[Mapping[str, Combination]] = {"params/main": "mean", "data/control": "mean"}
    traffic: ClassVar[Mapping[str, Traffic]] = {
        **FedAvg.traffic,
        "main": Traffic(f"{WEIGHTS} + 4*P", f"{WEIGHTS} + 4*P + 8"),
    }

    weighting: Literal["samples", "uniform"] = "uniform"
    option: Literal["auto", "I", "II", "gradient"] = "auto"
    server_lr: NotNegative = 1.0

    def own_epochs(self, epochs: int, rounds: int) -> int:
        """Count the pass for the gradient at the received weights, too."""
        return super().own_epochs(epochs, rounds) + (rounds if self.option == "I" else 0)

    # --- server ---

    def setup_server(self, server: Party, infos: Mapping[int, ClientInfo], ctx: Context) -> None:
        """Start from c = 0, and count the owners of every entry."""
        super().setup_server(server, infos, ctx)
        if self.option == "II" and not ctx.training.is_plain:
            raise InputError(
                f"{self.name}: option 'II' needs SGD without momentum, decay and clipping: use 'gradient'."
            )
        owners: State = {}
        for info in infos.values():
            for slot in self.parameter_slots(info, ctx).values():
                count = owners.setdefault(slot.key, torch.zeros_like(server.state[slot.key]))
                part_of(count, slot).add_(1)
        server.memory["owners"] = owners
        server.memory["control"] = {key: torch.zeros_like(server.state[key]) for key in owners}

    def send(self, server: Party, info: ClientInfo, step: Step, ctx: Context) -> Message:
        """Send w and c."""
        message = super().send(server, info, step, ctx)
        if step.name == "main":
            message.data |= grouped("control", extract(server.memory["control"], self.parameter_slots(info, ctx)))
        return message

    @torch.no_grad()
    def fuse(self, server: Party, replies: Mapping[int, Message], step: Step, ctx: Context) -> None:
        """Take w + eta_g (mean of y_k - w), and c + 1/N sum of (c_k+ - c_k) over this round's clients."""
        with part_way(server.state, server.memory["control"], self.server_lr):
            super().fuse(server, replies, step, ctx)
        self.refresh(server, ctx)
        control, owners = server.memory["control"], server.memory["owners"]
        for client, reply in replies.items():
            slots = self.parameter_slots(ctx.infos[client], ctx)
            for name, change in reply.group("control").items():
                slot = slots[name]  # whole, or a slice: its part of c is a view
                held = part_of(control[slot.key], slot)
                held += change.to(held) / part_of(owners[slot.key], slot)

    # --- client ---

    def local(self, client: Party, step: Step, ctx: Context) -> Local:
        """Train along g - c_k + c, then renew c_k."""
        if step.name != "main":
            return (yield from super().local(client, step, ctx))
        c = {name: tensor.to(ctx.device) for name, tensor in client.inbox.group("control").items()}
        mine = remembered(client, "control", c)
        w = {name: client.inbox.params["main"][name].to(ctx.device) for name in c}
        option = self.option if self.option != "auto" else "II" if ctx.training.is_plain else "gradient"
        looked = (yield gradients_at_rest(self.loss, ctx.training)) if option == "I" else None
        trained = yield Stage(
            self.loss,
            gradients=corrected,
            aux={"correction": {name: c[name] - mine[name] for name in c}},
            sum_gradients=option == "gradient",
        )
        y = client.tensors()
        if option == "II":  # c_k+ = c_k - c + (w - y) / (tau · eta)
            renewed = {n: mine[n] - c[n] + (w[n] - y[n]) / trained.rates for n in c}
        else:
            source = looked or trained
            renewed = {n: source.gradients["main"][n] / source.steps for n in c}
        client.memory["control"] = renewed
        change = {n: renewed[n] - mine[n] for n in c}
        reply = self.reply(client)
        reply.data |= grouped("control", change)
        return reply


def corrected(grads: tuple[Grads, ...], aux: Aux) -> Grads:
    """Return g - c_k + c; layers that are not shared have no variate."""
    change = aux["correction"]
    return {"main": {name: g + change[name] if name in change else g for name, g in grads[0]["main"].items()}}
