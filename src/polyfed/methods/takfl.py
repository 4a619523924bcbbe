"""TAKFL: Towards Diverse Device Heterogeneous Federated Learning via Task Arithmetic Knowledge Integration.

Morafah, Kungurtsev, Chang, Chen, Lin, NeurIPS 2024. https://arxiv.org/abs/2409.18461

FedDF with prototypes, but each prototype's ensemble is a distillation task of its own; a student adds up the resulting
task vectors with weights, so that the knowledge of small devices does not dilute that of large ones.

    zbar_j = mean logits of prototype j's uploads,  s_p = logits of the average x_p, both fixed                  (1)
    y: from x_p on  T² KL(zbar_j || z) + A·T_s² KL(s_p || z),  softmax at T and T_s;  tau_pj = y - x_p            (2)
    x_p <- x_p + sum_j lambda_pj tau_pj                                                                          (3)

Deviations:
    The paper tunes lambda on validation data, which the server has only with `select_on` (see FedDF): by default
    lambda is fixed and uniform.
    A prototype without uploads this round is no teacher, and the others' weights grow so that their sum stays; it is
    still a student. Running variances are cut off at zero after Eq. (3), since weights may have any sign.
    The released split of validation data is not copied: it calls an attribute that does not exist, and swaps its parts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from torch import Tensor

from polyfed.core.distill import distill_by
from polyfed.core.errors import InputError
from polyfed.core.fields import AtLeastOne, Count, NotNegative, Positive
from polyfed.core.message import Message, State
from polyfed.core.party import ClientInfo, Context, Party, cloned, fill, load_state, state_of
from polyfed.core.passes import logits_of
from polyfed.core.samples import Samples
from polyfed.core.stage import Aux, Batch
from polyfed.core.task_vectors import best_row, learned_row, merged, row_of
from polyfed.core.uploads import logits_by_architecture, ready_network
from polyfed.core.views import largest_first
from polyfed.methods.feddf import FedDF
from polyfed.ops.distance import kl_divergence


@dataclass(frozen=True)
class TAKFL(FedDF):
    """FedDF with a task vector for each prototype.

    Parameters
    ----------
    merge
        Where lambda comes from: `fixed`; `heuristic`: the best of drawn candidates, in which larger prototypes weigh
        more, on the data of `select_on`; `learned`: trained there.
    lam
        Fixed lambda from the smallest to the largest of M prototypes: M numbers for all students, or M² row by row
        (None: 1/M each). All 0 is FedAvg by architecture exactly.
    candidates
        Draws for each of three degrees of inequality.
    temperature, self_temperature, self_weight
        T, T_s and A of Eq. (2); with one prototype, A = 0 and lambda 1 this is FedDF.
    distill_epochs, distill_lr, distill_weight_decay, distill_clip, distill_cosine, distill_steps
        As in FedDF, with the paper's values: five epochs of Adam at a small rate. Every student learns M tasks.
    ensemble
        `logits` only, Eq. (1).
    check_every, patience
        Stay as they are: `select_on` is for lambda and `drop_worst` here.
    """

    name: ClassVar[str] = "takfl"
    paper: ClassVar[str] = "Morafah et al. 2024"
    sends: ClassVar[str] = "model weights and the number of samples"

    ensemble: Literal["logits"] = "logits"  # Eq. (1)
    temperature: Positive = 3.0
    distill_steps: Count | None = None
    distill_epochs: Count = 5
    distill_lr: Positive = 1e-5
    distill_weight_decay: NotNegative = 5e-5
    distill_clip: Positive | None = None
    distill_cosine: bool = False
    self_temperature: Positive = 20.0
    self_weight: NotNegative = 0.01
    merge: Literal["fixed", "heuristic", "learned"] = "fixed"
    lam: tuple[float, ...] | None = None
    candidates: AtLeastOne = 15

    def check(self) -> None:
        """Refuse tuned weights without data to tune them on, and what belongs to early stopping."""
        super().check()
        self.must_stay("labelled data is for lambda and drop_worst here", check_every=100, patience=1000)
        if self.merge != "fixed" and self.select_on == "none":
            raise InputError(f"{self.name}: merge='{self.merge}' needs labelled data at the server: set select_on.")

    def takes_learners(self) -> bool:
        """Take networks only: what has no weights has no task vectors."""
        return False

    def setup_server(self, server: Party, infos: Mapping[int, ClientInfo], ctx: Context) -> None:
        """Check the number of fixed weights."""
        super().setup_server(server, infos, ctx)
        prototypes = len(ctx.blueprints)
        if self.lam is not None and len(self.lam) not in (prototypes, prototypes**2):
            raise InputError(
                f"{self.name}: lam has {len(self.lam)} numbers, but there are {prototypes} architectures: give one for "
                f"each of them, smallest first, or {prototypes**2} row by row."
            )

    def refine(self, server: Party, replies: Mapping[int, Message], ctx: Context) -> None:
        """Learn every prototype's task on its own, Eq. (2), and add the task vectors up, Eq. (3)."""
        if not self.distills:
            return
        data, validation = self.split(server, ctx)
        prototypes = [blueprint.name for blueprint in reversed(largest_first(ctx.blueprints))]
        told = logits_by_architecture(replies, data, ctx)
        ensembles = {name: told[name] for name in prototypes if name in told}  # zbar_j, Eq. (1)
        weights = {}
        for place, student in enumerate(prototypes):
            held = self.held(server, ctx.blueprints[student], ctx)
            start = cloned(held)
            own = logits_of(ready_network(student, start, data, ctx), data)
            tasks = [self.task(start, student, teacher, ensembles[teacher], own, data, ctx) for teacher in ensembles]
            if self.merge == "fixed" or validation is None:
                row = row_of(self.lam, place, [name in ensembles for name in prototypes])
            elif self.merge == "heuristic":
                row = best_row(student, start, tasks, data, validation, ctx, self.candidates)
            else:
                row = learned_row(student, start, tasks, data, validation, ctx)
            fill(held, merged(start, tasks, row))
            weights[student] = dict(zip(ensembles, row, strict=True))
        ctx.log("distillation", {"weights": weights, "selected_on": self.select_on})
        self.refresh(server, ctx)

    def task(
        self, start: State, student: str, teacher: str, targets: Tensor, own: Tensor, data: Samples, ctx: Context
    ) -> State:
        """Return tau_pj, Eq. (2)."""
        model = ctx.replica(student)
        load_state(model, start)
        name = f"distill/{student}" + ("" if teacher == student else f"/{teacher}")  # the own task in FedDF's order
        distill_by(self, model, data, {"target": targets, "own": own}, ctx, name=name, loss=self.task_loss)
        moved = state_of(model)
        return {key: moved[key].to(tensor) - tensor for key, tensor in start.items()}

    def task_loss(self, nets: Mapping[str, Any], batch: Batch, aux: Aux) -> Tensor:
        """Return T² KL(zbar_j || z) + A·T_s² KL(s_p || z), Eq. (2)."""
        logits = nets["main"](batch.x)
        loss = self.temperature**2 * kl_divergence(logits, batch["target"], self.temperature)
        stay = self.self_temperature**2 * kl_divergence(logits, batch["own"], self.self_temperature)
        return loss + self.self_weight * stay
