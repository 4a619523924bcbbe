"""Arithmetic of dealing rows: whole numbers that add up, and checks that everybody gets some."""

from __future__ import annotations

import numbers
from typing import Any

import numpy as np

from polyfed.core.errors import InputError


def whole_number(what: str, value: Any, advice: str = "give a whole number of at least 1") -> int:
    """Return a count as an int.

    Raises
    ------
    InputError
        If it is text, a fraction, yes or no, or below one.
    """
    if isinstance(value, bool) or not isinstance(value, numbers.Integral) or value < 1:
        raise InputError(f"{what}={value!r} is not possible: {advice}.")
    return int(value)


def is_number(value: Any) -> bool:
    """Say whether a value is a finite number (not text, not yes or no)."""
    return isinstance(value, numbers.Real) and not isinstance(value, bool) and bool(np.isfinite(float(value)))


def check_room(samples: int, clients: int, min_size: int = 1) -> None:
    """Refuse when there are not enough samples for `min_size` at each of so many clients.

    Raises
    ------
    InputError
        With the number of clients that would work.
    """
    whole_number("clients", clients)
    whole_number("min_size", min_size, "give a whole number of at least 1, because every client needs data")
    if clients > samples:
        raise InputError(f"There are more clients ({clients}) than samples ({samples}): ask for at most {samples}.")
    if clients * min_size > samples:
        raise InputError(
            f"{clients} clients with at least {min_size} samples each need {clients * min_size} samples, but there are "
            f"{samples}: lower min_size to {samples // clients} or clients to {max(samples // min_size, 1)}."
        )


def check_sizes(parts: list[np.ndarray], min_size: int, advice: str) -> list[np.ndarray]:
    """Return the parts if each has at least `min_size` rows.

    Raises
    ------
    InputError
        Naming the first client that has fewer, with the advice.
    """
    for client, part in enumerate(parts):
        if len(part) < min_size:
            amount = f"only {len(part)} samples (min_size={min_size})" if len(part) else "no samples"
            raise InputError(f"Client {client} would get {amount}: {advice}.")
    return parts


def apportion(shares: np.ndarray, total: int | np.ndarray) -> np.ndarray:
    """Return whole numbers that follow `shares` (last axis sums to one) and sum to `total` exactly.

    The running sums are rounded, so each number is within one of its exact share. Several rows of shares may have
    a total each.
    """
    totals = np.asarray(total)[..., None]
    edges = np.minimum(np.rint(np.cumsum(shares, axis=-1) * totals).astype(np.int64), totals)
    edges[..., -1:] = totals
    return np.diff(edges, axis=-1, prepend=0)


def draw_shares(rng: np.random.Generator, alpha: float, clients: int, count: int) -> np.ndarray:
    """Draw `count` rows of shares from a symmetric Dirichlet, also where the arithmetic gives up.

    For alpha next to zero the limit is one client with everything; for a huge alpha, equal shares.
    """
    with np.errstate(all="ignore"):
        shares = rng.dirichlet(np.full(clients, alpha), size=count)
    for row in np.flatnonzero(~np.isclose(shares.sum(1), 1.0)):
        shares[row] = 1.0 / clients
        if alpha < 1:
            shares[row] = 0.0
            shares[row, rng.integers(clients)] = 1.0
    return shares


def lift(parts: list[np.ndarray], min_size: int, rng: np.random.Generator) -> list[np.ndarray]:
    """Move random samples, one by one from whoever has most, until everybody has `min_size`."""
    sizes = np.array([len(part) for part in parts])
    stacks: dict[int, list[int]] = {}
    for client in np.flatnonzero(sizes < min_size):
        gained = []
        while sizes[client] < min_size:
            donor = int(sizes.argmax())
            if donor not in stacks:
                stacks[donor] = rng.permutation(parts[donor]).tolist()
            gained.append(stacks[donor].pop())
            sizes[donor] -= 1
            sizes[client] += 1
        parts[client] = np.concatenate([parts[client], np.array(gained, dtype=np.int64)])
    for donor, stack in stacks.items():
        parts[donor] = np.array(stack, dtype=np.int64)
    return parts
