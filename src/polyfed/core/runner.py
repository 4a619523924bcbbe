"""Run one stage for one party on its live modules: the reference that every faster engine must agree with."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

from polyfed.core.augment import augmentation_of
from polyfed.core.convolving import LargeKernels
from polyfed.core.dpsgd import PrivateTraining, is_private
from polyfed.core.errors import InputError, TrainingError
from polyfed.core.layout import aligned, beside_weights, channels_last
from polyfed.core.learner import Learner
from polyfed.core.nets import EVAL, TRAIN, Net, has_batch_norm, mode
from polyfed.core.optimizers import make_optimizer
from polyfed.core.party import Context, Party
from polyfed.core.rng import generator, watched
from polyfed.core.samples import taken
from polyfed.core.settings import Training
from polyfed.core.stage import (
    Batch,
    Grads,
    Stage,
    Sums,
    Totals,
    Trained,
    Update,
    epoch_plan,
    is_trainable,
    learning_rate,
    split_loss,
)

PIECE = 4_000_000  # input values that are collected at once

_DROPOUTS = {
    nn.functional.dropout: 0,
    nn.functional.dropout1d: 1,
    nn.functional.dropout2d: 2,
    nn.functional.dropout3d: 3,
}


def run_stage(stage: Stage, party: Party, ctx: Context, name: str) -> Trained:
    """Run a stage to its end and return what it tells. A model that is no network learns from it in its own way.

    Raises
    ------
    TrainingError
        When a loss is not finite, with the party, round and batch.
    """
    model = party.models.get("main")
    if isinstance(model, Learner):
        return model.learn(stage, party, ctx)
    steppers: list[Stepper] = []
    totals = Totals()
    normed = is_normed(party)
    private = ctx.privacy.on and is_private(stage, party)
    guard = PrivateTraining(ctx.privacy, stage, party, ctx, name) if private else None
    dropout = SeededDropout(lambda: generator(ctx.seed, f"dropout/{name}", ctx.round, party.id), party.models)
    kernels = LargeKernels(party.models, able=guard is None)
    with channels_last(party.models, ctx.input_shape), flags_kept(party.models), dropout, kernels:
        training = stage.training or ctx.training
        steppers = [Stepper(update, update.training or training, party, name, guard) for update in stage.all_updates()]
        nets = {key: Net(module) for key, module in party.models.items()}
        lone = {key: LoneNet(module) for key, module in party.models.items()} if normed else nets
        aux = beside_weights(aligned(to_device(stage.aux, ctx.device)), party.models)
        if len(steppers) == 1:
            steppers[0].choose()
        for epoch, batch in batches_of(stage, party, ctx, name, guard):
            for number, stepper in enumerate(steppers):
                if len(steppers) > 1:
                    stepper.choose()
                rate = learning_rate(stepper.training, ctx.round, epoch, ctx.rounds)
                if stage.rate_factor is not None:
                    rate *= stage.rate_factor(totals.steps - (number > 0))
                noted = totals if stage.sum_gradients and number == 0 else None
                loss, sums = stepper.step(lone if len(batch.y) == 1 else nets, batch, aux, rate, noted)
                totals.losses.add(loss)
                totals.add(sums)
                if number == 0:
                    totals.step(rate)
            if stage.until is not None and stage.until(totals.steps):
                break
    if guard is not None:
        guard.finish()
    return check_finite(totals, party, ctx, name, len(steppers))


@contextmanager
def flags_kept(models: Mapping[str, nn.Module]) -> Iterator[None]:
    """Run the block, in which updates say which parameters ask for gradients; then each asks as it did before."""
    flags = [(parameter, parameter.requires_grad) for module in models.values() for parameter in module.parameters()]
    try:
        yield
    finally:
        for parameter, asked in flags:
            parameter.requires_grad_(asked)


def is_normed(party: Party) -> bool:
    """Tell whether one of a party's networks has BatchNorm: then a lone sample cannot be a batch of its own."""
    return any(has_batch_norm(module) for module in party.models.values())


def plan_of(
    stage: Stage, party: Party, ctx: Context, name: str, normed: bool
) -> Iterator[tuple[int, Tensor, list[int]]]:
    """Return the epochs of a stage for a party (see `epoch_plan`), from its own stream."""
    data = stage.data if stage.data is not None else party.train
    training = stage.training or ctx.training
    return epoch_plan(
        len(data),
        training.batch_size,
        stage.epochs if stage.epochs is not None or stage.steps is not None else training.epochs,
        stage.steps,
        generator(ctx.seed, f"batches/{name}", ctx.round, party.id),
        stage.shuffle,
        join_single=normed,
    )


def batches_of(
    stage: Stage, party: Party, ctx: Context, name: str, guard: PrivateTraining | None = None
) -> Iterator[tuple[int, Batch]]:
    """Yield `(epoch, batch)`; inputs are collected and scaled for many batches at once."""
    data = stage.data if stage.data is not None else party.train
    draws = generator(ctx.seed, f"draws/{name}", ctx.round, party.id) if stage.draws else None
    augmentation = augmentation_of(stage, party, ctx)
    changes = generator(ctx.seed, f"augment/{name}", ctx.round, party.id) if augmentation is not None else None
    at_once = max(1, PIECE // max(1, data.x[:1].numel()))  # samples
    for epoch, order, sizes in plan_of(stage, party, ctx, name, is_normed(party)) if guard is None else guard.plan():
        for positions, cut in pieces(order, sizes, at_once):
            x = data.inputs(positions).to(ctx.device).split(cut)
            y = data.labels(positions).to(ctx.device).split(cut)
            columns = {key: taken(column, positions).to(ctx.device).split(cut) for key, column in stage.columns.items()}
            for number, size in enumerate(cut):
                extra = {key: parts[number] for key, parts in columns.items()}
                for key, draw in stage.draws.items():
                    assert draws is not None
                    extra[key] = draw.sample(size, draws).to(ctx.device)
                inputs = x[number]
                if augmentation is not None and changes is not None:
                    inputs = augmentation.apply(inputs, augmentation.draw(size, changes), data.scaling)
                yield epoch, Batch(inputs, y[number], extra, ctx.task)


def pieces(order: Tensor, sizes: list[int], at_once: int) -> Iterator[tuple[Tensor, list[int]]]:
    """Cut an epoch into pieces of whole batches with about `at_once` samples each."""
    start = 0
    while sizes:
        count, samples = 1, sizes[0]
        while count < len(sizes) and samples + sizes[count] <= at_once:
            samples += sizes[count]
            count += 1
        yield order[start : start + samples], sizes[:count]
        start, sizes = start + samples, sizes[count:]


def to_device(tree: Any, device: torch.device) -> Any:
    """Return a tree of tensors and other values with the tensors on a device."""
    if device.type == "cpu":
        return tree
    return tree_map(lambda leaf: leaf.to(device) if isinstance(leaf, Tensor) else leaf, tree)


def check_finite(totals: Totals, party: Party, ctx: Context, name: str, per_batch: int = 1) -> Trained:
    """Return what a stage tells, or say where training broke down."""
    trained = totals.trained()
    if totals.losses.bad is not None:
        place, value = totals.losses.bad
        raise TrainingError(
            f"The loss of {party} became {value} in round {ctx.round}, batch {place // per_batch + 1} of '{name}': "
            f"try a smaller lr (now {ctx.training.lr:g}) or gradient clipping (training.clip)."
        )
    return trained


class Stepper:
    """One update with its optimizer, for the length of a stage."""

    def __init__(
        self, update: Update, training: Training, party: Party, name: str, guard: PrivateTraining | None = None
    ) -> None:
        self.update = update
        self.guard = guard  # training is private
        self.idle = f"{party} has nothing to train in '{name}': all that it could move is frozen (requires_grad=False)."
        self.training = training
        mine = {key: party.models[key].named_parameters() for key in update.trainable}
        self.chosen = {
            key: {n: p for n, p in mine[key] if p.requires_grad and is_trainable(n, prefixes)}
            for key, prefixes in update.trainable.items()
        }
        self.parameters: list[Tensor] = [p for group in self.chosen.values() for p in group.values()]
        if not self.parameters:
            raise InputError(unknown_parts(update, party, name) or self.idle)
        known = {id(parameter) for parameter in self.parameters}
        every = [parameter for module in party.models.values() for parameter in module.parameters()]
        self.others: list[Tensor] = [parameter for parameter in every if id(parameter) not in known]
        self.optimizer = make_optimizer(self.parameters, training)

    def choose(self) -> None:
        """Let only this update's parameters ask for gradients: it keeps the memory of alternating updates low."""
        for parameter in self.others:
            parameter.requires_grad_(False)
        for parameter in self.parameters:
            parameter.requires_grad_(True)

    def step(
        self, nets: Mapping[str, Net], batch: Batch, aux: Mapping[str, Any], rate: float, totals: Totals | None = None
    ) -> tuple[Tensor, Sums]:
        """Take one optimizer step and return the (first) loss, and what the losses gave beside themselves."""
        sums: Sums = {}
        for parameter in self.parameters:
            parameter.grad = None
        if self.guard is not None:
            loss = self._private(self.guard, batch, aux, totals)
        elif self.update.gradients is None:
            loss, sums = split_loss(self.update.losses[0](nets, batch, aux))
            if not loss.requires_grad:
                raise InputError(self.idle)
            loss.backward()  # type: ignore[no-untyped-call]
            if totals is not None:
                totals.add_gradients(
                    {k: {n: p.grad for n, p in g.items() if p.grad is not None} for k, g in self.chosen.items()}
                )
        else:
            values, grads = [], []
            for function in self.update.losses:
                value, more = split_loss(function(nets, batch, aux))
                values.append(value)
                grads.append(self._gradient(value))
                sums |= more
            if totals is not None:
                totals.add_gradients(grads[0])
            combined = self.update.gradients(tuple(grads), aux)
            for key, group in self.chosen.items():
                for name, parameter in group.items():
                    parameter.grad = combined[key][name]
            loss = values[0]
        if self.update.l1:
            for parameter in self.parameters:
                signs = parameter.detach().sign().mul_(self.update.l1)
                parameter.grad = signs if parameter.grad is None else parameter.grad + signs  # it may be another's
        if self.training.clip is not None:
            torch.nn.utils.clip_grad_norm_(self.parameters, self.training.clip)
        self.optimizer.step(rate)
        if self.update.project is not None:
            self._project()
        return loss.detach(), sums

    def _private(self, guard: PrivateTraining, batch: Batch, aux: Mapping[str, Any], totals: Totals | None) -> Tensor:
        """Set the noisy gradient, changed by the update's own rule, and return the loss."""
        numbers = range(len(self.update.losses))
        found = [guard.gradient(self.update, self.chosen, batch, aux, number) for number in numbers]
        loss, grads = found[0]
        if totals is not None:
            totals.add_gradients(grads)
        if self.update.gradients is not None:
            grads = self.update.gradients(tuple(each for _, each in found), aux)
        for key, group in self.chosen.items():
            for name, parameter in group.items():
                parameter.grad = grads[key][name]
        return loss

    def _gradient(self, loss: Tensor) -> Grads:
        if loss.requires_grad:
            values = iter(torch.autograd.grad(loss, self.parameters, materialize_grads=True))
        else:  # this one of several losses depends on frozen parameters only
            values = map(torch.zeros_like, self.parameters)
        return {key: {name: next(values) for name in group} for key, group in self.chosen.items()}

    @torch.no_grad()
    def _project(self) -> None:
        assert self.update.project is not None
        moved = self.update.project({key: {n: p.detach() for n, p in g.items()} for key, g in self.chosen.items()})
        for key, group in self.chosen.items():
            for name, parameter in group.items():
                parameter.copy_(moved[key][name])


def unknown_parts(update: Update, party: Party, name: str) -> str | None:
    """Return what to say of an update that names parts of networks which none of them has."""
    missing = []
    for key, prefixes in update.trainable.items():
        if any(is_trainable(n, prefixes) for n, _ in party.models[key].named_parameters()):
            return None
        missing.append(f"'{key}' has no parameter under {' or '.join(map(repr, prefixes or ()))}")
    return f"{party} has nothing to train in '{name}': {', '.join(missing)} (trainable of its stage)."


class LoneNet(Net):
    """A network with BatchNorm that must learn from a single sample: its norms use their running statistics."""

    def __init__(self, module: nn.Module, mode: str = TRAIN) -> None:
        super().__init__(module, EVAL)

    def still(self) -> Net:  # noqa: D102
        return self


def has_dropout(models: Mapping[str, nn.Module]) -> bool:
    """Tell whether some network has dropout layers."""
    return any(isinstance(m, nn.modules.dropout._DropoutNd) for model in models.values() for m in model.modules())


def draws_by_itself(module: nn.Module, inputs: Tensor) -> bool:
    """Tell whether a network draws from torch's global generator: a trial in both modes, on a copy.

    Dropout layers do not count: `SeededDropout` draws their masks.
    """
    module = copy.deepcopy(module)
    for wanted in (TRAIN, EVAL):
        with watched() as drawn, suppress(RuntimeError, ValueError):  # what cannot train says so when it is trained
            with mode(module, wanted), torch.no_grad(), SeededDropout(torch.Generator, {"main": module}):
                module(inputs)
            if drawn():
                return True
    return False


class SeededDropout(TorchFunctionMode):
    """Draw dropout masks from the client's own stream instead of torch's global generator.

    The global generator is shared between threads and would tie a client's masks to the order in which clients run.
    """

    def __init__(self, rng: Callable[[], torch.Generator], models: Mapping[str, nn.Module]) -> None:
        super().__init__()
        self.needed = has_dropout(models)
        self.rng = rng() if self.needed else None

    def __enter__(self) -> SeededDropout:
        return super().__enter__() if self.needed else self

    def __exit__(self, *details: Any) -> None:
        if self.needed:
            super().__exit__(*details)

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function not in _DROPOUTS:
            return function(*args, **kwargs)
        return self.dropout(_DROPOUTS[function], *args, **kwargs)

    def dropout(self, dims: int, input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
        """Drop single values (`dims` 0) or whole channels of `dims`-dimensional maps."""
        if not training or p == 0.0:
            return input
        shape = input.shape if dims == 0 else (*input.shape[:2], *(1,) * (input.dim() - 2))
        kept = torch.rand(shape, generator=self.rng).to(input.device) >= p
        return input * kept.to(input.dtype) / (1.0 - p) if p < 1.0 else input * 0.0
