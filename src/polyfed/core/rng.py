"""One tree of seeds: every random draw comes from `(seed, purpose, round, client)`.

A stream depends on nothing else, so the order of clients, the number of workers, the engine and a resume
from a checkpoint cannot shift it, and switching one part of a method off does not disturb the draws of another.
"""

from __future__ import annotations

import hashlib
import random
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

SERVER = -1  # the "client" number of the server in the seed tree

_global_generator = threading.RLock()


def seed_of(seed: int, purpose: str, round: int = 0, client: int = SERVER) -> int:
    """Return the 63-bit seed of one stream."""
    key = f"{seed}|{purpose}|{round}|{client}".encode()
    return int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "big") >> 1


def generator(seed: int, purpose: str, round: int = 0, client: int = SERVER) -> torch.Generator:
    """Return a fresh torch generator for one stream (always on the CPU, so that devices agree)."""
    return torch.Generator().manual_seed(seed_of(seed, purpose, round, client))


def numpy_generator(seed: int, purpose: str, round: int = 0, client: int = SERVER) -> np.random.Generator:
    """Return a fresh NumPy generator for one stream."""
    return np.random.default_rng(seed_of(seed, purpose, round, client))


@contextmanager
def seeded(seed: int, purpose: str, round: int = 0, client: int = SERVER) -> Iterator[None]:
    """Run the block with the global generators of torch, Python and NumPy at a seed of the tree, then put them back.

    Modules initialize themselves from the global generator, and some draw from it in every pass (functional dropout,
    noise); this is the one place where it is used. The lock keeps two threads from seeding it under each other.
    """
    number = seed_of(seed, purpose, round, client)
    with _global_generator, torch.random.fork_rng(devices=[]), _others_kept():
        _seed_torch(number)
        random.seed(number)
        np.random.seed(number % 2**32)
        yield


def _seed_torch(number: int) -> None:
    """Seed torch's global generators.

    Where there is no accelerator, `torch.manual_seed` notes for each kind of them to seed it once it appears, with the
    text of the whole call stack: a millisecond for every seed, and nobody ever uses it.
    """
    if torch.accelerator.is_available():
        torch.manual_seed(number)
    else:
        torch.default_generator.manual_seed(number)


@contextmanager
def _others_kept() -> Iterator[None]:
    """Put back the states of Python's and NumPy's global generators after the block."""
    python, numpy = random.getstate(), np.random.get_state()
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)


def _states() -> tuple[bytes, object, bytes]:
    """Return where all global generators stand."""
    numpy: Any = np.random.get_state()
    return torch.get_rng_state().numpy().tobytes(), random.getstate(), repr((numpy[1].tobytes(), numpy[2:])).encode()


@contextmanager
def watched() -> Iterator[Callable[[], bool]]:
    """Run the block alone with the global generators; the function tells whether one was drawn from so far."""
    with _global_generator, torch.random.fork_rng(devices=[]), _others_kept():
        before = _states()
        yield lambda: _states() != before
