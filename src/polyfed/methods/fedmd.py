"""FedMD: Heterogenous Federated Learning via Model Distillation.

Li, Wang, NeurIPS workshop 2019. https://arxiv.org/abs/1910.03581

Models of any architecture; only logits on a public set travel. Each round clients move towards the mean logits
("digest"), then train on their own data ("revisit").

Deviations:
    Pre-training runs for a fixed number of epochs instead of until convergence.
    Public labels are used only in pre-training; `public_epochs=0` needs none.
    The subset of a round travels as a seed (8 bytes) instead of its indices.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from polyfed.core.fields import AtLeastOne, Count, Positive
from polyfed.core.message import Message
from polyfed.core.method import Combination, Local, Method, Plan, Step
from polyfed.core.party import ClientInfo, Context, Party
from polyfed.core.passes import logits_of
from polyfed.core.samples import Samples
from polyfed.core.stage import Aux, Batch, Stage
from polyfed.core.subset import hear_subset, known_subset, note_subset, public_subset, subset_seed, tell_subset
from polyfed.core.traffic import Traffic
from polyfed.ops.aggregate import weighted_mean
from polyfed.ops.distance import LOGIT_LOSSES

PRETRAIN = Step("pretrain", who="all", down=False, up=False, evaluate="initial")
LOGITS = Step("logits")
DIGEST = Step("digest", up=False)
# Named like the ordinary local training of other methods, so that nothing but pre-training and digest sets it apart.
REVISIT = Step("main", down=False, up=False)


@dataclass(frozen=True)
class FedMD(Method):
    """Exchange logits on public data.

    Parameters
    ----------
    subset
        Number N_a of public samples in a round, drawn anew each round and the same for all (at most all of them).
    digest_epochs
        Epochs towards the mean logits; 0, with no pre-training, gives local training exactly.
    digest_loss
        `l1`, `l2`, `ce` (soft cross-entropy) or `kl` (the same gradient).
    digest_lr, digest_batch
        Learning rate and batch size of the digest (None: the run's own).
    public_epochs, private_epochs
        Pre-training: epochs on labelled public data, then on private data.
    """

    name: ClassVar[str] = "fedmd"
    paper: ClassVar[str] = "Li and Wang 2019"
    family: ClassVar[str] = "distillation"
    needs: ClassVar[frozenset[str]] = frozenset({"public"})
    sends: ClassVar[str] = "logits of the model on public samples"
    combines: ClassVar[Mapping[str, Combination]] = {"data/logits": "mean"}
    traffic: ClassVar[Mapping[str, Traffic]] = {
        "logits": Traffic("8", "4*min(subset, N)*C"),
        "digest": Traffic("4*min(subset, N)*C"),
    }

    subset: AtLeastOne = 1000
    digest_epochs: Count = 1
    digest_loss: Literal["l1", "l2", "ce", "kl"] = "l1"
    digest_lr: Positive | None = None
    digest_batch: AtLeastOne | None = None
    public_epochs: Count = 5
    private_epochs: Count = 5

    def requirements(self) -> frozenset[str]:
        """Pre-training on public data needs its labels; distances between distributions need classes."""
        labels = {"public_labels"} if self.public_epochs else set()
        return self.needs | labels | ({"classes"} if self.digest_loss in ("ce", "kl") else set())

    def outputs(self, private_classes: int, public_classes: int | None) -> int:
        """Public classes come first, then the private ones, where public labels are learned and are others."""
        return private_classes + ((public_classes or 0) if self.public_epochs else 0)

    def takes_learners(self) -> bool:
        """Answers on public data are all that is asked of a client, and soft labels all that it is taught."""
        return True

    def beyond_training(self) -> str | None:
        """Only answers on public data leave."""
        return None

    def own_epochs(self, epochs: int, rounds: int) -> int:
        """Count those before the rounds, too."""
        return self.private_epochs + super().own_epochs(epochs, rounds)

    def plan(self) -> Plan:
        """Pre-train once; in a round, logits go up, their mean comes down, and private data follows."""
        return Plan(before=(PRETRAIN,), round=(LOGITS, DIGEST, REVISIT))

    # --- server ---

    def send(self, server: Party, info: ClientInfo, step: Step, ctx: Context) -> Message:
        """Send the seed of this round's public subset, then the mean logits on it."""
        if step.name == LOGITS.name:
            return tell_subset(Message(), ctx)
        if step.name == DIGEST.name and known_subset(server) == subset_seed(ctx):
            message = Message(data={"logits": server.memory["logits"]})
            # A client that did not answer may not have heard of the subset: without its seed the rows would not match.
            return message if info.id in server.memory["answered"] else tell_subset(message, ctx)
        return Message()  # no logits came this round: nothing to digest

    def fuse(self, server: Party, replies: Mapping[int, Message], step: Step, ctx: Context) -> None:
        """Take the mean of the logits over this round's participants."""
        server.memory["logits"] = self.consensus([reply.data["logits"] for reply in replies.values()], ctx)
        server.memory["answered"] = list(replies)
        note_subset(server, subset_seed(ctx))

    def consensus(self, answers: Sequence[Tensor], ctx: Context) -> Tensor:
        """Return what clients digest: here the mean; methods built on FedMD change it."""
        # In double precision the mean of equal logits is those logits, bit for bit: L1 has no small gradients.
        doubles = (answer.double() for answer in answers)
        return weighted_mean(doubles, [1.0] * len(answers)).to(answers[0].dtype)

    # --- client ---

    def local(self, client: Party, step: Step, ctx: Context) -> Local:
        """Pre-train; tell logits; digest their mean; revisit private data."""
        hear_subset(client)
        if step.name == PRETRAIN.name:
            yield from self.pretrain(client, ctx)
        elif step.name == LOGITS.name:
            return Message(data={"logits": self.answer(client)})
        elif step.name == DIGEST.name and "logits" in client.inbox.data:
            yield from self.digest(client, client.inbox.data["logits"], ctx)
        elif step.name == REVISIT.name:
            yield from self.revisit(client, ctx)
        return None

    def answer(self, client: Party) -> Tensor:
        """Return what a client tells of the public subset: its logits, in prediction mode."""
        return logits_of(client.main, self.public_subset(client))

    def pretrain(self, client: Party, ctx: Context) -> Local:
        """Train on labelled public data, then on private data."""
        if self.public_epochs:
            yield Stage(public_loss, data=client.public, epochs=self.public_epochs)
        if self.private_epochs:
            yield replace(self.private_stage(client, ctx), epochs=self.private_epochs)
        return None

    def digest(self, client: Party, mean_logits: Tensor, ctx: Context) -> Local:
        """Move towards the mean logits on the public subset."""
        if self.digest_epochs:
            yield self.distillation(self.public_subset(client), mean_logits, ctx)
        return None

    def revisit(self, client: Party, ctx: Context) -> Local:
        """Train on private data."""
        yield self.private_stage(client, ctx)
        return None

    def private_stage(self, client: Party, ctx: Context) -> Stage:
        """Return the training on private data."""
        return Stage(private_loss, aux=label_shift(ctx), targets=shifted_labels(client, ctx))

    def distillation(self, data: Samples, target: Tensor, ctx: Context) -> Stage:
        """Return the stage that fits logits on `data` to `target`; public labels play no part."""
        training = replace(
            ctx.training,
            lr=self.digest_lr or ctx.training.lr,
            batch_size=self.digest_batch or ctx.training.batch_size,
        )
        columns = {"target": target}
        epochs = self.digest_epochs
        return Stage(self.distance, data=data, columns=columns, epochs=epochs, training=training, targets=target)

    def distance(self, nets: Mapping[str, Any], batch: Batch, aux: Aux) -> Tensor:
        """Return the distance of the logits to the batch's target logits."""
        return LOGIT_LOSSES[self.digest_loss](nets["main"](batch.x), batch["target"])

    def public_subset(self, party: Party) -> Samples:
        """Return this round's public samples: the same rows, in the same order, for every party."""
        return public_subset(party, self.subset)

    # --- prediction ---

    def predict(self, party: Party, x: Tensor, ctx: Context) -> Tensor:
        """Return scores of the private classes, then of the public ones, which are always wrong."""
        logits: Tensor = party.main(x)
        return logits.roll(-(ctx.public_classes or 0), dims=1)


def public_loss(nets: Mapping[str, Any], batch: Batch, aux: Aux) -> Tensor:
    """Return the task's loss on labelled public data."""
    return batch.loss(nets["main"](batch.x))


def private_loss(nets: Mapping[str, Any], batch: Batch, aux: Aux) -> Tensor:
    """Return the task's loss on private data, whose labels come after the public ones."""
    return batch.task.loss(nets["main"](batch.x), batch.y + aux["shift"])


def label_shift(ctx: Context) -> dict[str, Tensor]:
    """Return where private labels start among the outputs."""
    return {"shift": torch.tensor(ctx.public_classes or 0)}


def shifted_labels(client: Party, ctx: Context) -> Tensor | None:
    """Return private labels as places among the outputs, where public ones come before them (None: they do not)."""
    return client.train.labels() + ctx.public_classes if ctx.public_classes else None
