"""One-shot FedAvg: one round of long local training from a common random initialisation, then the weighted mean.

McMahan et al., AISTATS 2017. https://arxiv.org/abs/1602.05629. The simplest baseline of one-shot fusion.

Deviations:
    Instead of a seed the server sends a fingerprint of the common initial state (one number as well): a client that
    started from another one says so, and the run warns.
"""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from polyfed.core.errors import InputError
from polyfed.core.message import Message, State
from polyfed.core.method import Local, Step
from polyfed.core.nets import frozen_names
from polyfed.core.party import Blueprint, ClientInfo, Context, Party, state_of
from polyfed.core.stage import Stage
from polyfed.core.traffic import Traffic
from polyfed.methods.fedavg import FedAvg
from polyfed.methods.oneshot import TrainedOnce


@dataclass(frozen=True)
class OneShotFedAvg(TrainedOnce, FedAvg):
    """FedAvg with one round; with `l1=0` it is the first round of FedAvg exactly.

    Parameters
    ----------
    weighting
        As in FedAvg. `view`, `buffers` and `pretrain_epochs` are inherited: all tensors are averaged, in one round.
    l1
        Weight of the L1 norm of all parameters in local training; 0 is plain cross-entropy.
    """

    name: ClassVar[str] = "oneshot_fedavg"
    paper: ClassVar[str] = "McMahan et al. 2017, one round"
    needs: ClassVar[frozenset[str]] = frozenset({"same_arch", "builds"})
    sends: ClassVar[str] = "the trained weights and the number of samples, once"
    traffic: ClassVar[Mapping[str, Traffic]] = {"main": Traffic("8", "4*(P + B) + 8")}

    view: str = "full"

    def check(self) -> None:
        """Refuse fields of FedAvg that mean nothing here."""
        super().check()
        if self.pretrain_epochs:
            raise InputError(f"{self.name}: pretrain_epochs must be 0, since there is one round and nothing before it.")
        if self.view.startswith("shared"):
            raise InputError(f"{self.name}: view '{self.view}' leaves layers out, so there would be no global model.")

    def misfit(
        self, infos: Sequence[ClientInfo], blueprints: Mapping[str, Blueprint], input_shape: tuple[int, ...]
    ) -> str | None:
        """Return what to set when the global model would lack its statistics."""
        if self.buffers == "average" or not any("batchnorm" in b.properties for b in blueprints.values()):
            return None
        return "the clients' BatchNorm statistics for its global model: set buffers to 'average'"

    def stage(self, client: Party, ctx: Context) -> Stage:
        """Return the training of all one-shot methods."""
        return self.alone()

    def send(self, server: Party, info: ClientInfo, step: Step, ctx: Context) -> Message:
        """Send the fingerprint of the common initial state; clients are measured with their own networks."""
        if step.name != "main":
            return Message()
        return Message(meta={"initial": fingerprint(ctx.blueprints[info.architecture].initial)})

    def local(self, client: Party, step: Step, ctx: Context) -> Local:
        """Train, then upload; say so if the initial state was another one."""
        common = fingerprint(state_of(client.main)) == client.inbox.meta["initial"]
        reply = yield from super().local(client, step, ctx)
        assert reply is not None
        if not common:
            reply.meta["other_initial"] = 1
        return reply

    def shared(self, client: Party) -> State:
        """Return all tensors that enter the mean."""
        state, frozen = state_of(client.main, buffers=self.buffers == "average"), frozen_names(client.main)
        return {n: tensor for n, tensor in state.items() if tensor.is_floating_point() and n not in frozen}

    def fuse(self, server: Party, replies: Mapping[int, Message], step: Step, ctx: Context) -> None:
        """Take the weighted mean sum_j n_j/N w_j."""
        strangers = [client for client, reply in replies.items() if "other_initial" in reply.meta]
        if strangers:
            ctx.log("other_initial", strangers)
            names = ", ".join(map(str, strangers))
            warnings.warn(
                f"oneshot_fedavg: client {names} started from other weights than the rest, so the mean of their "
                "networks means little: use the same seed at all parties.",
                stacklevel=2,
            )
        super().fuse(server, replies, step, ctx)


def fingerprint(state: State) -> int:
    """Return a 48-bit checksum of all float tensors of a state, by name."""
    digest = hashlib.blake2b(digest_size=6)
    for name in sorted(state):
        if state[name].is_floating_point():
            digest.update(name.encode())
            digest.update(state[name].detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return int.from_bytes(digest.digest(), "big")
