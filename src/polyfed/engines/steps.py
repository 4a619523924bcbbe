"""Optimizer steps on stacked parameters: the arithmetic of torch's optimizers, one row for each client."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from polyfed.core.optimizers import Moved, fused_adam
from polyfed.core.settings import Training

Tensors = dict[str, dict[str, Tensor]]
Name = tuple[str, str]  # of a model and a parameter of it
Used = set[Name] | None  # those with a gradient; None: all

# Numbers in the widest vector of torch's kernels, which compute what is left behind the last vector in another way: a
# row of whole vectors has the same bits in every stack, and another one might not.
VECTOR = 16
REST: Name = ("", "")  # the parameters whose rows are not whole vectors


class Selection:
    """Some clients of a stack. Neighbours at the start are a view; others are copied out and back."""

    def __init__(self, clients: Sequence[int], total: int) -> None:
        self.clients = list(clients)
        self.everybody = self.clients == list(range(total))
        self.leading = self.everybody or self.clients == list(range(len(self.clients)))
        self.index = None if self.leading else torch.tensor(self.clients)

    def pick(self, tensor: Tensor) -> Tensor:
        """Return the rows of these clients."""
        if self.everybody:
            return tensor
        return tensor[: len(self.clients)] if self.index is None else tensor[self.index.to(tensor.device)]

    def put_back(self, tensor: Tensor, rows: Tensor) -> None:
        """Write the rows of these clients back, where `pick` copied them."""
        if self.index is not None:
            tensor.index_copy_(0, self.index.to(tensor.device), rows)

    def take(self, tensors: Any) -> Any:
        """Return a tree of stacked tensors for these clients."""
        return tensors if self.everybody else tree_map(self.pick, tensors)

    def put(self, tensors: Tensors, changed: Tensors) -> None:
        """Write back what was copied out."""
        if self.index is None:
            return
        for key, group in changed.items():
            for name, tensor in group.items():
                self.put_back(tensors[key][name], tensor)


def clip(grads: Tensors, limit: float) -> Tensors:
    """Scale every client's gradients down to a norm, as `clip_grad_norm_` does."""
    flat = [grad.reshape(len(grad), -1) for group in grads.values() for grad in group.values()]
    norm = torch.stack([grad.norm(dim=1) for grad in flat]).norm(dim=0)
    factor = (limit / (norm + 1e-6)).clamp(max=1.0)
    return {k: {n: g * _per_client(factor, g) for n, g in group.items()} for k, group in grads.items()}


def make_optimizer(training: Training, moved: Tensors, clients: int) -> Optimizer:
    """Return a fresh optimizer for stacked parameters."""
    return Sgd(training, moved, clients) if training.optimizer == "sgd" else Adam(training, moved, clients)


def _per_client(values: Tensor, like: Tensor) -> Tensor:
    return values.view(-1, *(1,) * (like.dim() - 1))


class Optimizer:
    """Moves stacked parameters in place."""

    def __init__(self, training: Training, moved: Tensors, clients: int) -> None:
        self.training = training

    def step(self, moved: Tensors, grads: Tensors, selection: Selection, rate: float, used: Used) -> None:
        """Take one step for the chosen clients."""
        raise NotImplementedError


class Sgd(Optimizer):
    """Stochastic gradient descent with momentum."""

    def __init__(self, training: Training, moved: Tensors, clients: int) -> None:
        super().__init__(training, moved, clients)
        self.velocity: dict[Name, Tensor] = {}
        if training.momentum:
            self.velocity = {(k, n): torch.zeros_like(t) for k, group in moved.items() for n, t in group.items()}

    def step(self, moved: Tensors, grads: Tensors, selection: Selection, rate: float, used: Used) -> None:
        """Move every parameter."""
        for key, group in moved.items():
            for name, parameter in group.items():
                if used is None or (key, name) in used:
                    self.move((key, name), parameter, grads[key][name], selection, rate)

    def move(self, name: Name, parameter: Tensor, grad: Tensor, selection: Selection, rate: float) -> None:
        """`v = m·v + g`, `w = w - lr·v`."""
        if self.training.weight_decay:
            grad = grad.add(parameter, alpha=self.training.weight_decay)
        if self.velocity:
            kept = self.velocity[name]
            velocity = selection.pick(kept)
            velocity.mul_(self.training.momentum).add_(grad)
            selection.put_back(kept, velocity)
            grad = velocity
        parameter.add_(grad, alpha=-rate)


class Adam(Optimizer):
    """Adam and AdamW with torch's default constants, in one call of torch's kernel for all parameters."""

    def __init__(self, training: Training, moved: Tensors, clients: int) -> None:
        super().__init__(training, moved, clients)
        self.clients = clients
        self.steps = [0] * clients  # they may differ: clients of a stack need not have equally many batches
        self.moments: dict[Name, tuple[Tensor, Tensor]] = {}  # means of gradients and of their squares

    def step(self, moved: Tensors, grads: Tensors, selection: Selection, rate: float, used: Used) -> None:
        """Count the step of every chosen client, then move its parameters."""
        for client in selection.clients:
            self.steps[client] += 1
        names = [(k, n) for k, group in moved.items() for n in group if used is None or (k, n) in used]
        whole = [(key, name) for key, name in names if moved[key][name][0].numel() % VECTOR == 0]
        rest = [name for name in names if name not in whole]
        pieces: dict[Name, tuple[Tensor, Tensor]] = {}  # parameters, which are moved in place, and their gradients
        for key, name in whole:
            pieces[key, name] = moved[key][name].contiguous(), grads[key][name].contiguous()
        if rest:  # side by side, filled up to whole vectors
            pieces[REST] = side_by_side(moved, rest), side_by_side(grads, rest)
        self._move(pieces, selection, rate)
        for key, name in whole:
            if pieces[key, name][0] is not moved[key][name]:
                moved[key][name].copy_(pieces[key, name][0])
        if rest:
            start = 0
            for key, name in rest:
                parameter = moved[key][name]
                end = start + parameter[0].numel()
                parameter.copy_(pieces[REST][0][:, start:end].view(parameter.shape))
                start = end

    def _move(self, pieces: Mapping[Name, tuple[Tensor, Tensor]], selection: Selection, rate: float) -> None:
        for name, (parameter, _) in pieces.items():
            if name not in self.moments:
                shape = (self.clients, *parameter.shape[1:])
                self.moments[name] = parameter.new_zeros(shape), parameter.new_zeros(shape)
        moments = {
            name: (selection.pick(mean), selection.pick(square)) for name, (mean, square) in self.moments.items()
        }
        parts: list[Moved] = [(*pieces[name], *moments[name]) for name in pieces]
        counts = [self.steps[client] for client in selection.clients]
        if len(set(counts)) == 1:  # the usual case
            counts = counts[:1] * len(parts)
        else:
            cut = [zip(*(tensor.unbind() for tensor in part), strict=True) for part in parts]
            parts = [rows for part in cut for rows in part]
            counts = counts * len(pieces)
        fused_adam(parts, counts, self.training, rate)
        for name, picked in moments.items():
            for kept, rows in zip(self.moments[name], picked, strict=True):
                selection.put_back(kept, rows)


def side_by_side(tensors: Tensors, names: Sequence[Name]) -> Tensor:
    """Return some tensors as one, `[clients, numbers]`, with zeros behind them up to whole vectors."""
    rows = [tensors[key][name].reshape(len(tensors[key][name]), -1) for key, name in names]  # a scalar has no axis
    width = sum(row.shape[1] for row in rows)
    return torch.cat([*rows, rows[0].new_zeros(len(rows[0]), -width % VECTOR)], 1)
