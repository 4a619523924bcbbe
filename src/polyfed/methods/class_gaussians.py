"""Gaussians of classes: what CCVR and methods like it tell of features, and draw from.

Clients tell count, mean and covariance of the features of each class that they hold; pooled, they are those of all
features together (Eq. 1 and 2 in `ops/moments.py`), although no feature travels.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from torch import Tensor

from polyfed.core.fields import Count, NotNegative
from polyfed.core.message import Message
from polyfed.core.method import Combination
from polyfed.core.party import ClientInfo, Context, Party
from polyfed.core.places import Place
from polyfed.core.prototypes import packed_moments, unpacked_moments
from polyfed.core.releases import client_moments
from polyfed.core.samples import Samples
from polyfed.methods.fedavg import FedAvg
from polyfed.ops.moments import gaussian_samples, merged_moments, pooled_moments, with_covariance

MOMENTS = "4*F + c + [covariance == 'full']*4*F*F + [covariance == 'diag']*4*F"  # bytes of a class's moments
COMMON = "[covariance == 'shared']*4*F*F"  # bytes of a covariance for all classes


@dataclass(frozen=True)
class ClassGaussians(FedAvg):
    """FedAvg with the Gaussians of the classes' features.

    Parameters
    ----------
    covariance
        `full`, one for each class; `shared`, one for all; `diag`, variances only.
    samples_per_class
        Virtual features M_c that are drawn of a class (None: 500 up to ten classes, otherwise 1000).
    ridge
        Share of the mean variance that is added to a covariance that is not positive definite.
    """

    needs: ClassVar[frozenset[str]] = frozenset({"feature_dim", "classes"})
    combines: ClassVar[Mapping[str, Combination]] = {
        "params/main": "mean",
        "data/means": "classes",
        "data/covariance": "classes",
    }

    covariance: Literal["full", "shared", "diag"] = "full"
    samples_per_class: Count | None = None
    ridge: NotNegative = 1e-4

    def tell_moments(self, client: Party, ctx: Context) -> Message:
        """Return what a client tells of its features."""
        main: Any = client.main
        found = client_moments(client, ctx, lambda x: main.features(x), self.covariance)
        return Message(data=packed_moments(found, ctx.num_classes))

    def pool_moments(self, server: Party, replies: Mapping[int, Message], ctx: Context) -> dict[str, Tensor]:
        """Return, and remember, the moments of all features; classes that nobody held keep their last ones."""
        pooled = pooled_moments([unpacked_moments(reply.data) for reply in replies.values()], self.covariance)
        fresh, old = with_covariance(pooled, self.covariance), server.memory.get("statistics")
        known = merged_moments(unpacked_moments(old) if old else None, fresh, self.covariance)
        server.memory["statistics"] = packed_moments(known, ctx.num_classes, counts=False)
        return dict(server.memory["statistics"])

    def virtual_features(self, statistics: Mapping[str, Tensor], party: Party | None, ctx: Context) -> Samples:
        """Return features z ~ N(mu_c, S_c), alike many of each class, that a party (None: the server) draws."""
        wanted, gaussians = self.samples_per_class, unpacked_moments(statistics)
        count = wanted if wanted is not None else 500 if ctx.num_classes <= 10 else 1000
        features = gaussian_samples(gaussians, self.covariance, count, ctx.rng("virtual", party), self.ridge)
        return Samples(features, gaussians.classes.repeat_interleave(count))

    def places(self, server: Party, info: ClientInfo, message: Message, ctx: Context) -> dict[str, Place]:
        """Return where entries meet: a shared covariance belongs to no class."""
        found = super().places(server, info, message, ctx)
        if self.covariance == "shared" and "covariance" in message.data:
            found["data/covariance"] = Place("data/covariance", tuple(message.data["covariance"].shape))
        return found
