"""One stage of many clients as one tensor program: their states are stacked, `vmap` takes their gradients at once.

Clients of a stack share architecture, losses and shapes; they may differ in the number of samples. Each has its own
order of samples, random draws, dropout masks, BatchNorm statistics and optimizer state, from the same streams as when
it runs alone, so the result is the same up to rounding.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import grad_and_value, vmap
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from polyfed.core.augment import augmentation_of
from polyfed.core.nets import EVAL, TRAIN, FunctionalNet, frozen_names
from polyfed.core.party import Context
from polyfed.core.rng import generator
from polyfed.core.runner import has_dropout, is_normed, pieces, plan_of
from polyfed.core.stage import Batch, Sums, Update, is_trainable, learning_rate, split_loss
from polyfed.engines.masks import Masks, Recorder
from polyfed.engines.stackdata import Inputs, Member, StackedBatch, StackedSamples, stack_trees
from polyfed.engines.steps import Optimizer, Selection, clip, make_optimizer

Tensors = dict[str, dict[str, Tensor]]  # model name -> tensor name -> [clients, ...]

GATHER = 1 << 23  # numbers that are collected and scaled at once


class Program:
    """The stages of some clients, run to their end."""

    def __init__(
        self,
        members: Sequence[Member],
        modules: Mapping[str, nn.Module],
        tensors: Tensors,
        ctx: Context,
        name: str,
    ) -> None:
        self.members = list(members)
        self.modules = dict(modules)
        self.ctx = ctx
        self.name = name
        self.stage = members[0].stage
        self.training = self.stage.training or ctx.training
        self.updates = self.stage.all_updates()
        self.normed = is_normed(members[0].party)
        parameters = {key: {n for n, _ in module.named_parameters()} for key, module in modules.items()}
        self.params: Tensors = {k: {n: t for n, t in g.items() if n in parameters[k]} for k, g in tensors.items()}
        self.buffers: Tensors = {k: {n: t for n, t in g.items() if n not in parameters[k]} for k, g in tensors.items()}
        self.frozen = {key: frozen_names(module) for key, module in modules.items()}
        self.moved = [chosen(self.params, update, self.frozen) for update in self.updates]
        self.optimizers: list[Optimizer] = [
            make_optimizer(update.training or self.training, moved, len(members))
            for update, moved in zip(self.updates, self.moved, strict=True)
        ]
        self.data = StackedSamples(members, ctx.device)
        self.aux, self.aux_dims = stack_trees([member.stage.aux for member in members], ctx.device)
        self.dropout = has_dropout(modules)
        self.draws = self._streams("draws") if self.stage.draws else []
        self.masks = self._streams("dropout") if self.dropout else []
        self.augmentation = augmentation_of(self.stage, members[0].party, ctx)
        self.changes = self._streams("augment") if self.augmentation is not None else []
        self.mask_shapes: dict[Any, list[tuple[torch.Size, float]]] = {}

    def _streams(self, purpose: str) -> list[torch.Generator]:
        """Return the stream of each client, the same as when it runs alone."""
        ctx = self.ctx
        return [generator(ctx.seed, f"{purpose}/{self.name}", ctx.round, m.party.id) for m in self.members]

    # --- the steps ---

    def run(self, limit: int | None = None) -> None:
        """Run all steps (or the first few, for a trial)."""
        for number, (selection, epoch, batch) in enumerate(self.steps()):
            if limit is not None and number >= limit:
                return
            self.step(selection, epoch, *batch)

    def steps(self) -> Iterator[tuple[Selection, int, Inputs]]:
        """Yield which clients go next, in which epoch, and their batches."""
        if len({len(member.data) for member in self.members}) == 1:
            yield from self._evenly()
            return
        for selection, epoch, positions in self.schedule():
            yield selection, epoch, self.batch(selection.clients, positions)

    def _evenly(self) -> Iterator[tuple[Selection, int, Inputs]]:
        """Clients with equally many samples always go together, and their inputs are collected for many batches."""
        everybody = Selection(range(len(self.members)), len(self.members))
        at_once = max(1, GATHER // max(1, self.data.numbers_per_sample * len(self.members)))
        plans = [self._epochs(member) for member in self.members]
        for epochs in zip(*plans, strict=True):
            epoch, _, sizes = epochs[0]
            order = torch.stack([order for _, order, _ in epochs])
            for positions, cut in pieces(order.T, sizes, at_once):
                x, y, columns = self.data.gather(everybody.clients, positions.T.unbind())
                parts = {key: column.split(cut, 1) for key, column in columns.items()}
                for number, (some, labels) in enumerate(zip(x.split(cut, 1), y.split(cut, 1), strict=True)):
                    extra = {key: part[number] for key, part in parts.items()}
                    some = self.augmented(everybody.clients, some)
                    yield everybody, epoch, (some, labels, extra | self.drawn(everybody.clients, some.shape[1]))

    def schedule(self) -> Iterator[tuple[Selection, int, list[Tensor]]]:
        """Yield which clients go next: all whose batches have the same size and learning rate.

        A client with a smaller last batch waits until the full batches of the others are done, so that clients with
        equal rests go together. Nobody begins an epoch before all others have ended theirs: ahead of them, it would go
        alone ever after. Where everybody takes a given number of steps, epochs mean nothing.
        """
        plans = [self._plan(member) for member in self.members]
        heads = [next(plan, None) for plan in plans]
        full = self.training.batch_size
        constant = all((update.training or self.training).decay == 1.0 for update in self.updates)
        together = constant and self.stage.steps is not None
        while True:
            groups: dict[tuple[int, int], list[int]] = {}
            for client, head in enumerate(heads):
                if head is not None:
                    groups.setdefault((0 if together else head[0], len(head[1])), []).append(client)
            if not groups:
                return
            best = max(groups, key=lambda key: (-key[0], key[1] == full, len(groups[key]), key[1]))
            clients = groups[best]
            positions, epoch = [], 0
            for client in clients:
                head = heads[client]
                assert head is not None
                epoch = head[0]
                positions.append(head[1])
            yield Selection(clients, len(self.members)), epoch, positions
            for client in clients:
                heads[client] = next(plans[client], None)

    def _epochs(self, member: Member) -> Iterator[tuple[int, Tensor, list[int]]]:
        return plan_of(member.stage, member.party, self.ctx, self.name, self.normed)

    def _plan(self, member: Member) -> Iterator[tuple[int, Tensor]]:
        for epoch, order, sizes in self._epochs(member):
            for positions in order.split(sizes):
                yield epoch, positions

    def batch(self, clients: Sequence[int], positions: Sequence[Tensor]) -> Inputs:
        """Return the inputs of one batch of every client, with its random draws."""
        x, y, columns = self.data.gather(clients, positions)
        return self.augmented(clients, x), y, columns | self.drawn(clients, len(positions[0]))

    def augmented(self, clients: Sequence[int], x: Tensor) -> Tensor:
        """Return the inputs of a batch as each client's own stream changes them."""
        if self.augmentation is None:
            return x
        drawn = torch.cat([self.augmentation.draw(x.shape[1], self.changes[client]) for client in clients])
        changed = self.augmentation.apply(x.flatten(0, 1), drawn, self.data.scaling)
        return changed.view(x.shape)

    def drawn(self, clients: Sequence[int], size: int) -> dict[str, Tensor]:
        """Return the random tensors of a batch: a client draws all of them in turn."""
        if not self.stage.draws:
            return {}
        drawn = [[draw.sample(size, self.draws[c]) for draw in self.stage.draws.values()] for c in clients]
        together = zip(self.stage.draws, zip(*drawn, strict=True), strict=True)
        return {key: torch.stack(values).to(self.ctx.device) for key, values in together}

    def step(self, selection: Selection, epoch: int, x: Tensor, y: Tensor, columns: dict[str, Tensor]) -> None:
        """Take one optimizer step of every update for the chosen clients."""
        aux = self.chosen_aux(selection)
        for number, update in enumerate(self.updates):
            rate = learning_rate(update.training or self.training, self.ctx.round, epoch, self.ctx.rounds)
            values, sums = self.update(number, StackedBatch(selection, x, y, columns, aux, rate))
            for place, (client, value) in enumerate(zip(selection.clients, values.tolist(), strict=True)):
                totals = self.members[client].totals
                totals.losses.add(value)
                if sums:
                    totals.add({name: tensor[place] for name, tensor in sums.items()})
                if number == 0:
                    totals.step(rate)

    def update(self, number: int, batch: StackedBatch) -> tuple[Tensor, Sums]:
        """Take one optimizer step; return the clients' (first) losses, and what the losses gave beside themselves."""
        update, selection = self.updates[number], batch.selection
        training = update.training or self.training
        moved = selection.take(self.moved[number])
        params, buffers = selection.take(self.params), selection.take(self.buffers)
        found = []
        sums: Sums = {}
        values: Tensor | None = None
        for place, _ in enumerate(update.losses):
            grads, value, more = self.gradients(number, place, batch, moved, params, buffers)
            found.append(grads)
            sums |= more
            values = value if values is None else values
        if self.stage.sum_gradients and number == 0:
            for place, client in enumerate(selection.clients):
                self.members[client].totals.add_gradients(tree_map(lambda grad, p=place: grad[p], found[0]))
        selection.put(self.buffers, buffers)
        if update.gradients is not None:
            dims = (0, self.aux_dims)
            grads = vmap(update.gradients, in_dims=dims)(tuple(found), batch.aux)
        else:
            grads = found[0]
        if update.l1:
            grads = {k: {n: g.add(moved[k][n].sign(), alpha=update.l1) for n, g in grads[k].items()} for k in grads}
        if training.clip is not None:
            grads = clip(grads, training.clip)
        # A parameter that a loss does not depend on has no gradient: it differs from one of zero by the weight decay.
        some = update.gradients is None and not update.l1 and training.weight_decay
        used = self.used[number] if some else None
        self.optimizers[number].step(moved, grads, selection, batch.rate, used)
        if update.project is not None:
            projected = vmap(update.project)(moved)
            for key, group in moved.items():
                for name, tensor in group.items():
                    tensor.copy_(projected[key][name])
        selection.put(self.moved[number], moved)
        assert values is not None
        return values, sums

    def gradients(
        self, number: int, place: int, batch: StackedBatch, moved: Tensors, params: Tensors, buffers: Tensors
    ) -> tuple[Tensors, Tensor, Sums]:
        """Return the gradients of one loss for every client, its values, and what it gave beside itself."""
        masks = self.draw_masks(number, place, batch, params, buffers)
        function = self.loss_of(number, place, batch.size)
        dims = (0, 0, 0, 0, 0, 0, self.aux_dims, 0)
        taken = vmap(grad_and_value(function, has_aux=True), in_dims=dims)
        grads, (values, sums) = taken(moved, params, buffers, batch.x, batch.y, batch.columns, batch.aux, masks)
        return grads, values.detach(), sums

    def loss_of(self, number: int, place: int, size: int) -> Any:
        """Return one loss as a function of tensors only."""
        function = self.updates[number].losses[place]
        kind = LoneFunctionalNet if self.normed and size == 1 else FunctionalNet
        modules, task = self.modules, self.ctx.task

        def pure(
            moved: Tensors, params: Tensors, buffers: Tensors, x: Any, y: Any, columns: Any, aux: Any, masks: Any
        ) -> tuple[Tensor, Sums]:
            nets = {
                key: kind(module, {**params[key], **moved.get(key, {})}, buffers[key])
                for key, module in modules.items()
            }
            with Masks(masks):
                return split_loss(function(nets, Batch(x, y, columns, task), aux))

        return pure

    # --- trials ---

    def chosen_aux(self, selection: Selection) -> Any:
        """Return the aux of the chosen clients."""
        if selection.everybody:
            return self.aux
        leaves, spec = tree_flatten(self.aux)
        dims, _ = tree_flatten(self.aux_dims)
        return tree_unflatten([selection.pick(t) if d == 0 else t for t, d in zip(leaves, dims, strict=True)], spec)

    def first_aux(self, aux: Any) -> Any:
        """Return the aux of the first client of a stack."""
        leaves, spec = tree_flatten(aux)
        dims, _ = tree_flatten(self.aux_dims)
        return tree_unflatten([leaf[0] if d == 0 else leaf for leaf, d in zip(leaves, dims, strict=True)], spec)

    @property
    def used(self) -> list[set[tuple[str, str]]]:
        """For each update, the parameters that its loss depends on: the optimizer leaves the others alone."""
        if not hasattr(self, "_used"):
            self._used = self._find_used()
        return self._used

    def _find_used(self) -> list[set[tuple[str, str]]]:
        """Run every loss once for the first client, on copies."""
        positions = [torch.arange(min(2, len(self.members[0].data)))]
        x, y, columns = tree_map(lambda tensor: tensor[0], self.data.gather([0], positions))
        rng = torch.Generator().manual_seed(0)
        columns |= {key: draw.sample(len(x), rng).to(self.ctx.device) for key, draw in self.stage.draws.items()}
        aux = self.first_aux(self.aux)
        found = []
        for number, update in enumerate(self.updates):
            params = {k: {n: t[0].detach().clone() for n, t in g.items()} for k, g in self.params.items()}
            buffers = {k: {n: t[0].detach().clone() for n, t in g.items()} for k, g in self.buffers.items()}
            moved = chosen(params, update, self.frozen)
            names = [(key, name) for key, group in moved.items() for name in group]
            flat = [moved[key][name].requires_grad_(True) for key, name in names]
            used: set[tuple[str, str]] = set()
            for place in range(len(update.losses)):
                with Recorder():
                    loss, _ = self.loss_of(number, place, len(x))(moved, params, buffers, x, y, columns, aux, None)
                if not loss.requires_grad:
                    continue
                grads = torch.autograd.grad(loss, flat, allow_unused=True)
                used |= {name for name, grad in zip(names, grads, strict=True) if grad is not None}
            found.append(used)
        return found

    def draw_masks(self, number: int, place: int, batch: StackedBatch, params: Any, buffers: Any) -> list[Tensor]:
        """Draw the dropout masks of one pass, each client's from its own stream."""
        if not self.dropout:
            return []
        key = (number, place, batch.size)
        if key not in self.mask_shapes:  # which masks a pass asks for does not depend on the client: look once
            recorder = Recorder()
            trees = (params, buffers, batch.x, batch.y, batch.columns)
            one = [tree_map(lambda t: t[0].detach().clone(), tree) for tree in trees]
            with torch.no_grad(), recorder:
                self.loss_of(number, place, batch.size)({}, *one, self.first_aux(batch.aux), None)
            self.mask_shapes[key] = recorder.calls
        shapes = self.mask_shapes[key]
        clients = batch.selection.clients
        drawn = [[torch.rand(shape, generator=self.masks[c]) >= p for shape, p in shapes] for c in clients]
        return [torch.stack(masks).to(self.ctx.device) for masks in zip(*drawn, strict=True)]


def chosen(params: Tensors, update: Update, frozen: Mapping[str, frozenset[str]]) -> Tensors:
    """Return the tensors that an update moves."""
    return {
        key: {n: tensor for n, tensor in params[key].items() if n not in frozen[key] and is_trainable(n, prefixes)}
        for key, prefixes in update.trainable.items()
    }


class LoneFunctionalNet(FunctionalNet):
    """A network with BatchNorm that must learn from a single sample: its norms use their running statistics."""

    def __init__(self, module: nn.Module, params: Any, buffers: Any, mode: str = TRAIN) -> None:
        super().__init__(module, params, buffers, EVAL)

    def still(self) -> FunctionalNet:  # noqa: D102
        return self
