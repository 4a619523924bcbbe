"""What is to be learned: classes, several yes-or-no labels, or values.

A task knows its loss, what a network's outputs mean, which single figure stands for "how good" in every table, and what
the mean of several predictions is. A loss reaches it as `batch.loss(outputs)`, a hook as `ctx.task`. Everything here is
pure, so that an engine may run it for many clients at once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor
from torch.nn import functional as F

from polyfed.core.errors import InputError, unknown

TINY = 1e-30  # probabilities are kept above it before a logarithm


@dataclass(frozen=True)
class Task:
    """Base of the three tasks.

    Class attributes
    ----------------
    name
        What a configuration calls it.
    score, title
        The metric that stands for how good a model is wherever one figure does, and what tables call it. More is better
        for every task, so that "worst", "gain" and "best" mean the same for all of them.
    metrics
        What is measured beside it where nobody asks for others.
    selects
        What validation data is asked for when a round is chosen: the `score`, or the `loss`, which exists on any data.
    noun
        What an output stands for.
    """

    name: ClassVar[str] = ""
    score: ClassVar[str] = ""
    title: ClassVar[str] = ""
    metrics: ClassVar[tuple[str, ...]] = ()
    selects: ClassVar[str] = "score"
    noun: ClassVar[str] = ""

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the mean loss of a batch."""
        raise NotImplementedError

    def total_loss(self, outputs: Tensor, targets: Tensor) -> float:
        """Return the sum of the samples' losses: what a measurement adds up."""
        return float(self.loss(outputs, targets)) * len(targets)

    def predictions(self, outputs: Tensor) -> Tensor:
        """Return what outputs say, in the units of the targets: probabilities or values."""
        raise NotImplementedError

    def mean(self, outputs: Tensor) -> Tensor:
        """Return outputs that predict the mean of what several networks predict, `[networks, samples, outputs]`."""
        raise NotImplementedError

    def right(self, outputs: Tensor, targets: Tensor) -> float | None:
        """Return the samples that were answered correctly (None: the score is not such a share)."""
        return None


@dataclass(frozen=True)
class Classification(Task):
    """One class of several: cross-entropy on logits, judged by accuracy."""

    name: ClassVar[str] = "classification"
    score: ClassVar[str] = "accuracy"
    title: ClassVar[str] = "accuracy"
    noun: ClassVar[str] = "class"

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the cross-entropy."""
        return F.cross_entropy(outputs, targets)

    def total_loss(self, outputs: Tensor, targets: Tensor) -> float:
        """Return the summed cross-entropy."""
        return float(F.cross_entropy(outputs, targets, reduction="sum"))

    def predictions(self, outputs: Tensor) -> Tensor:
        """Return probabilities."""
        return outputs.softmax(-1)

    def mean(self, outputs: Tensor) -> Tensor:
        """Return the mean of the probabilities, in log space: its softmax is that mean again."""
        return outputs.softmax(-1).mean(0).clamp_min(TINY).log()

    def right(self, outputs: Tensor, targets: Tensor) -> float | None:
        """Return how many samples have their class as the largest output."""
        return int((outputs.argmax(1) == targets).sum())


@dataclass(frozen=True)
class Multilabel(Task):
    """Several labels, each yes or no: binary cross-entropy on logits, judged by the share of right answers."""

    name: ClassVar[str] = "multilabel"
    score: ClassVar[str] = "accuracy"
    title: ClassVar[str] = "accuracy"
    metrics: ClassVar[tuple[str, ...]] = ("macro_f1",)  # rare labels make accuracy look good
    noun: ClassVar[str] = "label"

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the binary cross-entropy, mean over samples and labels."""
        return F.binary_cross_entropy_with_logits(outputs, targets)

    def predictions(self, outputs: Tensor) -> Tensor:
        """Return the probability of every label."""
        return outputs.sigmoid()

    def mean(self, outputs: Tensor) -> Tensor:
        """Return the mean of the probabilities as logits: its sigmoid is that mean again."""
        yes, no = outputs.sigmoid().mean(0), (-outputs).sigmoid().mean(0)
        return yes.clamp_min(TINY).log() - no.clamp_min(TINY).log()

    def right(self, outputs: Tensor, targets: Tensor) -> float | None:
        """Return the right answers, of every sample the share over its labels."""
        return float(((outputs > 0) == (targets > 0.5)).float().mean(1).sum())


@dataclass(frozen=True)
class Regression(Task):
    """Values: squared error, judged by R², the share of the variance that is explained.

    Networks learn `(target - center) / spread`, so that targets of any unit can be learned with usual learning rates;
    metrics are in the units of the targets.

    Parameters
    ----------
    center, spread
        Mean and standard deviation of every target; empty: targets are learned as they are.
    """

    name: ClassVar[str] = "regression"
    score: ClassVar[str] = "r2"
    title: ClassVar[str] = "R²"
    metrics: ClassVar[tuple[str, ...]] = ("rmse", "mae")
    selects: ClassVar[str] = "loss"  # R² of a few validation samples may not exist
    noun: ClassVar[str] = "target"

    center: tuple[float, ...] = ()
    spread: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "center", tuple(float(value) for value in self.center))
        object.__setattr__(self, "spread", tuple(float(value) for value in self.spread))
        if len(self.center) != len(self.spread) or any(not value > 0 for value in self.spread):
            raise InputError(
                "Regression takes a center and a positive spread for every target, or neither, not "
                f"center={list(self.center)} and spread={list(self.spread)}."
            )

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the squared error in units of the spread, mean over samples and targets."""
        return F.mse_loss(outputs, self.as_outputs(targets))

    def as_outputs(self, targets: Tensor) -> Tensor:
        """Return targets as the outputs that would predict them: in units of the spread."""
        if not self.center:
            return targets
        return (targets - targets.new_tensor(self.center)) / targets.new_tensor(self.spread)

    def predictions(self, outputs: Tensor) -> Tensor:
        """Return values in the units of the targets."""
        if not self.center:
            return outputs
        return outputs * outputs.new_tensor(self.spread) + outputs.new_tensor(self.center)

    def mean(self, outputs: Tensor) -> Tensor:
        """Return the mean of the values."""
        return outputs.mean(0)


CLASSIFICATION = Classification()
TASKS: dict[str, type[Task]] = {kind.name: kind for kind in (Classification, Multilabel, Regression)}


def as_task(task: Task | str | None) -> Task:
    """Return a task by its name (None: classification).

    Raises
    ------
    InputError
        With the nearest known name.
    """
    if isinstance(task, Task):
        return task
    if task is None:
        return CLASSIFICATION
    if task == "segmentation":
        raise InputError(
            "task='segmentation' is not there: networks give one row of outputs for a sample, not one for every pixel. "
            f"Possible are {', '.join(TASKS)}."
        )
    if not isinstance(task, str) or task not in TASKS:
        raise unknown("task", str(task), TASKS)
    return TASKS[task]()


def describe(task: Task) -> list[object]:
    """Return a task as plain values, to be written or sent: its name, and of a regression center and spread."""
    if isinstance(task, Regression):
        return [task.name, list(task.center), list(task.spread)]
    return [task.name]


def from_description(found: list[object]) -> Task:
    """Read what `describe` wrote."""
    name, *units = found
    if name == Regression.name:
        return Regression(*(tuple(part) for part in units))  # type: ignore[arg-type]
    return as_task(str(name))


def same_targets(targets: Tensor) -> bool:
    """Tell whether some target has one value in all samples: then no share of its variance can be explained."""
    return len(targets) < 2 or bool((targets == targets[:1]).all(0).any())


def check_score(task: Task, targets: Tensor, what: str) -> None:
    """Refuse samples on which a model cannot be judged.

    Raises
    ------
    InputError
        Naming the samples.
    """
    if task.score == "r2" and same_targets(targets):
        raise InputError(
            f"The targets of {what} ({len(targets)} samples) do not vary, so R² does not exist: give more samples."
        )
