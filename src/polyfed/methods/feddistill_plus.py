"""FedDistill+ (FD-FL): FD's mean logits of each label, with averaged weights beside them.

Jeong, Oh, Kim, Park, Bennis, Kim, NeurIPS workshop 2018. https://arxiv.org/abs/1811.11479
As a baseline of FedGen, with weights: Zhu, Hong, Zhou, ICML 2021. https://arxiv.org/abs/2105.10056

Deviations:
    As in `feddistill` and `fedavg`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from polyfed.core.message import Message
from polyfed.core.method import Combination, Local, Step
from polyfed.core.party import Context, Party
from polyfed.core.traffic import Traffic
from polyfed.methods.fedavg import PRETRAIN, WEIGHTS, FedAvg
from polyfed.methods.feddistill import FedDistill


@dataclass(frozen=True)
class FedDistillPlus(FedDistill, FedAvg):
    """FedDistill with averaged weights (FedDistill+, FD-FL).

    Parameters
    ----------
    lam
        Weight lambda of the soft targets; 0 gives FedAvg exactly.
    view, weighting, buffers, pretrain_epochs
        As in FedAvg.
    """

    name: ClassVar[str] = "feddistill_plus"
    sends: ClassVar[str] = "model weights, the number of samples, the mean logits of each class"
    combines: ClassVar[Mapping[str, Combination]] = {"params/main": "mean", "data/logits": "classes"}
    traffic: ClassVar[Mapping[str, Traffic]] = {
        **FedAvg.traffic,
        "main": Traffic(f"{WEIGHTS} + C_m*(4*C + c)", f"{WEIGHTS} + 8 + C_k*(4*C + c)"),
    }

    def fuse(self, server: Party, replies: Mapping[int, Message], step: Step, ctx: Context) -> None:
        """Do as both do; pre-training is FedAvg's."""
        if step.name == PRETRAIN.name:
            return FedAvg.fuse(self, server, replies, step, ctx)
        return super().fuse(server, replies, step, ctx)

    def local(self, client: Party, step: Step, ctx: Context) -> Local:
        """Do as FedDistill does, and return the weights too; pre-training is FedAvg's."""
        if step.name == PRETRAIN.name:
            return (yield from FedAvg.local(self, client, step, ctx))
        reply = yield from super().local(client, step, ctx)
        assert reply is not None
        return Message({"main": self.shared(client)}, reply.data, {"samples": len(client.train)})
