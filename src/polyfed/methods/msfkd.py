"""MSFKD (reconstruction): selective knowledge distillation for heterogeneous models.

"Knowledge selection and local updating optimization for federated knowledge distillation with heterogeneous models",
IEEE JSTSP 17(1), 2023. **A reconstruction**: neither text nor program of the paper was at hand.

Known of it are heterogeneous models, an exchange of predictions, and two levers: which knowledge is used, and how much
local work is done. Here HeteroFL's average is the start, and the server distills into it only predictions that are
likely right: for each public sample those of the most certain networks.

    K(x) = the ceil(rho·m) of m uploads with the best score q_k(x);  teacher(x) = mean over K(x) of z_k(x)       (1)
    x is left out if the least normalized entropy of all uploads exceeds kappa                                    (2)
    E_k: one epoch less when a client's share of all selections is below 1/(2m) for three of its rounds           (3)

Deviations:
    All of it is this library's reading; name results "MSFKD (reconstruction)".
    A round in which every sample is left out says nothing about any client's work, Eq. (3).
    With `selector="label"` all networks that are right teach, and samples that nobody gets right are left out.
    Distillation is as in `feddf_hetero`, which `rho=1, kappa=1` is exactly. There is no form with logits on the wire.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch
from torch import Tensor

from polyfed.core.fields import SomeShare
from polyfed.core.message import Message
from polyfed.core.method import Step
from polyfed.core.party import ClientInfo, Context, Party
from polyfed.core.samples import Samples
from polyfed.core.stage import Stage
from polyfed.core.traffic import Symbol, Traffic
from polyfed.core.uploads import uploaded_logits
from polyfed.methods.fedavg import PRETRAIN
from polyfed.methods.feddf_hetero import FedDFHetero
from polyfed.methods.heterofl import SLICED, STATISTICS, HeteroFL
from polyfed.ops.robust import whole

PATIENCE = 3  # rounds of few selections before a client does less


@dataclass(frozen=True)
class MSFKD(FedDFHetero):
    """FedFusion with selected knowledge (a reconstruction).

    Parameters
    ----------
    rho
        Share of the uploads that teach a sample, Eq. (1); 1: all.
    kappa
        Limit of the least normalized entropy of a sample, Eq. (2); 1: no sample is left out.
    selector
        The score: `entropy`, least first; `margin` of the two largest probabilities; `label`: right or wrong, for
        public data with the clients' own labels.
    adapt
        Lower the epochs of clients that are rarely selected, Eq. (3); with rho = 1 nobody is.
    ensemble
        `logits` only.
    """

    name: ClassVar[str] = "msfkd"
    paper: ClassVar[str] = "IEEE JSTSP 2023 (reconstruction)"
    traffic: ClassVar[Mapping[str, Traffic]] = {**HeteroFL.traffic, "main": Traffic(f"{SLICED} + E*8", f"{SLICED} + 8")}
    symbols: ClassVar[Mapping[str, Symbol]] = {
        "E": Symbol("1 for a client whose epochs were lowered, else 0", lambda told: "epochs" in told.message.meta)
    }

    ensemble: Literal["logits"] = "logits"  # the teacher is a mean of logits
    rho: SomeShare = 0.5
    kappa: SomeShare = 0.9
    selector: Literal["entropy", "margin", "label"] = "entropy"
    adapt: bool = True

    def uses_public_labels(self) -> dict[str, str]:
        """Labels say which networks are right, with `selector="label"`."""
        return super().uses_public_labels() | ({"selector='label'": "entropy"} if self.selector == "label" else {})

    # --- server ---

    def setup_server(self, server: Party, infos: Mapping[int, ClientInfo], ctx: Context) -> None:
        """Everybody starts with all epochs."""
        super().setup_server(server, infos, ctx)
        server.memory["epochs"], server.memory["few"] = {}, {}  # client -> E_k, and its rounds of few selections

    def fuse(self, server: Party, replies: Mapping[int, Message], step: Step, ctx: Context) -> None:
        """Do as FedFusion does, then choose the clients' next amount of work."""
        super().fuse(server, replies, step, ctx)
        if self.adapt and step.name not in (PRETRAIN.name, STATISTICS.name):
            self.choose_work(server, ctx.records.get("selected", {}), ctx)

    def lesson(self, replies: Mapping[int, Message], data: Samples, ctx: Context) -> tuple[Samples, Tensor]:
        """Return the samples that somebody knows, and the mean logits of those who know them, Eq. (1) and (2)."""
        each = list(uploaded_logits(replies, data, ctx))
        chosen, keep = self.selection(torch.stack(each), data.labels().to(each[0].device))
        total, number = torch.zeros_like(each[0]), chosen.sum(0)
        for logits, mine in zip(each, chosen, strict=True):
            total = total + logits * mine.unsqueeze(1)
        counts = (chosen * keep).sum(1)
        shares = (counts / counts.sum().clamp_min(1)).tolist()
        ctx.log("selected", {str(client): share for client, share in zip(replies, shares, strict=True)})
        positions = torch.nonzero(keep).flatten()
        targets = total[positions] / number[positions].unsqueeze(1)
        return data.select(positions.cpu()), targets

    def selection(self, logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Return K(x), Eq. (1), as 0 and 1 [clients, samples], and which samples are kept, Eq. (2)."""
        log_p = logits.log_softmax(2)
        if self.selector == "label":
            right = (logits.argmax(2) == labels).to(logits.dtype)
            return right, right.sum(0) > 0
        uncertainty = (-(log_p.exp() * log_p).sum(2) / math.log(logits.shape[2])).clamp_max(1.0)
        if self.selector == "entropy":
            score = -uncertainty
        else:
            first, second = log_p.exp().topk(2, dim=2).values.unbind(2)
            score = first - second
        best = score.argsort(dim=0, descending=True, stable=True)[: whole(self.rho * len(logits))]
        chosen = torch.zeros_like(score).scatter_(0, best, 1.0)
        return chosen, uncertainty.amin(0) <= self.kappa

    def choose_work(self, server: Party, shares: Mapping[str, float], ctx: Context) -> None:
        """Lower E_k of clients with few selections for some rounds, Eq. (3)."""
        epochs, few = server.memory["epochs"], server.memory["few"]
        for client, share in shares.items() if any(shares.values()) else ():  # few beside others: not where all are out
            few[client] = few.get(client, 0) + 1 if share < 1 / (2 * len(shares)) else 0
            if few[client] == PATIENCE:
                epochs[client] = max(1, epochs.get(client, ctx.training.epochs) - 1)
                few[client] = 0

    def send(self, server: Party, info: ClientInfo, step: Step, ctx: Context) -> Message:
        """Send the slice, and the number of epochs where it is not that of all."""
        message = super().send(server, info, step, ctx)
        if step.name == "main" and str(info.id) in server.memory["epochs"]:
            message.meta["epochs"] = server.memory["epochs"][str(info.id)]
        return message

    # --- client ---

    def stage(self, client: Party, ctx: Context) -> Stage:
        """Train for as many epochs as the server says."""
        epochs = client.inbox.meta.get("epochs")
        stage = super().stage(client, ctx)
        return stage if epochs is None else replace(stage, epochs=int(epochs))
