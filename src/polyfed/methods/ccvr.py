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
from typing import ClassVar, Literal

from torch import Tensor

from polyfed.core.fields import AtLeastOne, Positive
from polyfed.core.heads import head_misfit, head_names, head_of, head_stage, train_head
from polyfed.core.message import Message
from polyfed.core.method import Local, Plan, Step
from polyfed.core.party import ClientInfo, Context, Party
from polyfed.core.privacy import Releases
from polyfed.core.stage import Stage
from polyfed.core.traffic import Traffic
from polyfed.core.views import Blueprints, Shared, View
from polyfed.methods.class_gaussians import COMMON, MOMENTS, ClassGaussians
from polyfed.methods.fedavg import EXCHANGE, WEIGHTS

AVERAGED = f"[form == 'server']*{WEIGHTS}"  # bytes of the model


@dataclass(frozen=True)
class CCVR(ClassGaussians):
    """Train the head again, on features drawn from the classes' Gaussians.

    Parameters
    ----------
    form
        `server`: FedAvg, whose head is calibrated at the server; `clients`: local training, every client calibrates its
        own head.
    when
        Calibrate at the `final` model, or in `every_round`.
    samples_per_class
        As in `class_gaussians.py`; 0 gives FedAvg, or local training, exactly.
    head_epochs, head_lr, head_batch
        Epochs, learning rate and batch size of Eq. (3), plain SGD (None: the run's own).
    """

    name: ClassVar[str] = "ccvr"
    paper: ClassVar[str] = "Luo et al. 2021"
    family: ClassVar[str] = "prototypes"
    sends: ClassVar[str] = "model weights (server form); count, mean and covariance of the features of each class"
    traffic: ClassVar[Mapping[str, Traffic]] = {
        "main": Traffic(AVERAGED, f"{AVERAGED} + [form == 'server']*8"),
        "pretrain": EXCHANGE,
        "statistics": Traffic(AVERAGED, f"C_k*({MOMENTS} + 4) + {COMMON}"),
        "head": Traffic("4*H"),
        "calibrate": Traffic(f"C_m*({MOMENTS}) + {COMMON}"),
    }

    form: Literal["server", "clients"] = "server"
    when: Literal["final", "every_round"] = "final"
    head_epochs: AtLeastOne = 10
    head_lr: Positive | None = None
    head_batch: AtLeastOne | None = None

    def check(self) -> None:
        """Refuse a view: the form says what is averaged."""
        self.must_stay("the server's form averages all, the clients' form nothing", view="auto")
        if self.form == "clients":
            self.must_stay("the clients' form averages nothing", pretrain_epochs=0)

    def misfit(self, infos: Sequence[ClientInfo], blueprints: Blueprints, input_shape: tuple[int, ...]) -> str | None:
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

    def releases(self) -> Releases:
        """Tell statistics in every round, or once."""
        told = int(self.samples_per_class != 0)
        return Releases(each_round=told) if self.when == "every_round" else Releases(once=told)

    # --- server ---

    def policy(self, ctx: Context) -> View:
        """Average everything, or nothing."""
        return super().policy(ctx) if self.form == "server" else Shared(())

    def send(self, server: Party, info: ClientInfo, step: Step, ctx: Context) -> Message:
        """Send the model, its head only, or the pooled statistics."""
        if step.name == "calibrate":
            return Message(data=server.memory["statistics"])
        message = super().send(server, info, step, ctx)
        if step.name == "head":
            message.params["main"] = head_of(message.params["main"], ctx.blueprints[info.architecture])
        return message

    def fuse(self, server: Party, replies: Mapping[int, Message], step: Step, ctx: Context) -> None:
        """Average models; or pool statistics, Eq. (1) and (2), and calibrate the head, Eq. (3)."""
        if step.name != "statistics":
            return super().fuse(server, replies, step, ctx)
        statistics = self.pool_moments(server, replies, ctx)
        if self.form == "server" and len(statistics["classes"]):
            (blueprint,) = ctx.blueprints.values()
            stage = self.calibration(statistics, None, ctx)
            train_head(head_of(server.state, blueprint), stage, ctx, "calibrate")
            self.refresh(server, ctx)

    def calibration(self, statistics: Mapping[str, Tensor], client: Party | None, ctx: Context) -> Stage:
        """Return the training of a head (a client's, or the server's) on virtual features, Eq. (3)."""
        names = head_names(ctx.blueprints[client.architecture]) if client is not None else None
        return head_stage(self, "head", self.virtual_features(statistics, client, ctx), ctx, names)

    # --- client ---

    def local(self, client: Party, step: Step, ctx: Context) -> Local:
        """Train; tell the statistics of the features; calibrate the own head."""
        if step.name == "statistics":
            return self.tell_moments(client, ctx)
        if step.name not in ("calibrate", "head"):
            return (yield from super().local(client, step, ctx))
        if step.name == "calibrate" and len(client.inbox.data["classes"]):
            yield self.calibration(client.inbox.data, client, ctx)
        return None
