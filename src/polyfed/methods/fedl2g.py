"""FedL2G: Learning to Guide Local Training in Heterogeneous Federated Learning.

Zhang, Liu, Hua, Cao, Yang, 2024. https://arxiv.org/abs/2410.06490

Guiding vectors, one for each class, pull the logits (or features) of clients of any architecture, as FedProto's
prototypes do; but they are trained so that one guided step lowers the client's loss on samples that it does not train
on. A client keeps such a quiz set Q apart from its study set S and trains on S with

    L(w; X, Y)  =  CE(h(X; w), Y) + MSE(o(X; w), V[Y]),      o: logits or features, size D                     (1)

Then, with a batch (X, Y) of n samples of S and the network as it is, it tells how the guides should move:

    w'  =  w - eta · grad_w L(w; X, Y),      G  =  d CE(w'; Q) / dV                                            (2)

The server steps along the mean of G, V <- V - eta_s G; before the rounds clients only tell G.

Deviations:
    Quiz sets are drawn at random (released: the first samples in storage order); training batches are new in every
    epoch, with all samples. With fewer than 5 batches a fifth of the samples is the quiz; a single sample is both.
    Gradients of clients are clipped only as the run says (`training.clip`; theirs: 100).
    A row of zeros counts as a gradient, not as an absent class.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from polyfed.core.fields import AtLeastOne, Count, NotNegative, Positive
from polyfed.core.looking import gradient_through_a_step
from polyfed.core.message import Message
from polyfed.core.method import EVALUATE, Combination, Local, Method, Plan, Step
from polyfed.core.nets import features_and_logits
from polyfed.core.party import ClientInfo, Context, Party
from polyfed.core.prototypes import class_numbers, mean_prototypes, spread
from polyfed.core.rng import generator
from polyfed.core.samples import Samples, drawn, set_apart
from polyfed.core.stage import Aux, Batch, Stage, learning_rate
from polyfed.core.traffic import Traffic

GUIDE = Step("guide", who="all")
LENGTH = "([form == 'logit']*C + [form == 'feature']*F)"  # numbers of a guide
GUIDES = Traffic(f"4*C*{LENGTH}", f"C_m*(4*{LENGTH} + c)")


@dataclass(frozen=True)
class FedL2G(Method):
    """Exchange guiding vectors and their gradients.

    Parameters
    ----------
    form
        What is guided: `logit` (vectors of C numbers; any networks) or `feature` (features of one size).
    guide_weight
        Weight of the MSE in Eq. (1); 0 gives local training on the study set exactly.
    server_lr
        Step eta_s of the guides (None: 0.1 for logits, 100 for features); 0: they stay as drawn.
    server_clip
        Limit of the norm of the mean G.
    warm_up
        Exchanges before the rounds, in which clients tell G and do not train.
    quiz_batches, study_batches
        Batches in the quiz set Q, and in the sample (X, Y) of Eq. (2).
    """

    name: ClassVar[str] = "fedl2g"
    paper: ClassVar[str] = "Zhang et al. 2024"
    family: ClassVar[str] = "prototypes"
    sends: ClassVar[str] = "the gradient of its loss for the guiding vector of each class in a batch"
    combines: ClassVar[Mapping[str, Combination]] = {"data/gradients": "classes"}
    traffic: ClassVar[Mapping[str, Traffic]] = {"main": GUIDES, "guide": GUIDES}

    form: Literal["logit", "feature"] = "logit"
    guide_weight: NotNegative = 1.0
    server_lr: NotNegative | None = None
    server_clip: Positive = 100.0
    warm_up: Count = 50
    quiz_batches: AtLeastOne = 1
    study_batches: AtLeastOne = 1

    def requirements(self) -> frozenset[str]:
        """Features need one size."""
        return frozenset({"feature_dim", "classes"} if self.form == "feature" else {"classes"})

    def plan(self) -> Plan:
        """Warm up the guides, then train and guide."""
        return Plan(before=(GUIDE,) * self.warm_up)

    # --- server ---

    def setup_server(self, server: Party, infos: Mapping[int, ClientInfo], ctx: Context) -> None:
        """Draw the guides V from N(0, 1)."""
        size = ctx.feature_dim if self.form == "feature" else ctx.num_classes
        server.memory["guides"] = torch.randn(ctx.num_classes, size, generator=ctx.rng("guides")).to(ctx.device)

    def send(self, server: Party, info: ClientInfo, step: Step, ctx: Context) -> Message:
        """Send V; networks predict without it."""
        return Message() if step.name == EVALUATE.name else Message(data={"guides": server.memory["guides"]})

    def fuse(self, server: Party, replies: Mapping[int, Message], step: Step, ctx: Context) -> None:
        """Take V - eta_s G, with the mean of each row of G over the clients that had the class."""
        told = ({**reply.data, "prototypes": reply.data["gradients"]} for reply in replies.values())
        guides: Tensor = server.memory["guides"]
        mean, _ = spread(mean_prototypes(told, ctx.num_classes, "uniform"), *guides.shape)
        rate = self.server_lr if self.server_lr is not None else 0.1 if self.form == "logit" else 100.0
        scale = (self.server_clip / mean.norm().clamp(min=1e-12)).clamp(max=1.0)
        server.memory["guides"] = guides - rate * scale * mean.to(guides)

    # --- client ---

    def guided_loss(self, net: Any, x: Tensor, y: Tensor, guides: Tensor) -> Tensor:
        """Return Eq. (1)."""
        o, logits = features_and_logits(net, x) if self.form == "feature" else 2 * (net(x),)
        loss = F.cross_entropy(logits, y)
        return loss if self.guide_weight == 0 else loss + self.guide_weight * (o - guides[y]).pow(2).mean()

    def loss(self, nets: Mapping[str, Any], batch: Batch, aux: Aux) -> Tensor:
        """Return Eq. (1) on a batch of the study set."""
        return self.guided_loss(nets["main"], batch.x, batch.y, aux["guides"])

    def local(self, client: Party, step: Step, ctx: Context) -> Local:
        """Train on the study set, then tell how the guides should move."""
        guides = client.inbox.data["guides"].to(ctx.device)
        study, quiz = self.divided(client.train, client.id, ctx)
        if step.name == "main":
            yield Stage(self.loss, data=study, aux={"guides": guides})
        told = int(client.memory.get("told", 0))  # the round is 0 in all of the warm-up: no two draws may be the same
        client.memory["told"] = told + 1
        batch = drawn(study, self.study_batches * ctx.training.batch_size, ctx.rng(f"study/{told}", client))
        gradient, present = self.gradient(client, batch, quiz, guides, ctx)
        return Message(data={"gradients": gradient[present], "classes": class_numbers(present, ctx.num_classes)})

    def divided(self, data: Samples, client: int, ctx: Context) -> tuple[Samples, Samples]:
        """Return study set and quiz set, the same in all rounds."""
        wanted, n = self.quiz_batches * ctx.training.batch_size, len(data)
        size = wanted if n >= 5 * ctx.training.batch_size and wanted < n else max(1, n // 5)
        return set_apart(data, size, generator(ctx.seed, "quiz", 0, client))

    def gradient(self, client: Party, study: Samples, quiz: Samples, v: Tensor, ctx: Context) -> tuple[Tensor, Tensor]:
        """Return G [C, D] and the classes of the study batch, Eq. (2); the network stays as it is."""
        eta = learning_rate(ctx.training, ctx.round, 0, ctx.rounds)
        asked = quiz, lambda net, x, y: F.cross_entropy(net(x), y)
        purpose = f"guide/{client.memory.get('told', 0)}"
        found = gradient_through_a_step(client, (study, self.guided_loss), asked, v, eta, ctx, purpose)
        return found, study.labels().to(ctx.device).unique()
