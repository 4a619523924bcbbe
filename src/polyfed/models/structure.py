"""When two modules are the same architecture: they would compute the same from the same tensors.

Names and shapes of tensors do not tell: two networks may differ in a rate of dropout, or in a number that only their
`forward` knows. So the structure is everything that a module holds except the values of its state. Whatever cannot be
looked into counts as different, which is always safe.
"""

from __future__ import annotations

import functools
import hashlib
import types
import weakref
from collections.abc import Hashable
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor, nn

from polyfed.core.learner import Learner

APART = {"training", "_parameters", "_buffers", "_modules"}  # attributes of a module that are described otherwise
PLAIN = (bool, int, float, complex, str, bytes, type(None), type, torch.dtype, torch.device, types.BuiltinFunctionType)


def structure(module: nn.Module) -> Hashable:
    """Return a value that is equal for modules of the same architecture, whatever their weights."""
    if isinstance(module, Learner):  # two estimators of one class with the same fields
        return type(module.estimator), repr(module)
    return _Reader().read(module)


class _Itself:
    """Something that is equal to itself only. Holds it, so that its identity is not given to another."""

    def __init__(self, thing: Any) -> None:
        self.thing = thing

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Itself) and self.thing is other.thing

    def __hash__(self) -> int:
        return id(self.thing)


class _Reader:
    """Describes what a module holds. What was seen before is named by its number: sharing is part of a structure."""

    def __init__(self) -> None:
        self.seen: dict[int, int] = {}
        self.kept: list[Any] = []  # as long as we read, no identity is given to another object

    def read(self, value: Any) -> Hashable:
        if isinstance(value, PLAIN):
            return type(value), value
        if id(value) in self.seen:
            return "again", self.seen[id(value)]
        self.seen[id(value)] = len(self.seen)
        self.kept.append(value)
        return type(value), self.inside(value)

    def inside(self, value: Any) -> Hashable:
        if isinstance(value, nn.Module):
            return self.module(value)
        if isinstance(value, Tensor):
            return self.outline(value), _content(value)
        if isinstance(value, dict):
            return tuple((self.read(key), self.read(item)) for key, item in value.items())
        if isinstance(value, list | tuple):
            return tuple(self.read(item) for item in value)
        if isinstance(value, set | frozenset) and all(isinstance(item, PLAIN) for item in value):
            return frozenset(value)
        if isinstance(value, types.FunctionType):
            cells = tuple(self.read(_in_cell(cell)) for cell in value.__closure__ or ())
            own = self.read(value.__defaults__), self.read(value.__kwdefaults__)
            return value.__code__, _Itself(value.__globals__), cells, own
        if isinstance(value, types.MethodType):
            return self.read(value.__func__), self.read(value.__self__)
        if isinstance(value, functools.partial):
            return self.read(value.func), self.read(value.args), self.read(value.keywords)
        if isinstance(value, weakref.ref):
            return self.read(value())
        if is_dataclass(value):
            return tuple(self.read(getattr(value, field.name)) for field in fields(value))
        return _Itself(value)

    def module(self, module: nn.Module) -> Hashable:
        state = {**module._parameters, **module._buffers}
        hidden = module._non_persistent_buffers_set
        return (
            tuple((name, self.read(t) if name in hidden else self.state(t)) for name, t in state.items()),
            tuple((name, self.read(child)) for name, child in module._modules.items()),
            tuple((name, self.read(item)) for name, item in sorted(vars(module).items()) if name not in APART),
        )

    def state(self, tensor: Tensor | None) -> Hashable:
        """Describe a tensor whose values are part of the state, not of the structure."""
        if tensor is None or id(tensor) in self.seen:
            return self.read(tensor)
        self.seen[id(tensor)] = len(self.seen)
        return self.outline(tensor)

    def outline(self, tensor: Tensor) -> Hashable:
        return type(tensor), tuple(tensor.shape), tensor.dtype, tensor.requires_grad


def _content(tensor: Tensor) -> bytes:
    numbers = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return hashlib.blake2b(numbers.numpy().tobytes(), digest_size=16).digest()


def _in_cell(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # nothing was put into it
        return None
