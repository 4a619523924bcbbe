"""Mutations of what others send or a disk holds: bytes, and JSON with values that nobody would expect."""

from __future__ import annotations

import copy
import json
import random
import struct
from typing import Any

NASTY: list[Any] = [
    *(0, -1, 1, 2**31, 2**40, 2**62, 2**63, 2**64, 10**400, -(10**400), 0.5, -0.0, 1e308, 5e-324),
    *(
        float("inf"),
        float("-inf"),
        float("nan"),
        True,
        False,
        None,
        "",
        "x" * 5000,
        "\x1b[31mred\x1b[0m",
        "\u202e",
        "F8_E4M3",
    ),
    *([], {}, [[]], [0, 2**62, 2**62], [-1], {"": 0}, "mlp:100000x8", "mlp:1x1000000000", "cnn:9999999", "os:system"),
]


def nested(depth: int) -> Any:
    """Return a list in a list in a list."""
    value: Any = []
    for _ in range(depth):
        value = [value]
    return value


def mutate_tree(tree: Any, rng: random.Random) -> Any:
    """Return a tree of JSON with one to three places changed, removed or added."""
    tree = copy.deepcopy(tree)
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        places = list(_places(tree))
        if not places:
            return rng.choice(NASTY)
        holder, key = rng.choice(places)
        what = rng.random()
        if what < 0.12:
            del holder[key]
        elif what < 0.2 and isinstance(holder, dict):
            holder[str(rng.choice(NASTY))[:50]] = copy.deepcopy(rng.choice(NASTY))
        elif what < 0.23:
            holder[key] = nested(rng.choice((50, 200)))
        else:
            holder[key] = copy.deepcopy(rng.choice(NASTY))
    return tree


def mutate_bytes(content: bytes, rng: random.Random) -> bytes:
    """Return bytes with some flipped, cut, doubled, filled or exchanged."""
    if not content:
        return rng.randbytes(rng.randrange(1, 64))
    what, changed = rng.random(), bytearray(content)
    place = rng.randrange(len(changed))
    if what < 0.45:
        for _ in range(rng.choice((1, 1, 2, 8))):
            changed[rng.randrange(len(changed))] ^= 1 << rng.randrange(8)
    elif what < 0.6:
        del changed[place:]
    elif what < 0.7:
        changed[place:place] = rng.randbytes(rng.choice((1, 8, 200)))
    elif what < 0.8:
        changed[place : place + rng.choice((4, 8, 64))] = b"\xff" * 8
    elif what < 0.9:
        changed[place : place + 16] = b"\x00" * rng.choice((0, 16, 300))
    else:
        return rng.randbytes(rng.randrange(len(content) + 1))
    return bytes(changed)


def mutate_blob(blob: bytes, rng: random.Random) -> bytes:
    """Return a safetensors blob whose bytes, or whose description of its tensors, are changed."""
    if len(blob) < 9 or rng.random() < 0.4:
        return mutate_bytes(blob, rng)
    (length,) = struct.unpack("<Q", blob[:8])
    header, body = json.loads(blob[8 : 8 + length]), blob[8 + length :]
    if rng.random() < 0.3:
        words = header["__metadata__"]
        words["meta"] = json.dumps(mutate_tree(json.loads(words.get("meta", "{}")), rng))
    elif rng.random() < 0.05:
        header |= {f"data/{number}": {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]} for number in range(30_000)}
    else:
        header = mutate_tree(header, rng)
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + body


def _places(tree: Any) -> Any:
    """Yield every (holder, key) of a tree."""
    keys = tree.keys() if isinstance(tree, dict) else range(len(tree)) if isinstance(tree, list) else ()
    for key in keys:
        yield tree, key
        yield from _places(tree[key])
