"""Averages of model states: whole, by layer, or by index slices of a larger model.

Everything here is a sum over clients in ascending id, in place, so a hundred states are averaged with one extra copy
of the model in memory and the result does not depend on the order in which replies arrived.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

Index = tuple[slice | Tensor, ...]


@dataclass(frozen=True, slots=True)
class Slot:
    """Where a client's tensor lives in the server's state: under which key, and which part of it (None: all)."""

    key: str
    part: Index | None = None


IndexMap = dict[str, Slot]  # client tensor name -> its place at the server; a missing name is not shared


class Part(NamedTuple):
    """One client's contribution to an average."""

    state: Mapping[str, Tensor]
    slots: IndexMap
    weight: float


def extract(state: Mapping[str, Tensor], slots: IndexMap) -> dict[str, Tensor]:
    """Return the client's tensors, cut from the server's state (views where possible)."""
    return {name: state[slot.key] if slot.part is None else state[slot.key][slot.part] for name, slot in slots.items()}


@torch.no_grad()
def scatter_mean(state: dict[str, Tensor], parts: Iterable[Part]) -> None:
    """Replace every covered entry of `state` by the weighted mean over the parts that hold it; the rest stays.

    `w[i] = sum_k a_k w_k[i] / sum_k a_k` over the clients `k` whose slice contains entry `i`, as a running mean: the
    tensor of a lone holder, and equal tensors of any number of holders, come back without rounding.
    """
    mean: dict[str, Tensor] = {}
    weight: dict[str, float | Tensor] = {}
    for part in parts:
        if part.weight == 0:
            continue
        for name, tensor in part.state.items():
            slot = part.slots[name]
            key, index = slot.key, slot.part
            if key not in mean:
                mean[key] = torch.zeros_like(state[key])
                weight[key] = 0.0
            held = weight[key]
            if index is not None and not isinstance(held, Tensor):
                held = torch.full_like(state[key], held)
            tensor = tensor.to(mean[key])
            if index is None:
                held = held + part.weight
                mean[key].lerp_(tensor, part.weight / held)
            else:
                assert isinstance(held, Tensor)
                held[index] += part.weight
                mean[key][index] = mean[key][index].lerp(tensor, part.weight / held[index])
            weight[key] = held
    for key, averaged in mean.items():
        held = weight[key]
        state[key].copy_(torch.where(held > 0, averaged, state[key]) if isinstance(held, Tensor) else averaged)


@torch.no_grad()
def weighted_mean(tensors: Iterable[Tensor], weights: Iterable[float]) -> Tensor:
    """Return `sum a_k t_k / sum a_k`, accumulated in the given order."""
    total: Tensor | None = None
    weight = 0.0
    for tensor, a in zip(tensors, weights, strict=True):
        total = tensor * a if total is None else total.add_(tensor, alpha=a)
        weight += a
    assert total is not None, "nothing to average"
    return total / weight
