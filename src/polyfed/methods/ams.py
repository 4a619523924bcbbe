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
    The fused predictor is not sent back; clients keep their own networks and are measured with them
    (under `own`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from polyfed.core.errors import InputError
from polyfed.core.fields import AtLeastOne, Count, NotNegative, Positive
from polyfed.core.message import Message
from polyfed.core.method import Step
from polyfed.core.nets import EVAL, FunctionalNet
from polyfed.core.party import ClientInfo, Context, Party
from polyfed.core.passes import logits_of
from polyfed.core.samples import Samples
from polyfed.core.stage import Aux, Batch, Stage
from polyfed.fusion.impressions import class_similarity, impressions, last_weight_name, soft_targets
from polyfed.methods.ensemble import CHUNK, OneShot
from polyfed.models import build
from polyfed.ops.distance import kl_divergence
from polyfed.ops.selection import (
    cluster_heads,
    fit_temperature,
    greedy_cover,
    normalized,
    top_k_scores,
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
        For `zero_shot`: inputs for each class and network, and optimisation steps.
    """

    name: ClassVar[str] = "ams"
    paper: ClassVar[str] = "Zhang and Zhang 2022"
    sends: ClassVar[str] = "the trained weights and the number of samples, once"

    top_k: Count | Literal["all"] = 1
    normalize: Literal["none", "temperature", "zscore"] = "none"
    mask_absent: bool = False
    confidence: Literal["logit", "first_norm", "first_max"] = "logit"
    select: Literal["all", "greedy", "cluster"] = "all"
    keep: Count = 0
    distill: Literal["none", "unlabeled", "zero_shot"] = "none"
    student: str = "mlp:2"
    distill_temperature: NotNegative = 0.0
    distill_epochs: AtLeastOne = 20
    distill_lr: Positive = 1e-3
    impressions: AtLeastOne = 20
    impression_steps: AtLeastOne = 1000

    def check(self) -> None:
        """Refuse choices that do not go together."""
        super().check()
        if self.confidence != "logit" and self.top_k != 1:
            raise InputError(f"{self.name}: confidence='{self.confidence}' chooses one network, so top_k must be 1.")
        if self.confidence != "logit" and self.normalize != "none":
            raise InputError(
                f"{self.name}: confidence='{self.confidence}' does not compare logits, so normalize must be 'none'."
            )
        if self.select == "cluster" and self.keep < 1:
            raise InputError(f"{self.name}: select='cluster' needs keep, the number of groups.")

    def requirements(self) -> frozenset[str]:
        """Distillation and clustering need public data, the first layer a model that can be cut there."""
        needs = set(self.needs)
        if self.distill == "unlabeled" or self.select == "cluster":
            needs.add("public")
        if self.confidence != "logit":
            needs.add("split3")
        return frozenset(needs)

    def tells_counts(self) -> bool:
        """Masks, greedy choice and data impressions need to know which labels a client has."""
        return self.mask_absent or self.select == "greedy" or self.distill == "zero_shot"

    # --- client ---

    def upload(self, client: Party, ctx: Context) -> Message:
        """Return the network, the number of samples, and the fitted temperature where one is used."""
        message = super().upload(client, ctx)
        message.meta["samples"] = len(client.train)
        if self.normalize == "temperature":
            held = client.data.validation
            known = held if held is not None and len(held) else client.train
            message.meta["temperature"] = fit_temperature(logits_of(client.main, known), known.labels().to(ctx.device))
        return message

    # --- server ---

    def setup_server(self, server: Party, infos: Mapping[int, ClientInfo], ctx: Context) -> None:
        """Build the student, if AMS is to be distilled."""
        if self.distill != "none":
            server.models["main"] = ctx.initialized(
                "student", lambda: build(self.student, ctx.input_shape, ctx.num_classes)
            )

    def fuse(self, server: Party, replies: Mapping[int, Message], step: Step, ctx: Context) -> None:
        """Keep the uploads (or some of them), and distill them if asked for."""
        super().fuse(server, replies, step, ctx)
        if self.select != "all":
            kept = {str(client) for client in self.chosen_clients(server, ctx)}
            server.memory["uploads"] = {c: upload for c, upload in server.memory["uploads"].items() if c in kept}
            ctx.log("kept", self.held(server))
        if self.distill != "none":
            self.distill_into_student(server, ctx)

    def chosen_clients(self, server: Party, ctx: Context) -> list[int]:
        """Return the clients whose networks are kept."""
        held = self.held(server)
        if self.select == "greedy":
            places = greedy_cover(torch.stack(self.about(server, "counts")), self.keep or None)
        else:
            with torch.no_grad():
                outputs = [self.network_outputs(server, x.to(ctx.device), ctx) for x, _ in server.public.chunks(CHUNK)]
            places = cluster_heads(torch.cat(outputs, dim=1), self.about(server, "samples"), self.keep)
        return [held[place] for place in places]

    def fused_scores(self, server: Party, x: Tensor, ctx: Context) -> Tensor:
        """Return AMS's scores, or the student's logits."""
        if self.distill != "none":
            logits: Tensor = server.main(x)
            return logits
        return self.ams_scores(server, x, ctx)

    def ams_scores(self, server: Party, x: Tensor, ctx: Context) -> Tensor:
        """Return `sum over the k most confident j of Z[j]`, ties to the lowest client."""
        present = (torch.stack(self.about(server, "counts")) > 0).to(x.device) if self.mask_absent else None
        if self.confidence != "logit":
            return self.first_layer_scores(server, x, present, ctx)
        logits = self.network_outputs(server, x, ctx)
        if self.normalize == "temperature":
            logits = normalized(logits, "temperature", torch.tensor(self.about(server, "temperature")))
        elif self.normalize == "zscore":
            logits = normalized(logits, "zscore")
        k = None if self.top_k in (0, "all") else int(self.top_k)
        return top_k_scores(logits, k, present=present)

    def first_layer_scores(self, server: Party, x: Tensor, present: Tensor | None, ctx: Context) -> Tensor:
        """Run all first layers, then only the rest of the network with the strongest response to each input."""
        held = self.held(server)
        uploads = server.memory["uploads"]
        nets = [FunctionalNet(self.module(c, ctx), uploads[str(c)]["state"], {}, EVAL) for c in held]
        stems = [net.stem(x) for net in nets]
        flat = [stem.flatten(1) for stem in stems]
        strength = torch.stack([s.norm(dim=1) if self.confidence == "first_norm" else s.amax(dim=1) for s in flat])
        winner = strength.argmax(dim=0)
        scores = x.new_zeros((len(x), ctx.num_classes))
        for place, net in enumerate(nets):
            rows = torch.nonzero(winner == place).flatten()
            if len(rows):
                logits = net.head(net.middle(stems[place][rows])).unsqueeze(0)
                scores[rows] = top_k_scores(logits, 1, present=None if present is None else present[place : place + 1])
        return scores

    # --- distillation at the server ---

    def distill_into_student(self, server: Party, ctx: Context) -> None:
        """Fit the student to the scores of AMS on public data or on data impressions."""
        zero_shot = self.distill == "zero_shot"
        data = self.make_impressions(server, ctx) if zero_shot else server.public
        with torch.no_grad():
            target = torch.cat([self.ams_scores(server, x.to(ctx.device), ctx) for x, _ in data.chunks(CHUNK)])
        training = replace(
            ctx.training, optimizer="adam", lr=self.distill_lr, decay=1.0, round_decay=1.0, weight_decay=0.0, clip=None
        )
        stage = Stage(
            self.distance,
            data=data,
            columns={"target": target},
            epochs=self.distill_epochs,
            training=training,
        )
        ctx.log("distill_loss", ctx.run(stage, server, "distill"))

    def distance(self, nets: Mapping[str, Any], batch: Batch, aux: Aux) -> Tensor:
        """Return T²·KL(softmax(scores / T) || softmax(student / T))."""
        temperature = self.distill_temperature or (20.0 if self.distill == "zero_shot" else 2.0)
        return temperature**2 * kl_divergence(nets["main"](batch.x), batch["target"], temperature)

    def make_impressions(self, server: Party, ctx: Context) -> Samples:
        """Make inputs from each uploaded network for the classes it was trained on."""
        made = []
        for client in self.held(server):
            upload = server.memory["uploads"][str(client)]
            module, state = self.module(client, ctx), upload["state"]
            rng = ctx.rng("impressions", client)
            similarity = class_similarity(state[last_weight_name(module)].cpu())
            classes = torch.nonzero(upload["counts"]).flatten().tolist()
            targets = soft_targets(similarity, classes, self.impressions, (1.0, 0.1), rng).to(ctx.device)
            network = FunctionalNet(module, state, {}, EVAL)
            made.append(impressions(network, targets, ctx.input_shape, rng, steps=self.impression_steps))
        x = torch.cat(made).cpu()
        return Samples(x, torch.zeros(len(x), dtype=torch.long))
