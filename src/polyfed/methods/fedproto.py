"""FedProto: Federated Prototype Learning across Heterogeneous Clients.

Tan, Long, Liu, Zhou, Lu, Jiang, Zhang, AAAI 2022. https://arxiv.org/abs/2105.00243

Clients of any architecture exchange class means of their features and pull their own features towards the global ones.

Deviations:
    The printed mean divides twice (by the clients and by the class total); here it is the mean over all samples of a
    class (`weighting="samples"`) or over its holders (`"uniform"`, as released code does).
    Prototypes are collected after training in prediction mode. Released programs collect them while the model still
    moves: `collect="training"`, which takes the mean over all local epochs (the authors: over the last). FedTGP's
    released program takes those of the network before its training, in prediction mode: `collect="before"`.
    A class that nobody held this round keeps its last prototype.
    Class numbers travel with the prototypes (one byte each); the usual cost formula leaves them out.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, cast

import torch
from torch import Tensor
from torch.nn import functional as F

from polyfed.core.fields import NotNegative
from polyfed.core.message import Message
from polyfed.core.method import Combination, Local, Method, Step
from polyfed.core.party import ClientInfo, Context, Party
from polyfed.core.privacy import Releases
from polyfed.core.prototypes import class_means, class_sums, mean_prototypes, merged, packed_means, spread
from polyfed.core.stage import Aux, Batch, Stage, Sums
from polyfed.core.traffic import Traffic


@dataclass(frozen=True)
class FedProto(Method):
    """Exchange class prototypes.

    Parameters
    ----------
    lam
        Weight lambda of the distance to the global prototype; 0 gives local training exactly.
    weighting
        `samples`: mean over all samples of a class; `uniform`: plain mean over its holders.
    predict_with
        `head`: the client's own classifier; `prototype`: the nearest global prototype.
    collect
        The client's prototypes: `after` its training in prediction mode (one pass over its data more), `before` it, or
        from the batches while `training`.
    """

    name: ClassVar[str] = "fedproto"
    paper: ClassVar[str] = "Tan et al. 2022"
    family: ClassVar[str] = "prototypes"
    needs: ClassVar[frozenset[str]] = frozenset({"feature_dim", "classes"})
    sends: ClassVar[str] = "the mean feature vector and the number of samples of each class"
    combines: ClassVar[Mapping[str, Combination]] = {"data/prototypes": "classes"}
    traffic: ClassVar[Mapping[str, Traffic]] = {"main": Traffic("C_m*(4*F + c)", "C_k*(4*F + 4 + c)")}

    lam: NotNegative = 1.0
    weighting: Literal["samples", "uniform"] = "samples"
    predict_with: Literal["head", "prototype"] = "head"
    collect: Literal["after", "before", "training"] = "after"

    def beyond_training(self) -> str | None:
        """Name sums of features while the network moves: `class_means` does not make those."""
        return "features collected in training (collect=after and before can be private)" if self.collecting else None

    def releases(self) -> Releases:
        """Tell prototypes in every round."""
        return Releases(each_round=1)

    @property
    def collecting(self) -> bool:
        """Whether prototypes are collected while training."""
        return self.collect == "training"

    def send(self, server: Party, info: ClientInfo, step: Step, ctx: Context) -> Message:
        """Send the global prototypes that exist so far."""
        return Message(data=dict(server.memory.get("prototypes", {})))

    def loss(self, nets: Mapping[str, Any], batch: Batch, aux: Aux) -> Tensor:
        """Return CE + lambda·MSE(f(x), P[y]); a class without prototype contributes nothing."""
        return self.loss_of(nets["main"].features(batch.x), nets, batch, aux)

    def collecting_loss(self, nets: Mapping[str, Any], batch: Batch, aux: Aux) -> tuple[Tensor, Sums]:
        """Return the same, and the sums of the features by class."""
        z = nets["main"].features(batch.x)
        return self.loss_of(z, nets, batch, aux), class_sums(z, batch.y, len(aux["known"]))

    def loss_of(self, z: Tensor, nets: Mapping[str, Any], batch: Batch, aux: Aux) -> Tensor:
        """Return the loss at given features."""
        loss = F.cross_entropy(nets["main"].head(z), batch.y)
        if self.lam == 0:
            return loss
        difference: Tensor = (z - aux["prototypes"][batch.y]) * aux["known"][batch.y].unsqueeze(1)
        return loss + self.lam * difference.pow(2).mean()

    def local(self, client: Party, step: Step, ctx: Context) -> Local:
        """Train towards the global prototypes, then return the client's own."""
        prototypes, known = spread(client.inbox.data, ctx.num_classes, cast(int, client.main.feature_dim))
        before = class_means(client, ctx) if self.collect == "before" else None
        loss = self.collecting_loss if self.collecting else self.loss
        trained = yield Stage(loss, aux={"prototypes": prototypes, "known": known})
        if not self.collecting:
            return Message(data=before or class_means(client, ctx))
        seen = trained.sums
        return Message(data=packed_means(seen["features"], seen["counts"], ctx.num_classes, ctx.training.epochs))

    def fuse(self, server: Party, replies: Mapping[int, Message], step: Step, ctx: Context) -> None:
        """Average prototypes class by class."""
        fresh = mean_prototypes((reply.data for reply in replies.values()), ctx.num_classes, self.weighting)
        server.memory["prototypes"] = merged(server.memory.get("prototypes", {}), fresh, ctx.num_classes)

    def predict(self, party: Party, x: Tensor, ctx: Context) -> Tensor:
        """Return logits, or minus the distance to each prototype (unknown classes are excluded)."""
        if self.predict_with == "head" or "prototypes" not in party.inbox.data:
            return super().predict(party, x, ctx)
        main: Any = party.main
        z: Tensor = main.features(x)
        prototypes, known = spread(party.inbox.data, ctx.num_classes, z.shape[1])
        return (-torch.cdist(z, prototypes)).masked_fill(known == 0, -1e9)
