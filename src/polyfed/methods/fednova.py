"""FedNova: Tackling the Objective Inconsistency Problem in Heterogeneous Federated Optimization.

Wang, Liu, Liang, Joshi, Poor, NeurIPS 2020. https://arxiv.org/abs/2007.07481

Clients that take more local steps pull the mean of FedAvg towards their own objective. Here every client's change is
divided by its effective number of steps, and their mean is multiplied by a common one:

    w  <-  w + tau_eff · sum_k p_k (w_k - w) / a_k,      tau_eff = sum_k p_k a_k                 (1)

where a_k = ||a_k||_1 says how far w_k lies from w, in learning rates, if the gradient is 1 in every step: the number of
steps tau_k for plain SGD, more with momentum, less with a proximal term.

Deviations:
    a_k comes from the recurrence of the optimizer itself (`effective_steps`), which is that of the released program for
    momentum or a proximal term alone; with both, that one adds them up, and here they act together. A learning rate
    that decays within the round counts too. For Adam, a_k = tau_k.
    With a proximal term tau_eff = sum_k p_k tau_k, as in the released program.
    Server momentum is kept in weights, not divided by the learning rate: the same where that is constant.
    BatchNorm's statistics have FedAvg's mean: a step beyond the mean could make a variance negative.
    Clients with unequal work are had with `straggler_share=1` (1 to E epochs; the paper draws 2 to 5).
    Layer by layer (clients of several depths), p_k and tau_eff are over the clients that own a layer.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from polyfed.core.errors import InputError, MessageError
from polyfed.core.fields import NotNegative, PartShare
from polyfed.core.message import Message
from polyfed.core.method import Combination, Local, Step
from polyfed.core.party import ClientInfo, Context, Party
from polyfed.core.stage import batch_sizes, learning_rate, learning_rates
from polyfed.core.traffic import Traffic
from polyfed.methods.fedavg import WEIGHTS, FedAvg
from polyfed.methods.fedprox import FedProx
from polyfed.ops.aggregate import Part, scatter_mean
from polyfed.ops.steps import effective_by_epoch, effective_steps


@dataclass(frozen=True)
class FedNova(FedProx):
    """Normalized averaging: equal numbers of effective steps give FedAvg exactly.

    Parameters
    ----------
    gmf
        Server momentum: u <- gmf·u + (the change of Eq. 1), w <- w + u; 0: none.
    mu
        Weight of FedProx's penalty; 0: none.
    """

    name: ClassVar[str] = "fednova"
    paper: ClassVar[str] = "Wang et al. 2020"
    sends: ClassVar[str] = "model weights, the number of samples and of effective local steps"
    combines: ClassVar[Mapping[str, Combination]] = {"params/main": "apart"}  # changes are divided by steps first
    traffic: ClassVar[Mapping[str, Traffic]] = {
        **FedAvg.traffic,
        "main": Traffic(WEIGHTS, f"{WEIGHTS} + 16 + [mu > 0]*8"),
    }

    gmf: PartShare = 0.0
    mu: NotNegative = 0.0

    def check(self) -> None:
        """Refuse slices: their entries have owners of their own."""
        super().check()
        if self.view == "prefix":
            raise InputError(f"{self.name}: view 'prefix' is not offered: use 'owned', 'same_arch' or 'full'.")

    def setup_server(self, server: Party, infos: Mapping[int, ClientInfo], ctx: Context) -> None:
        """Start without momentum."""
        super().setup_server(server, infos, ctx)
        if ctx.training.optimizer == "sgd" and ctx.training.lr * self.mu >= 1:
            raise InputError(f"{self.name}: lr times mu must be below 1: a step would go past the received weights.")
        server.memory["momentum"] = {}

    @torch.no_grad()
    def fuse(self, server: Party, replies: Mapping[int, Message], step: Step, ctx: Context) -> None:
        """Take Eq. (1): w goes beyond (or not as far as) the mean of the w_k with weights p_k / a_k."""
        if step.name != "main":
            return super().fuse(server, replies, step, ctx)
        # In units of the longest way, so that equal ones count exactly 1.
        unit = max(map(steps_told, replies.values()))
        sums: dict[str, Tensor] = {}  # over the owners of a parameter: n_k, n_k · tau_k, n_k / a_k
        for client, reply in replies.items():
            n, a = self.weight(reply), steps_told(reply) / unit
            tau = float(reply.meta["steps"]) / unit if self.mu else a
            mine = torch.tensor([n, n * tau, n / a], dtype=torch.float64)
            for slot in self.parameter_slots(ctx.infos[client], ctx).values():
                sums[slot.key] = sums.get(slot.key, 0) + mine
        start = {key: server.state[key].clone() for key in sums}
        scatter_mean(server.state, self.parts(server, replies, unit, ctx))
        momentum = server.memory["momentum"]
        for key, w in start.items():
            total, taus, inverses = sums[key].tolist()
            reach = (taus / total) * (inverses / total)  # tau_eff · sum_k p_k / a_k
            moved = w.lerp(server.state[key], reach)
            if self.gmf:
                momentum[key] = moved - w + (self.gmf * momentum[key] if key in momentum else 0)
                moved = w + momentum[key]
            server.state[key].copy_(moved)
        self.refresh(server, ctx)

    def parts(self, server: Party, replies: Mapping[int, Message], unit: float, ctx: Context) -> Iterator[Part]:
        """Yield every client's parameters with weight n_k / a_k, and its statistics with n_k."""
        for client, reply in replies.items():
            state, slots, n = self.part(server, client, reply, ctx)
            buffers = ctx.blueprints[ctx.infos[client].architecture].buffers
            yield Part({m: t for m, t in state.items() if m not in buffers}, slots, n / (steps_told(reply) / unit))
            yield Part({m: t for m, t in state.items() if m in buffers}, slots, n)

    def numbers(self, info: ClientInfo, ctx: Context) -> dict[str, tuple[float, float]]:
        """Return a_k and tau_k after the fewest and the most epochs; with BatchNorm a lone last sample is no batch."""
        lone, plain = (len(batch_sizes(info.samples, ctx.training.batch_size, join)) for join in (True, False))
        fewest = 1 if self.straggler_share else ctx.training.epochs
        rates = [learning_rate(ctx.training, ctx.round, epoch, ctx.rounds) for epoch in range(ctx.training.epochs)]
        ways = [w for n in (lone, plain) for w in effective_by_epoch(rates, n, *self.forces(ctx))[fewest - 1 :]]
        return {"effective": (min(ways), max(ways)), "steps": (fewest * lone, ctx.training.epochs * plain)}

    def forces(self, ctx: Context) -> tuple[float, float]:
        """Return momentum and proximal weight as they act in a step: on plain SGD only."""
        return (ctx.training.momentum, self.mu) if ctx.training.optimizer == "sgd" else (0.0, 0.0)

    def local(self, client: Party, step: Step, ctx: Context) -> Local:
        """Train as FedAvg or FedProx does, and tell a_k."""
        if step.name != "main":
            return (yield from super().local(client, step, ctx))
        stage = self.stage(client, ctx)
        trained = yield stage
        rates = learning_rates(stage, trained, ctx.training, ctx.round, ctx.rounds)
        reply = self.reply(client)
        reply.meta["effective"] = effective_steps(rates, *self.forces(ctx))
        if self.mu:
            reply.meta["steps"] = trained.steps
        return reply


def steps_told(reply: Message) -> float:
    """Return a client's a_k; nothing can be divided by zero."""
    told = float(reply.meta["effective"])
    if told <= 0:
        raise MessageError(f"A reply tells of {told:g} effective steps: every client takes some.")
    return told
