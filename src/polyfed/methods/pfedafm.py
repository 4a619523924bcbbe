"""pFedAFM: Adaptive Feature Mixture for Batch-Level Personalization in Heterogeneous Federated Learning.

Yi, Yu, Ren, Wang, Liu, Li, 2024. https://arxiv.org/abs/2404.17847

Every client has a private extractor f_k and head h_k; a small common extractor g travels. Their features are mixed,
coordinate by coordinate, by a trainable vector a in [0, 1]^d before the private head. Private part and common extractor
are trained one after the other, each with the other fixed.

Deviations:
    The mixing vector has a learning rate of its own, so it steps after the private network on the same batch instead
    of together with it.
    A fixed extractor predicts as it would in use (BatchNorm with its running statistics).
    The common extractor gets features of the clients' size by a linear layer where its own are of another one; its head
    is left out.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, cast

import torch
from torch import Tensor, nn

from polyfed.core.fields import Count, NotNegative, Share
from polyfed.core.method import Local, Step
from polyfed.core.party import Context, Party
from polyfed.core.stage import Aux, Batch, Grads, Stage, Update
from polyfed.methods.proxies import Proxies
from polyfed.models import build, with_feature_dim


class Mixing(nn.Module):
    """The mixing vector a: `a·own + (1 - a)·common`."""

    def __init__(self, features: int, start: float) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.full((features,), start))

    def forward(self, own: Tensor, common: Tensor) -> Tensor:
        """Return the mixed features."""
        return self.a * own + (1 - self.a) * common


@dataclass(frozen=True)
class PFedAFM(Proxies):
    """Mix private and common features.

    Parameters
    ----------
    mixing
        Where the mixing vector a starts: 1 is the private extractor alone, 0 the common one alone.
    mixing_lr
        Learning rate of a (0.1 in the paper for clients of one architecture); 0 leaves a where it started, which at 1
        gives local training exactly.
    common_epochs
        Epochs of the second phase, in which the common extractor learns (None: as many as the run's; 0: none).
    proxy, weighting
        The common extractor g as a model string (without its head), and a client's weight in the mean.
    """

    name: ClassVar[str] = "pfedafm"
    paper: ClassVar[str] = "Yi et al. 2024"
    needs: ClassVar[frozenset[str]] = frozenset({"feature_dim"})
    sends: ClassVar[str] = "the weights of a small common feature extractor and the number of samples"

    weighting: Literal["samples", "uniform"] = "samples"
    mixing: Share = 1.0
    mixing_lr: NotNegative = 0.01
    common_epochs: Count | None = None

    def own_epochs(self, epochs: int, rounds: int) -> int:
        """Count those of the common extractor, too."""
        common = epochs if self.common_epochs is None else self.common_epochs
        return super().own_epochs(epochs + common, rounds)

    def build_proxy(self, ctx: Context) -> nn.Module:
        """Build the common extractor: a model that ends at its features."""
        model = with_feature_dim(build(self.proxy, ctx.input_shape, ctx.num_classes), ctx.feature_dim)
        model.head = nn.Identity()
        return model

    def setup_client(self, client: Party, ctx: Context) -> None:
        """Add the common extractor and the mixing vector."""
        super().setup_client(client, ctx)
        client.models["mixing"] = Mixing(cast(int, client.main.feature_dim), self.mixing).to(ctx.device)

    def serves(self, server: Party) -> bool:
        """Return False: an extractor does not predict."""
        return False

    def mixed_loss(self, nets: Mapping[str, Any], batch: Batch, aux: Aux) -> Tensor:
        """Return CE(h_k(a·f_k(x) + (1 - a)·g(x)))."""
        own, common = nets["main"].features(batch.x), nets["proxy"].eval()(batch.x)
        return batch.loss(nets["main"].head(nets["mixing"].call("forward", own, common)))

    def mixing_loss(self, nets: Mapping[str, Any], batch: Batch, aux: Aux) -> Tensor:
        """Return the same loss without moving the private network's statistics again."""
        return self.mixed_loss({**nets, "main": nets["main"].still()}, batch, aux)

    def common_loss(self, nets: Mapping[str, Any], batch: Batch, aux: Aux) -> Tensor:
        """Return CE(h_k(g(x)))."""
        return batch.loss(nets["main"].head(nets["proxy"](batch.x)))

    def local(self, client: Party, step: Step, ctx: Context) -> Local:
        """Train f_k, h_k and a with g fixed, then g with h_k fixed; return g."""
        updates = [Update((self.mixed_loss,), {"main": None})]
        if self.mixing_lr:
            rate = replace(ctx.training, lr=self.mixing_lr)
            updates.append(Update((self.mixing_loss,), {"mixing": None}, project=clamped, training=rate))
        yield Stage(updates=tuple(updates))
        if self.common_epochs != 0:
            yield Stage(self.common_loss, trainable={"proxy": None}, epochs=self.common_epochs)
        return self.reply(client)

    def predict(self, party: Party, x: Tensor, ctx: Context) -> Tensor:
        """Return h_k of the mixed features."""
        own: Any = party.main
        logits: Tensor = own.head(party.models["mixing"](own.features(x), party.models["proxy"](x)))
        return logits


def clamped(moved: Grads) -> Grads:
    """Return the mixing vector within [0, 1]."""
    return {"mixing": {"a": moved["mixing"]["a"].clamp(0.0, 1.0)}}
