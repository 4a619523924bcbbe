"""FD / FedDistill: Communication-Efficient On-Device Machine Learning: Federated Distillation and Augmentation.

Jeong, Oh, Kim, Park, Bennis, Kim, NeurIPS workshop 2018. https://arxiv.org/abs/1811.11479

Clients of any architecture tell the mean logit vector of each label, collected while they train; what the others say of
a label is a soft target for its samples. No public data is needed.

    L = CE(z, y) + lambda · CE(softmax(G_k[y]), softmax(z))                                    (1)
    G_k[c] = (sum_j F_j[c] - F_k[c]) / (M_c - 1),  over the M_c clients that hold label c       (2)

Deviations:
    The vectors of a round are those of its participants; a client that was not among them learns from all of these.
    A label without a vector (nobody held it, or only this client) adds nothing to the loss; there are none in round 1.
    Label means start from zero counts (one released program starts at one, which shrinks them).
    With privacy the vectors are collected after training, in prediction mode: sums over steps have no bound.
    The mean over clients is uniform, so the numbers of samples of each label do not travel; the labels do (one byte).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from polyfed.core.fields import NotNegative
from polyfed.core.message import Message
from polyfed.core.method import Combination, Local, Method, Step
from polyfed.core.party import ClientInfo, Context, Party
from polyfed.core.privacy import Releases
from polyfed.core.prototypes import class_numbers, spread
from polyfed.core.releases import class_means_of
from polyfed.core.stage import Aux, Batch, Stage, Sums
from polyfed.core.traffic import Traffic


@dataclass(frozen=True)
class FedDistill(Method):
    """Exchange the mean logits of each label.

    Parameters
    ----------
    lam
        Weight lambda of the soft targets, Eq. (1); 0 gives local training exactly.
    leave_one_out
        A client's targets leave its own vectors out, Eq. (2); False: the plain mean, equal for all.
    """

    name: ClassVar[str] = "feddistill"
    paper: ClassVar[str] = "Jeong et al. 2018"
    family: ClassVar[str] = "distillation"
    needs: ClassVar[frozenset[str]] = frozenset({"classes"})
    sends: ClassVar[str] = "the mean logits of each class"
    combines: ClassVar[Mapping[str, Combination]] = {"data/logits": "classes"}
    traffic: ClassVar[Mapping[str, Traffic]] = {"main": Traffic("C_m*(4*C + c)", "C_k*(4*C + c)")}

    lam: NotNegative = 1.0
    leave_one_out: bool = True

    def beyond_training(self) -> str | None:
        """Only mean logits leave."""
        return None

    def releases(self) -> Releases:
        """Tell mean logits in every round."""
        return Releases(each_round=1)

    def send(self, server: Party, info: ClientInfo, step: Step, ctx: Context) -> Message:
        """Send G_k, Eq. (2), for the labels that have one."""
        message = super().send(server, info, step, ctx)
        if "total" in server.memory:
            total, holders = server.memory["total"], server.memory["holders"]
            own = server.memory["uploads"].get(str(info.id))
            if self.leave_one_out and own is not None:
                mine, held = by_label(own, ctx)
                total, holders = total - mine, holders - held
            message.data |= packed(total, holders, ctx)
        return message

    def fuse(self, server: Party, replies: Mapping[int, Message], step: Step, ctx: Context) -> None:
        """Add up the vectors F_k and count their holders, label by label."""
        super().fuse(server, replies, step, ctx)
        server.memory["uploads"] = {str(client): dict(reply.data) for client, reply in replies.items()}
        each = [by_label(reply.data, ctx) for reply in replies.values()]
        # In double precision: taking a client's own vector off again leaves those of the others, not their rounding.
        server.memory["total"] = torch.stack([vectors.double() for vectors, _ in each]).sum(0)
        server.memory["holders"] = torch.stack([known for _, known in each]).sum(0)

    def stage(self, client: Party, ctx: Context) -> Stage:
        """Train with the soft targets that came."""
        targets, known = by_label(client.inbox.data, ctx)
        return Stage(self.distill_loss, aux={"targets": targets, "known": known})

    def local(self, client: Party, step: Step, ctx: Context) -> Local:
        """Train, and tell the mean logits F_k of each label that was seen."""
        if not ctx.privacy.on:
            trained = yield self.stage(client, ctx)
            return Message(data=packed(trained.sums["logits"], trained.sums["counts"], ctx))
        # Sums over the steps have no bound: with privacy the logits are those of the trained network, once a sample.
        yield replace(self.stage(client, ctx), loss=lambda *given: self.distill_loss(*given)[0])
        means, counts = class_means_of(client, ctx, lambda x: client.main(x), "logits")
        return Message(data=packed(means * counts.unsqueeze(1), counts, ctx))

    def distill_loss(self, nets: Mapping[str, Any], batch: Batch, aux: Aux) -> tuple[Tensor, Sums]:
        """Return Eq. (1), and beside it the sum of the logits, and the number of samples, of each label."""
        logits = nets["main"](batch.x)
        loss = F.cross_entropy(logits, batch.y)
        if self.lam > 0:
            soft = -(aux["targets"][batch.y].softmax(1) * logits.log_softmax(1)).sum(1)
            loss = loss + self.lam * (soft * aux["known"][batch.y]).mean()
        labels = torch.arange(logits.shape[1], device=logits.device)
        member = (labels.unsqueeze(1) == batch.y.unsqueeze(0)).to(logits.dtype)  # [C, B]
        return loss, {"logits": member @ logits.detach(), "counts": member.sum(1)}


def packed(total: Tensor, counts: Tensor, ctx: Context) -> dict[str, Tensor]:
    """Return the mean vectors of the labels that were counted, as they travel: nothing where there are none."""
    present = torch.nonzero(counts).flatten()
    if not len(present):
        return {}
    mean = (total[present] / counts[present].unsqueeze(1)).to(torch.get_default_dtype())
    return {"logits": mean, "classes": class_numbers(present, ctx.num_classes)}


def by_label(data: Mapping[str, Tensor], ctx: Context) -> tuple[Tensor, Tensor]:
    """Return all labels' vectors [C, C], zero where there is none, and 1 for the labels that have one."""
    known = {"prototypes": data["logits"], "classes": data["classes"]} if "logits" in data else {}
    return spread(known, ctx.num_classes, ctx.num_classes)
