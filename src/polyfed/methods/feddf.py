"""FedDF: Ensemble Distillation for Robust Model Fusion in Federated Learning.

Lin, Kong, Stich, Jaggi, NeurIPS 2020. https://arxiv.org/abs/2006.07242

Clients of one architecture (a prototype p) are averaged; then the server distills the ensemble of *all* uploaded
networks into every prototype's average x_p, on unlabeled public data:

    x_p = sum_k n_k w_k / sum_k n_k,  over this round's clients of prototype p                          (1)
    L = T² · KL(softmax(mean_k z_k(x) / T) || softmax(z_p(x) / T)),  mean over all clients of the round   (2)

`feddf_hetero` (FedFusion in FedFD's tables) does the same with width slices.

Deviations:
    The server has no validation data by itself, and distills for a fixed number of steps (the paper: at most 10000,
    until validation data shows no gain for 1000). `select_on="public"` sets labelled public samples apart for early
    stopping (the paper: a tenth of the training data); `test` takes the test set, and the run says so.
    `drop_worst` compares with the mean and deviation of the networks that beat chance; if none does, all are kept (as
    released: without the best one in the mean, and only where all beat chance).
    T² in Eq. (2) is not in the released loss; it is 1 by default.
    The released option `avg_losses` has the gradient of `ensemble="probs"` and is not offered apart.
    A teacher whose BatchNorm statistics were not uploaded gets those of the public data.
    A client that is no network has no weights to average: it uploads its logits on the public data, is a teacher in
    Eq. (2) as the others are, and learns from what the ensemble says there; it is its own student. Such a federation
    chooses nothing (`select_on`, `drop_worst`). It hears the ensemble at the beginning of its next round.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from torch import Tensor

from polyfed.core.distill import distillation_loss
from polyfed.core.message import Message
from polyfed.core.method import EVALUATE, Combination, Local, Step
from polyfed.core.needs import EXPLAINED
from polyfed.core.party import Blueprint, ClientInfo, Context, Party
from polyfed.core.passes import logits_of
from polyfed.core.stage import Stage
from polyfed.core.traffic import Traffic
from polyfed.methods.distillation import EnsembleDistillation
from polyfed.methods.fedavg import WEIGHTS, FedAvg


@dataclass(frozen=True)
class FedDF(EnsembleDistillation):
    """FedAvg by architecture with distillation of the ensemble at the server.

    Parameters
    ----------
    view
        `same_arch`, or `full` for one architecture.
    weighting, buffers, pretrain_epochs
        As in FedAvg, for the average of a prototype; the server distills after pre-training too.
    """

    name: ClassVar[str] = "feddf"
    paper: ClassVar[str] = "Lin et al. 2020"
    sends: ClassVar[str] = "model weights (of a model that is no network: its logits on public data), number of samples"
    combines: ClassVar[Mapping[str, Combination]] = {"params/main": "apart", "data/logits": "apart"}
    traffic: ClassVar[Mapping[str, Traffic]] = {
        **FedAvg.traffic,
        "main": Traffic(f"{WEIGHTS} + [P == 0 and t > 1]*4*N*C", f"{WEIGHTS} + 8 + [P == 0]*4*N*C"),
    }

    view: Literal["same_arch", "full"] = "same_arch"  # each prototype has a network of its own

    def takes_learners(self) -> bool:
        """Only predictions of the ensemble count; to choose among networks needs networks."""
        return self.select_on == "none"

    def requirements(self) -> frozenset[str]:
        """As others, but the server builds only networks (see `misfit`)."""
        return super().requirements() - {"builds"}

    def misfit(
        self, infos: Sequence[ClientInfo], blueprints: Mapping[str, Blueprint], input_shape: tuple[int, ...]
    ) -> str | None:
        """Return which network the server cannot build, or what the average lacks."""
        hidden = [i for i in infos if blueprints[i.architecture].build is None and not is_learner(i, blueprints)]
        if hidden:
            return f"{EXPLAINED['builds']}, but the model of {hidden[0]} is known to that client only"
        return super().misfit(infos, blueprints, input_shape)

    def global_architecture(self, ctx: Context) -> Blueprint | None:
        """Return the one network's architecture; a learner is none."""
        found = super().global_architecture(ctx)
        return None if found is None or "learner" in found.properties else found

    def students(self, ctx: Context) -> list[Blueprint]:
        """Return the architectures of networks."""
        return [blueprint for blueprint in super().students(ctx) if "learner" not in blueprint.properties]

    def fuse(self, server: Party, replies: Mapping[int, Message], step: Step, ctx: Context) -> None:
        """Average by architecture, Eq. (1), which ends with the distillation, `refine`."""
        super().fuse(server, self.kept(server, replies, ctx), step, ctx)

    def agreed(self, server: Party, targets: Tensor, ctx: Context) -> None:
        """Keep what the ensemble says, where somebody will hear it."""
        if any(is_learner(info, ctx.blueprints) for info in ctx.infos.values()):
            server.memory["ensemble"] = targets

    # --- learners ---

    def send(self, server: Party, info: ClientInfo, step: Step, ctx: Context) -> Message:
        """Send a network's average, or what the ensemble said last of the public data."""
        if not is_learner(info, ctx.blueprints):
            return super().send(server, info, step, ctx)
        said = server.memory.get("ensemble")
        return Message() if said is None or step.name == EVALUATE.name else Message(data={"logits": said})

    def local(self, client: Party, step: Step, ctx: Context) -> Local:
        """Train and return weights; or learn from the ensemble and from own data, and tell what one thinks."""
        assert client.info is not None
        if not is_learner(client.info, ctx.blueprints):
            return (yield from super().local(client, step, ctx))
        if "logits" in client.inbox.data:
            targets = client.inbox.data["logits"]
            options: dict[str, Any] = {
                "columns": {"target": targets},
                "aux": {"temperature": self.temperature},
                "targets": targets,
            }
            yield Stage(distillation_loss, data=client.public, **options)
        yield self.stage(client, ctx)
        return Message(data={"logits": logits_of(client.main, client.public)}, meta={"samples": len(client.train)})


def is_learner(info: ClientInfo, blueprints: Mapping[str, Blueprint]) -> bool:
    """Tell whether a client's model is no network."""
    return "learner" in blueprints[info.architecture].properties
