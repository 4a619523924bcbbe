"""MOON: Model-Contrastive Federated Learning.

Li, He, Song, CVPR 2021. https://arxiv.org/abs/2103.16257

FedAvg with a contrastive term: the features z of a sample should be near those of the received network, z_glob, and far
from those of the client's own previous network, z_prev (cos is the cosine, T the temperature):

    L = CE + mu · L_con,   L_con = -log( e^(cos(z, z_glob)/T) / (e^(cos(z, z_glob)/T) + sum e^(cos(z, z_prev)/T)) )  (3)

Deviations:
    z is what the classifier sees, `features(x)`, of any network. The paper's networks end with a projection of two
    layers to 256 numbers before the classifier, which is trained, shared and used in prediction like all the rest:
    `feature_dim=256` gives every network a linear one; for the paper's, write it into the network's `features`.
    In its first exchange a client has no previous network and takes the received one: L_con is then log 2 and its
    gradient 0, so that the first exchange is FedAvg's.
    With clients of several architectures both other networks are of the client's own: filled from the layers or slices
    that it receives, and its own rest. For widths there is `moon_hetero` (FedFD's tables): with `view="prefix"` slices
    are averaged without HeteroFL's companions, scaler, static BatchNorm and mask.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from polyfed.core.fields import AtLeastOne, NotNegative, Positive
from polyfed.core.message import State
from polyfed.core.method import Local, Step
from polyfed.core.party import Context, Party
from polyfed.core.stage import Aux, Batch, Stage
from polyfed.methods.fedavg import FedAvg


@dataclass(frozen=True)
class Moon(FedAvg):
    """FedAvg with a contrastive term on the features.

    Parameters
    ----------
    mu
        Weight of the term; 0 gives FedAvg exactly. The paper: 5 for CIFAR-10, 1 for CIFAR-100 and Tiny-ImageNet.
    temperature
        T: how sharply near and far are told apart.
    previous
        How many of its own last networks a client keeps and stays away from.
    """

    name: ClassVar[str] = "moon"
    paper: ClassVar[str] = "Li et al. 2021"
    family: ClassVar[str] = "weights"
    needs: ClassVar[frozenset[str]] = frozenset({"features"})

    mu: NotNegative = 1.0
    temperature: Positive = 0.5
    previous: AtLeastOne = 1

    def stage(self, client: Party, ctx: Context) -> Stage:
        """Train beside the received network and the client's own previous ones, which stay as they are."""
        stage = super().stage(client, ctx)
        if self.mu == 0:
            return stage
        received = snapshot(client)
        others = client.memory.get("previous") or [received]
        beside = {"global": received, "previous": {str(place): state for place, state in enumerate(others)}}
        return replace(stage, aux={**stage.aux, **beside})

    def loss(self, nets: Mapping[str, Any], batch: Batch, aux: Aux) -> Tensor:
        """Return L = CE + mu · L_con, Eq. (3)."""
        if self.mu == 0:
            return super().loss(nets, batch, aux)
        net = nets["main"]
        z = net.features(batch.x)
        near = self.beside(net, aux["global"]).features(batch.x)
        far = [self.beside(net, state).features(batch.x) for state in aux["previous"].values()]
        return self.label_loss(net.head(z), batch, aux) + self.mu * contrast(z, near, far, self.temperature)

    def beside(self, net: Any, state: State) -> Any:
        """Return another network of the client's architecture, as it predicts."""
        return net.replaced(state).eval()

    def label_loss(self, logits: Tensor, batch: Batch, aux: Aux) -> Tensor:
        """Return the loss of the logits alone."""
        return batch.loss(logits)

    def local(self, client: Party, step: Step, ctx: Context) -> Local:
        """Train and reply as FedAvg does, then keep a copy of the trained network."""
        reply = yield from super().local(client, step, ctx)
        if self.mu:
            client.memory["previous"] = [snapshot(client), *client.memory.get("previous", [])][: self.previous]
        return reply


def snapshot(client: Party) -> State:
    """Return a copy of all that the client's network computes with."""
    return {name: tensor.clone() for name, tensor in client.tensors().items() if tensor.is_floating_point()}


def contrast(z: Tensor, near: Tensor, far: list[Tensor], temperature: float) -> Tensor:
    """Return L_con of Eq. (3), mean over the batch.

    Written as log(1 + sum e^((cos(z, far) - cos(z, near))/T)): where `far` is `near`, its gradient is exactly 0.
    """
    z, near = (F.normalize(vector, dim=1, eps=1e-8) for vector in (z, near))
    further = [(z * (F.normalize(other, dim=1, eps=1e-8) - near)).sum(dim=1) / temperature for other in far]
    return torch.stack([torch.zeros_like(further[0]), *further]).logsumexp(dim=0).mean()
