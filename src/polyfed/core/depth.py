"""Networks that differ in depth: which tensors belong to which block of which stack, read off their names.

Blocks of one kind are numbered, `layers.2.linear.weight` or `stages.1.0.layers.0.conv.weight`. The number of a block is
the last of the first run of numbers in a name: block 2 of the stack `layers`, block 0 of the stack `stages.1`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

from polyfed.core.party import Blueprint


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


def top_names(blueprint: Blueprint, blueprints: Mapping[str, Blueprint]) -> Iterator[str]:
    """Yield the tensors of the last block of every stack, if it is of the kind of the deepest network's last one.

    The first block of a ResNet's stage, which changes the width, is not.
    """
    for stack, blocks in stacks_of(blueprint.shapes).items():
        deepest = max(blueprints.values(), key=lambda b: len(stacks_of(b.shapes).get(stack, {})))
        theirs = stacks_of(deepest.shapes)[stack]
        top, last = blocks[max(blocks)], theirs[max(theirs)]
        alike = {n: blueprint.shapes[m] for n, m in top.items()} == {n: deepest.shapes[m] for n, m in last.items()}
        if alike and len(theirs) > 1:
            yield from top.values()
