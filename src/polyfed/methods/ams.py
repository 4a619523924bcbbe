"""AMS: Investigating Neuron Disturbing in Fusing Heterogeneous Neural Networks.

Zhang, Zhang, 2022. https://arxiv.org/abs/2210.12974

Clients upload their networks once. The server does not mix them: for each input it asks all of them and believes the
one with the largest logit (its "absolute confidence"), which is far larger on classes that a network was trained on.
Top-k sums the logits of the k most confident networks; the gap between top-1 and the sum of all shows how much the
networks disturb each other in the last layer alone. Any architectures, one set of labels.

Deviations:
    The paper names ways to make AMS cheaper (distillation with unlabeled data or none, choosing clients, choosing by
    the first layer) without details; `distill`, `select` and `confidence` are our reading of them.
    `normalize` and `mask_absent` are not in the paper. With `mask_absent` a network abstains from classes it has no
    samples of; among several chosen networks only those that know a class are summed for it.
    The server asks a client that is no network about every input, as in the ensemble; its logits are log-probabilities.
    The fused predictor is not sent back; clients keep their own networks, measured under `own`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch

from polyfed.core.errors import InputError
from polyfed.core.fields import AtLeastOne, Count, NotNegative, Positive
from polyfed.core.message import Message
from polyfed.core.method import Step
from polyfed.core.party import ClientInfo, Context, Party
from polyfed.core.passes import logits_of
from polyfed.core.stage import Stage
from polyfed.core.traffic import Traffic
from polyfed.fusion.choosing import choose
from polyfed.fusion.distill import Distillation, distillation_stage, make_student
from polyfed.fusion.networks import Selection
from polyfed.methods.oneshot import OneShot
from polyfed.ops.selection import TEMPERATURES, fit_temperature

UPLOADED = (  # bytes of a network, its samples, its label counts, and its temperature
    "4*(P + B) + 8 + [mask_absent or select == 'greedy' or distill == 'zero_shot']*4*C + [normalize == 'temperature']*8"
)


@dataclass(frozen=True)
class AMS(OneShot):
    """Believe the most confident network.

    Parameters
    ----------
    top_k
        How many of the most confident networks are summed: 1 is AMS-top1; 0 or `all` is AMS-full, which has the same
        labels as the mean of all logits.
    normalize
        Put the networks' logits on a common scale first: `temperature` (each client fits one number on its validation
        data, or training data if it has none), `zscore` (over the classes of each input), or `none`.
    mask_absent
        A network has no say about classes its client has no samples of.
    confidence
        What is compared: the largest `logit`, or (with top_k 1) the norm or the maximum of the first layer's
        activations, `first_norm` and `first_max`: then only the chosen network is run to its end.
    select, keep
        Keep only some networks: `greedy` adds the one with the most labels not yet covered, `cluster` groups them by
        their outputs on public data and keeps the one with most samples of each group; at most `keep` networks
        (0: no limit). `all` keeps everything.
    distill, student
        Distil AMS into one small model: `unlabeled` with public data, `zero_shot` with inputs made from the networks.
    distill_temperature, distill_epochs, distill_lr
        Of the distillation, T²·KL(teacher || student); a temperature of 0 stands for 2, or 20 for `zero_shot`.
        Batches are as large as the run's.
    impressions, impression_steps
        For `zero_shot`: inputs for each class and network, and optimization steps.
    """

    name: ClassVar[str] = "ams"
    paper: ClassVar[str] = "Zhang and Zhang 2022"
    needs: ClassVar[frozenset[str]] = frozenset({"builds", "classes"})
    sends: ClassVar[str] = "the trained weights and the number of samples, once"
    traffic: ClassVar[Mapping[str, Traffic]] = {"main": Traffic(up=UPLOADED)}

    top_k: Count | Literal["all"] = 1
    normalize: Literal["none", "temperature", "zscore"] = "none"
    mask_absent: bool = False
    confidence: Literal["logit", "first_norm", "first_max"] = "logit"
    select: Literal["all", "greedy", "cluster"] = "all"
    keep: Count = 0
    distill: Literal["none", "unlabeled", "zero_shot"] = "none"
    student: str = "mlp:2"
    distill_temperature: NotNegative = 0.0
    distill_epochs: AtLeastOne = Distillation.epochs
    distill_lr: Positive = Distillation.lr
    impressions: AtLeastOne = Distillation.impressions
    impression_steps: AtLeastOne = Distillation.impression_steps

    def check(self) -> None:
        """Refuse choices that do not go together."""
        super().check()
        early = f"{self.name}: confidence='{self.confidence}'"
        if self.confidence != "logit" and self.top_k != 1:
            raise InputError(f"{early} chooses one network, so top_k must be 1.")
        if self.confidence != "logit" and self.normalize != "none":
            raise InputError(f"{early} does not compare logits, so normalize must be 'none'.")
        if self.select == "cluster" and self.keep < 1:
            raise InputError(f"{self.name}: select='cluster' needs keep, the number of groups.")

    def requirements(self) -> frozenset[str]:
        """Distillation and clustering need public data, the first layer a model that can be cut there."""
        public = {"public"} if self.distill == "unlabeled" or self.select == "cluster" else set()
        return self.needs | public | ({"split3"} if self.confidence != "logit" else set())

    def takes_learners(self) -> bool:
        """Logits are compared, whoever gives them; a first layer and inputs made by gradients need networks."""
        return self.distill != "zero_shot" and self.confidence == "logit"

    def tells_counts(self) -> bool:
        """Masks, greedy choice and data impressions need to know which labels a client has."""
        return self.mask_absent or self.select == "greedy" or self.distill == "zero_shot"

    def beyond_training(self) -> str | None:
        """Name the temperature, which is fitted to samples."""
        return "a temperature fitted to their samples" if self.normalize == "temperature" else None

    def upload(self, client: Party, ctx: Context) -> Message:
        """Return the network, the number of samples, and the fitted temperature where one is used."""
        message = super().upload(client, ctx)
        message.meta["samples"] = len(client.train)
        if self.normalize == "temperature":
            known = client.calibration
            message.meta["temperature"] = fit_temperature(logits_of(client.main, known), known.labels().to(ctx.device))
        return message

    def numbers(self, info: ClientInfo, ctx: Context) -> dict[str, tuple[float, float]]:
        """Return between what a temperature is fitted."""
        return {"temperature": TEMPERATURES}

    def setup_server(self, server: Party, infos: Mapping[int, ClientInfo], ctx: Context) -> None:
        """Build the student, if AMS is to be distilled."""
        if self.distill != "none":
            student = make_student(self.student, ctx.input_shape, ctx.num_classes, ctx.seed)
            server.models["main"] = student.to(ctx.device)

    def fuse(self, server: Party, replies: Mapping[int, Message], step: Step, ctx: Context) -> None:
        """Keep the uploads (or some of them), and distill them if asked for."""
        super().fuse(server, replies, step, ctx)
        if self.select != "all":
            held, networks, counts = self.held(server), self.networks(server, ctx), self.counts(server)
            samples, public = self.about(server, "samples"), server.data.public
            kept = [held[j] for j in choose(networks, self.select, self.keep or None, counts, samples, public)]
            self.keep_only(server, kept)
            ctx.log("kept", kept)
        if self.distill != "none":
            ctx.log("distill_loss", ctx.run(self.distillation(server, ctx), server, "distill").loss)

    def make_fused(self, server: Party, ctx: Context) -> torch.nn.Module:
        """Return `sum over the k most confident j of Z[j]`, ties to the lowest client."""
        present = torch.stack(self.about(server, "counts")) > 0 if self.mask_absent else None
        temperatures = self.about(server, "temperature") if self.normalize == "temperature" else None
        k = None if self.top_k in (0, "all") else int(self.top_k)
        return Selection(self.networks(server, ctx), k, self.normalize, temperatures, present, self.confidence)

    def distillation(self, server: Party, ctx: Context) -> Stage:
        """Return the training of the student: with public data, or with inputs made from the networks."""
        sizes = ctx.training.batch_size, self.impressions, self.impression_steps
        options = Distillation(self.distill_temperature, self.distill_epochs, self.distill_lr, *sizes)
        public = server.public if self.distill == "unlabeled" else None
        teacher, networks, counts = self.fused(server, ctx), self.networks(server, ctx), self.counts(server)
        rngs = [ctx.rng("impressions", client) for client in self.held(server)]
        return distillation_stage(teacher, networks, public, counts, ctx.input_shape, options, rngs)
