"""Parked client states: one flat row of numbers for each client and model, swapped into shared modules.

A module object exists once for each architecture (and worker); activating a client points the module's tensors at the
client's row, which copies nothing. Training then writes straight into the row.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from polyfed.core.message import State


@dataclass(frozen=True)
class Place:
    """Where one tensor lies in the flat rows."""

    dtype: torch.dtype
    start: int
    shape: torch.Size

    @property
    def stop(self) -> int:
        """One past its last element."""
        return self.start + self.shape.numel()


class Layout:
    """How the tensors of one state lie in flat rows, one row for each type of number."""

    def __init__(self, state: Mapping[str, Tensor]) -> None:
        self.places: dict[str, Place] = {}
        self.lengths: dict[torch.dtype, int] = {}
        for name, tensor in state.items():
            start = self.lengths.get(tensor.dtype, 0)
            self.places[name] = Place(tensor.dtype, start, tensor.shape)
            self.lengths[tensor.dtype] = start + tensor.numel()

    def views(self, rows: Mapping[torch.dtype, Tensor]) -> State:
        """Return the tensors of a state as views into its rows."""
        return {name: rows[p.dtype][p.start : p.stop].view(p.shape) for name, p in self.places.items()}

    def pack(self, state: Mapping[str, Tensor]) -> dict[torch.dtype, Tensor]:
        """Copy a state into fresh rows."""
        rows = {dtype: torch.empty(length, dtype=dtype) for dtype, length in self.lengths.items()}
        for name, view in self.views(rows).items():
            view.copy_(state[name])
        return rows


@dataclass
class Record:
    """One client at rest: its models' rows and its memory. `version` counts the times it was active."""

    rows: dict[str, dict[torch.dtype, Tensor]] = field(default_factory=dict)  # model name -> rows
    layouts: dict[str, Layout] = field(default_factory=dict)
    memory: dict[str, Any] = field(default_factory=dict)
    version: int = 0

    def state(self, model: str) -> State:
        """Return a model's tensors (views into the rows)."""
        return self.layouts[model].views(self.rows[model])

    def copy(self) -> Record:
        """Return a record with rows of its own (memory is shared: evaluation does not write it)."""
        rows = {m: {dtype: row.clone() for dtype, row in r.items()} for m, r in self.rows.items()}
        return Record(rows, self.layouts, self.memory, self.version)

    def tree(self) -> dict[str, Any]:
        """Return everything in a form for a checkpoint."""
        return {"models": {m: self.state(m) for m in self.rows}, "memory": self.memory}


class Seat:
    """A module that clients take in turn: knows where each of its tensors hangs."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        owners = dict(module.named_modules())
        self.parameters = dict(module.named_parameters())
        self.buffers: dict[str, tuple[nn.Module, str]] = {}
        for name, _ in module.named_buffers():
            owner, _, leaf = name.rpartition(".")
            self.buffers[name] = (owners[owner], leaf)

    def attach(self, state: State) -> None:
        """Point the module's tensors at the given ones."""
        for name, tensor in state.items():
            if name in self.parameters:
                parameter = self.parameters[name]
                parameter.data = tensor
                parameter.grad = None
            else:
                owner, leaf = self.buffers[name]
                owner._buffers[leaf] = tensor
