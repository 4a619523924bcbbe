"""Which part of the server's tensors a client holds: ready-made policies for methods that share parameters.

A policy lays out the server's state for the architectures in the federation and gives each architecture its map into
that state. The same averaging then does FedAvg (`Full`), layer-wise averaging (`Owned`), averaging by architecture
(`SameArch`), width slicing (`Prefix`) and sharing of the top layers (`Shared`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import prod

import torch

from polyfed.core.errors import InputError
from polyfed.core.message import State
from polyfed.core.party import Blueprint
from polyfed.core.width import Channels, channel_index, cut, mesh, shapes_at
from polyfed.ops.aggregate import IndexMap, Slot

Blueprints = Mapping[str, Blueprint]


def shared_names(blueprint: Blueprint, buffers: bool) -> list[str]:
    """Return the names that are averaged unless others are asked for: all that can be, but for frozen parameters.

    Nobody moves a frozen parameter: it is the same at all parties that have this architecture.
    """
    return [name for name in floating_names(blueprint, buffers) if name not in blueprint.frozen]


def floating_names(blueprint: Blueprint, buffers: bool) -> list[str]:
    """Return the names that can be averaged: parameters, and float buffers if asked for; never integers."""
    return [
        name
        for name, tensor in blueprint.initial.items()
        if tensor.is_floating_point() and (buffers or name not in blueprint.buffers)
    ]


def largest_first(blueprints: Blueprints) -> list[Blueprint]:
    """Order architectures by size, then name: the largest one gives common layers their initial values."""
    return sorted(blueprints.values(), key=lambda b: (-b.parameters, b.name))


def at_rate(widest: Blueprint, rate: float) -> Blueprint:
    """Return what is known of a network whose hidden layers have a share of the channels; at rate 1 it is the widest.

    Its tensors are the first entries of the widest one's, along every axis.
    """
    if rate == 1:
        return widest
    shapes = shapes_at(widest.width_groups, widest.shapes, rate)
    size = sum(prod(shape) for name, shape in shapes.items() if name not in widest.buffers)
    name, initial = name_at(widest.name, rate), cut(widest.initial, shapes)
    return replace(widest, name=name, shapes=shapes, initial=initial, parameters=size, build=None)


def name_at(widest: str, rate: float) -> str:
    """Return the name of an architecture at a rate: its own at rate 1."""
    return widest if rate == 1 else f"{widest}*{rate:g}"


def contains(large: Blueprint, small: Blueprint) -> bool:
    """Tell whether every tensor of one architecture is a slice of the other's of that name."""
    return all(name in large.shapes and _covers(large.shapes[name], shape) for name, shape in small.shapes.items())


def uncontained(own: Blueprint, blueprints: Blueprints) -> Blueprint | None:
    """Return the largest architecture that is no part of the given one: of another family, deeper or wider."""
    return next((b for b in largest_first(blueprints) if own.family != b.family or not contains(own, b)), None)


@dataclass(frozen=True)
class Full:
    """All clients hold the same architecture, the whole of it."""

    buffers: bool = True

    def layout(self, blueprints: Blueprints) -> State:
        """Return the server's initial state."""
        if len(blueprints) > 1:
            names = ", ".join(sorted(blueprints))
            raise InputError(
                f"View 'full' needs one architecture for all clients, but there are {len(blueprints)} ({names}): "
                "use view 'owned' (layer-wise), 'same_arch' or 'prefix' (width slices)."
            )
        (blueprint,) = blueprints.values()
        return {name: blueprint.initial[name].clone() for name in shared_names(blueprint, self.buffers)}

    def slots(self, blueprint: Blueprint, blueprints: Blueprints) -> IndexMap:
        """Return the map of one architecture."""
        return {name: Slot(name) for name in shared_names(blueprint, self.buffers)}


@dataclass(frozen=True)
class Owned:
    """Layer-wise: a tensor is shared by all clients that own one of its name and shape (members of one family)."""

    buffers: bool = True

    def layout(self, blueprints: Blueprints) -> State:
        """Return the union of all names; common ones start from the largest architecture."""
        state: State = {}
        owner: dict[str, str] = {}
        for blueprint in largest_first(blueprints):
            for name in shared_names(blueprint, self.buffers):
                if name not in state:
                    state[name] = blueprint.initial[name].clone()
                    owner[name] = blueprint.name
                elif state[name].shape != blueprint.initial[name].shape:
                    raise InputError(
                        f"View 'owned' needs one shape for each name, but '{name}' is {list(state[name].shape)} in "
                        f"{owner[name]} and {list(blueprint.initial[name].shape)} in {blueprint.name}: "
                        "use view 'same_arch', or 'prefix' for width slices of one network."
                    )
        return state

    def slots(self, blueprint: Blueprint, blueprints: Blueprints) -> IndexMap:
        """Return the map of one architecture."""
        return {name: Slot(name) for name in shared_names(blueprint, self.buffers)}


@dataclass(frozen=True)
class OwnedBut(Owned):
    """Layer-wise, but every architecture has some tensors of its own: a method's view says which."""

    def own_names(self, blueprint: Blueprint, blueprints: Blueprints) -> set[str]:
        """Return the names of what an architecture does not share with others."""
        return set()

    def layout(self, blueprints: Blueprints) -> State:
        """Return all tensors; those of one name start from the same values."""
        common = super().layout(blueprints)
        places = [item for blueprint in blueprints.values() for item in self.slots(blueprint, blueprints).items()]
        return {slot.key: common[name].clone() for name, slot in places}

    def slots(self, blueprint: Blueprint, blueprints: Blueprints) -> IndexMap:
        """Return the map of one architecture."""
        own = self.own_names(blueprint, blueprints)
        names = shared_names(blueprint, self.buffers)
        return {name: Slot(f"{blueprint.name}::{name}" if name in own else name) for name in names}


@dataclass(frozen=True)
class SameArch:
    """One shared model for each architecture; a lone member gets its own tensors back."""

    buffers: bool = True

    def layout(self, blueprints: Blueprints) -> State:
        """Return the initial states of all architectures, each under its own name."""
        return {
            f"{blueprint.name}::{name}": blueprint.initial[name].clone()
            for blueprint in blueprints.values()
            for name in shared_names(blueprint, self.buffers)
        }

    def slots(self, blueprint: Blueprint, blueprints: Blueprints) -> IndexMap:
        """Return the map of one architecture."""
        return {name: Slot(f"{blueprint.name}::{name}") for name in shared_names(blueprint, self.buffers)}


@dataclass(frozen=True)
class Prefix:
    """Width slices (HeteroFL): a client holds the first entries along every axis of the largest tensor of that name."""

    buffers: bool = True

    def layout(self, blueprints: Blueprints) -> State:
        """Return, for every name, the initial tensor of the architecture that is largest along every axis."""
        state: State = {}
        for blueprint in largest_first(blueprints):
            for name in shared_names(blueprint, self.buffers):
                tensor = blueprint.initial[name]
                held = state.get(name)
                if held is None or (tensor.shape != held.shape and _covers(tensor.shape, held.shape)):
                    state[name] = tensor.clone()
                elif not _covers(held.shape, tensor.shape):
                    raise InputError(
                        f"View 'prefix' needs nested shapes, but '{name}' of {blueprint.name} is {list(tensor.shape)} "
                        f"and another has {list(held.shape)}: use rates of one network, such as cnn@1,cnn@0.5."
                    )
        return state

    def slots(self, blueprint: Blueprint, blueprints: Blueprints) -> IndexMap:
        """Return the map of one architecture; a tensor that is whole gets no index, which is faster."""
        slots: IndexMap = {}
        for name in shared_names(blueprint, self.buffers):
            shape = blueprint.initial[name].shape
            whole = all(_covers(shape, b.initial[name].shape) for b in blueprints.values() if name in b.initial)
            slots[name] = Slot(name, None if whole else tuple(slice(0, n) for n in shape))
        return slots


@dataclass(frozen=True)
class Window:
    """Width windows (FedRolex): a client holds some channels of every hidden layer, the same in all layers of a group.

    `channels(group, full, count)` says which `count` of the `full` channels; the layout is that of `Prefix`.
    """

    channels: Channels
    buffers: bool = True

    def layout(self, blueprints: Blueprints) -> State:
        """Return, for every name, the initial tensor of the architecture that is largest along every axis."""
        return Prefix(self.buffers).layout(blueprints)

    def slots(self, blueprint: Blueprint, blueprints: Blueprints) -> IndexMap:
        """Return the map of one architecture."""
        names = shared_names(blueprint, self.buffers)
        widest = {name: max(b.shapes[name] for b in blueprints.values() if name in b.shapes) for name in names}
        shapes = {name: blueprint.shapes[name] for name in names}
        index = channel_index(blueprint.width_groups, widest, shapes, self.channels)
        return {
            name: Slot(name, None if all(axis is None for axis in index[name]) else mesh(index[name], widest[name]))
            for name in names
        }


@dataclass(frozen=True)
class Shared:
    """Only the tensors whose names start with one of `names` are shared (LG-FedAvg: the top layers), frozen or not.

    Without names nothing is shared.
    """

    names: tuple[str, ...] = ("head",)
    buffers: bool = True

    def layout(self, blueprints: Blueprints) -> State:
        """Return the shared tensors; every architecture must have them in one shape."""
        state: State = {}
        for blueprint in largest_first(blueprints):
            mine = self._mine(blueprint)
            if self.names and not mine:
                raise InputError(
                    f"View 'shared' finds no tensor of {blueprint.name} under {', '.join(self.names)}: "
                    f"its names start with {', '.join(sorted({n.split('.')[0] for n in blueprint.shapes}))}."
                )
            for name in mine:
                tensor = state.setdefault(name, blueprint.initial[name].clone())
                if tensor.shape != blueprint.initial[name].shape:
                    raise InputError(
                        f"View 'shared' needs equal shapes, but '{name}' of {blueprint.name} is "
                        f"{list(blueprint.initial[name].shape)} and another architecture has {list(tensor.shape)}: "
                        "set feature_dim (--feature-dim N) to give all models features of one size."
                    )
        return state

    def slots(self, blueprint: Blueprint, blueprints: Blueprints) -> IndexMap:
        """Return the map of one architecture."""
        return {name: Slot(name) for name in self._mine(blueprint)}

    def _mine(self, blueprint: Blueprint) -> list[str]:
        return [
            name
            for name in floating_names(blueprint, self.buffers)
            if any(name == prefix or name.startswith(prefix + ".") for prefix in self.names)
        ]


View = Full | Owned | SameArch | Prefix | Window | Shared
VIEWS = ("auto", "full", "owned", "same_arch", "prefix", "shared")


def check_view(spec: str) -> None:
    """Refuse an unknown policy."""
    kind, _, rest = spec.partition(":")
    if kind not in VIEWS or (rest and kind != "shared"):
        raise InputError(f"Unknown view '{spec}': choose one of {', '.join(VIEWS)} (shared:head+layers.2 names parts).")


def resolve_view(spec: str, blueprints: Blueprints, buffers: bool) -> View:
    """Turn a name into a policy.

    `auto` takes the whole model when all architectures are the same, layers by name when they are members of one family
    whose layers of one name have one shape, otherwise the whole model among clients of the same architecture: also for
    widths of one network, whose slices are averaged when `prefix` is asked for.
    """
    check_view(spec)
    kind, _, rest = spec.partition(":")
    if kind == "auto":
        families = {blueprint.family for blueprint in blueprints.values()}
        if len(blueprints) == 1:
            return Full(buffers)
        aligned = len(families) == 1 and None not in families and _one_shape_a_name(blueprints)
        return Owned(buffers) if aligned else SameArch(buffers)
    if kind == "shared":
        return Shared(tuple(rest.split("+")) if rest else ("head",), buffers)
    policies: dict[str, type[Full | Owned | SameArch | Prefix]] = {
        "full": Full,
        "owned": Owned,
        "same_arch": SameArch,
        "prefix": Prefix,
    }
    return policies[kind](buffers)


def _one_shape_a_name(blueprints: Blueprints) -> bool:
    """Tell whether tensors of the same name have the same shape (widths of one network do not)."""
    found: dict[str, tuple[int, ...]] = {}
    return all(found.setdefault(n, shape) == shape for b in blueprints.values() for n, shape in b.shapes.items())


def _covers(large: torch.Size | tuple[int, ...], small: torch.Size | tuple[int, ...]) -> bool:
    return len(large) == len(small) and all(a >= b for a, b in zip(large, small, strict=True))
