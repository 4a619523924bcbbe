"""DaFKD: Domain-aware Federated Knowledge Distillation.

Wang, Li, Xu, Li, Zhan, Zeng, CVPR 2023.
https://openaccess.thecvf.com/content/CVPR2023/html/Wang_DaFKD_Domain-Aware_Federated_Knowledge_Distillation_CVPR_2023_paper.html

A network knows only the domain that it was trained on. Beside its classifier each client trains a discriminator D_k, a
linear layer on the same features f_k, which tells its own inputs from those of a generator G that all clients train
together. On generated samples the server then distills the ensemble into the average, each network by its
discriminator's word:

    client, model and D:  CE + BCE(D(x), 1) + BCE(D(G(e)), 0) + gp · mean (||grad_x D(x~)|| - 1)²        (1)
    client, G:            BCE(D(G(e)), 1)                                                                (2)
    a_k(x) = D_k(x) / sum_j D_j(x),  teacher(x) = sum_k a_k(x) z_k(x)                                    (3)
    L = T² · KL(softmax(teacher / T) || softmax(student / T)),  on N samples of G                        (4)

D_k never leaves its client: the scores D_k(x) do. Samples travel as the seed of their noise. `dafkd_hetero` (FedFD's
tables) does the same with HeteroFL's slices.

Deviations:
    Terms of Eq. (1) and (2) run through all local epochs of their rounds (as released: the first five epochs, which
    were all). x~ lies between x and G(e), at a random place; the norm is that of the whole slope (as released: at each
    pixel, over the channels).
    Generated samples move no BatchNorm statistics of the clients' networks.
    Eq. (4) is a mean over the batch; the released one also over classes, which Adam does not feel (SGD, of
    `dafkd_hetero`, does: its steps are C times as large).
    Where all scores of a sample are 0, weights are equal (as released: there is no teacher).
    G makes inputs as networks see them, after scaling; vectors, too.
    There is nothing to distill on before G was trained: not in the first round (as released).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from polyfed.core.distill import distill_held
from polyfed.core.fields import AtLeastOne, Count, NotNegative, OptimizerName, PartShare, Positive
from polyfed.core.message import Message
from polyfed.core.method import Combination, Local, Step
from polyfed.core.party import ClientInfo, Context, Party, load_state
from polyfed.core.passes import logits_of, pass_over
from polyfed.core.rng import seed_of
from polyfed.core.samples import Samples
from polyfed.core.settings import training_of
from polyfed.core.stage import Aux, Batch, Draw, Stage, Update
from polyfed.core.traffic import Symbol, Traffic, model_size
from polyfed.core.uploads import uploaded_network
from polyfed.core.views import largest_first
from polyfed.methods.fedavg import WEIGHTS, FedAvg
from polyfed.methods.generating import Generating
from polyfed.models.generators import generated_samples, input_generator
from polyfed.ops.aggregate import mean_state
from polyfed.ops.penalty import between, gradient_penalty

GENERATED = "[G > 0]*(4*G + 8)"  # bytes of the generator and the seed of its noise


@dataclass(frozen=True)
class DaFKD(Generating, FedAvg):
    """FedAvg with distillation of an ensemble weighted by discriminators.

    Parameters
    ----------
    discriminator_rounds, generator_rounds
        Discriminators learn in so many first rounds, Eq. (1), the generator in so many, Eq. (2).
    penalty
        Weight gp of the gradient penalty.
    noise_dim, width, generator_lr
        Sizes of G (noise, channels of its last hidden layer) and its learning rate (Adam).
    samples
        N: samples that are scored and distilled on in a round.
    temperature
        T of Eq. (4).
    distill_epochs, distill_batch, distill_lr, distill_optimizer, distill_momentum
        The server's training on them; with 0 epochs and both `rounds` 0, FedAvg exactly (HeteroFL, in its form).
    view, weighting, buffers, pretrain_epochs
        As in FedAvg, for clients of one architecture.
    """

    name: ClassVar[str] = "dafkd"
    paper: ClassVar[str] = "Wang et al. 2023"
    family: ClassVar[str] = "distillation"
    needs: ClassVar[frozenset[str]] = frozenset({"same_arch"})
    sends: ClassVar[str] = "model weights, a generator, scores of generated samples, the number of samples"
    shares: ClassVar[frozenset[str]] = frozenset({"main", "generator"})
    combines: ClassVar[Mapping[str, Combination]] = dict.fromkeys(
        ("params/main", "params/generator", "data/scores"), "apart"
    )  # also teachers
    traffic: ClassVar[Mapping[str, Traffic]] = {
        **FedAvg.traffic,
        "main": Traffic(f"{WEIGHTS} + {GENERATED}", f"{WEIGHTS} + 8 + [G > 0]*4*(G + samples)"),
    }
    symbols: ClassVar[Mapping[str, Symbol]] = {"G": model_size("generator", "numbers of the generator")}

    discriminator_rounds: Count = 3
    generator_rounds: Count = 5
    penalty: NotNegative = 0.3
    noise_dim: AtLeastOne = 100
    width: AtLeastOne = 32
    generator_lr: Positive = 1e-3
    samples: AtLeastOne = 640
    temperature: Positive = 10.0
    distill_epochs: Count = 5
    distill_batch: AtLeastOne = 128
    distill_lr: Positive = 1e-5
    distill_optimizer: OptimizerName = "adam"
    distill_momentum: PartShare = 0.0

    def requirements(self) -> frozenset[str]:
        """Need features, on which discriminators sit, and networks that the server can build."""
        return super().requirements() | {"features", "builds", "classes"}

    @property
    def generates(self) -> bool:
        """Whether anything of Eq. (1), (2) or (4) is done."""
        return bool(self.distill_epochs or self.discriminator_rounds or self.generator_rounds)

    def build_generator(self, ctx: Context) -> nn.Module:
        """Build G, a generator of inputs."""
        return input_generator(self.noise_dim, ctx.input_shape, self.width)

    # --- server ---

    def send(self, server: Party, info: ClientInfo, step: Step, ctx: Context) -> Message:
        """Send w, G, and the seed of the samples to be scored."""
        message = super().send(server, info, step, ctx)
        if step.name == "main" and self.generates:
            self.put_generator(server, message)
            message.meta["noise"] = noise_seed(ctx)
        return message

    def refine(self, server: Party, replies: Mapping[int, Message], ctx: Context) -> None:
        """Distill the uploaded networks into their average, Eq. (4); then average the generators."""
        if not any("scores" in reply.data for reply in replies.values()):
            return  # pre-training, or all of it is switched off
        generator = server.models["generator"]
        if self.distill_epochs and ctx.round > 1:
            data = generated_samples(generator, noise_seed(ctx), self.samples, self.noise_dim)  # those that were scored
            answers = torch.stack([logits_of(uploaded_network(k, r, data, ctx), data) for k, r in replies.items()])
            scores = torch.stack([reply.data["scores"].to(answers) for reply in replies.values()])
            self.distill_into(server, data, weighted_teacher(answers, scores), ctx)
        states = (reply.params["generator"] for reply in replies.values())
        load_state(generator, mean_state(states, [self.weight(reply) for reply in replies.values()]))

    def distill_into(self, server: Party, data: Samples, targets: Tensor, ctx: Context) -> None:
        """Fit the average, as the largest network, to the teacher, where it stays among the shared tensors."""
        largest = largest_first(ctx.blueprints)[0]
        held, student = self.held(server, largest, ctx), ctx.replica(largest.name)
        ctx.log("distill_loss", distill_held(self, held, student, data, targets, ctx))
        self.refresh(server, ctx)

    # --- client ---

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
        made_with = training_of(self, "generator", ctx.training, optimizer="adam")
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

    def beyond_training(self) -> str | None:
        """Not only weights leave."""
        return self.sends

    def local(self, client: Party, step: Step, ctx: Context) -> Local:
        """Train; return the shared tensors, the generator, and the discriminator's scores of the round's samples."""
        if "noise" not in client.inbox.meta:
            return (yield from super().local(client, step, ctx))
        # The samples are those of the generator as it was received: training may move it.
        seed = int(client.inbox.meta["noise"])
        data = generated_samples(client.models["generator"], seed, self.samples, self.noise_dim)
        reply = (yield from super().local(client, step, ctx)) or Message()
        self.put_generator(client, reply)
        main: Any = client.main
        scores = pass_over(main, data, lambda x, _: client.models["discriminator"](main.features(x)).sigmoid())
        reply.data["scores"] = torch.cat(scores).squeeze(1)
        return reply


def noise_seed(ctx: Context) -> int:
    """Return the seed of this round's generated samples."""
    return seed_of(ctx.seed, "generated-samples", ctx.round)


def weighted_teacher(answers: Tensor, scores: Tensor) -> Tensor:
    """Return Eq. (3) from logits `[K, N, C]` and scores `[K, N]`; equal weights where all scores are 0."""
    total = scores.sum(0)
    weights = torch.where(total > 0, scores / total, torch.full_like(scores, 1 / len(scores)))
    return (weights.unsqueeze(2) * answers).sum(0)
