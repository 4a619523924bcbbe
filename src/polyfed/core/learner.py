"""Clients whose model is no network: an estimator that is fitted as a whole, and can be asked.

To a method it looks like any model: outputs come from `party.main(x)`, and a `Stage` says what is to be learned. But a
stage is not a number of gradient steps here. It is a lesson that replaces the earlier one on the same kind of samples
(the client's own, or public ones), and the estimator is fitted anew to all lessons that it has.

A client remembers its lessons, not the estimator: that follows from them, its samples and a seed of the client. So a
checkpoint holds tensors only, never a pickle, and after a crash the estimator is fitted again and gives the same
numbers.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from threading import RLock
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from polyfed.core.errors import InputError, TrainingError, first_line
from polyfed.core.nets import EVAL, Net
from polyfed.core.party import Context, Party, PartyData
from polyfed.core.rng import seed_of
from polyfed.core.samples import Samples
from polyfed.core.stage import Batch, Stage, Trained, split_loss
from polyfed.core.task import Classification, Multilabel, Regression, Task, describe, from_description
from polyfed.ops.copies import weighted_copies

BOOK = "lessons"  # in a client's memory: what its learner was last fitted on
DOUBT = 1e-3  # the share of a prediction that is spread over all classes: nothing is impossible, so logarithms exist
AT_ONCE = 4096  # samples
REMEMBERED = 256  # fitted estimators that are kept in memory; others are fitted again when somebody asks

# Estimators work one at a time, beside networks on other threads: scikit-learn sets the process's filters of warnings
# aside while a forest works, and two at once would not put them back.
ALONE = RLock()

Part = tuple[Any, Any]  # of one target: the classes that were seen, and what was fitted (None: there was only one)


class Estimator(Protocol):
    """What is asked of an estimator, beside `predict_proba` where there are classes: scikit-learn's interface."""

    def fit(self, *args: Any, **kwargs: Any) -> Any:
        """Learn."""
        ...

    def predict(self, *args: Any, **kwargs: Any) -> Any:
        """Answer."""
        ...

    def get_params(self, deep: bool = True) -> Any:
        """Return its fields."""
        ...


class Learner(nn.Module):
    """An estimator in the place of a network.

    Parameters
    ----------
    estimator
        Anything with scikit-learn's `fit`, `get_params` and `predict_proba` (regression: `predict`). Copies are fitted.
    outputs
        How many classes, labels or targets there are.
    emphasis
        What public samples weigh together, in units of the client's own samples together: with 1, what was agreed on
        counts as much as what the client knows by itself, as where a network takes one epoch of each.
    """

    def __init__(self, estimator: Any, outputs: int, emphasis: float = 1.0) -> None:
        super().__init__()
        self.estimator = estimator
        self.outputs = outputs
        self.emphasis = emphasis
        self.fits = Fits()
        self.kept: Fitted | None = None  # of a learner that was read from a file: it predicts, and cannot learn
        self.memory: dict[str, Any] = {}
        self.data = PartyData()
        self.owner = 0

    def extra_repr(self) -> str:
        """Return all that tells two learners apart."""
        fields = sorted(self.estimator.get_params(deep=True).items())
        return f"{type(self.estimator).__qualname__}, {fields}, outputs={self.outputs}, emphasis={self.emphasis:g}"

    def __deepcopy__(self, memo: Any) -> Learner:
        """Return a learner for another client: unlike a network's weights, fitted estimators are never changed."""
        other = Learner(self.estimator, self.outputs, self.emphasis)
        other.kept = self.kept
        other.fits, other.memory, other.data, other.owner = self.fits, dict(self.memory), self.data, self.owner
        return other.train(self.training)

    def attach(self, party: Party) -> None:
        """Be the learner of this client from now on: with its memory, its data and its seed."""
        self.memory, self.data, self.owner = party.memory, party.data, party.id

    def forward(self, x: Tensor) -> Tensor:
        """Return outputs: as a network's, so that their softmax (sigmoid) is what the estimator believes, or values.

        Of classes they are log-probabilities without their mean over the classes: the mean of a network's logits does
        not move in training with cross-entropy either, so that both are on one scale.
        """
        with ALONE:
            fitted = self.fitted()
            if fitted is None:
                return x.new_zeros(len(x), self.outputs, dtype=torch.get_default_dtype())
            found = fitted(x.detach().cpu().flatten(1).double().numpy())
        return torch.from_numpy(found).to(device=x.device, dtype=torch.get_default_dtype())

    def fitted(self) -> Fitted | None:
        """Return what follows from the client's lessons (or was read from a file); None: it had none."""
        if self.kept is not None:
            return self.kept
        book = self.memory.get(BOOK)
        if book is None:
            return None
        with ALONE:
            return self.fits.get((self.owner, book["key"]), lambda: self._fit(book))

    def lessons(self) -> dict[str, Any]:
        """Return what the client's learner was last fitted on, as plain values and tensors: for a file."""
        found: dict[str, Any] = self.memory.get(BOOK, {})
        return found

    def recall(self, lessons: dict[str, Any], data: PartyData, owner: int) -> None:
        """Be as the learner was that gave these `lessons`: it is fitted again, to the same samples.

        Raises
        ------
        InputError
            If these are others, or it cannot be fitted.
        """
        self.memory, self.data, self.owner = {BOOK: lessons} if lessons else {}, data, owner
        try:
            self.fitted()
        except Exception as error:  # estimators raise whatever they like, and so do files
            raise InputError(f"The learner of client {owner} cannot be fitted again ({first_line(error)}).") from error

    def estimators(self) -> list[Any]:
        """Return what was fitted: one estimator, or one for each label or value (None: all samples were of one class).

        Classes are numbered as they were seen: those without a sample at this client are left out.
        """
        fitted = self.fitted()
        return [] if fitted is None else [estimator for _, estimator in fitted.parts]

    def learn(self, stage: Stage, party: Party, ctx: Context) -> Trained:
        """Take in what a stage teaches, and fit.

        Raises
        ------
        TrainingError
            With the client, where the estimator cannot be fitted.
        """
        if ctx.privacy.on:
            raise InputError(f"{party} has {party.architecture}, which learns without gradients: there is no noise.")
        self.attach(party)
        lessons = dict(party.memory.get(BOOK, {}).get("lessons", {}))
        lessons.update(self._lesson(stage, party))
        seed = seed_of(ctx.seed, "learner", 0, party.id) % (1 << 32)  # one for all fits: only lessons differ
        book = {"seed": seed, "task": describe(ctx.task), "lessons": lessons}
        party.memory[BOOK] = {**book, "key": fingerprint(seed, self._table(book))}
        try:
            self.fitted()
        except Exception as error:  # estimators raise whatever they like
            raise TrainingError(
                f"The learner of {party} cannot be fitted in round {ctx.round} ({first_line(error)})."
            ) from error
        return Trained(self._loss(stage, party, ctx), steps=1)

    def _lesson(self, stage: Stage, party: Party) -> dict[str, Any]:
        """Return what a stage teaches: rows (of public data) and targets, where they are not the samples' labels."""
        targets = {} if stage.targets is None else {"targets": stage.targets.detach().cpu().clone()}
        if stage.data is None or stage.data is party.data.train:
            return {"own": targets}
        public = party.data.public
        if public is None or stage.data.x is not public.x:
            raise InputError(f"{party} has a learner, which learns from its own and from public samples, no others.")
        rows = stage.data.rows()
        return {"public": {"rows": rows if isinstance(rows, Tensor) else torch.arange(len(public.x)), **targets}}

    def _loss(self, stage: Stage, party: Party, ctx: Context) -> float:
        """Return the stage's loss, after learning."""
        data = stage.data if stage.data is not None else party.train
        loss, nets, total = stage.all_updates()[0].losses[0], {"main": Net(self, EVAL)}, 0.0
        for rows in torch.arange(len(data)).split(AT_ONCE):
            columns = {name: column[rows] for name, column in stage.columns.items()}
            batch = Batch(data.inputs(rows), data.labels(rows), columns, ctx.task)
            with torch.no_grad():
                value, _ = split_loss(loss(nets, batch, stage.aux))
            total += float(value) * len(rows)
        return total / max(1, len(data))

    def _fit(self, book: dict[str, Any]) -> Fitted:
        table = self._table(book)
        if fingerprint(int(book["seed"]), table) != book["key"]:
            raise InputError("its samples are not those that it was fitted on")
        return fit(self.estimator, table, int(book["seed"]), self.outputs)

    def _table(self, book: dict[str, Any]) -> Table:
        """Return all samples of all lessons; the client's own weigh 1 each."""
        task = from_description(book["task"])
        x, targets, weights = [], [], []
        own = len(self.data.train) if self.data.train is not None and "own" in book["lessons"] else 0
        for source, lesson in sorted(book["lessons"].items()):
            data = self.data.train if source == "own" else self.data.public
            assert data is not None
            data = data if source == "own" else Samples(data.x, data.y, lesson["rows"], data.scaling)
            weight = self.emphasis * own / len(data) if source == "public" and own else 1.0
            x.append(data.inputs().detach().cpu().flatten(1).double())
            targets.append(to_learn(task, lesson.get("targets"), data.labels().cpu()))
            weights.append(torch.full((len(data),), weight, dtype=torch.float64))
        known = targets[0] if len(targets) == 1 else torch.cat([_soft(task, t, self.outputs) for t in targets])
        return Table(task, torch.cat(x), known, torch.cat(weights))


@dataclass(frozen=True)
class Table:
    """Samples to be fitted to: inputs, what is to be answered, and what each weighs."""

    task: Task
    x: Tensor
    targets: Tensor  # class numbers or probabilities, or values as outputs
    weights: Tensor


class Fits:
    """Fitted estimators by what they were fitted on, those that were asked for last; shared by a learner's copies."""

    def __init__(self) -> None:
        self._known: OrderedDict[Any, Fitted] = OrderedDict()

    def get(self, key: Any, make: Callable[[], Fitted]) -> Fitted:
        """Return what is known under a key, or make it."""
        if key not in self._known:
            self._known[key] = make()
        self._known.move_to_end(key)
        while len(self._known) > REMEMBERED:
            self._known.popitem(last=False)
        return self._known[key]


@dataclass(frozen=True)
class Fitted:
    """A fitted estimator, or one for each target, and what its answers mean."""

    task: Task
    parts: tuple[Part, ...]
    outputs: int

    def __call__(self, x: Any) -> Any:
        """Return outputs for rows of numbers."""
        if isinstance(self.task, Regression):
            return np.stack([part.predict(x).reshape(len(x)) for _, part in self.parts], axis=1)
        if isinstance(self.task, Multilabel):
            yes = np.stack([probabilities(part, x, 2)[:, 1] for part in self.parts], axis=1)
            return np.log(yes) - np.log1p(-yes)
        logs = np.log(probabilities(self.parts[0], x, self.outputs))
        return logs - logs.mean(axis=1, keepdims=True)


def probabilities(part: Part, x: Any, classes: int) -> Any:
    """Return `(1 - DOUBT)·p + DOUBT / C`: what was fitted says p, and 0 of classes that it never saw."""
    seen, estimator = part
    found = np.zeros((len(x), classes))
    found[:, seen] = 1.0 if estimator is None else estimator.predict_proba(x)
    return (1 - DOUBT) * found + DOUBT / classes


def to_learn(task: Task, targets: Tensor | None, labels: Tensor) -> Tensor:
    """Return what is to be learned of some samples: class numbers, probabilities, or values as outputs."""
    if isinstance(task, Regression):
        return task.as_outputs(labels) if targets is None else targets
    if targets is None or not targets.is_floating_point():
        return labels if targets is None else targets
    return task.predictions(targets.double())


def fit(estimator: Any, table: Table, seed: int, outputs: int) -> Fitted:
    """Fit copies of an estimator to weighted samples: one, or one for each label or value."""
    task, x, targets, weights = table.task, table.x, table.targets, table.weights
    parts: list[Part] = []
    if isinstance(task, Classification):
        parts.append(_fit_classes(estimator, x, targets, weights, seed))
    else:
        for column in targets.double().unbind(1):
            if isinstance(task, Multilabel):
                parts.append(_fit_classes(estimator, x, torch.stack([1 - column, column], 1), weights, seed))
            else:
                parts.append((None, fit_copy(estimator, x.numpy(), column.numpy(), weights.numpy(), seed)))
    return Fitted(task, tuple(parts), outputs)


def _fit_classes(estimator: Any, x: Tensor, labels: Tensor, weights: Tensor, seed: int) -> Part:
    rows, classes, each = weighted_copies(labels, weights)
    seen, codes = np.unique(classes.numpy(), return_inverse=True)  # some estimators want numbers without gaps
    if len(seen) == 1:
        return seen, None
    return seen, fit_copy(estimator, x[rows].numpy(), codes, each.numpy(), seed)


def fit_copy(estimator: Any, x: Any, y: Any, weights: Any, seed: int) -> Any:
    """Fit a copy whose random numbers come from the seed, on one thread."""
    from sklearn.base import clone  # type: ignore[import-untyped]
    from sklearn.pipeline import Pipeline  # type: ignore[import-untyped]

    made = clone(estimator)
    fields = made.get_params(deep=True)
    fixed = {name: seed for name in fields if name.split("__")[-1] == "random_state"}
    if not type(made).__module__.startswith("sklearn"):  # whose default is one thread; others take all there are
        fixed |= {name: 1 for name, value in fields.items() if name.split("__")[-1] == "n_jobs" and value is None}
    made.set_params(**fixed)
    last = f"{made.steps[-1][0]}__" if isinstance(made, Pipeline) else ""
    weighted = {} if np.all(weights == 1.0) else {f"{last}sample_weight": weights}
    return made.fit(x, y, **weighted)


def fingerprint(seed: int, table: Table) -> str:
    """Return what tells one fit from all others."""
    digest = hashlib.blake2b(f"{seed}|{describe(table.task)}".encode(), digest_size=16)
    for tensor in (table.x, table.targets, table.weights):
        digest.update(f"|{tensor.dtype}|{tuple(tensor.shape)}|".encode())
        digest.update(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _soft(task: Task, targets: Tensor, outputs: int) -> Tensor:
    """Return class numbers as probabilities, so that they can stand below others."""
    if isinstance(task, Classification) and not targets.is_floating_point():
        return nn.functional.one_hot(targets, outputs).double()
    return targets.double()
