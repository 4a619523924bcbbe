"""Choosing single weights of a network: its tensors as one long list, the largest of it, the choice in few bytes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor


def share_of(number: int, size: float) -> int:
    """Return how many of some weights a share of them is, floor(r·n), at least one."""
    return max(1, int(size * number + 1e-9))


def largest(weights: Tensor, size: float) -> tuple[Tensor, Tensor]:
    """Return which weights are the floor(r·n) largest (of equal ones the first), and the magnitude of the smallest."""
    count = share_of(len(weights), size)
    if count == len(weights):
        return torch.ones_like(weights, dtype=torch.bool), weights.new_zeros(())
    order = weights.abs().argsort(descending=True, stable=True)[:count]
    chosen = torch.zeros_like(weights, dtype=torch.bool)
    chosen[order] = True
    return chosen, weights[order[-1]].abs()


def flat(state: Mapping[str, Tensor], names: Sequence[str]) -> Tensor:
    """Return some tensors as one long list."""
    return torch.cat([state[name].reshape(-1) for name in names])


def pack_choice(chosen: Tensor) -> Tensor:
    """Return a list of booleans as bits, eight to a byte, or as the chosen positions where that is shorter (int32)."""
    positions = chosen.nonzero().flatten()
    if 4 * len(positions) < -(-len(chosen) // 8):
        return positions.to(torch.int32)
    bits = torch.nn.functional.pad(chosen.to(torch.uint8), (0, -len(chosen) % 8)).view(-1, 8)
    return (bits << torch.arange(8, dtype=torch.uint8, device=chosen.device)).sum(1, dtype=torch.uint8)


def unpack_choice(packed: Tensor, length: int) -> Tensor:
    """Return the booleans again."""
    if packed.dtype == torch.int32:
        chosen = torch.zeros(length, dtype=torch.bool, device=packed.device)
        chosen[packed.long()] = True
        return chosen
    bits = packed[:, None] >> torch.arange(8, dtype=torch.uint8, device=packed.device)
    return (bits & 1).flatten()[:length].bool()


class Weights(NamedTuple):
    """The weights that compete, by name: those of a group with each other. In all messages they are one long list."""

    groups: list[list[str]]
    shapes: Mapping[str, tuple[int, ...]]

    @property
    def names(self) -> list[str]:
        """All names, group by group."""
        return list(chain(*self.groups))

    @property
    def lengths(self) -> list[int]:
        """How many numbers each tensor has."""
        return [prod(self.shapes[name]) for name in self.names]

    @property
    def group_lengths(self) -> list[int]:
        """How many numbers each group has."""
        return [sum(prod(self.shapes[name]) for name in names) for names in self.groups]

    def split(self, values: Tensor) -> dict[str, Tensor]:
        """Return a long list as tensors again."""
        parts = zip(self.names, values.split(self.lengths), strict=True)
        return {name: part.view(self.shapes[name]) for name, part in parts}
