"""States in few numbers: every matrix by its largest singular values and their vectors, all else as it is."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping

import torch
from torch import Tensor

Factors = tuple[Tensor, Tensor, Tensor]  # U [m, r], s [r], V [r, n]
WHOLE = -1  # in the place of a rank: the matrix travels as it is


@torch.no_grad()
def compress(matrix: Tensor, energy: float) -> Factors:
    """Return the first r singular values and vectors of `[m, n]`, with the least r that keeps a share of the energy.

    The energy is the sum of squared singular values; all of it (1) loses nothing but rounding. A matrix of zeros has
    rank 0.
    """
    u, s, v = torch.linalg.svd(matrix.double(), full_matrices=False)
    kept = s.square().cumsum(0)
    rank = 0 if kept[-1] == 0 else int((kept < energy * kept[-1]).sum()) + 1
    return u[:, :rank].to(matrix.dtype), s[:rank].to(matrix.dtype), v[:rank].to(matrix.dtype)


def expand(factors: Factors) -> Tensor:
    """Return U diag(s) V."""
    u, s, v = factors
    return (u * s) @ v


@torch.no_grad()
def pack(state: Mapping[str, Tensor], energy: float, whole: Collection[str] = ()) -> tuple[Tensor, Tensor]:
    """Return a state as one row of numbers, by ascending name, and the rank of each of its matrices.

    A tensor of more than one axis is a matrix with its first axis as rows and takes `r(m + n + 1)` numbers; those that
    `whole` names are not compressed, and have `WHOLE` for a rank.
    """
    values, ranks = [], []
    for name, tensor in sorted(state.items()):  # a checkpoint may have changed their order
        if tensor.dim() < 2 or name in whole:
            values.append(tensor.flatten())
            ranks += [WHOLE] * (tensor.dim() > 1)
            continue
        factors = compress(tensor.flatten(1), energy)
        values.extend(factor.flatten() for factor in factors)
        ranks.append(len(factors[1]))
    return torch.cat(values), torch.tensor(ranks, dtype=torch.int16)


@torch.no_grad()
def unpack(values: Tensor, ranks: Tensor, like: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the state that was packed: names and shapes are those of `like`."""
    state, left, place = {}, iter(ranks.tolist()), 0

    def take(*shape: int) -> Tensor:
        nonlocal place
        place += math.prod(shape)
        return values[place - math.prod(shape) : place].view(shape)

    for name, tensor in sorted(like.items()):
        rank = next(left) if tensor.dim() > 1 else WHOLE
        if rank < 0:
            state[name] = take(*tensor.shape)
        else:
            rows, columns = len(tensor), tensor[0].numel()
            state[name] = expand((take(rows, rank), take(rank), take(rank, columns))).view(tensor.shape)
    return state


def packed_change(change: Mapping[str, Tensor], energy: float, whole: Collection[str] = ()) -> dict[str, Tensor]:
    """Return a change of a state as it travels: its numbers, and the ranks of its matrices."""
    values, ranks = pack(change, energy, whole)
    return {"change": values, "ranks": ranks}


def packed_difference(
    new: Mapping[str, Tensor], old: Mapping[str, Tensor], energy: float, whole: Collection[str] = ()
) -> dict[str, Tensor]:
    """Return the change from one state to another as it travels."""
    return packed_change({name: new[name] - old[name] for name in new}, energy, whole)


def unpacked_change(packed: Mapping[str, Tensor], like: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return a change that travelled: names and shapes are those of `like`."""
    return unpack(packed["change"], packed["ranks"], like)


def changed(state: Mapping[str, Tensor], packed: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return a state after a packed change (none: as it is)."""
    if not packed:
        return dict(state)
    change = unpacked_change(packed, state)
    return {name: tensor + change[name] for name, tensor in state.items()}
