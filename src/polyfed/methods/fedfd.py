"""FedFD: Feature Distillation is the Better Choice for Model-Heterogeneous Federated Learning.

Li, Wang, Xu et al. 2025. https://arxiv.org/abs/2507.10348

HeteroFL, and after every average the server distils the *features* of the uploaded networks into the global one, on
unlabeled public data U. Networks of one width are one teacher, the mean of their features; the global features reach
the width of a teacher by a projection with orthonormal columns, M = exp(W)[:, :d] with W skew-symmetric. Equation
numbers are those of docs/methods/fedfd.md. Clients take levels with their models: `levels("cnn:16-32-64", "a-d-g")`.

Deviations:
    The paper gives no distributions for its KL divergence, no optimiser, no number of distillation epochs and no public
    set: softmax over features at temperature 1, SGD with momentum 0.9 and no weight decay, one epoch, and the run's
    public data. The printed argument order of the KL divergence is `kl_direction="student_teacher"`.
    Optimiser state, of projections too, is new each round.
    With BatchNorm a last public sample alone joins the batch before it (the paper's loop would drop it).
    BatchNorm statistics of teachers and of the global network (with `measure="slice"` also of its slices) are all
    collected on U, in batches of the run's size; teachers then predict with them, so that a teacher's feature does not
    depend on the batch. The clients' own models, measured by default, have statistics of the clients' own data.
    `static_bn=False` averages running statistics entry by entry over unlike widths, though their inputs differ.
    `align=False` has one projection for each client of another width than the server's, and none for those of its
    width: with one client to a width it does what grouping does.
    Without alignment and orthogonality the paper's figures are those of logit distillation, so that is what is run.
    `aggregation="none"` is sketched in the paper in one sentence. Here clients send features and logits on U, not their
    networks; the student learns its head from the mean logits (nothing else would train it), and clients digest the
    student's logits as in FedMD before they train.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, Literal, cast

import torch
from torch import Tensor, nn

from polyfed.build import make_blueprint
from polyfed.core.errors import InputError
from polyfed.core.fields import AtLeastOne, Count, NotNegative, OptimizerName, PartShare, Positive
from polyfed.core.message import Message
from polyfed.core.method import Local, Plan, Step
from polyfed.core.party import Blueprint, ClientInfo, Context, Party, load_state, state_of
from polyfed.core.passes import logits_of, pass_over
from polyfed.core.samples import Samples
from polyfed.core.settings import Training
from polyfed.core.stage import Aux, Batch, Stage
from polyfed.core.statistics import collect_statistics
from polyfed.core.views import largest_first
from polyfed.methods.fedmd import FedMD, subset_seed
from polyfed.methods.heterofl import HeteroFL
from polyfed.ops.distance import kl_divergence
from polyfed.ops.projection import (
    LinearProjection,
    OrthogonalProjection,
    feature_distance,
)

FEATURE, PROJECTION = "feature/", "projection/"  # columns and side models of the server, each with a teacher's name
Lessons = Iterable[tuple[int, Mapping[str, Tensor]]]  # client -> its "features" and "logits" on the public samples


@dataclass(frozen=True)
class FedFD(HeteroFL):
    """HeteroFL with distillation of features at the server.

    Parameters
    ----------
    distill
        `feature`; `logit`: ensemble distillation of the mean logits of all uploaded networks (FedDF); `none`: HeteroFL
        exactly, as is `distill_epochs=0` (without aggregation that is local training).
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
        Whether teachers of the server's own width add a term, with M = I (None: only without aggregation).
    logit_aux
        Weight of a logit term beside the features (None: 0, and 1 without aggregation). Above 0 the head learns too.
    distill_epochs, distill_batch, distill_lr, distill_optimizer, distill_momentum
        The server's training on U.
    aggregation
        `prefix`: HeteroFL's average of slices; `none`: clients of any architecture keep their networks, and the
        server's is only a student, from whose logits they learn in turn.
    server_model
        The server's network as a model string (None: the largest of the clients'). With `prefix` it must contain
        every client's, in depth and width; what no client holds then learns from distillation only.
    subset, digest_epochs, digest_loss, digest_lr, digest_batch
        Without aggregation: public samples in a round (0: all), and how clients learn from the server's logits on them
        (see FedMD). With `digest_epochs=0` clients train locally exactly.
    weighting, scaler, global_rate, static_bn, statistics, mask, clip, measure
        As in HeteroFL, with other defaults; without aggregation only `static_bn` counts, and for the server only.
        Mind that `static_bn=False` averages running statistics of unlike widths.
    view, buffers, pretrain_epochs
        As in FedAvg, for the average only. To distill, `view` is `prefix` (or `full`, for one architecture), and
        `buffers="local"` needs `static_bn`; the server distils after pre-training too.
    """

    name: ClassVar[str] = "fedfd"
    paper: ClassVar[str] = "Li et al. 2025"
    family: ClassVar[str] = "parameters"
    sends: ClassVar[str] = "the weights of its width slice; without aggregation, features and logits on public samples"
    additive: ClassVar[bool] = False

    weighting: Literal["samples", "uniform"] = "samples"
    statistics: Literal["clients", "public"] = "public"
    mask: bool = False
    clip: Positive | None = None
    measure: Literal["slice", "own"] = "own"
    distill: Literal["feature", "logit", "none"] = "feature"
    align: bool = True
    orthogonal: bool = True
    orth_map: Literal["matrix_exp", "series", "taylor", "cayley", "gram_schmidt"] = "matrix_exp"
    terms: AtLeastOne = 8
    init_scale: NotNegative = 0.01
    proj_persist: bool = True
    temperature: Positive = 1.0
    kl_direction: Literal["teacher_student", "student_teacher"] = "teacher_student"
    feature_loss: Literal["kl", "mse"] = "kl"
    include_full_group: bool | None = None
    logit_aux: NotNegative | None = None
    distill_epochs: Count = 1
    distill_batch: AtLeastOne = 64
    distill_lr: Positive = 0.01
    distill_optimizer: OptimizerName = "sgd"
    distill_momentum: PartShare = 0.9
    aggregation: Literal["prefix", "none"] = "prefix"
    server_model: str | None = None
    subset: Count = 0
    digest_epochs: Count = 1
    digest_loss: Literal["l1", "l2", "ce", "kl"] = "l1"
    digest_lr: Positive | None = None
    digest_batch: AtLeastOne | None = None

    def check(self) -> None:
        """Refuse choices that do not go together."""
        super().check()
        if self.aggregation == "none":
            if self.distill == "none":
                raise InputError(f"{self.name}: without aggregation and distillation nothing is shared: use 'local'.")
        elif self.distill != "none" and self.view not in ("prefix", "full"):
            raise InputError(
                f"{self.name}: the server distils into the widest network, which holds every client's slice: "
                f"view is 'prefix', not '{self.view}'."
            )
        elif self.distill != "none" and self.buffers == "local" and not self.static_bn:
            raise InputError(
                f"{self.name}: buffers='local' leaves the global network without BatchNorm statistics: "
                "use static_bn=True or buffers='average'."
            )

    def requirements(self) -> frozenset[str]:
        """Need public data and features; with averaging also widths of networks that the server can build."""
        if self.aggregation == "none":
            return frozenset({"public", "features"})
        return super().requirements() | (frozenset() if self.kind == "none" else {"public", "features", "builds"})

    @property
    def kind(self) -> str:
        """What is distilled: without alignment and orthogonality, logits."""
        bare = self.distill == "feature" and not self.align and not self.orthogonal
        return "logit" if bare else self.distill

    @property
    def full_group(self) -> bool:
        """Whether teachers as wide as the server take part: without averaging, nothing else carries their knowledge."""
        return self.aggregation == "none" if self.include_full_group is None else self.include_full_group

    @property
    def logit_weight(self) -> float:
        """Weight of the logit term."""
        if self.kind == "logit":
            return 1.0
        return float(self.aggregation == "none") if self.logit_aux is None else self.logit_aux

    @cached_property
    def exchange(self) -> FedMD:
        """FedMD's part in `aggregation="none"`: the public subset and the digest of the server's logits on it."""
        options = {n: getattr(self, n) for n in ("digest_epochs", "digest_loss", "digest_lr", "digest_batch")}
        return FedMD(subset=self.subset or 2**62, public_epochs=0, private_epochs=0, **options)

    def plan(self) -> Plan:
        """As HeteroFL; without aggregation one exchange a round."""
        return Plan() if self.aggregation == "none" else super().plan()

    # --- server ---

    def setup_server(self, server: Party, infos: Mapping[int, ClientInfo], ctx: Context) -> None:
        """Lay out the slices (or build the student), and a projection, Eq. (3), for every teacher of another width."""
        if self.aggregation == "none":
            student = self.server_blueprint(ctx)
            assert student.build is not None
            server.models["main"] = student.build().to(ctx.device)
        else:
            if self.server_model is not None or self.kind != "none":
                add_widest(ctx, self.server_blueprint(ctx), self.name)
            super().setup_server(server, infos, ctx)
        if self.kind != "feature":
            return
        for info in infos.values():
            inputs, outputs = cast(int, server.main.feature_dim), ctx.blueprints[info.architecture].feature_dim
            assert outputs is not None  # features are required
            name = PROJECTION + self.teacher(info)
            if inputs != outputs and name not in server.models:
                server.models[name] = self.projection(inputs, outputs, ctx)
        self.draw_projections(server, ctx)

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

    def projection(self, inputs: int, outputs: int, ctx: Context) -> nn.Module:
        """Return the projection from the server's to a teacher's features."""
        if not self.orthogonal:
            return LinearProjection(inputs, outputs).to(ctx.device)
        return OrthogonalProjection(inputs, outputs, self.orth_map, self.terms).to(ctx.device)

    def draw_projections(self, server: Party, ctx: Context) -> None:
        """Draw the parameters of all projections."""
        for name, module in server.models.items():
            if name.startswith(PROJECTION):
                module.reset(ctx.rng(name), self.init_scale)  # type: ignore[operator]

    def refine(self, server: Party, replies: Mapping[int, Message], ctx: Context) -> None:
        """Distil the uploaded networks into the average, and put the result back among the shared tensors."""
        if self.kind == "none":
            return
        lessons = ((client, self.lesson(server, client, reply, ctx)) for client, reply in replies.items())
        self.teach_server(server, lessons, server.public, ctx)
        architecture = self.global_architecture(ctx)
        assert architecture is not None  # that of the network just distilled into
        own, slots = state_of(server.main), self.all_slots(architecture, ctx)
        for name, slot in slots.items():
            held = server.state[slot.key]
            (held if slot.part is None else held[slot.part]).copy_(own[name])

    def lesson(self, server: Party, client: int, reply: Message, ctx: Context) -> dict[str, Tensor]:
        """Return what an uploaded network says on U (the upload itself, not a slice of the new average)."""
        blueprint = ctx.blueprints[ctx.infos[client].architecture]
        features = self.kind == "feature" and (self.full_group or blueprint.feature_dim != server.main.feature_dim)
        if not features and not self.logit_weight:
            return {}
        model = ctx.replica(blueprint.name)
        load_state(model, reply.params["main"])
        if blueprint.running_statistics() - reply.params["main"].keys():
            collect_statistics(model, server.public, ctx.training.batch_size)
        return answers(model, server.public, features, bool(self.logit_weight))

    def fuse(self, server: Party, replies: Mapping[int, Message], step: Step, ctx: Context) -> None:
        """Take HeteroFL's average, Eq. (1), and train it in `refine`; without aggregation, train the student."""
        if self.aggregation != "none":
            super().fuse(server, replies, step, ctx)
            return
        server.memory["subset_seed"] = subset_seed(ctx)
        lessons = ((client, reply.data) for client, reply in replies.items())
        if self.teach_server(server, lessons, self.exchange.public_subset(server), ctx):
            server.memory["taught"] = True  # until then its logits are noise, and clients get none
        if self.static_bn:
            collect_statistics(server.main, server.public, ctx.training.batch_size)

    def teach_server(self, server: Party, lessons: Lessons, data: Samples, ctx: Context) -> bool:
        """Train the server's network, and the projections of this round's teachers, on U; tell whether any taught."""
        columns = self.targets(server, lessons, ctx) if self.distill_epochs else {}
        if not columns:
            return False  # no epochs, or all clients are as wide as the server and averaged: nothing to distill
        if not self.proj_persist:
            self.draw_projections(server, ctx)
        training = Training(
            batch_size=self.distill_batch,
            optimizer=self.distill_optimizer,
            lr=self.distill_lr,
            momentum=self.distill_momentum,
        )
        # The head gets no gradient from features and stays as it was averaged; absent teachers' projections stay too.
        names = [PROJECTION + column.removeprefix(FEATURE) for column in columns]
        trainable = {"main": None, **{name: None for name in names if name in server.models}}
        stage = Stage(
            self.distillation_loss,
            trainable,
            data=data,
            columns=columns,
            epochs=self.distill_epochs,
            training=training,
        )
        ctx.log("distill_loss", ctx.run(stage, server, "distill"))
        return True

    def targets(self, server: Party, lessons: Lessons, ctx: Context) -> dict[str, Tensor]:
        """Return the teachers as columns over the public samples: uniform means of features, Eq. (2), and of logits."""
        total: dict[str, Tensor] = {}
        members: dict[str, int] = {}
        for client, lesson in lessons:
            for name, tensor in lesson.items():
                column = name
                if name == "features":
                    if tensor.shape[1] == server.main.feature_dim and not self.full_group:
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

    def send(self, server: Party, info: ClientInfo, step: Step, ctx: Context) -> Message:
        """As HeteroFL; without aggregation the seed of the public subset and, once it learned, the student's logits."""
        if self.aggregation != "none":
            return super().send(server, info, step, ctx)
        if step.name == "evaluate":
            return Message()
        seed = subset_seed(ctx)
        message = Message(meta={"subset_seed": seed})
        if server.memory.get("taught") and self.digest_epochs:
            if ctx.cache.get("student_logits", (None,))[0] != seed:  # once a round, for all clients
                server.memory["subset_seed"] = seed
                ctx.cache["student_logits"] = seed, logits_of(server.main, self.exchange.public_subset(server))
            message.data["logits"] = ctx.cache["student_logits"][1]
        return message

    # --- client ---

    def setup_client(self, client: Party, ctx: Context) -> None:
        """As HeteroFL; without aggregation there is nothing to scale for."""
        if self.aggregation != "none":
            super().setup_client(client, ctx)

    def local(self, client: Party, step: Step, ctx: Context) -> Local:
        """As HeteroFL; without aggregation digest the student's logits, train, and answer on the public subset."""
        if self.aggregation != "none":
            return (yield from super().local(client, step, ctx))
        client.memory["subset_seed"] = int(client.inbox.meta["subset_seed"])
        if "logits" in client.inbox.data:
            yield from self.exchange.digest(client, client.inbox.data["logits"], ctx)
        yield from self.exchange.revisit(client, ctx)
        subset = self.exchange.public_subset(client)
        return Message(data=answers(client.main, subset, self.kind == "feature", bool(self.logit_weight)))


def add_widest(ctx: Context, blueprint: Blueprint, method: str) -> None:
    """Add the server's architecture, which must contain all others, to those the shared tensors are laid out for."""
    for client in largest_first(ctx.blueprints):
        # Blocks or channels that the server lacks would be averaged, but never distilled.
        if blueprint.family != client.family or not contains(blueprint, client):
            raise InputError(
                f"{method}: the server's network {blueprint.name} does not contain {client.name}: name one of the same "
                "family, at least as deep and as wide as every client's (server_model), or use aggregation='none'."
            )
    ctx.blueprints.setdefault(blueprint.name, blueprint)


def contains(large: Blueprint, small: Blueprint) -> bool:
    """Tell whether every tensor of one architecture is a slice of the other's of that name."""
    if not small.shapes.keys() <= large.shapes.keys():
        return False
    pairs = ((large.shapes[name], shape) for name, shape in small.shapes.items())
    return all(len(a) == len(b) and all(x >= y for x, y in zip(a, b, strict=True)) for a, b in pairs)


def answers(model: nn.Module, data: Samples, features: bool, logits: bool) -> dict[str, Tensor]:
    """Return a network's features and logits on some samples, in prediction mode."""

    def answer(x: Tensor, _: Tensor) -> dict[str, Tensor]:
        z = model.features(x)  # type: ignore[operator]
        return {**({"features": z} if features else {}), **({"logits": model.head(z)} if logits else {})}  # type: ignore[operator]

    parts = pass_over(model, data, answer)
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
