"""Trees of tensors on their way to another process: a few words that describe them, then their bytes.

Small tensors travel together in one copy, large ones straight from where they lie; the receiver's tensors are views of
what arrived. Nothing is pickled, and no checksum is taken: the connection has its own.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from polyfed.core.blob import DTYPES
from polyfed.core.checkpoint import Tree, flattened, unflattened

ALIGN = 64  # bytes: tensors begin where torch's own would
TOGETHER = 1 << 22  # bytes: tensors up to here travel together, in parcels of about this size
LONGEST = 1 << 30  # bytes in one transfer

_NAMES = {name: dtype for dtype, name in DTYPES.items()}


@dataclass(frozen=True)
class Item:
    """What is said of a tensor before it arrives."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    on_gpu: bool  # and travels from GPU to GPU
    by_memory: bool  # it was on a device, travels by way of the processors' memory, and goes to the receiver's device

    @property
    def size(self) -> int:
        """Bytes."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize

    @property
    def places(self) -> tuple[bool, bool]:
        """Where it travels, and where it goes: tensors of one parcel have this in common."""
        return self.on_gpu, self.by_memory

    @property
    def space(self) -> int:
        """Bytes that it takes among others."""
        return -(-self.size // ALIGN) * ALIGN


def described(tree: Tree, on_gpu: bool) -> tuple[bytes, list[Tensor], list[Item]]:
    """Return the words that go ahead of a tree, its tensors, and what they say of each.

    Tensors on a GPU stay there if they can travel so (`on_gpu`); otherwise the receiver puts them on its own device.
    """
    found: dict[str, Tensor] = {}
    skeleton = flattened(tree, found)
    away = [tensor.device.type != "cpu" for tensor in found.values()]
    tensors = [tensor.detach() if on_gpu else tensor.detach().cpu() for tensor in found.values()]
    items = [
        Item(tensor.dtype, tuple(tensor.shape), there and on_gpu, there and not on_gpu)
        for tensor, there in zip(tensors, away, strict=True)
    ]
    told = [[DTYPES[item.dtype], item.shape, item.on_gpu, item.by_memory] for item in items]
    return json.dumps({"tree": skeleton, "tensors": told}).encode(), tensors, items


def read(words: bytes) -> tuple[Any, list[Item]]:
    """Return what `described` wrote: the tree without its tensors, and what is known of each of them."""
    told = json.loads(words)
    return told["tree"], [Item(_NAMES[dtype], tuple(shape), *places) for dtype, shape, *places in told["tensors"]]


def parcels(items: Sequence[Item]) -> Iterator[list[int]]:
    """Yield which tensors travel together, by number: both sides find the same."""
    waiting: list[int] = []
    filled = 0
    for number, item in enumerate(items):
        if item.size > TOGETHER:
            yield [number]
            continue
        if waiting and (filled + item.space > TOGETHER or items[waiting[0]].places != item.places):
            yield waiting
            waiting, filled = [], 0
        waiting.append(number)
        filled += item.space
    if waiting:
        yield waiting


def filled(tensors: Sequence[Tensor], items: Sequence[Item]) -> Tensor:
    """Return the bytes of a parcel: those of a lone tensor where they lie."""
    if len(tensors) == 1:
        return _bytes(tensors[0])
    parcel = torch.zeros(sum(item.space for item in items), dtype=torch.uint8, device=tensors[0].device)
    start = 0
    for tensor, item in zip(tensors, items, strict=True):
        if item.size:
            parcel[start : start + item.size] = _bytes(tensor)
        start += item.space
    return parcel


def empty(items: Sequence[Item], gpu: torch.device | None) -> Tensor:
    """Return memory for a parcel that is about to arrive."""
    size = items[0].size if len(items) == 1 else sum(item.space for item in items)
    return torch.empty(size, dtype=torch.uint8, device=gpu if items[0].on_gpu else "cpu")


def opened(parcel: Tensor, items: Sequence[Item]) -> list[Tensor]:
    """Return the tensors of a parcel: views of it."""
    found, start = [], 0
    for item in items:
        found.append(parcel[start : start + item.size].view(item.dtype).view(item.shape))
        start += item.space
    return found


def tree_of(skeleton: Any, tensors: Mapping[int, Tensor]) -> Tree:
    """Return the tree again, with its tensors by number."""
    return unflattened(skeleton, {str(number): tensor for number, tensor in tensors.items()})


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)
