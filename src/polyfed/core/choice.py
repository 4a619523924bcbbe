"""Single weights of a network, as methods that keep only some of them send and average them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from torch import Tensor

from polyfed.core.message import State
from polyfed.core.party import Blueprint, fill
from polyfed.core.places import Place
from polyfed.core.views import shared_names
from polyfed.ops.aggregate import IndexMap, Slot
from polyfed.ops.choice import Weights, flat, pack_choice, unpack_choice


def layer_of(name: str) -> str:
    """Return the layer that a tensor belongs to."""
    return name.rpartition(".")[0]


def competing(blueprint: Blueprint, by_layer: bool) -> Weights:
    """Return the weights that compete, all or layer by layer: of layers with a matrix, biases too, but not of norms."""
    layers = {layer_of(n) for n, shape in blueprint.shapes.items() if len(shape) > 1 and n not in blueprint.buffers}
    found: dict[str, list[str]] = {}
    for name in shared_names(blueprint, buffers=False):
        if layer_of(name) in layers:
            found.setdefault(layer_of(name) if by_layer else "", []).append(name)
    return Weights(list(found.values()), blueprint.shapes)


class Choice(NamedTuple):
    """Some of the weights that compete: `chosen` says which, in the order of the long list of all."""

    weights: Weights
    chosen: Tensor

    @classmethod
    def unpacked(cls, weights: Weights, packed: Tensor) -> Choice:
        """Return a choice that travelled."""
        return cls(weights, unpack_choice(packed, sum(weights.lengths)))

    def packed(self) -> Tensor:
        """Return which weights they are, in few bytes."""
        return pack_choice(self.chosen)

    def masks(self) -> dict[str, Tensor]:
        """Return, tensor by tensor, which weights are chosen."""
        return self.weights.split(self.chosen)

    def values_of(self, state: Mapping[str, Tensor]) -> Tensor:
        """Return the chosen values as one list."""
        return flat(state, self.weights.names)[self.chosen]

    def put(self, state: Mapping[str, Tensor], values: Tensor) -> None:
        """Write the chosen values to their places, and zeros to those of the other weights that compete."""
        whole = values.new_zeros(len(self.chosen)).masked_scatter_(self.chosen, values)
        fill(state, self.weights.split(whole))

    def part(self, values: Tensor) -> tuple[State, IndexMap]:
        """Return the chosen values tensor by tensor, and their places: for a mean over those who hold a weight."""
        masks = self.masks()
        state: State = {}
        slots: IndexMap = {}
        for (name, mask), own in zip(masks.items(), values.split([int(m.sum()) for m in masks.values()]), strict=True):
            whole = bool(mask.all())
            state[name] = own.view(mask.shape) if whole else own
            slots[name] = Slot(name, None if whole else mask.nonzero(as_tuple=True))
        return state, slots

    def place(self, key: str) -> Place:
        """Return where the chosen values lie in the list of all weights that compete."""
        return Place(key, tuple(self.chosen.shape), (self.chosen.nonzero().flatten(),))
