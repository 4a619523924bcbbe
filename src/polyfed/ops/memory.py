"""Memory in which a thread computes again and again (float32, of the processor), until it is told to forget it.

Large tensors come from the system and go back to it. Getting them anew, page by page, takes as long as a simple
operation on them, and threads wait for each other there.
"""

from __future__ import annotations

import math
import threading

import torch
from torch import Tensor


class _Memory(threading.local):
    def __init__(self) -> None:
        self.scratch: dict[str, Tensor] = {}
        self.free: list[Tensor] = []


_memory = _Memory()
KEPT = 8  # blocks that a thread keeps for later


def scratch(name: str, *shape: int) -> Tensor:
    """Return memory whose numbers nobody needs after this thread's next call with the same name."""
    size = math.prod(shape)
    block = _memory.scratch.get(name)
    if block is None or len(block) < size:
        block = _memory.scratch[name] = _fresh(size)
    return block[:size].view(shape)


def borrowed(size: int) -> Tensor:
    """Return a block of so many numbers or more: the caller's until it is `returned`, or lost."""
    fitting = [place for place, block in enumerate(_memory.free) if len(block) >= size]
    if not fitting:
        return _fresh(size)
    return _memory.free.pop(min(fitting, key=lambda place: len(_memory.free[place])))


def returned(block: Tensor) -> None:
    """Give a borrowed block back."""
    _memory.free.append(block)
    if len(_memory.free) > KEPT:
        _memory.free.pop(min(range(len(_memory.free)), key=lambda place: len(_memory.free[place])))


def forget() -> None:
    """Give all that this thread keeps back to the system."""
    _memory.scratch.clear()
    _memory.free.clear()


def _fresh(size: int) -> Tensor:
    return torch.empty(size, dtype=torch.float32, device="cpu")
