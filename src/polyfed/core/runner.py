"""Run one stage for one party on its live modules: the reference that every faster engine must agree with."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from polyfed.core.errors import TrainingError
from polyfed.core.nets import EVAL, TRAIN, Net, has_batch_norm
from polyfed.core.party import Context, Party, Training
from polyfed.core.rng import generator
from polyfed.core.samples import Samples
from polyfed.core.stage import Batch, Grads, Stage, Update, batch_plan, is_trainable, learning_rate, make_optimizer

_DROPOUTS = {
    nn.functional.dropout: 0,
    nn.functional.dropout1d: 1,
    nn.functional.dropout2d: 2,
    nn.functional.dropout3d: 3,
}


def run_stage(stage: Stage, party: Party, ctx: Context, name: str) -> float:
    """Run a stage to its end and return its mean loss.

    Raises
    ------
    TrainingError
        When a loss is not finite, with the party, round and batch.
    """
    data = stage.data if stage.data is not None else party.train
    training = stage.training or ctx.training
    normed = any(has_batch_norm(module) for module in party.models.values())
    epochs = stage.epochs if stage.epochs is not None or stage.steps is not None else training.epochs
    batches = batch_plan(
        len(data),
        training.batch_size,
        epochs,
        stage.steps,
        generator(ctx.seed, f"batches/{name}", ctx.round, party.id),
        stage.shuffle,
        join_single=normed,
    )
    draws = generator(ctx.seed, f"draws/{name}", ctx.round, party.id)
    steppers = [Stepper(update, update.training or training, party) for update in stage.all_updates()]
    losses: list[Tensor] = []
    with SeededDropout(generator(ctx.seed, f"dropout/{name}", ctx.round, party.id), party.models):
        for epoch, positions in batches:
            batch = make_batch(stage, data, positions, draws, ctx.device)
            lone = normed and len(positions) == 1
            nets = {key: LoneNet(module) if lone else Net(module) for key, module in party.models.items()}
            for stepper in steppers:
                rate = learning_rate(stepper.training, ctx.round, epoch)
                losses.append(stepper.step(nets, batch, stage.aux, rate))
    for module in party.models.values():
        module.requires_grad_(True)
    return check_finite(losses, party, ctx, name, len(steppers))


def make_batch(stage: Stage, data: Samples, positions: Tensor, draws: torch.Generator, device: torch.device) -> Batch:
    """Collect the inputs, labels, columns and draws of one batch."""
    columns = {name: column[positions].to(device) for name, column in stage.columns.items()}
    for name, draw in stage.draws.items():
        columns[name] = draw.sample(len(positions), draws).to(device)
    return Batch(data.inputs(positions).to(device), data.labels(positions).to(device), columns)


def check_finite(losses: list[Tensor], party: Party, ctx: Context, name: str, per_batch: int = 1) -> float:
    """Return the mean of the losses, or say where training broke down."""
    if not losses:
        return 0.0
    values = torch.stack(losses)
    bad = torch.nonzero(~torch.isfinite(values)).flatten()
    if len(bad):
        batch = int(bad[0]) // per_batch + 1
        raise TrainingError(
            f"The loss of {party} became {float(values[bad[0]])} in round {ctx.round}, batch {batch} of '{name}': "
            f"try a smaller lr (now {ctx.training.lr:g}) or gradient clipping (training.clip)."
        )
    return float(values.mean())


class Stepper:
    """One update with its optimiser, for the length of a stage."""

    def __init__(self, update: Update, training: Training, party: Party) -> None:
        self.update = update
        self.training = training
        self.modules = party.models
        self.chosen = {
            key: {n: p for n, p in party.models[key].named_parameters() if is_trainable(n, prefixes)}
            for key, prefixes in update.trainable.items()
        }
        self.parameters: list[Tensor] = [p for group in self.chosen.values() for p in group.values()]
        self.optimizer = make_optimizer(self.parameters, training)

    def step(self, nets: Mapping[str, Net], batch: Batch, aux: Mapping[str, Any], rate: float) -> Tensor:
        """Take one optimiser step and return the (first) loss."""
        # Frozen parameters must not ask for gradients: this is what keeps the memory of alternating updates low.
        for module in self.modules.values():
            module.requires_grad_(False)
        for parameter in self.parameters:
            parameter.requires_grad_(True)
            parameter.grad = None
        if self.update.gradients is None:
            loss = self.update.losses[0](nets, batch, aux)
            loss.backward()  # type: ignore[no-untyped-call]
        else:
            values, grads = [], []
            for function in self.update.losses:
                values.append(function(nets, batch, aux))
                grads.append(self._gradient(values[-1]))
            combined = self.update.gradients(tuple(grads), aux)
            for key, group in self.chosen.items():
                for name, parameter in group.items():
                    parameter.grad = combined[key][name]
            loss = values[0]
        if self.training.clip is not None:
            torch.nn.utils.clip_grad_norm_(self.parameters, self.training.clip)
        for options in self.optimizer.param_groups:
            options["lr"] = rate
        self.optimizer.step()
        if self.update.project is not None:
            self._project()
        return loss.detach()

    def _gradient(self, loss: Tensor) -> Grads:
        flat = torch.autograd.grad(loss, self.parameters, materialize_grads=True)
        values = iter(flat)
        return {key: {name: next(values) for name in group} for key, group in self.chosen.items()}

    @torch.no_grad()
    def _project(self) -> None:
        assert self.update.project is not None
        moved = self.update.project({key: {n: p.detach() for n, p in g.items()} for key, g in self.chosen.items()})
        for key, group in self.chosen.items():
            for name, parameter in group.items():
                parameter.copy_(moved[key][name])


class LoneNet(Net):
    """A network with BatchNorm that must learn from a single sample: its norms use their running statistics."""

    def __init__(self, module: nn.Module, mode: str = TRAIN) -> None:
        super().__init__(module, EVAL)

    def still(self) -> Net:  # noqa: D102
        return self


class SeededDropout(TorchFunctionMode):
    """Draw dropout masks from the client's own stream instead of torch's global generator.

    The global generator is shared between threads and would tie a client's masks to the order in which clients run.
    """

    def __init__(self, rng: torch.Generator, models: Mapping[str, nn.Module]) -> None:
        super().__init__()
        self.rng = rng
        self.needed = any(
            isinstance(m, nn.modules.dropout._DropoutNd) for model in models.values() for m in model.modules()
        )

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
