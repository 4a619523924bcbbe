"""FedFD: Feature Distillation is the Better Choice for Model-Heterogeneous Federated Learning.

Li, Wang, Xu et al. 2025. https://arxiv.org/abs/2507.10348

HeteroFL, and after every average the server distils the *features* of the uploaded networks into the global one, on
unlabeled public data U. Networks of one width are one teacher, the mean of their features; the global features reach
the width of a teacher by a projection with orthonormal columns (`feature_teaching.py`). Equation numbers are those of
docs/methods/fedfd.md. Clients take levels with their models: `levels("cnn:16-32-64", "a-d-g")`.

Deviations:
    The paper gives no distributions for its KL divergence, no optimizer, no number of distillation epochs and no public
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
    The paper's variant without averaging is a method of its own, `fedfd_student`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

from torch import Tensor

from polyfed.core.errors import InputError
from polyfed.core.fields import Positive
from polyfed.core.message import Message
from polyfed.core.method import Combination
from polyfed.core.party import ClientInfo, Context, Party, state_of
from polyfed.core.uploads import uploaded_network
from polyfed.core.views import uncontained
from polyfed.methods.feature_teaching import FeatureTeaching, answers
from polyfed.methods.heterofl import HeteroFL
from polyfed.ops.aggregate import part_of


@dataclass(frozen=True)
class FedFD(FeatureTeaching, HeteroFL):
    """HeteroFL with distillation of features at the server.

    Parameters
    ----------
    distill
        `feature`; `logit`: ensemble distillation of the mean logits of all uploaded networks (FedDF); `none`: HeteroFL
        exactly, as is `distill_epochs=0`.
    server_model
        The server's network as a model string (None: the largest of the clients'). It must contain every client's, in
        depth and width; what no client holds then learns from distillation only.
    weighting, scaler, global_rate, static_bn, statistics, mask, clip, measure
        As in HeteroFL, with other defaults. Mind that `static_bn=False` averages running statistics of unlike widths.
    view, buffers, pretrain_epochs
        As in FedAvg, for the average only. To distill, `view` is `prefix` (or `full`, for one architecture), and
        `buffers="local"` needs `static_bn`; the server distils after pre-training too.
    """

    name: ClassVar[str] = "fedfd"
    paper: ClassVar[str] = "Li et al. 2025"
    family: ClassVar[str] = "width"
    sends: ClassVar[str] = "the weights of the client's width slice, BatchNorm's statistics, and the number of samples"
    combines: ClassVar[Mapping[str, Combination]] = {"params/main": "apart"}  # also a teacher

    weighting: Literal["samples", "uniform"] = "samples"
    statistics: Literal["clients", "public"] = "public"
    mask: bool = False
    clip: Positive | None = None
    measure: Literal["slice", "own"] = "own"

    def check(self) -> None:
        """Refuse choices that do not go together."""
        super().check()
        if self.distill != "none" and self.view not in ("prefix", "full"):
            raise InputError(
                f"{self.name}: the server distills into the widest network, which holds every client's slice: "
                f"view is 'prefix', not '{self.view}'."
            )
        if self.distill != "none" and self.buffers == "local" and not self.static_bn:
            raise InputError(
                f"{self.name}: buffers='local' leaves the global network without BatchNorm statistics: "
                "use static_bn=True or buffers='average'."
            )

    def requirements(self) -> frozenset[str]:
        """Widths of one network; to distill, also public data, features, and networks that the server can build."""
        needs = frozenset() if self.kind == "none" else frozenset({"public", "features", "builds"})
        return super().requirements() | needs | ({"classes"} if self.logit_weight else frozenset())

    def setup_server(self, server: Party, infos: Mapping[int, ClientInfo], ctx: Context) -> None:
        """Lay out the slices of the server's network, which must contain all others, and the projections."""
        if self.server_model is not None or self.kind != "none":
            own = self.server_blueprint(ctx)
            # Blocks or channels that the server lacks would be averaged, but never distilled.
            if (client := uncontained(own, ctx.blueprints)) is not None:
                raise InputError(
                    f"{self.name}: the server's network {own.name} does not contain {client.name}: name one of the "
                    "same family, at least as deep and as wide as every client's (server_model), or use "
                    "fedfd_student, which averages no weights."
                )
            ctx.blueprints.setdefault(own.name, own)
        super().setup_server(server, infos, ctx)
        self.add_projections(server, infos, ctx)

    def refine(self, server: Party, replies: Mapping[int, Message], ctx: Context) -> None:
        """Distil the uploaded networks into the average, Eq. (1), and put the result back among the shared tensors."""
        if self.kind == "none":
            return
        lessons = ((client, self.lesson(server, client, reply, ctx)) for client, reply in replies.items())
        self.teach_server(server, lessons, server.public, ctx)
        architecture = self.global_architecture(ctx)
        assert architecture is not None  # that of the network just distilled into
        own, slots = state_of(server.main), self.all_slots(architecture, ctx)
        for name, slot in slots.items():
            part_of(server.state[slot.key], slot).copy_(own[name])

    def lesson(self, server: Party, client: int, reply: Message, ctx: Context) -> dict[str, Tensor]:
        """Return what an uploaded network says on U (the upload itself, not a slice of the new average)."""
        blueprint = ctx.blueprints[ctx.infos[client].architecture]
        wanted = self.include_full_group or blueprint.feature_dim != server.main.feature_dim
        features = self.kind == "feature" and wanted
        if not features and not self.logit_weight:
            return {}
        model = uploaded_network(client, reply, server.public, ctx)
        return answers(model, server.public, features, bool(self.logit_weight))
