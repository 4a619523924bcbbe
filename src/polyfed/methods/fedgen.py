"""FedGen: Data-Free Knowledge Distillation for Heterogeneous Federated Learning.

Zhu, Hong, Zhou, ICML 2021. https://arxiv.org/abs/2105.10056

The server trains a small generator G of *features*: for noise e and a label y, features that the heads h_k of all
uploaded networks take for y (`feature_generating.py`). Clients train with generated features beside their own data, and
so hear of the others' data without any data at the server:

    r_k(y) = n_ky / sum_j n_jy,  over this round's clients                                              (1)
    D(e, G) = exp(-mean_ij ||e_i - e_j||² · |G_i - G_j|),  both distances as means over their numbers    (2)
    min_G  mean_{y,e} sum_k r_k(y) · CE(h_k(G(e, y)), y) + diversity · D                                (3)
    client:  CE(h(f(x)), y) + B_g/B · alpha_t · CE(h(G(e, y')), y') + beta_t · KL(h(G(e, y)) || h(f(x)))  (4)

with y' uniform over the labels known so far and alpha_t = max(1e-4, alpha · decay^t). `share="model"` averages whole
networks, as the paper does; `share="head"` only heads, for clients of any architecture with features of one size.
`fedgen_hetero` (FedFD's tables) does the same with HeteroFL's slices.

Deviations:
    The printed objective of G has no D; the released one has, and also a term against the global network with weight 0,
    which is not offered. Terms of Eq. (4) are not switched off after 20 local epochs.
    n_ky are the client's samples, and each generated sample has the share of its own label (as released: one more than
    the samples seen while training, and the mean share of the batch).
    Labels are drawn for G if some client of the round holds more than one sample of them (if there is no such label,
    any that is held). y' is drawn from all labels that G was ever trained on: their numbers travel.
    G's optimizer is new each round. G travels once it is trained: not in the first round.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from polyfed.core.errors import InputError
from polyfed.core.fields import NotNegative
from polyfed.core.method import Local, Step
from polyfed.core.party import Context, Party
from polyfed.core.privacy import Releases
from polyfed.core.releases import class_counts
from polyfed.core.stage import Aux, Batch, Draw, Stage
from polyfed.core.traffic import Traffic
from polyfed.methods.feature_generating import FeatureGenerating, answered
from polyfed.methods.fedavg import FedAvg
from polyfed.ops.distance import kl_divergence

SHARED = "4*([share == 'model']*(P + [buffers == 'average']*B) + [share == 'head']*H)"  # bytes of w or h
GENERATED, COUNTED = "[C_m > 0]*4*G + C_m*c", "8 + [G > 0]*4*C"  # bytes of G and its labels, of n_k and the n_ky


@dataclass(frozen=True)
class FedGen(FeatureGenerating, FedAvg):
    """FedAvg, of networks or of heads, with generated features beside the clients' data.

    Parameters
    ----------
    share
        What is averaged: the whole `model`, or the `head` (with `feature_dim`, clients of any architecture).
    alpha, beta
        Weights of the two terms of Eq. (4); both 0 give FedAvg exactly (`head`: LG-FedAvg).
    decay
        alpha, beta and the learning rate of G are multiplied by it after every round.
    diversity, noise_dim, hidden, generator_steps, generator_batch, generator_lr, generator_weight_decay
        Weight of D in Eq. (3), sizes and training of G; clients draw batches of generated features of its size B_g.
    view, weighting, buffers, pretrain_epochs
        As in FedAvg; with `share="head"` the view names the head (`auto`: `shared:head`).
    """

    name: ClassVar[str] = "fedgen"
    paper: ClassVar[str] = "Zhu et al. 2021"
    family: ClassVar[str] = "distillation"
    needs: ClassVar[frozenset[str]] = frozenset({"feature_dim"})
    sends: ClassVar[str] = "model weights (or those of the head) and the number of samples of each class"
    traffic: ClassVar[Mapping[str, Traffic]] = {
        "main": Traffic(f"{SHARED} + {GENERATED}", f"{SHARED} + {COUNTED}"),
        "pretrain": Traffic(SHARED, f"{SHARED} + {COUNTED}"),
    }

    share: Literal["model", "head"] = "model"
    alpha: NotNegative = 10.0
    beta: NotNegative = 10.0

    def check(self) -> None:
        """Refuse a view of more than the head."""
        super().check()
        if self.share == "head" and self.view != "auto" and not self.view.startswith("shared"):
            raise InputError(f"{self.name}: with share='head' the view is 'shared:head', or stays 'auto'.")

    @property
    def generates(self) -> bool:
        """Whether a term of Eq. (4) needs generated features."""
        return bool(self.alpha or self.beta)

    def releases(self) -> Releases:
        """Tell counts in every round, where there is a generator."""
        return Releases(each_round=int(self.generates))

    def wanted_view(self) -> str:
        """Return the view: of heads, or as in FedAvg."""
        return "shared:head" if self.share == "head" and self.view == "auto" else self.view

    def stage(self, client: Party, ctx: Context) -> Stage:
        """Train with Eq. (4) as soon as there is a generator."""
        stage = super().stage(client, ctx)
        if "generator" not in client.inbox.params:
            return stage
        faded = self.decay ** max(ctx.round - 1, 0)
        ratio = self.generator_batch / (stage.training or ctx.training).batch_size
        weights = {
            "alpha": torch.tensor(ratio * max(1e-4, self.alpha * faded)),
            "beta": torch.tensor(max(1e-4, self.beta * faded)),
            "labels": client.inbox.data["labels"].long(),
        }
        drawn = {"drawn": self.noise(self.generator_batch), "label": Draw((self.generator_batch,), "uniform")}
        return replace(
            stage, loss=self.generative_loss, aux={**stage.aux, **weights}, draws={"noise": self.noise(), **drawn}
        )

    def own_loss(self, nets: Mapping[str, Any], batch: Batch, aux: Aux) -> tuple[Tensor, Tensor]:
        """Return the logits of the client's samples, and their cross-entropy."""
        logits = nets["main"](batch.x)
        return logits, batch.loss(logits)

    def generative_loss(self, nets: Mapping[str, Any], batch: Batch, aux: Aux) -> Tensor:
        """Return Eq. (4); G is in prediction mode, and its answer for the sample's own label is no target to move."""
        main, generator = nets["main"], nets["generator"].eval()
        logits, loss = self.own_loss(nets, batch, aux)
        if self.alpha:
            number = aux["labels"].shape[0]
            drawn = aux["labels"][(batch["label"] * number).long().clamp(max=number - 1)]
            generated = generator.call("forward", batch["drawn"], drawn)
            loss = loss + aux["alpha"] * F.cross_entropy(answered(main, generated), drawn)
        if self.beta:
            target = answered(main, generator.call("forward", batch["noise"], batch.y)).detach()
            loss = loss + aux["beta"] * kl_divergence(logits, target)
        return loss

    def local(self, client: Party, step: Step, ctx: Context) -> Local:
        """Train, then return the shared tensors and the numbers of samples."""
        reply = yield from super().local(client, step, ctx)
        if self.generates and reply is not None and "samples" in reply.meta:
            reply.data["counts"] = class_counts(client, ctx)
        return reply
