"""Networks that differ in depth: which tensors belong to which block of which stack, read off their names.

Blocks of one kind are numbered, `layers.2.linear.weight` or `stages.1.0.layers.0.conv.weight`. The number of a block is
the last of the first run of numbers in a name: block 2 of the stack `layers`, block 0 of the stack `stages.1`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple


class Place(NamedTuple):
    """Where a tensor is: the stack, the number of the block in it, and the name inside of the block."""

    stack: str
    block: int
    inner: str


def place_of(name: str) -> Place | None:
    """Return where a tensor is, or None where it belongs to no numbered block."""
    parts = name.split(".")
    numbered = [part.isdecimal() for part in parts]
    if True not in numbered:
        return None
    first = numbered.index(True)
    last = numbered.index(False, first) - 1 if False in numbered[first:] else len(parts) - 1
    return Place(".".join(parts[:last]), int(parts[last]), ".".join(parts[last + 1 :]))


def stacks_of(names: Iterable[str]) -> dict[str, dict[int, dict[str, str]]]:
    """Return stack -> block -> name inside of it -> the whole name, in their order."""
    stacks: dict[str, dict[int, dict[str, str]]] = {}
    for name in names:
        place = place_of(name)
        if place is not None:
            stacks.setdefault(place.stack, {}).setdefault(place.block, {})[place.inner] = name
    return stacks
