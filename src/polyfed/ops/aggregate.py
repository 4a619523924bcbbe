"""Averages of model states: whole, by layer, or by index slices of a larger model.

Everything here is a sum over clients in ascending id, in place, so a hundred states are averaged with one extra copy
of the model in memory and the result does not depend on the order in which replies arrived.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

Index = tuple[slice | Tensor, ...]

PIECE = 1 << 18  # numbers that are averaged at once: a megabyte stays in the cache of a core


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


def part_of(whole: Tensor, slot: Slot) -> Tensor:
    """Return the part of a tensor that a slot names: a view, unless its index is a list of places."""
    return whole if slot.part is None else whole[slot.part]


def extract(state: Mapping[str, Tensor], slots: IndexMap) -> dict[str, Tensor]:
    """Return the client's tensors, cut from the server's state (views where possible)."""
    return {name: part_of(state[slot.key], slot) for name, slot in slots.items()}


@torch.no_grad()
def scatter_mean(state: dict[str, Tensor], parts: Iterable[Part]) -> None:
    """Replace every covered entry of `state` by the weighted mean over the parts that hold it; the rest stays.

    `w[i] = sum_k a_k w_k[i] / sum_k a_k` over the clients `k` whose slice contains entry `i`, as a running mean: the
    tensor of a lone holder, and equal tensors of any number of holders, come back without rounding.
    """
    held_by: dict[str, list[tuple[Tensor, Index | None, float]]] = {}
    for part in parts:
        if part.weight == 0:
            continue
        for name, tensor in part.state.items():
            slot = part.slots[name]
            held_by.setdefault(slot.key, []).append((tensor, slot.part, part.weight))
    for key, holders in held_by.items():
        if all(index is None for _, index, _ in holders):
            state[key].copy_(_whole_mean(state[key], [(tensor, a) for tensor, _, a in holders]))
        else:
            mean, weight = _sliced_mean(state[key], holders)
            state[key].copy_(torch.where(weight > 0, mean, state[key]))


def _whole_mean(like: Tensor, holders: list[tuple[Tensor, float]]) -> Tensor:
    """Return the running mean of whole tensors, piece by piece, so that the sum stays in the cache."""
    mean = torch.zeros_like(like, memory_format=torch.contiguous_format)
    flat = mean.view(-1)
    same = mean.dtype, mean.device
    shares, weight = [], 0.0
    for _, a in holders:
        weight += a
        shares.append(a / weight)
    if len(flat) <= PIECE:  # small tensors are many: nothing is cut, and converted only where it must be
        for (tensor, _), share in zip(holders, shares, strict=True):
            mean.lerp_(tensor if (tensor.dtype, tensor.device) == same else tensor.to(mean), share)
        return mean
    sources = [tensor.to(mean).reshape(-1) for tensor, _ in holders]
    for start in range(0, len(flat), PIECE):
        piece = flat[start : start + PIECE]
        for source, share in zip(sources, shares, strict=True):
            piece.lerp_(source[start : start + PIECE], share)
    return mean


def _sliced_mean(like: Tensor, holders: list[tuple[Tensor, Index | None, float]]) -> tuple[Tensor, Tensor]:
    """Return the running mean of slices and the weight behind every entry."""
    mean, weight = torch.zeros_like(like), torch.zeros_like(like)
    for tensor, index, a in holders:
        place: Index = (...,) if index is None else index  # type: ignore[assignment]
        weight[place] += a
        mean[place] = mean[place].lerp(tensor.to(mean), a / weight[place])
    return mean, weight


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


@torch.no_grad()
def mean_state(states: Iterable[Mapping[str, Tensor]], weights: Iterable[float]) -> dict[str, Tensor]:
    """Return the weighted mean of states with the same names, as a running mean: equal states come back as they are."""
    mean: dict[str, Tensor] = {}
    total = 0.0
    for state, weight in zip(states, weights, strict=True):
        total += weight
        for name, tensor in state.items():
            if name not in mean:
                mean[name] = tensor.detach().clone()
            else:
                mean[name].lerp_(tensor.to(mean[name]), weight / total)
    return mean


@contextmanager
def part_way(state: Mapping[str, Tensor], names: Iterable[str], rate: float) -> Iterator[None]:
    """Let some tensors go only a share of the way that the block moves them: w + rate · (moved - w); 1: all of it."""
    start = {name: state[name].clone() for name in names} if rate != 1 else {}
    yield
    for name, w in start.items():
        state[name].lerp_(w, 1 - rate)


@torch.no_grad()
def plain_mean(tensors: Iterable[Tensor]) -> Tensor:
    """Return the mean with equal weights; one tensor at a time is in memory."""
    total: Tensor | None = None
    number = 0
    for tensor in tensors:
        total = tensor.clone() if total is None else total.add_(tensor)
        number += 1
    assert total is not None, "nothing to average"
    return total / number
