"""DaFKD: Domain-aware Federated Knowledge Distillation.

Wang, Li, Xu, Li, Zhan, Zeng, CVPR 2023.
https://openaccess.thecvf.com/content/CVPR2023/html/Wang_DaFKD_Domain-Aware_Federated_Knowledge_Distillation_CVPR_2023_paper.html

A network knows only the domain that it was trained on. Each client trains a discriminator D_k of its own domain, and a
generator G with all others, Eq. (1) and (2) of `discriminating.py`. On generated samples the server then distills the
ensemble into the average, each network by its discriminator's word:

    a_k(x) = D_k(x) / sum_j D_j(x),  teacher(x) = sum_k a_k(x) z_k(x)                                    (3)
    L = T² · KL(softmax(teacher / T) || softmax(student / T)),  on N samples of G                        (4)

D_k never leaves its client: the scores D_k(x) do. Samples travel as the seed of their noise. `dafkd_hetero` (FedFD's
tables) does the same with HeteroFL's slices.

Deviations:
    Those of `discriminating.py`; G makes inputs as networks see them, after scaling, vectors too.
    Eq. (4) is a mean over the batch; the released one also over classes, which Adam does not feel (SGD, of
    `dafkd_hetero`, does: its steps are C times as large).
    Where all scores of a sample are 0, weights are equal (as released: there is no teacher).
    There is nothing to distill on before G was trained: not in the first round (as released).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from polyfed.core.distill import distill_held
from polyfed.core.fields import AtLeastOne, Count, OptimizerName, PartShare, Positive
from polyfed.core.message import Message
from polyfed.core.method import Combination, Local, Step
from polyfed.core.party import ClientInfo, Context, Party
from polyfed.core.passes import logits_of
from polyfed.core.rng import seed_of
from polyfed.core.samples import Samples
from polyfed.core.traffic import Traffic
from polyfed.core.uploads import uploaded_network
from polyfed.core.views import largest_first
from polyfed.methods.discriminating import Discriminating
from polyfed.methods.fedavg import WEIGHTS, FedAvg

GENERATED = "[G > 0]*(4*G + 8)"  # bytes of the generator and the seed of its noise


@dataclass(frozen=True)
class DaFKD(Discriminating):
    """FedAvg with distillation of an ensemble weighted by discriminators.

    Parameters
    ----------
    samples
        N: samples that are scored and distilled on in a round.
    temperature
        T of Eq. (4).
    distill_epochs, distill_batch, distill_lr, distill_optimizer, distill_momentum
        The server's training on them; with 0 epochs and both `rounds` 0, FedAvg exactly (HeteroFL, in its form).
    discriminator_rounds, generator_rounds, penalty, noise_dim, width, generator_lr
        As in `discriminating.py`: the clients' half.
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

    samples: AtLeastOne = 640
    temperature: Positive = 10.0
    distill_epochs: Count = 5
    distill_batch: AtLeastOne = 128
    distill_lr: Positive = 1e-5
    distill_optimizer: OptimizerName = "adam"
    distill_momentum: PartShare = 0.0

    @property
    def generates(self) -> bool:
        """Whether anything of Eq. (1), (2) or (4) is done."""
        return bool(self.distill_epochs or self.discriminator_rounds or self.generator_rounds)

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
        if self.distill_epochs and ctx.round > 1:
            data = self.generated(server, noise_seed(ctx), self.samples)  # those that were scored
            answers = torch.stack([logits_of(uploaded_network(k, r, data, ctx), data) for k, r in replies.items()])
            scores = torch.stack([reply.data["scores"].to(answers) for reply in replies.values()])
            self.distill_into(server, data, weighted_teacher(answers, scores), ctx)
        self.average_generators(server, replies, [self.weight(reply) for reply in replies.values()])

    def distill_into(self, server: Party, data: Samples, targets: Tensor, ctx: Context) -> None:
        """Fit the average, as the largest network, to the teacher, where it stays among the shared tensors."""
        largest = largest_first(ctx.blueprints)[0]
        held, student = self.held(server, largest, ctx), ctx.replica(largest.name)
        ctx.log("distill_loss", distill_held(self, held, student, data, targets, ctx))
        self.refresh(server, ctx)

    # --- client ---

    def beyond_training(self) -> str | None:
        """Not only weights leave."""
        return self.sends

    def local(self, client: Party, step: Step, ctx: Context) -> Local:
        """Train; return the shared tensors, the generator, and the discriminator's scores of the round's samples."""
        if "noise" not in client.inbox.meta:
            return (yield from super().local(client, step, ctx))
        # The samples are those of the generator as it was received: training may move it.
        data = self.generated(client, int(client.inbox.meta["noise"]), self.samples)
        reply = (yield from super().local(client, step, ctx)) or Message()
        self.put_generator(client, reply)
        reply.data["scores"] = self.scores(client, data)
        return reply


def noise_seed(ctx: Context) -> int:
    """Return the seed of this round's generated samples."""
    return seed_of(ctx.seed, "generated-samples", ctx.round)


def weighted_teacher(answers: Tensor, scores: Tensor) -> Tensor:
    """Return Eq. (3) from logits `[K, N, C]` and scores `[K, N]`; equal weights where all scores are 0."""
    total = scores.sum(0)
    weights = torch.where(total > 0, scores / total, torch.full_like(scores, 1 / len(scores)))
    return (weights.unsqueeze(2) * answers).sum(0)
