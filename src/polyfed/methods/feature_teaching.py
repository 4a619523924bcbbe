"""What FedFD and its variant without averaging share: a server that learns from the features of unlike networks.

Networks of one architecture are one teacher, the mean of their features on unlabeled public data U. The features of the
server's network reach the width of a teacher by a projection with orthonormal columns, M = exp(W)[:, :d] with W
skew-symmetric. Equation numbers are those of docs/methods/fedfd.md.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn

from polyfed.build import make_blueprint
from polyfed.core.errors import InputError
from polyfed.core.fields import AtLeastOne, Count, NotNegative, OptimizerName, PartShare, Positive
from polyfed.core.method import Method
from polyfed.core.party import Blueprint, ClientInfo, Context, Party
from polyfed.core.passes import pass_over
from polyfed.core.samples import Samples
from polyfed.core.settings import training_of
from polyfed.core.stage import Aux, Batch, Stage
from polyfed.core.views import largest_first
from polyfed.ops.distance import kl_divergence
from polyfed.ops.projection import LinearProjection, OrthMap, OrthogonalProjection, feature_distance

FEATURE, PROJECTION = "feature/", "projection/"  # columns and side models of the server, each with a teacher's name
Lessons = Iterable[tuple[int, Mapping[str, Tensor]]]  # client -> its "features" and "logits" on the public samples


def answers(model: nn.Module, data: Samples, features: bool, logits: bool) -> dict[str, Tensor]:
    """Return a network's features and logits on some samples, in prediction mode."""

    def answer(x: Tensor, _: Tensor) -> dict[str, Tensor]:
        z = model.features(x)  # type: ignore[operator]
        return {**({"features": z} if features else {}), **({"logits": model.head(z)} if logits else {})}  # type: ignore[operator]

    parts = pass_over(model, data, answer)
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}


@dataclass(frozen=True)
class FeatureTeaching(Method):
    """A server that learns from features of networks of any width.

    Parameters
    ----------
    distill
        `feature`, or `logit`: the mean logits of all clients (FedDF).
    align
        One teacher for each architecture, the mean of its members; False: one teacher and projection for each client.
    orthogonal
        Projections with orthonormal columns; False: free matrices. With both off, `distill="logit"`.
    orth_map, terms
        From W to Q: `matrix_exp`, `series` (scaled and squared, with so many terms), `taylor` (the plain series, good
        only for small W), `cayley`. `gram_schmidt` forms no W: it makes the columns of I + A orthonormal.
    init_scale, proj_persist
        Standard deviation of a projection's parameter at the start; keep it over rounds, or draw it anew in each.
    temperature, kl_direction, feature_loss
        tau of the softmax, `teacher_student` = KL(p || q) or `student_teacher`; `kl` or `mse`.
    include_full_group
        Whether teachers of the server's own width add a term, with M = I.
    logit_aux
        Weight of a logit term beside the features. Above 0 the head learns too.
    distill_epochs, distill_batch, distill_lr, distill_optimizer, distill_momentum
        The server's training on U.
    server_model
        The server's network as a model string (None: the largest of the clients').
    static_bn
        BatchNorm of the server's network without running statistics in training; they are collected on U after it.
    """

    distill: Literal["feature", "logit", "none"] = "feature"
    align: bool = True
    orthogonal: bool = True
    orth_map: OrthMap = "matrix_exp"
    terms: AtLeastOne = 8
    init_scale: NotNegative = 0.01
    proj_persist: bool = True
    temperature: Positive = 1.0
    kl_direction: Literal["teacher_student", "student_teacher"] = "teacher_student"
    feature_loss: Literal["kl", "mse"] = "kl"
    include_full_group: bool = False
    logit_aux: NotNegative = 0.0
    distill_epochs: Count = 1
    distill_batch: AtLeastOne = 64
    distill_lr: Positive = 0.01
    distill_optimizer: OptimizerName = "sgd"
    distill_momentum: PartShare = 0.9
    server_model: str | None = None
    static_bn: bool = True

    @property
    def kind(self) -> str:
        """What is distilled: without alignment and orthogonality, logits."""
        bare = self.distill == "feature" and not self.align and not self.orthogonal
        return "logit" if bare else self.distill

    @property
    def logit_weight(self) -> float:
        """Weight of the logit term."""
        return 1.0 if self.kind == "logit" else self.logit_aux

    def server_blueprint(self, ctx: Context) -> Blueprint:
        """Return the architecture of the server's network."""
        if self.server_model is not None:
            return make_blueprint(
                self.server_model, self.server_model, ctx.input_shape, ctx.num_classes, ctx.seed, None, "linear"
            )
        largest = next((b for b in largest_first(ctx.blueprints) if b.build is not None), None)
        if largest is None:
            raise InputError(
                f"{self.name}: the server can build none of the clients' models: name one for it "
                "(--set method.server_model=resnet10:w16)."
            )
        return largest

    def teacher(self, info: ClientInfo) -> str:
        """Return the teacher that a client is part of: its architecture, or itself."""
        return info.architecture if self.align else str(info.id)

    def add_projections(self, server: Party, infos: Mapping[int, ClientInfo], ctx: Context) -> None:
        """Give the server a projection, Eq. (3), for every teacher of another width."""
        if self.kind != "feature":
            return
        for info in infos.values():
            inputs, outputs = cast(int, server.main.feature_dim), ctx.blueprints[info.architecture].feature_dim
            assert outputs is not None  # features are required
            name = PROJECTION + self.teacher(info)
            if inputs != outputs and name not in server.models:
                server.models[name] = self.projection(inputs, outputs).to(ctx.device)
        self.draw_projections(server, ctx)

    def projection(self, inputs: int, outputs: int) -> nn.Module:
        """Return the projection from the server's to a teacher's features."""
        if not self.orthogonal:
            return LinearProjection(inputs, outputs)
        return OrthogonalProjection(inputs, outputs, self.orth_map, self.terms)

    def draw_projections(self, server: Party, ctx: Context) -> None:
        """Draw the parameters of all projections."""
        for name, module in server.models.items():
            if name.startswith(PROJECTION):
                module.reset(ctx.rng(name), self.init_scale)  # type: ignore[operator]

    def teach_server(self, server: Party, lessons: Lessons, data: Samples, ctx: Context) -> bool:
        """Train the server's network, and the projections of this round's teachers, on U; tell whether any taught."""
        columns = self.targets(server, lessons, ctx) if self.distill_epochs else {}
        if not columns:
            return False  # no epochs, or all clients are as wide as the server and left out: nothing to distill
        if not self.proj_persist:
            self.draw_projections(server, ctx)
        # The head gets no gradient from features and stays as it was; absent teachers' projections stay too.
        names = [PROJECTION + column.removeprefix(FEATURE) for column in columns]
        trainable = {"main": None, **{name: None for name in names if name in server.models}}
        stage = Stage(
            self.distillation_loss,
            trainable,
            data=data,
            columns=columns,
            epochs=self.distill_epochs,
            training=training_of(self, "distill", ctx.training),
        )
        ctx.log("distill_loss", ctx.run(stage, server, "distill").loss)
        return True

    def targets(self, server: Party, lessons: Lessons, ctx: Context) -> dict[str, Tensor]:
        """Return the teachers as columns over the public samples: uniform means of features, Eq. (2), and of logits."""
        total: dict[str, Tensor] = {}
        members: dict[str, int] = {}
        for client, lesson in lessons:
            for name, tensor in lesson.items():
                column = name
                if name == "features":
                    if tensor.shape[1] == server.main.feature_dim and not self.include_full_group:
                        continue
                    column = FEATURE + self.teacher(ctx.infos[client])
                total[column] = total[column] + tensor if column in total else tensor
                members[column] = members.get(column, 0) + 1
        return {column: tensor / members[column] for column, tensor in total.items()}

    def distillation_loss(self, nets: Mapping[str, Any], batch: Batch, aux: Aux) -> Tensor:
        """Return the mean over teachers of KL(softmax(e/tau) || softmax(z M/tau)), Eq. (4), and the logit term (5)."""
        net = nets["main"].still() if self.static_bn else nets["main"]
        z = net.features(batch.x)
        terms = []
        for column, teacher in batch.columns.items():
            if column.startswith(FEATURE):
                projection = nets.get(PROJECTION + column.removeprefix(FEATURE))  # none where M = I
                student = z if projection is None else projection(z)
                terms.append(feature_distance(student, teacher, self.feature_loss, self.temperature, self.kl_direction))
        parts = [torch.stack(terms).mean()] if terms else []
        if "logits" in batch:
            parts.append(self.logit_weight * kl_divergence(net.head(z), batch["logits"], self.temperature))
        return torch.stack(parts).sum()
