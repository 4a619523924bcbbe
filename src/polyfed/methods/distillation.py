"""Ensemble distillation at the server: what FedDF, FedFusion, TAKFL and MSFKD share.

After an average of weights the server fits networks to what all uploaded networks say of unlabeled public data:

    L = T² · KL(softmax(mean_k z_k(x) / T) || softmax(z(x) / T)),  mean over all clients of the round              (1)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from polyfed.core.distill import distill_held
from polyfed.core.errors import InputError
from polyfed.core.fields import AtLeastOne, Count, NotNegative, OptimizerName, PartShare, Positive, SomeShare
from polyfed.core.message import Message
from polyfed.core.method import Combination
from polyfed.core.party import Blueprint, ClientInfo, Context, Party
from polyfed.core.passes import count_right
from polyfed.core.rng import generator
from polyfed.core.samples import Samples, split_off
from polyfed.core.uploads import uploaded_logits, uploaded_network
from polyfed.methods.fedavg import FedAvg
from polyfed.ops.aggregate import plain_mean
from polyfed.ops.distance import log_of


@dataclass(frozen=True)
class EnsembleDistillation(FedAvg):
    """Distill the uploaded networks into averages at the server.

    Parameters
    ----------
    ensemble
        What is averaged over teachers: `logits`, or `probs` (softmax at temperature T).
    distill_steps, distill_epochs
        Steps on the public data (None: by epochs); 0 gives the average exactly.
    distill_lr, distill_batch, distill_optimizer, distill_momentum, distill_weight_decay, distill_clip, distill_cosine
        The server's training; `distill_cosine` lets the learning rate fall to zero along half a wave.
    temperature
        T of Eq. (1).
    select_on, holdout
        Labelled data by which the server chooses: `none`; `public`: the share `holdout` of the public data, which is
        then not distilled on (its classes must be the clients'); `test`: the test set (always reported).
    check_every, patience
        With such data: keep the best student of every so many steps, and stop after so many without a gain.
    drop_worst
        With such data: leave out networks below 1.2 times chance, or below the mean by 1.5 standard deviations.
    """

    family: ClassVar[str] = "distillation"
    combines: ClassVar[Mapping[str, Combination]] = {"params/main": "apart"}  # also a teacher

    ensemble: Literal["logits", "probs"] = "logits"
    distill_steps: Count | None = 1000
    distill_epochs: Count = 1
    distill_lr: Positive = 1e-3
    distill_batch: AtLeastOne = 128
    distill_optimizer: OptimizerName = "adam"
    distill_momentum: PartShare = 0.0
    distill_weight_decay: NotNegative = 0.0
    distill_clip: Positive | None = 5.0
    distill_cosine: bool = True
    temperature: Positive = 1.0
    select_on: Literal["none", "public", "test"] = "none"
    holdout: SomeShare = 0.1
    check_every: AtLeastOne = 100
    patience: AtLeastOne = 1000
    drop_worst: bool = False

    def check(self) -> None:
        """Refuse choices without the data to choose by."""
        super().check()
        if self.drop_worst and self.select_on == "none":
            raise InputError(f"{self.name}: drop_worst needs labelled data at the server: set select_on.")

    def requirements(self) -> frozenset[str]:
        """Need public data, labelled or not, and networks that the server can build."""
        return super().requirements() | {"public", "builds", "classes"}

    def selects_on_test(self) -> bool:
        """Only on the user's word."""
        return self.select_on == "test"

    def uses_public_labels(self) -> dict[str, str]:
        """Return which options, as they are, use labels of the public data, and what to take without labels."""
        return {"select_on='public'": "none"} if self.select_on == "public" else {}

    def outputs(self, private_classes: int, public_classes: int | None) -> int:
        """As many as private classes; public labels can be used only if they are of these."""
        for option in self.uses_public_labels() if public_classes is not None else ():
            raise InputError(f"{self.name}: {option} needs public data with the clients' own classes.")
        return private_classes

    def setup_server(self, server: Party, infos: Mapping[int, ClientInfo], ctx: Context) -> None:
        """Check that there are the labels that are asked for."""
        for option, other in self.uses_public_labels().items():
            if bool((server.public.labels() < 0).any()):
                raise InputError(f"{self.name}: {option} needs labels of the public data: use '{other}'.")
        if self.select_on == "test" and server.data.validation is None:
            raise InputError(f"{self.name}: select_on='test' needs a test set at the server, and there is none.")
        super().setup_server(server, infos, ctx)

    @property
    def distills(self) -> bool:
        """Whether the server trains at all."""
        return (self.distill_epochs if self.distill_steps is None else self.distill_steps) > 0

    def split(self, server: Party, ctx: Context) -> tuple[Samples, Samples | None]:
        """Return the samples to distill on, and those to choose by; the same in every round."""
        if self.select_on != "public":
            return server.public, server.data.validation
        parts: tuple[Samples, Samples] = ctx.cached(
            "holdout", lambda: split_off(server.public, self.holdout, generator(ctx.seed, "holdout"))
        )
        return parts

    def kept(self, server: Party, replies: Mapping[int, Message], ctx: Context) -> Mapping[int, Message]:
        """Return the replies without the worst networks."""
        data, validation = self.split(server, ctx)
        if not self.drop_worst or validation is None:
            return replies
        right = [count_right(uploaded_network(c, reply, data, ctx), validation) for c, reply in replies.items()]
        good = worth_keeping([number / len(validation) for number in right], 1 / ctx.num_classes)
        ctx.log("dropped", [client for client, keep in zip(replies, good, strict=True) if not keep])
        return {client: replies[client] for client, keep in zip(replies, good, strict=True) if keep}

    def students(self, ctx: Context) -> list[Blueprint]:
        """Return the architectures that learn from the ensemble."""
        return list(ctx.blueprints.values())

    def refine(self, server: Party, replies: Mapping[int, Message], ctx: Context) -> None:
        """Distill the ensemble into the students' averages."""
        if not self.distills:
            return
        data, validation = self.split(server, ctx)
        data, targets = self.lesson(replies, data, ctx)
        self.agreed(server, targets, ctx)
        if len(data):
            students = self.students(ctx)
            losses = {s.name: self.teach(server, s, data, targets, validation, ctx) for s in students}
            ctx.log("distillation", {"loss": losses, "samples": len(data), "selected_on": self.select_on})
            self.refresh(server, ctx)

    def agreed(self, server: Party, targets: Tensor, ctx: Context) -> None:
        """Take note of the target of a round's distillation."""

    def lesson(self, replies: Mapping[int, Message], data: Samples, ctx: Context) -> tuple[Samples, Tensor]:
        """Return samples and the ensemble's logits on them, the target of Eq. (1)."""
        logits = uploaded_logits(replies, data, ctx)
        if self.ensemble == "logits":
            return data, plain_mean(logits)
        probs = plain_mean((z / self.temperature).softmax(1) for z in logits)
        return data, self.temperature * log_of(probs)  # whose softmax at temperature T is `probs`

    def teach(
        self,
        server: Party,
        blueprint: Blueprint,
        data: Samples,
        targets: Tensor,
        validation: Samples | None,
        ctx: Context,
    ) -> float:
        """Distill into the average of one architecture, Eq. (1), put it among the shared tensors, return the loss.

        HeteroFL's statistics of a width are not among them, and are collected after this.
        """
        student, held = ctx.replica(blueprint.name), self.held(server, blueprint, ctx)
        choice = {"validation": validation, "every": self.check_every, "patience": self.patience}
        return distill_held(self, held, student, data, targets, ctx, name=f"distill/{blueprint.name}", **choice)


def worth_keeping(accuracies: Sequence[float], chance: float) -> list[bool]:
    """Tell which networks are neither near chance nor far below the others; all, if none beats chance."""
    found = torch.tensor(accuracies, dtype=torch.float64)
    beats = found >= 1.2 * chance
    if not beats.any():
        return [True] * len(accuracies)
    limit = found[beats].mean() - 1.5 * found[beats].std(correction=0)
    good: list[bool] = (beats & (found >= limit)).tolist()
    return good
