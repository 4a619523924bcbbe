"""What goes into a stack: the clients, their samples in one table, the batches taken from it, and their `aux` trees."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from polyfed.core.party import Party
from polyfed.core.samples import Samples, taken
from polyfed.core.stage import Stage, Totals
from polyfed.engines.steps import Selection

Inputs = tuple[Tensor, Tensor, dict[str, Tensor]]  # of some clients: x, y and columns, each [clients, samples, ...]


def stack_trees(trees: Sequence[Any], device: torch.device) -> tuple[Any, Any]:
    """Stack the tensors of equal trees; a tensor that all of them share stays one. Also returns `vmap`'s dimensions."""
    if not any(trees):
        return {}, {}
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


@dataclass
class Member:
    """One client in a stack: its stage and its tensors."""

    party: Party
    stage: Stage
    states: Mapping[str, Mapping[str, Tensor]]
    totals: Totals = field(default_factory=Totals)

    @property
    def data(self) -> Samples:
        """The samples of the stage."""
        return self.stage.data if self.stage.data is not None else self.party.train


@dataclass(frozen=True)
class StackedBatch:
    """One batch of some clients, and what goes with it into a step."""

    selection: Selection
    x: Tensor  # [clients, samples, ...], as are labels and columns
    y: Tensor
    columns: dict[str, Tensor]
    aux: Any  # of the selected clients
    rate: float

    @property
    def size(self) -> int:
        """Samples of each client."""
        return self.x.shape[1]


class Column:
    """Values of all clients in one table; `rows` says where each client's samples are in it."""

    def __init__(self, tables: Sequence[Tensor], rows: Sequence[Tensor | None]) -> None:
        if all(table is tables[0] for table in tables):
            self.table = tables[0]
            self.rows = [row if row is not None else torch.arange(len(tables[0])) for row in rows]
            return
        own = [table if row is None else taken(table, row) for table, row in zip(tables, rows, strict=True)]
        self.table = torch.cat(own)
        starts = torch.tensor([0, *map(len, own)]).cumsum(0).tolist()
        self.rows = [torch.arange(start, start + len(part)) for start, part in zip(starts, own, strict=False)]

    def locate(self, clients: Sequence[int], positions: Sequence[Tensor]) -> Tensor:
        """Return the rows of each client's positions, one client after the other."""
        return torch.cat([self.rows[client][p] for client, p in zip(clients, positions, strict=True)])


class StackedSamples:
    """The samples of all clients of a stack, with the columns of their stages."""

    def __init__(self, members: Sequence[Member], device: torch.device) -> None:
        data = [member.data for member in members]
        index = [item.index for item in data]
        self.device = device
        self.scaling = data[0].scaling
        self.inputs = Column([item.x for item in data], index)
        self.labels = Column([item.y for item in data], index).table
        self.columns = {
            key: Column([member.stage.columns[key] for member in members], [None] * len(members))
            for key in members[0].stage.columns
        }

    @property
    def numbers_per_sample(self) -> int:
        """Numbers in the input of one sample."""
        return self.inputs.table[:1].numel()

    def gather(self, clients: Sequence[int], positions: Sequence[Tensor]) -> Inputs:
        """Return inputs, labels and columns with the clients as first dimension."""
        shape = (len(clients), len(positions[0]))
        rows = self.inputs.locate(clients, positions)
        x = self.scaling.apply(taken(self.inputs.table, rows)).to(self.device).unflatten(0, shape)
        y = taken(self.labels, rows).to(self.device).unflatten(0, shape)
        columns = {}
        for key, column in self.columns.items():
            found = taken(column.table, column.locate(clients, positions))
            columns[key] = found.to(self.device).unflatten(0, shape)
        return x, y, columns
