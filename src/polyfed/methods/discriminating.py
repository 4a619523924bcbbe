"""Discriminators of domains: the half of DaFKD that its clients do (Wang et al., CVPR 2023).

Beside its classifier each client trains a discriminator D_k, a linear layer on the same features f_k, which tells its
own inputs from those of a generator G that all clients train together, against their discriminators:

    model and D:  CE + BCE(D(x), 1) + BCE(D(G(e)), 0) + gp · mean (||grad_x D(x~)|| - 1)²        (1)
    G:            BCE(D(G(e)), 1)                                                                (2)

D_k never leaves its client; what it says of samples (`scores`) may.

Deviations:
    Terms of Eq. (1) and (2) run through all local epochs of their rounds (as released: the first five epochs, which
    were all). x~ lies between x and G(e), at a random place; the norm is that of the whole slope (as released: at each
    pixel, over the channels).
    Generated samples move no BatchNorm statistics of the clients' networks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from polyfed.core.fields import Count, NotNegative
from polyfed.core.party import Context, Party
from polyfed.core.passes import pass_over
from polyfed.core.samples import Samples
from polyfed.core.stage import Aux, Batch, Draw, Stage, Update
from polyfed.methods.fedavg import FedAvg
from polyfed.methods.generating import InputGenerating
from polyfed.ops.penalty import between, gradient_penalty


@dataclass(frozen=True)
class Discriminating(InputGenerating, FedAvg):
    """FedAvg whose clients train discriminators, and a generator, in the first rounds.

    Parameters
    ----------
    discriminator_rounds, generator_rounds
        Discriminators learn in so many first rounds, Eq. (1), the generator in so many, Eq. (2).
    penalty
        Weight gp of the gradient penalty.
    """

    discriminator_rounds: Count = 3
    generator_rounds: Count = 5
    penalty: NotNegative = 0.3

    def requirements(self) -> frozenset[str]:
        """Need features, on which discriminators sit."""
        return super().requirements() | {"features"}

    def setup_client(self, client: Party, ctx: Context) -> None:
        """Give the client a place for G, and a discriminator of its own."""
        super().setup_client(client, ctx)
        self.add_generator(client, ctx)
        if self.generates:
            size = cast(int, client.main.feature_dim)
            client.models["discriminator"] = ctx.initialized("discriminator", partial(nn.Linear, size, 1))

    def stage(self, client: Party, ctx: Context) -> Stage:
        """Train network and discriminator, then the generator, on each batch of the first rounds."""
        stage = super().stage(client, ctx)
        loss: Any = stage.loss
        learns, makes = (0 < ctx.round <= rounds for rounds in (self.discriminator_rounds, self.generator_rounds))
        if not (learns or makes):
            return stage
        both = {"main": None, "discriminator": None}
        first = Update((self.domain_loss,), both) if learns else Update((loss,), {"main": None})
        made_with = self.generator_training(ctx)
        second = (Update((self.generator_loss,), {"generator": None}, training=made_with),) if makes else ()
        draws = {"noise": Draw((None, self.noise_dim)), "place": Draw((None,), "uniform")}
        return replace(stage, loss=None, updates=(first, *second), draws=draws)

    def domain_loss(self, nets: Mapping[str, Any], batch: Batch, aux: Aux) -> Tensor:
        """Return Eq. (1); the classifier's own loss comes from the method below."""
        main, discriminator = nets["main"].still(), nets["discriminator"]

        def score(x: Tensor) -> Tensor:
            logits: Tensor = discriminator(main.features(x)).squeeze(1)
            return logits

        fake = nets["generator"].still()(batch["noise"])
        loss = self.loss(nets, batch, aux) + F.softplus(-score(batch.x)).mean() + F.softplus(score(fake)).mean()
        if not self.penalty:
            return loss
        return loss + self.penalty * gradient_penalty(score, between(batch.x, fake, batch["place"]))

    def generator_loss(self, nets: Mapping[str, Any], batch: Batch, aux: Aux) -> Tensor:
        """Return Eq. (2)."""
        scores: Tensor = nets["discriminator"](nets["main"].still().features(nets["generator"](batch["noise"])))
        return F.softplus(-scores).mean()

    def scores(self, client: Party, data: Samples) -> Tensor:
        """Return D_k(x) of some samples: how much they are like the client's own."""
        main: Any = client.main
        found = pass_over(main, data, lambda x, _: client.models["discriminator"](main.features(x)).sigmoid())
        return torch.cat(found).squeeze(1)
