"""Clients at rest: one row of numbers for each client and tensor, swapped into shared modules.

A module object exists once for each architecture and worker; activating a client points the module's tensors at the
client's rows, which copies nothing. Training then writes straight into the rows. The rows of one tensor lie one below
the other, client by client, so that neighbours can be trained as one stack, and pages that were never written cost no
memory.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from polyfed.core.message import State

Rows = dict[str, Tensor]  # tensor name -> its numbers, flat, with some space behind them

ALIGN = 16  # numbers: rows start at cache lines
BLOCK_BYTES = 256 << 20  # rows that lie together; memory is taken only where rows are used


@dataclass(frozen=True)
class Place:
    """What one tensor needs."""

    dtype: torch.dtype
    shape: torch.Size
    size: int  # numbers
    length: int  # of its row


class Layout:
    """How the tensors of one state become flat rows."""

    def __init__(self, state: Mapping[str, Tensor]) -> None:
        self.places: dict[str, Place] = {}
        for name, tensor in state.items():
            length = -(-tensor.numel() // ALIGN) * ALIGN
            self.places[name] = Place(tensor.dtype, tensor.shape, tensor.numel(), length)

    @property
    def nbytes(self) -> int:
        """Bytes of one client's rows."""
        return sum(place.length * place.dtype.itemsize for place in self.places.values())

    def views(self, rows: Rows) -> State:
        """Return the tensors of a state as views into its rows."""
        return {name: rows[name][: p.size].view(p.shape) for name, p in self.places.items()}

    def stacked(self, rows: Rows) -> State:
        """Return the tensors of many states, with the clients as first dimension, as views into `[clients, n]` rows."""
        return {
            name: rows[name][:, : p.size].view(-1, *p.shape).data  # see `ModuleSlot.attach` for `.data`
            for name, p in self.places.items()
        }


class Memory:
    """Gives out memory for rows: plain up to a budget, then in files that the system writes out when it must."""

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self.given = 0
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._files = 0

    def take(self, rows: int, length: int, dtype: torch.dtype) -> Tensor:
        """Return an unwritten `[rows, length]` table."""
        size = rows * length * dtype.itemsize
        self.given += size
        if self.given <= self.budget:
            return torch.empty(rows, length, dtype=dtype)
        if self._folder is None:
            self._folder = tempfile.TemporaryDirectory(prefix="polyfed-")
        self._files += 1
        path = Path(self._folder.name) / f"{self._files}.rows"
        return torch.from_file(str(path), shared=True, size=rows * length, dtype=dtype).view(rows, length)


class StateTable:
    """The rows of all clients of one architecture, for one of their models."""

    def __init__(self, layout: Layout, clients: int, memory: Memory) -> None:
        self.layout = layout
        self.clients = clients
        self.memory = memory
        self.blocks: list[Rows] = []
        self.size = max(1, min(clients, BLOCK_BYTES // max(1, layout.nbytes)))  # rows of a block
        self.used = 0

    def take(self) -> int:
        """Return the number of a free row."""
        if self.used == len(self.blocks) * self.size:
            places = self.layout.places.items()
            self.blocks.append({name: self.memory.take(self.size, p.length, p.dtype) for name, p in places})
        self.used += 1
        return self.used - 1

    def state(self, number: int) -> State:
        """Return one client's tensors: views into its rows."""
        block = self.blocks[number // self.size]
        return self.layout.views({name: table[number % self.size] for name, table in block.items()})

    def together(self, numbers: list[int]) -> Rows | None:
        """Return `[clients, n]` views of several clients' rows, or None where they are not neighbours."""
        first = numbers[0]
        ascending = all(number == first + k for k, number in enumerate(numbers))
        if not ascending or first // self.size != numbers[-1] // self.size:
            return None
        start = first % self.size
        block = self.blocks[first // self.size]
        return {name: table[start : start + len(numbers)] for name, table in block.items()}


@dataclass
class Record:
    """One client at rest: its models' tensors and its memory. `version` counts the times it was active."""

    states: dict[str, State] = field(default_factory=dict)  # model name -> its tensors: views into its rows
    memory: dict[str, Any] = field(default_factory=dict)
    version: int = 0
    numbers: dict[str, int] = field(default_factory=dict)  # model name -> number of its row in the table

    def copy(self) -> Record:
        """Return a record with tensors of its own (memory is shared: evaluation does not write it)."""
        states = {m: {name: tensor.clone() for name, tensor in state.items()} for m, state in self.states.items()}
        return Record(states, self.memory, self.version)

    def to(self, device: torch.device) -> Record:
        """Return a record whose tensors are on a device."""
        states = {m: {name: tensor.to(device) for name, tensor in state.items()} for m, state in self.states.items()}
        return Record(states, self.memory, self.version)

    def tree(self) -> dict[str, Any]:
        """Return everything in a form for a checkpoint."""
        return {"models": self.states, "memory": self.memory}


class ModuleSlot:
    """A module that clients take in turn: knows where each of its tensors hangs."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.parameters = dict(module.named_parameters(remove_duplicate=False))
        self.places: dict[str, tuple[dict[str, Any], str]] = {}  # where a module keeps a tensor, and as what
        owners = dict(module.named_modules())
        for name in [*self.parameters, *(name for name, _ in module.named_buffers(remove_duplicate=False))]:
            owner, _, leaf = name.rpartition(".")
            kept = owners[owner]._parameters if name in self.parameters else owners[owner]._buffers
            self.places[name] = kept, leaf

    def attach(self, state: State) -> None:
        """Point the module's tensors at the given ones."""
        for name, tensor in state.items():
            if name in self.parameters:
                parameter = self.parameters[name]
                parameter.data = tensor
                parameter.grad = None
            else:
                # Rows of one block share autograd's count of in-place writes; `.data` has one of its own. Otherwise
                # another worker's client would seem to write into this one's statistics.
                kept, leaf = self.places[name]
                kept[leaf] = tensor.data

    def replaced(self, state: State) -> str | None:
        """Return a tensor of the module that is none of the given ones, to which it was attached."""
        for name, tensor in state.items():
            kept, leaf = self.places[name]
            now = kept.get(leaf)
            if now is None or now.data_ptr() != tensor.data_ptr() or now is not self.parameters.get(name, now):
                return name
        return None
