"""FedMD+Global with Learning without Forgetting (LwoF).

Shi, Radu, Yang, "Closing the Gap between Client and Global Model Performance in Heterogeneous Federated Learning".

FedMD with a global model of the server's own architecture, which learns from the same mean logits as the clients. The
local update makes a client forget part of what it has just distilled; LwoF holds its outputs on private inputs close to
those of its own copy from before the update. (In FedMD's words, which the code uses: the global update at a client is
the digest, the local update the revisit.)

Deviations:
    The paper is silent on the temperature: rho = 2, as in the original LwF, without a factor rho^2 (`scale_rho2`).
    The paper is silent on the reduction of L1: mean over batch and outputs (`l1_reduction="sum_outputs"` sums them).
    The paper is silent on which outputs compete at test time: all, public ones too (`eval_outputs="private"`); with
    `all`, the accuracy among the private outputs is reported beside it.
    The paper is silent on the start of the server's model: random (`server_init="public"` trains it on public labels).
    Pre-training runs for a fixed number of epochs instead of until convergence.
    A client that is no network learns private labels and what it has digested together, anew each time: it forgets
    nothing of the latter, so the penalty is not for it.
    The copy's logits are computed once before a local update, which equals computing them batch by batch as long as
    images do not change in training: with LwoF, `augment` is refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

from torch import Tensor, nn
from torch.nn import functional as F

from polyfed.core.augment import refuse_changes
from polyfed.core.errors import InputError
from polyfed.core.fields import AtLeastOne, Count, NotNegative, Positive
from polyfed.core.message import Message
from polyfed.core.method import Local, Plan, Step
from polyfed.core.party import ClientInfo, Context, Party
from polyfed.core.passes import logits_of
from polyfed.core.stage import Aux, Batch, Stage
from polyfed.core.statistics import collect_statistics
from polyfed.core.subset import known_subset
from polyfed.core.views import largest_first
from polyfed.methods.fedmd import DIGEST, LOGITS, PRETRAIN, REVISIT, FedMD, public_loss
from polyfed.models import build
from polyfed.ops.distance import l1, soft_cross_entropy


@dataclass(frozen=True)
class FedMDGlobal(FedMD):
    """FedMD with a global model at the server and local updates that forget less.

    Parameters
    ----------
    subset, digest_epochs, digest_batch, digest_lr, digest_loss
        The public subset of a round and the distillation on it, the same at the clients and at the server (see FedMD).
    public_epochs, private_epochs
        Pre-training of the clients; the accuracy after it is the stage `initial`.
    l1_reduction
        `mean` over batch and outputs, or `sum_outputs` (mean over the batch only: gradients C times as large).
    global_model
        False: no model at the server. The clients are the same; without `lwof` this is FedMD exactly.
    server_model
        The server's architecture as a model string, `wrn-40-1` in the paper (None: the largest of the clients').
    server_init
        `random`, or `public`: the server first trains on labelled public data for `public_epochs`.
    lwof
        Add the penalty beta·L_CE(rho) to the local loss.
    beta
        Weight of the penalty; 0 is `lwof=False` exactly, and the larger it is, the less the outputs move.
    rho
        Temperature of the soft labels.
    scale_rho2
        Multiply the penalty by rho^2, so that its gradient keeps its size as rho grows.
    eval_outputs
        `all`: a prediction of a public class is wrong; `private`: only private classes compete.
    bn_recalibrate
        After the local update, collect BatchNorm statistics on the round's public subset again, so that distilled and
        personalised models predict with statistics of the same samples.
    """

    name: ClassVar[str] = "fedmd_global"
    paper: ClassVar[str] = "Shi, Radu and Yang"
    needs: ClassVar[frozenset[str]] = frozenset({"public", "classes"})

    subset: AtLeastOne = 5000
    digest_epochs: Count = 5
    digest_batch: AtLeastOne | None = 64
    public_epochs: Count = 20
    private_epochs: Count = 20
    l1_reduction: Literal["mean", "sum_outputs"] = "mean"
    global_model: bool = True
    server_model: str | None = None
    server_init: Literal["random", "public"] = "random"
    lwof: bool = True
    beta: NotNegative = 1.0
    rho: Positive = 2.0
    scale_rho2: bool = False
    eval_outputs: Literal["all", "private"] = "all"
    bn_recalibrate: bool = False

    def check(self) -> None:
        """Refuse choices that do not go together."""
        super().check()
        if self.l1_reduction != "mean" and self.digest_loss != "l1":
            raise InputError(
                f"{self.name}: l1_reduction='{self.l1_reduction}' needs digest_loss='l1', not '{self.digest_loss}'."
            )
        if self.server_init == "public" and not self.public_epochs:
            raise InputError(f"{self.name}: server_init='public' needs public_epochs of at least 1.")

    @property
    def penalised(self) -> bool:
        """Whether the local update is held to the copy's outputs."""
        return self.lwof and self.beta > 0

    def plan(self) -> Plan:
        """Do as FedMD does, and measure the clients between distillation and local update."""
        # With `up` the step ends in `fuse`, where the server trains its own model; nothing is sent for that.
        pretrain = replace(PRETRAIN, up=self.global_model and self.server_init == "public")
        return Plan(before=(pretrain,), round=(LOGITS, replace(DIGEST, evaluate="distilled"), REVISIT))

    # --- server ---

    def setup_server(self, server: Party, infos: Mapping[int, ClientInfo], ctx: Context) -> None:
        """Build the global model M_g; it starts as a client's model of this architecture would."""
        if self.penalised:
            refuse_changes(ctx.training, self.name, "outputs that LwoF holds on to are", "set lwof=false")
        if self.global_model:
            server.models["main"] = self.build_global(ctx)

    def build_global(self, ctx: Context) -> nn.Module:
        """Return M_g with its initial weights."""
        if self.server_model is None:
            largest = largest_first(ctx.blueprints)[0]
            if largest.build is None or "learner" in largest.properties:
                raise InputError(
                    f"{self.name}: the server cannot build {largest.name}, the largest of the clients' models: "
                    "name one of its own (--set method.server_model=wrn-40-1)."
                )
            return largest.build().to(ctx.device)
        spec, outputs = self.server_model, ctx.num_classes + (ctx.public_classes or 0)
        return ctx.initialized(spec, lambda: build(spec, ctx.input_shape, outputs))

    def fuse(self, server: Party, replies: Mapping[int, Message], step: Step, ctx: Context) -> None:
        """Average the logits, then let M_g learn from them as the clients will."""
        if step.name == PRETRAIN.name:
            ctx.run(Stage(public_loss, data=server.public, epochs=self.public_epochs), server, "server/pretrain")
            return
        super().fuse(server, replies, step, ctx)
        if self.global_model and self.digest_epochs:
            stage = self.distillation(self.public_subset(server), server.memory["logits"], ctx)
            ctx.log("server_loss", ctx.run(stage, server, "server/digest").loss)

    # --- client ---

    def distance(self, nets: Mapping[str, Any], batch: Batch, aux: Aux) -> Tensor:
        """Return L_g, the distance of the logits to the mean logits."""
        if self.l1_reduction == "mean":
            return super().distance(nets, batch, aux)
        return l1(nets["main"](batch.x), batch["target"]) * batch["target"].shape[1]

    def revisit(self, client: Party, ctx: Context) -> Local:
        """Train on private data, near the outputs of the copy M'_k from before."""
        if self.penalised:
            copy = logits_of(client.main, client.train)  # z', once: the copy is frozen and no image changes
            stage = self.private_stage(client, ctx)
            yield replace(stage, loss=self.lwof_loss, columns={"copy": copy})
        else:
            yield from super().revisit(client, ctx)
        if self.bn_recalibrate and known_subset(client) is not None:
            collect_statistics(client.main, self.public_subset(client), self.digest_batch or ctx.training.batch_size)
        return None

    def lwof_loss(self, nets: Mapping[str, Any], batch: Batch, aux: Aux) -> Tensor:
        """Return L_t + beta·L_CE(rho), L_CE = -sum_j p_j log q_j with p, q = softmax(z'/rho), softmax(z/rho)."""
        logits = nets["main"](batch.x)
        task = F.cross_entropy(logits, batch.y + aux["shift"])
        scale = self.rho**2 if self.scale_rho2 else 1.0
        return task + self.beta * scale * soft_cross_entropy(logits, batch["copy"], self.rho)

    # --- prediction ---

    def predict(self, party: Party, x: Tensor, ctx: Context) -> Tensor:
        """Return scores of the private classes, then (`all`) of the public ones, which are always wrong."""
        scores = super().predict(party, x, ctx)
        return scores[:, : ctx.num_classes] if self.eval_outputs == "private" else scores
