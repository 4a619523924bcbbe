"""FedTGP: Trainable Global Prototypes with Adaptive-Margin-Enhanced Contrastive Learning.

("... for Data and Model Heterogeneity in Federated Learning".)
Zhang, Liu, Hua, Cao, AAAI 2024. https://arxiv.org/abs/2401.03230

FedProto, but the global prototypes are trained at the server to stay far apart. A small network T maps class numbers to
prototypes and is fitted to the clients' prototypes (p, y) with a margin:

    gap_c   =  min over c' of ||Q_c - Q_c'||,    Q_c: mean of the clients' prototypes of class c          (1)
    margin  =  min( max_c gap_c, threshold )                                                             (2)
    loss    =  CE( -(||p - T(c)|| + margin · [c = y])_c , y )                                            (3)

Clients train as in FedProto with P[c] = T(c).

Deviations:
    Prototypes are collected after training in prediction mode, as the paper says. The released program takes them
    before it saves what was trained, so that they are those of the network before this round: `collect="before"`.
    Squared distances are kept above 1e-12, where their root has a gradient. With one class there is no gap: margin 0.
    Class numbers and counts travel with the prototypes, as in FedProto, and nothing goes down before the first ones.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from polyfed.core.fields import AtLeastOne, Count, NotNegative, Positive
from polyfed.core.message import Message
from polyfed.core.method import Step
from polyfed.core.party import ClientInfo, Context, Party
from polyfed.core.prototypes import class_numbers, mean_prototypes
from polyfed.core.samples import Samples
from polyfed.core.settings import training_of
from polyfed.core.stage import Aux, Batch, Stage
from polyfed.methods.fedproto import FedProto


class TrainablePrototypes(nn.Module):
    """The network T: an embedding of class numbers, a hidden layer, a linear layer."""

    def __init__(self, classes: int, size: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(classes, size)
        self.layers = nn.Sequential(nn.Linear(size, size), nn.ReLU(), nn.Linear(size, size))

    def forward(self, classes: Tensor) -> Tensor:
        """Return the prototypes of some classes."""
        prototypes: Tensor = self.layers(self.embedding(classes))
        return prototypes


@dataclass(frozen=True)
class FedTGP(FedProto):
    """Exchange class prototypes that are trained at the server.

    Parameters
    ----------
    lam, weighting, predict_with, collect
        As in FedProto, with the paper's defaults; lam=0 gives local training exactly. `weighting` is that of the means
        in Eq. (1).
    server_epochs
        Passes S over the prototypes of a round; 0 sends the untrained T.
    margin_threshold
        Largest margin, Eq. (2); 0: no margin.
    server_lr, server_batch
        Learning rate and batch size of Eq. (3), plain SGD (None: the run's own).
    """

    name: ClassVar[str] = "fedtgp"
    paper: ClassVar[str] = "Zhang et al. 2024"

    lam: NotNegative = 10.0
    weighting: Literal["samples", "uniform"] = "uniform"
    predict_with: Literal["head", "prototype"] = "prototype"
    server_epochs: Count = 100
    margin_threshold: NotNegative = 100.0
    server_lr: Positive | None = None
    server_batch: AtLeastOne | None = None

    def setup_server(self, server: Party, infos: Mapping[int, ClientInfo], ctx: Context) -> None:
        """Build the network T."""
        build = partial(TrainablePrototypes, ctx.num_classes, ctx.feature_dim)
        server.models["prototypes"] = ctx.initialized("prototypes", build)

    def margin(self, replies: Mapping[int, Message], ctx: Context) -> Tensor:
        """Return the margin of a round, Eq. (2)."""
        means = mean_prototypes((reply.data for reply in replies.values()), ctx.num_classes, self.weighting)
        return gaps(means["prototypes"]).max().clamp(max=self.margin_threshold)

    def fuse(self, server: Party, replies: Mapping[int, Message], step: Step, ctx: Context) -> None:
        """Fit T to the prototypes of the round; the global ones are then its values."""
        classes = torch.arange(ctx.num_classes, device=ctx.device)
        network = server.models["prototypes"]
        if self.server_epochs:
            margin = self.margin(replies, ctx)
            ctx.log("margin", float(margin))
            stage = Stage(
                contrastive_loss,
                data=Samples(
                    torch.cat([reply.data["prototypes"] for reply in replies.values()]),
                    torch.cat([reply.data["classes"].long() for reply in replies.values()]),
                ),
                aux={"classes": classes, "margin": margin},
                epochs=self.server_epochs,
                training=training_of(self, "server", ctx.training),
            )
            ctx.run(stage, {"main": network}, "prototypes")
        with torch.no_grad():
            trained = network(classes)
        server.memory["prototypes"] = {"prototypes": trained, "classes": class_numbers(classes, ctx.num_classes)}


def gaps(means: Tensor) -> Tensor:
    """Return the distance of every row to its nearest other row, Eq. (1); 0 for a lone row."""
    distance = torch.cdist(means, means).fill_diagonal_(torch.inf)
    nearest = distance.min(dim=1).values
    return torch.where(nearest.isfinite(), nearest, 0.0)


def contrastive_loss(nets: Mapping[str, Any], batch: Batch, aux: Aux) -> Tensor:
    """Return Eq. (3): the nearest trained prototype should be that of the class, and by the margin."""
    trained = nets["main"](aux["classes"])
    square = (batch.x.unsqueeze(1) - trained).pow(2).sum(dim=2)
    distance = square.clamp(min=1e-12).sqrt()
    return F.cross_entropy(-(distance + aux["margin"] * (batch.y.unsqueeze(1) == aux["classes"])), batch.y)
