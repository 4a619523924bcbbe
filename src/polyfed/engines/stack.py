"""One stage of many clients as one tensor program: their states are stacked, `vmap` takes their gradients at once.

Clients of a stack share architecture, losses and shapes; they may differ in the number of samples. Each has its own
order of samples, random draws, dropout masks, BatchNorm statistics and optimizer state, from the same streams as when
it runs alone, so the result is the same up to rounding.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import grad_and_value, vmap
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from polyfed.core.losses import Losses
from polyfed.core.nets import EVAL, TRAIN, FunctionalNet, frozen_names
from polyfed.core.party import Context, Party
from polyfed.core.rng import generator
from polyfed.core.runner import has_dropout, is_normed, pieces, plan_of
from polyfed.core.samples import Samples
from polyfed.core.stage import Batch, Stage, Update, is_trainable, learning_rate
from polyfed.engines.masks import Masks, Recorder
from polyfed.engines.steps import Optimizer, Selection, clip, make_optimizer

Inputs = tuple[Tensor, Tensor, dict[str, Tensor]]  # of some clients: x, y and columns, each [clients, samples, ...]
Tensors = dict[str, dict[str, Tensor]]  # model name -> tensor name -> [clients, ...]

GATHER = 1 << 23  # numbers that are collected and scaled at once


@dataclass
class Member:
    """One client in a stack: its stage and its tensors."""

    party: Party
    stage: Stage
    states: Mapping[str, Mapping[str, Tensor]]
    losses: Losses = field(default_factory=Losses)

    @property
    def data(self) -> Samples:
        """The samples of the stage."""
        return self.stage.data if self.stage.data is not None else self.party.train


class Column:
    """Values of all clients in one table; `rows` says where each client's samples are in it."""

    def __init__(self, tables: Sequence[Tensor], rows: Sequence[Tensor | None]) -> None:
        if all(table is tables[0] for table in tables):
            self.table = tables[0]
            self.rows = [row if row is not None else torch.arange(len(tables[0])) for row in rows]
            return
        own = [table if row is None else table[row] for table, row in zip(tables, rows, strict=True)]
        self.table = torch.cat(own)
        starts = torch.tensor([0, *map(len, own)]).cumsum(0).tolist()
        self.rows = [torch.arange(start, start + len(part)) for start, part in zip(starts, own, strict=False)]

    def locate(self, clients: Sequence[int], positions: Sequence[Tensor]) -> Tensor:
        """Return the rows of each client's positions, one client after the other."""
        return torch.cat([self.rows[client][p] for client, p in zip(clients, positions, strict=True)])


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
        self._collect_data()
        self.aux, self.aux_dims = stack_trees([member.stage.aux for member in members], ctx.device)
        self.dropout = has_dropout(modules)
        self.draws = self._streams("draws") if self.stage.draws else []
        self.masks = self._streams("dropout") if self.dropout else []
        self.mask_shapes: dict[Any, list[tuple[torch.Size, float]]] = {}

    def _streams(self, purpose: str) -> list[torch.Generator]:
        """Return the stream of each client, the same as when it runs alone."""
        ctx = self.ctx
        return [generator(ctx.seed, f"{purpose}/{self.name}", ctx.round, m.party.id) for m in self.members]

    def _collect_data(self) -> None:
        data = [member.data for member in self.members]
        index = [item.index for item in data]
        self.scaling = data[0].scaling
        self.data = Column([item.x for item in data], index)
        self.labels = Column([item.y for item in data], index).table
        self.columns = {
            key: Column([member.stage.columns[key] for member in self.members], [None] * len(self.members))
            for key in self.stage.columns
        }

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
        at_once = max(1, GATHER // max(1, self.data.table[:1].numel() * len(self.members)))
        plans = [plan_of(member.stage, member.party, self.ctx, self.name) for member in self.members]
        for epochs in zip(*plans, strict=True):
            epoch, _, sizes = epochs[0]
            order = torch.stack([order for _, order, _ in epochs])
            for positions, cut in pieces(order.T, sizes, at_once):
                x, y, columns = self.gather(everybody.clients, positions.T.unbind())
                parts = {key: column.split(cut, 1) for key, column in columns.items()}
                for number, (some, labels) in enumerate(zip(x.split(cut, 1), y.split(cut, 1), strict=True)):
                    extra = {key: part[number] for key, part in parts.items()}
                    yield everybody, epoch, (some, labels, extra | self.drawn(everybody.clients, len(some[0])))

    def schedule(self) -> Iterator[tuple[Selection, int, list[Tensor]]]:
        """Yield which clients go next: all whose batches have the same size and learning rate.

        A client with a smaller last batch waits until the full batches of the others are done, so that clients with
        equal rests go together.
        """
        plans = [self._plan(member) for member in self.members]
        heads = [next(plan, None) for plan in plans]
        full = self.training.batch_size
        constant = all((update.training or self.training).decay == 1.0 for update in self.updates)
        while True:
            groups: dict[tuple[int, int], list[int]] = {}
            for client, head in enumerate(heads):
                if head is not None:
                    groups.setdefault((len(head[1]), 0 if constant else head[0]), []).append(client)
            if not groups:
                return
            best = max(groups, key=lambda key: (key[0] == full, len(groups[key]), -key[1], key[0]))
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

    def _plan(self, member: Member) -> Iterator[tuple[int, Tensor]]:
        for epoch, order, sizes in plan_of(member.stage, member.party, self.ctx, self.name):
            for positions in order.split(sizes):
                yield epoch, positions

    def batch(self, clients: Sequence[int], positions: Sequence[Tensor]) -> Inputs:
        """Return the inputs of one batch of every client, with its random draws."""
        x, y, columns = self.gather(clients, positions)
        return x, y, columns | self.drawn(clients, len(positions[0]))

    def gather(self, clients: Sequence[int], positions: Sequence[Tensor]) -> Inputs:
        """Return inputs, labels and columns with the clients as first dimension."""
        shape = (len(clients), len(positions[0]))
        device = self.ctx.device
        rows = self.data.locate(clients, positions)
        x = self.scaling.apply(self.data.table[rows]).to(device).unflatten(0, shape)
        y = self.labels[rows].to(device).unflatten(0, shape)
        columns = {}
        for key, column in self.columns.items():
            columns[key] = column.table[column.locate(clients, positions)].to(device).unflatten(0, shape)
        return x, y, columns

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
            rate = learning_rate(update.training or self.training, self.ctx.round, epoch)
            values = self.update(number, update, selection, x, y, columns, aux, rate)
            for client, value in zip(selection.clients, values.tolist(), strict=True):
                self.members[client].losses.add(value)

    def update(
        self,
        number: int,
        update: Update,
        selection: Selection,
        x: Tensor,
        y: Tensor,
        columns: dict[str, Tensor],
        aux: Any,
        rate: float,
    ) -> Tensor:
        """Take one optimizer step; return the clients' (first) losses."""
        training = update.training or self.training
        moved = selection.take(self.moved[number])
        params, buffers = selection.take(self.params), selection.take(self.buffers)
        found = []
        values: Tensor | None = None
        for place, _ in enumerate(update.losses):
            grads, value = self.gradients(number, place, selection, moved, params, buffers, x, y, columns, aux)
            found.append(grads)
            values = value if values is None else values
        selection.put(self.buffers, buffers)
        if update.gradients is not None:
            dims = (0, self.aux_dims)
            grads = vmap(update.gradients, in_dims=dims)(tuple(found), aux)
        else:
            grads = found[0]
        if training.clip is not None:
            grads = clip(grads, training.clip)
        # A parameter that a loss does not depend on has no gradient: it differs from one of zero by the weight decay.
        used = self.used[number] if update.gradients is None and training.weight_decay else None
        self.optimizers[number].step(moved, grads, selection, rate, used)
        if update.project is not None:
            projected = vmap(update.project)(moved)
            for key, group in moved.items():
                for name, tensor in group.items():
                    tensor.copy_(projected[key][name])
        selection.put(self.moved[number], moved)
        assert values is not None
        return values

    def gradients(
        self,
        number: int,
        place: int,
        selection: Selection,
        moved: Tensors,
        params: Tensors,
        buffers: Tensors,
        x: Tensor,
        y: Tensor,
        columns: dict[str, Tensor],
        aux: Any,
    ) -> tuple[Tensors, Tensor]:
        """Return the gradients of one loss for every client, and its values."""
        masks = self.draw_masks(number, place, selection, params, buffers, x, y, columns, aux)
        function = self.loss_of(number, place, x.shape[1])
        dims = (0, 0, 0, 0, 0, 0, self.aux_dims, 0)
        grads, values = vmap(grad_and_value(function), in_dims=dims)(moved, params, buffers, x, y, columns, aux, masks)
        return grads, values.detach()

    def loss_of(self, number: int, place: int, size: int) -> Any:
        """Return one loss as a function of tensors only."""
        function = self.updates[number].losses[place]
        kind = LoneFunctionalNet if self.normed and size == 1 else FunctionalNet
        modules = self.modules

        def pure(
            moved: Tensors, params: Tensors, buffers: Tensors, x: Any, y: Any, columns: Any, aux: Any, masks: Any
        ) -> Tensor:
            nets = {
                key: kind(module, {**params[key], **moved.get(key, {})}, buffers[key])
                for key, module in modules.items()
            }
            with Masks(masks):
                return function(nets, Batch(x, y, columns), aux)

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
        device = self.ctx.device
        rows = self.data.locate([0], positions)
        x, y = self.scaling.apply(self.data.table[rows]).to(device), self.labels[rows].to(device)
        columns = {key: c.table[c.locate([0], positions)].to(device) for key, c in self.columns.items()}
        rng = torch.Generator().manual_seed(0)
        columns |= {key: draw.sample(len(x), rng).to(device) for key, draw in self.stage.draws.items()}
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
                    loss = self.loss_of(number, place, len(x))(moved, params, buffers, x, y, columns, aux, None)
                if not loss.requires_grad:
                    continue
                grads = torch.autograd.grad(loss, flat, allow_unused=True)
                used |= {name for name, grad in zip(names, grads, strict=True) if grad is not None}
            found.append(used)
        return found

    def draw_masks(
        self, number: int, place: int, selection: Selection, params: Any, buffers: Any, *rest: Any
    ) -> list[Tensor]:
        """Draw the dropout masks of one pass, each client's from its own stream."""
        if not self.dropout:
            return []
        x, y, columns, aux = rest
        key = (number, place, x.shape[1])
        if key not in self.mask_shapes:  # which masks a pass asks for does not depend on the client: look once
            recorder = Recorder()
            one = [tree_map(lambda t: t[0].detach().clone(), tree) for tree in (params, buffers, x, y, columns)]
            with torch.no_grad(), recorder:
                self.loss_of(number, place, x.shape[1])({}, *one, self.first_aux(aux), None)
            self.mask_shapes[key] = recorder.calls
        shapes = self.mask_shapes[key]
        drawn = [[torch.rand(shape, generator=self.masks[c]) >= p for shape, p in shapes] for c in selection.clients]
        return [torch.stack(masks).to(self.ctx.device) for masks in zip(*drawn, strict=True)]


def chosen(params: Tensors, update: Update, frozen: Mapping[str, frozenset[str]]) -> Tensors:
    """Return the tensors that an update moves."""
    return {
        key: {n: tensor for n, tensor in params[key].items() if n not in frozen[key] and is_trainable(n, prefixes)}
        for key, prefixes in update.trainable.items()
    }


def stack_trees(trees: Sequence[Any], device: torch.device) -> tuple[Any, Any]:
    """Stack the tensors of equal trees; a tensor that all of them share stays one. Also returns `vmap`'s dimensions."""
    flattened = [tree_flatten(dict(tree)) for tree in trees]
    spec = flattened[0][1]
    values: list[Any] = []
    dims: list[int | None] = []
    for leaves in zip(*(leaves for leaves, _ in flattened), strict=True):
        first = leaves[0]
        if not isinstance(first, Tensor):
            values.append(first)
            dims.append(None)
        elif all(same_memory(leaf, first) for leaf in leaves):
            values.append(first.to(device))
            dims.append(None)
        else:
            values.append(torch.stack(leaves).to(device))
            dims.append(0)
    return tree_unflatten(values, spec), tree_unflatten(dims, spec)


def same_memory(a: Tensor, b: Tensor) -> bool:
    """Tell whether two tensors are the same numbers at the same place."""
    return a is b or (
        a.data_ptr() == b.data_ptr() and a.shape == b.shape and a.stride() == b.stride() and a.dtype == b.dtype
    )


class LoneFunctionalNet(FunctionalNet):
    """A network with BatchNorm that must learn from a single sample: its norms use their running statistics."""

    def __init__(self, module: nn.Module, params: Any, buffers: Any, mode: str = TRAIN) -> None:
        super().__init__(module, params, buffers, EVAL)

    def still(self) -> FunctionalNet:  # noqa: D102
        return self
