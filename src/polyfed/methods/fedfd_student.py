"""FedFD without averaging: clients of any architecture keep their networks and teach a student at the server.

Li, Wang, Xu et al. 2025. https://arxiv.org/abs/2507.10348

The paper sketches this use of its feature distillation in one sentence. Clients send features and logits on a public
subset, the server's network learns from them as in FedFD (equation numbers are those of docs/methods/fedfd.md), and
clients digest its logits as in FedMD before they train.

Deviations:
    The paper does not say what travels: here features and logits on U, not the networks.
    The student learns its head from the mean logits (nothing else would train it), and teachers of its own width take
    part, with M = I (no average carries their knowledge).
    The way back is FedMD's digest; the student's logits travel once it has learned something.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar, Literal

from torch import Tensor

from polyfed.core.fields import AtLeastOne, Count, NotNegative, Positive
from polyfed.core.message import Message
from polyfed.core.method import EVALUATE, Combination, Local, Step
from polyfed.core.party import ClientInfo, Context, Party
from polyfed.core.passes import logits_of
from polyfed.core.statistics import collect_statistics
from polyfed.core.subset import hear_subset, note_subset, subset_seed, tell_subset
from polyfed.core.traffic import Symbol, Told, Traffic
from polyfed.methods.feature_teaching import FeatureTeaching, answers
from polyfed.methods.fedmd import FedMD


def subset_size(told: Told) -> int:
    """Return how many public samples a round takes."""
    return min(told.method.subset or len(told.public or ()), len(told.public or ()))


@dataclass(frozen=True)
class FedFDStudent(FeatureTeaching):
    """Feature distillation into a student at the server, whose logits clients of any architecture digest.

    Parameters
    ----------
    include_full_group, logit_aux
        As in FedFD, with other defaults: teachers of the student's own width count, and logits train its head.
    distill_epochs
        The student's training on U; 0: local training exactly.
    subset
        Public samples in a round (0: all).
    digest_epochs, digest_loss, digest_lr, digest_batch
        How clients learn from the student's logits on them (see FedMD). With `digest_epochs=0` clients train locally
        exactly.
    """

    name: ClassVar[str] = "fedfd_student"
    paper: ClassVar[str] = "Li et al. 2025"
    family: ClassVar[str] = "distillation"
    needs: ClassVar[frozenset[str]] = frozenset({"public", "features", "classes"})
    sends: ClassVar[str] = "features and logits of the model on public samples"
    combines: ClassVar[Mapping[str, Combination]] = {"data/logits": "apart", "data/features": "apart"}
    traffic: ClassVar[Mapping[str, Traffic]] = {
        "main": Traffic(
            "8 + [t > 1 and digest_epochs > 0]*4*n_p*C",
            "4*n_p*([distill == 'feature']*F + [distill == 'logit' or logit_aux > 0]*C)",
        )
    }
    symbols: ClassVar[Mapping[str, Symbol]] = {"n_p": Symbol("public samples of a round: subset, or all", subset_size)}

    distill: Literal["feature", "logit"] = "feature"
    include_full_group: bool = True
    logit_aux: NotNegative = 1.0
    subset: Count = 0
    digest_epochs: Count = 1
    digest_loss: Literal["l1", "l2", "ce", "kl"] = "l1"
    digest_lr: Positive | None = None
    digest_batch: AtLeastOne | None = None

    @cached_property
    def exchange(self) -> FedMD:
        """FedMD's part: the public subset and the digest of the student's logits on it."""
        options = {n: getattr(self, n) for n in ("digest_epochs", "digest_loss", "digest_lr", "digest_batch")}
        return FedMD(subset=self.subset or 2**62, public_epochs=0, private_epochs=0, **options)

    # --- server ---

    def setup_server(self, server: Party, infos: Mapping[int, ClientInfo], ctx: Context) -> None:
        """Build the student, and its projections."""
        student = self.server_blueprint(ctx)
        assert student.build is not None
        server.models["main"] = student.build().to(ctx.device)
        self.add_projections(server, infos, ctx)

    def send(self, server: Party, info: ClientInfo, step: Step, ctx: Context) -> Message:
        """Send the seed of the public subset and, once it learned, the student's logits on it."""
        if step.name == EVALUATE.name:
            return Message()
        message = tell_subset(Message(), ctx)
        if server.memory.get("taught") and self.digest_epochs:
            message.data["logits"] = ctx.this_round("student_logits", lambda: self.student_logits(server, ctx))
        return message

    def student_logits(self, server: Party, ctx: Context) -> Tensor:
        """Return what the student says of this round's subset."""
        note_subset(server, subset_seed(ctx))
        return logits_of(server.main, self.exchange.public_subset(server))

    def fuse(self, server: Party, replies: Mapping[int, Message], step: Step, ctx: Context) -> None:
        """Train the student, Eq. (4) and (5)."""
        note_subset(server, subset_seed(ctx))
        lessons = ((client, reply.data) for client, reply in replies.items())
        if self.teach_server(server, lessons, self.exchange.public_subset(server), ctx):
            server.memory["taught"] = True  # until then its logits are noise, and clients get none
        if self.static_bn:
            collect_statistics(server.main, server.public, ctx.training.batch_size)

    # --- client ---

    def local(self, client: Party, step: Step, ctx: Context) -> Local:
        """Digest the student's logits, train, and answer on the public subset."""
        hear_subset(client)
        if "logits" in client.inbox.data:
            yield from self.exchange.digest(client, client.inbox.data["logits"], ctx)
        yield from self.exchange.revisit(client, ctx)
        subset = self.exchange.public_subset(client)
        return Message(data=answers(client.main, subset, self.kind == "feature", bool(self.logit_weight)))
