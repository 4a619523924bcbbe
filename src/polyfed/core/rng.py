"""One tree of seeds: every random draw comes from `(seed, purpose, round, client)`.

A stream depends on nothing else, so the order of clients, the number of workers, the engine and a resume
from a checkpoint cannot shift it, and switching one part of a method off does not disturb the draws of another.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

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
    """Run the block with torch's global generator at a seed of the tree, then put its old state back.

    Modules initialise themselves from the global generator, and some draw from it in every pass (functional dropout,
    noise); this is the one place where it is used. The lock keeps two threads from seeding it under each other.
    """
    with _global_generator, torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed_of(seed, purpose, round, client))
        yield


@contextmanager
def watched() -> Iterator[Callable[[], bool]]:
    """Run the block alone with torch's global generator; the function tells whether it was drawn from so far."""
    with _global_generator, torch.random.fork_rng(devices=[]):
        before = torch.get_rng_state()
        yield lambda: not torch.equal(torch.get_rng_state(), before)
