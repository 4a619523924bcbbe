"""What FedGen and its form for width slices share: a server that trains a generator of *features*.

For noise e and a label y, G makes features that the heads h_k of all uploaded networks take for y. Equation numbers are
those of `fedgen.py`. A network that has fewer features than G makes is given the first of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from polyfed.core.fields import AtLeastOne, AtLeastTwo, NotNegative, Positive, SomeShare
from polyfed.core.message import Message
from polyfed.core.method import Combination, Step
from polyfed.core.party import ClientInfo, Context, Party
from polyfed.core.prototypes import class_numbers
from polyfed.core.samples import Samples
from polyfed.core.settings import training_of
from polyfed.core.stage import Aux, Batch, Draw, Stage
from polyfed.methods.generating import Generating
from polyfed.models.generators import FeatureGenerator
from polyfed.ops.distance import diversity


def answered(net: Any, z: Tensor) -> Tensor:
    """Return what a network's head says of generated features: of the first ones, where it has fewer."""
    logits: Tensor = net.head(z[:, : net.module.feature_dim])
    return logits


@dataclass(frozen=True)
class FeatureGenerating(Generating):
    """A generator of features at the server, beside averaged weights, that clients receive.

    Parameters
    ----------
    decay
        The learning rate of G is multiplied by it after every round.
    diversity
        Weight of D in Eq. (3).
    noise_dim, hidden
        Sizes of G: noise (uniform in [0, 1]) and hidden layer.
    generator_steps, generator_batch, generator_lr, generator_weight_decay
        G's training (Adam).
    """

    shares: ClassVar[frozenset[str]] = frozenset({"main", "generator"})
    combines: ClassVar[Mapping[str, Combination]] = {"params/main": "apart"}  # also a teacher

    decay: SomeShare = 0.98
    diversity: NotNegative = 1.0
    noise_dim: AtLeastOne = 32
    hidden: AtLeastOne = 256
    generator_steps: AtLeastOne = 50
    generator_batch: AtLeastTwo = 32  # the generator has BatchNorm
    generator_lr: Positive = 3e-4
    generator_weight_decay: NotNegative = 1e-2

    def noise(self, rows: int | None = None) -> Draw:
        """Return the draw of e, for so many features (None: one for each sample of a batch)."""
        return Draw((rows, self.noise_dim), "uniform")

    def build_generator(self, ctx: Context) -> nn.Module:
        """Build G for the largest features that a client has."""
        return self.generator_of(max(blueprint.feature_dim or 0 for blueprint in ctx.blueprints.values()), ctx)

    def generator_of(self, size: int, ctx: Context) -> nn.Module:
        """Build a generator of features of a size."""
        return FeatureGenerator(self.noise_dim, ctx.num_classes, self.hidden, size)

    def setup_client(self, client: Party, ctx: Context) -> None:
        """Give the client a place for G, as far as it makes the client's own features: it knows no other sizes."""
        super().setup_client(client, ctx)
        if self.generates:
            size = cast(int, client.main.feature_dim)
            client.models["generator"] = ctx.initialized("generator", lambda: self.generator_of(size, ctx))

    def send(self, server: Party, info: ClientInfo, step: Step, ctx: Context) -> Message:
        """Send G, once it is trained, and the labels that it knows, to clients that train."""
        message = super().send(server, info, step, ctx)
        if step.name == "main" and "labels" in server.memory:
            self.put_generator(server, message)
            made, size = message.params["generator"], ctx.blueprints[info.architecture].feature_dim
            made |= {name: made[name][:size] for name in ("output.weight", "output.bias")}
            message.data["labels"] = class_numbers(server.memory["labels"], ctx.num_classes)
        return message

    def refine(self, server: Party, replies: Mapping[int, Message], ctx: Context) -> None:
        """Train G on the uploaded heads; the average stays as it is."""
        if self.generates:
            self.train_generator(server, replies, ctx)

    def train_generator(self, server: Party, replies: Mapping[int, Message], ctx: Context) -> None:
        """Take some steps on Eq. (3); only G moves."""
        counts = torch.stack([reply.data["counts"] for reply in replies.values()]).cpu()
        total = counts.sum(0)
        known = torch.nonzero(counts.amax(0) > 1).flatten()
        known = known if len(known) else torch.nonzero(total).flatten()
        number = self.generator_steps * self.generator_batch
        labels = known[torch.randint(len(known), (number,), generator=ctx.rng("generated-labels"))]
        architectures = {str(client): ctx.infos[client].architecture for client in replies}
        stage = Stage(
            partial(self.generator_loss, architectures=architectures),
            {"generator": None},
            data=Samples(torch.zeros(number, 1), labels),
            aux={
                "heads": {str(client): reply.params["main"] for client, reply in replies.items()},
                "shares": dict(zip(architectures, counts / total.clamp(min=1), strict=True)),  # r_k, Eq. (1)
            },
            draws={"noise": self.noise()},
            steps=self.generator_steps,
            training=training_of(self, "generator", ctx.training, optimizer="adam", round_decay=self.decay),
        )
        networks = {name: ctx.replica(name) for name in architectures.values()}
        trained = ctx.run(stage, {"generator": server.models["generator"], **networks}, "generator")
        ctx.log("generator_loss", trained.loss)
        server.memory["labels"] = torch.cat([known, server.memory.get("labels", known[:0])]).unique()

    def generator_loss(
        self, nets: Mapping[str, Any], batch: Batch, aux: Aux, architectures: Mapping[str, str]
    ) -> Tensor:
        """Return Eq. (3): what the heads make of generated features, each by its share of a label, and diversity."""
        z = nets["generator"].call("forward", batch["noise"], batch.y)
        loss = self.diversity * diversity(batch["noise"], z)
        for client, architecture in architectures.items():
            logits = answered(nets[architecture].replaced(aux["heads"][client]).eval(), z)
            share = aux["shares"][client].to(z)[batch.y]
            loss = loss + (share * F.cross_entropy(logits, batch.y, reduction="none")).mean()
        return loss
