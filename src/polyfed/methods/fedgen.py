"""FedGen: Data-Free Knowledge Distillation for Heterogeneous Federated Learning.

Zhu, Hong, Zhou, ICML 2021. https://arxiv.org/abs/2105.10056

The server trains a small generator G of *features*: for noise e and a label y, features that the heads h_k of all
uploaded networks take for y. Clients train with generated features beside their own data, and so hear of the others'
data without any data at the server:

    r_k(y) = n_ky / sum_j n_jy,  over this round's clients                                              (1)
    D(e, G) = exp(-mean_ij ||e_i - e_j||² · |G_i - G_j|),  both distances as means over their numbers    (2)
    min_G  mean_{y,e} sum_k r_k(y) · CE(h_k(G(e, y)), y) + diversity · D                                (3)
    client:  CE(h(f(x)), y) + B_g/B · alpha_t · CE(h(G(e, y')), y') + beta_t · KL(h(G(e, y)) || h(f(x)))  (4)

with y' uniform over the labels known so far and alpha_t = max(1e-4, alpha · decay^t). `share="model"` averages whole
networks, as the paper does; `share="head"` only heads, for clients of any architecture with features of one size.

Deviations:
    The printed objective of G has no D; the released one has, and also a term against the global network with weight 0,
    which is not offered. Terms of Eq. (4) are not switched off after 20 local epochs.
    n_ky are the client's samples, and each generated sample has the share of its own label (as released: one more than
    the samples seen while training, and the mean share of the batch).
    Labels are drawn for G if some client of the round holds more than one sample of them (if there is no such label,
    any that is held). y' is drawn from all labels that G was ever trained on: their numbers travel.
    FedFD's form on HeteroFL's slices (first outputs of G for narrow clients) is not offered.
    G's optimizer is new each round. G travels once it is trained: not in the first round.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar, Literal, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from polyfed.core.errors import InputError
from polyfed.core.fields import AtLeastOne, AtLeastTwo, NotNegative, Positive, SomeShare
from polyfed.core.message import Message
from polyfed.core.method import EVALUATE, Combination, Local, Step
from polyfed.core.party import ClientInfo, Context, Party
from polyfed.core.privacy import Releases
from polyfed.core.prototypes import class_numbers
from polyfed.core.releases import class_counts
from polyfed.core.samples import Samples
from polyfed.core.settings import training_of
from polyfed.core.stage import Aux, Batch, Draw, Stage
from polyfed.core.traffic import Symbol, Traffic, model_size
from polyfed.methods.fedavg import FedAvg
from polyfed.methods.generating import Generating
from polyfed.models.generators import FeatureGenerator
from polyfed.ops.distance import diversity, kl_divergence

SHARED = "4*([share == 'model']*(P + [buffers == 'average']*B) + [share == 'head']*H)"  # bytes of w or h


@dataclass(frozen=True)
class FedGen(Generating, FedAvg):
    """FedAvg, of networks or of heads, with generated features beside the clients' data.

    Parameters
    ----------
    share
        What is averaged: the whole `model`, or the `head` (with `feature_dim`, clients of any architecture).
    alpha, beta
        Weights of the two terms of Eq. (4); both 0 give FedAvg exactly (`head`: LG-FedAvg).
    decay
        alpha, beta and the learning rate of G are multiplied by it after every round.
    diversity
        Weight of D in Eq. (3).
    noise_dim, hidden
        Sizes of G: noise (uniform in [0, 1]) and hidden layer.
    generator_steps, generator_batch, generator_lr, generator_weight_decay
        G's training (Adam); clients draw batches of generated features of the same size B_g.
    view, weighting, buffers, pretrain_epochs
        As in FedAvg; with `share="head"` the view names the head (`auto`: `shared:head`).
    """

    name: ClassVar[str] = "fedgen"
    paper: ClassVar[str] = "Zhu et al. 2021"
    family: ClassVar[str] = "distillation"
    needs: ClassVar[frozenset[str]] = frozenset({"feature_dim", "builds", "classes"})
    sends: ClassVar[str] = "model weights (or those of the head) and the number of samples of each class"
    shares: ClassVar[frozenset[str]] = frozenset({"main", "generator"})
    combines: ClassVar[Mapping[str, Combination]] = {"params/main": "apart"}  # also a teacher
    traffic: ClassVar[Mapping[str, Traffic]] = {
        "main": Traffic(f"{SHARED} + [C_m > 0]*4*G + C_m*c", f"{SHARED} + 8 + [G > 0]*4*C"),
        "pretrain": Traffic(SHARED, f"{SHARED} + 8 + [G > 0]*4*C"),
    }
    symbols: ClassVar[Mapping[str, Symbol]] = {"G": model_size("generator", "numbers of the generator")}

    share: Literal["model", "head"] = "model"
    alpha: NotNegative = 10.0
    beta: NotNegative = 10.0
    decay: SomeShare = 0.98
    diversity: NotNegative = 1.0
    noise_dim: AtLeastOne = 32
    hidden: AtLeastOne = 256
    generator_steps: AtLeastOne = 50
    generator_batch: AtLeastTwo = 32  # the generator has BatchNorm
    generator_lr: Positive = 3e-4
    generator_weight_decay: NotNegative = 1e-2

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

    def build_generator(self, ctx: Context) -> nn.Module:
        """Build G, a generator of features: they have one size everywhere."""
        size = cast(int, next(iter(ctx.blueprints.values())).feature_dim)
        return FeatureGenerator(self.noise_dim, ctx.num_classes, self.hidden, size)

    # --- server ---

    def send(self, server: Party, info: ClientInfo, step: Step, ctx: Context) -> Message:
        """Send w (or h), and G with the labels that it knows."""
        message = super().send(server, info, step, ctx)
        if step.name != EVALUATE.name and "labels" in server.memory:
            self.put_generator(server, message)
            message.data["labels"] = class_numbers(server.memory["labels"], ctx.num_classes)
        return message

    def fuse(self, server: Party, replies: Mapping[int, Message], step: Step, ctx: Context) -> None:
        """Train G on the uploaded heads, then average."""
        if self.generates:
            self.train_generator(server, replies, ctx)
        super().fuse(server, replies, step, ctx)

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
            draws={"noise": Draw((None, self.noise_dim), "uniform")},
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
            logits = nets[architecture].replaced(aux["heads"][client]).eval().head(z)
            share = aux["shares"][client].to(z)[batch.y]
            loss = loss + (share * F.cross_entropy(logits, batch.y, reduction="none")).mean()
        return loss

    # --- client ---

    def setup_client(self, client: Party, ctx: Context) -> None:
        """Give the client a place for G."""
        self.add_generator(client, ctx)

    def stage(self, client: Party, ctx: Context) -> Stage:
        """Train with Eq. (4) as soon as there is a generator."""
        stage = super().stage(client, ctx)
        if "generator" not in client.inbox.params:
            return stage
        faded = self.decay ** max(ctx.round - 1, 0)
        ratio = self.generator_batch / (stage.training or ctx.training).batch_size
        return replace(
            stage,
            loss=self.generative_loss,
            aux={
                "alpha": torch.tensor(ratio * max(1e-4, self.alpha * faded)),
                "beta": torch.tensor(max(1e-4, self.beta * faded)),
                "labels": client.inbox.data["labels"].long(),
            },
            draws={
                "noise": Draw((None, self.noise_dim), "uniform"),
                "drawn": Draw((self.generator_batch, self.noise_dim), "uniform"),
                "label": Draw((self.generator_batch,), "uniform"),
            },
        )

    def generative_loss(self, nets: Mapping[str, Any], batch: Batch, aux: Aux) -> Tensor:
        """Return Eq. (4); G is in prediction mode, and its answer for the sample's own label is no target to move."""
        main, generator = nets["main"], nets["generator"].eval()
        logits = main(batch.x)
        loss = F.cross_entropy(logits, batch.y)
        if self.alpha:
            number = aux["labels"].shape[0]
            drawn = aux["labels"][(batch["label"] * number).long().clamp(max=number - 1)]
            generated = generator.call("forward", batch["drawn"], drawn)
            loss = loss + aux["alpha"] * F.cross_entropy(main.head(generated), drawn)
        if self.beta:
            target = main.head(generator.call("forward", batch["noise"], batch.y)).detach()
            loss = loss + aux["beta"] * kl_divergence(logits, target)
        return loss

    def local(self, client: Party, step: Step, ctx: Context) -> Local:
        """Train, then return the shared tensors and the numbers of samples."""
        reply = yield from super().local(client, step, ctx)
        if self.generates and reply is not None:
            reply.data["counts"] = class_counts(client, ctx)
        return reply
