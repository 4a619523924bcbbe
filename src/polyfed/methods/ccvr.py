"""CCVR: No Fear of Heterogeneity: Classifier Calibration for Federated Learning with Non-IID Data.

Luo, Chen, Hu, Zhang, Liang, Feng, NeurIPS 2021. https://arxiv.org/abs/2106.05001

Under label skew the classifier is the most biased layer. Clients tell mean and covariance of their features by class;
pooled, they are those of all features together (Eq. 1 and 2 in `ops/moments.py`). Virtual features are drawn from these
Gaussians, alike for all classes, and the head alone is trained on them:

    h  <-  argmin sum_c sum_(z ~ N(mu_c, S_c)) CE(h(z), c)                                           (3)

`form="server"` is the paper's: FedAvg, then a new head at the server. `form="clients"` is the one that FedVTC compares
with: networks of any architecture are trained locally, and each client fits its own head to the common Gaussians.

Deviations:
    The heterogeneous form is built from FedVTC's cost table, which holds (C + 1)·d + d² numbers: one covariance for all
    classes in every round (`covariance="shared", when="every_round"`). Here it is C_k·(d + 1) + d², means with counts.
    A class with one sample in all has no covariance and is left out, except with a shared one. In every round, classes
    that nobody held keep their last Gaussian.
    Covariances that are not positive definite get a ridge. The power transform of features is not offered.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

from torch import Tensor

from polyfed.core.errors import InputError
from polyfed.core.fields import AtLeastOne, Count, NotNegative, Positive
from polyfed.core.heads import head_loss, head_misfit, head_names, train_head
from polyfed.core.message import Message
from polyfed.core.method import Combination, Local, Plan, Step
from polyfed.core.party import Blueprint, ClientInfo, Context, Party
from polyfed.core.places import Place
from polyfed.core.privacy import Releases
from polyfed.core.prototypes import packed_moments, unpacked_moments
from polyfed.core.releases import client_moments
from polyfed.core.samples import Samples
from polyfed.core.settings import training_of
from polyfed.core.stage import Stage
from polyfed.core.traffic import Traffic
from polyfed.core.views import Shared, View
from polyfed.methods.fedavg import EXCHANGE, WEIGHTS, FedAvg
from polyfed.ops.moments import gaussian_samples, merged_moments, pooled_moments, with_covariance

AVERAGED = f"[form == 'server']*{WEIGHTS}"  # bytes of the model, of a class's moments, and of a covariance for all
MOMENTS = "4*F + c + [covariance == 'full']*4*F*F + [covariance == 'diag']*4*F"
COMMON = " + [covariance == 'shared']*4*F*F"


@dataclass(frozen=True)
class CCVR(FedAvg):
    """Train the head again, on features drawn from the classes' Gaussians.

    Parameters
    ----------
    form
        `server`: FedAvg, whose head is calibrated at the server; `clients`: local training, every client calibrates its
        own head.
    when
        Calibrate at the `final` model, or in `every_round`.
    covariance
        `full`, one for each class; `shared`, one for all; `diag`, variances only.
    samples_per_class
        Virtual features M_c (None: 500 up to ten classes, otherwise 1000); 0 gives FedAvg, or local training, exactly.
    head_epochs, head_lr, head_batch
        Epochs, learning rate and batch size of Eq. (3), plain SGD (None: the run's own).
    ridge
        Share of the mean variance that is added to a covariance that is not positive definite.
    weighting, buffers, pretrain_epochs
        As in FedAvg, for the server's form. `view` is not used.
    """

    name: ClassVar[str] = "ccvr"
    paper: ClassVar[str] = "Luo et al. 2021"
    family: ClassVar[str] = "prototypes"
    sends: ClassVar[str] = "model weights (server form); count, mean and covariance of the features of each class"
    combines: ClassVar[Mapping[str, Combination]] = {
        "params/main": "mean",
        "data/means": "classes",
        "data/covariance": "classes",
    }
    traffic: ClassVar[Mapping[str, Traffic]] = {
        "main": Traffic(AVERAGED, f"{AVERAGED} + [form == 'server']*8"),
        "pretrain": EXCHANGE,
        "statistics": Traffic(AVERAGED, f"C_k*({MOMENTS} + 4){COMMON}"),
        "head": Traffic("4*H"),
        "calibrate": Traffic(f"C_m*({MOMENTS}){COMMON}"),
    }

    form: Literal["server", "clients"] = "server"
    when: Literal["final", "every_round"] = "final"
    covariance: Literal["full", "shared", "diag"] = "full"
    samples_per_class: Count | None = None
    head_epochs: AtLeastOne = 10
    head_lr: Positive | None = None
    head_batch: AtLeastOne | None = None
    ridge: NotNegative = 1e-4

    def check(self) -> None:
        """Refuse a view: the form says what is averaged."""
        if self.view != "auto":
            raise InputError(f"{self.name}: leave view out: the server's form averages all, the clients' form nothing.")
        if self.form == "clients" and self.pretrain_epochs:
            raise InputError(f"{self.name}: the clients' form averages nothing: leave pretrain_epochs out.")

    def requirements(self) -> frozenset[str]:
        """Features of one size."""
        return frozenset({"feature_dim", "classes"})

    def misfit(
        self, infos: Sequence[ClientInfo], blueprints: Mapping[str, Blueprint], input_shape: tuple[int, ...]
    ) -> str | None:
        """Return what to do with several networks in the server's form, or heads that cannot be trained."""
        if self.form == "server" and len(blueprints) > 1:
            return "one architecture at all clients: give them one model, or set form=clients (own heads)"
        return head_misfit(blueprints)

    def plan(self) -> Plan:
        """Add the exchange of statistics, after the rounds or in each; a head, or what makes one, comes back."""
        server, always = self.form == "server", self.when == "every_round"
        main, who = Step(down=server, up=server), "selected" if always else "all"
        extra = [Step("statistics", who=who, down=server), Step("head" if server else "calibrate", who=who, up=False)]
        if self.samples_per_class == 0:
            extra = []
        elif always and server:
            extra.pop()  # the head goes down with the next model
        plan = super().plan()
        return replace(plan, round=(main, *extra)) if always else replace(plan, round=(main,), after=tuple(extra))

    # --- server ---

    def policy(self, ctx: Context) -> View:
        """Average everything, or nothing."""
        return super().policy(ctx) if self.form == "server" else Shared(())

    def send(self, server: Party, info: ClientInfo, step: Step, ctx: Context) -> Message:
        """Send the model, its head only, or the pooled statistics."""
        if self.form == "clients":
            return Message(data=server.memory["statistics"]) if step.name == "calibrate" else Message()
        message = super().send(server, info, step, ctx)
        if step.name == "head":
            names = head_names(ctx.blueprints[info.architecture])
            message.params["main"] = {name: message.params["main"][name] for name in names}
        return message

    def fuse(self, server: Party, replies: Mapping[int, Message], step: Step, ctx: Context) -> None:
        """Average models; or pool statistics, Eq. (1) and (2), and calibrate the head, Eq. (3)."""
        if step.name != "statistics":
            return super().fuse(server, replies, step, ctx)
        pooled = pooled_moments([unpacked_moments(reply.data) for reply in replies.values()], self.covariance)
        fresh, old = with_covariance(pooled, self.covariance), server.memory.get("statistics")
        known = merged_moments(unpacked_moments(old) if old else None, fresh, self.covariance)
        server.memory["statistics"] = packed_moments(known, ctx.num_classes, counts=False)
        if self.form == "server" and len(known.classes):
            (blueprint,) = ctx.blueprints.values()
            head = {name: server.state[name] for name in head_names(blueprint)}
            train_head(head, self.calibration(server.memory["statistics"], None, ctx), ctx, "calibrate")
            self.refresh(server, ctx)

    def beyond_training(self) -> str | None:
        """Only weights and class statistics leave."""
        return None

    def releases(self) -> Releases:
        """Tell statistics in every round, or once."""
        if self.samples_per_class == 0:
            return Releases()
        return Releases(each_round=1) if self.when == "every_round" else Releases(once=1)

    def places(self, server: Party, info: ClientInfo, message: Message, ctx: Context) -> dict[str, Place]:
        """Return where entries meet: a shared covariance belongs to no class."""
        found = super().places(server, info, message, ctx)
        if self.covariance == "shared" and "covariance" in message.data:
            found["data/covariance"] = Place("data/covariance", tuple(message.data["covariance"].shape))
        return found

    # --- client ---

    def local(self, client: Party, step: Step, ctx: Context) -> Local:
        """Train; tell the statistics of the features; calibrate the own head."""
        if step.name == "statistics":
            main: Any = client.main
            found = client_moments(client, ctx, lambda x: main.features(x), self.covariance)
            return Message(data=packed_moments(found, ctx.num_classes))
        if step.name == "calibrate" and len(client.inbox.data["classes"]):
            yield self.calibration(client.inbox.data, client, ctx)
        elif step.name == "main" and self.form == "clients":
            yield Stage(self.loss)
        elif self.form == "server" and step.name != "head":
            return (yield from super().local(client, step, ctx))
        return None

    def calibration(self, statistics: Mapping[str, Tensor], client: Party | None, ctx: Context) -> Stage:
        """Return the training of a head (a client's, or the server's) on virtual features, Eq. (3)."""
        wanted, gaussians = self.samples_per_class, unpacked_moments(statistics)
        count = wanted if wanted is not None else 500 if ctx.num_classes <= 10 else 1000
        features = gaussian_samples(gaussians, self.covariance, count, ctx.rng("virtual", client), self.ridge)
        return Stage(
            head_loss,
            trainable={"main": head_names(ctx.blueprints[client.architecture]) if client is not None else None},
            data=Samples(features, gaussians.classes.repeat_interleave(count)),
            received=True,
            epochs=self.head_epochs,
            training=training_of(self, "head", ctx.training),
        )
