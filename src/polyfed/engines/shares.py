"""Fusing divided over the processes of torch's launcher, by keys of the server's state.

A mean over clients is a sum in ascending id, and sums are rounded: dividing it by clients would change its last digits.
So each rank gets some keys and, of all clients' replies, only the tensors of those keys; it fuses them as one process
would, and only the means travel back (docs/decisions/0020-divided-fusing.md).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from polyfed.core.blob import DTYPES, all_finite
from polyfed.core.checkpoint import Tree
from polyfed.core.federation import Federation
from polyfed.core.message import Message
from polyfed.core.method import Method, Step
from polyfed.core.party import ClientInfo, Context, Party
from polyfed.core.threads import one_thread
from polyfed.engines.link import Link
from polyfed.engines.packing import packed, unpacked

MOST = 0.5  # where one key has a larger share of the numbers, its rank does nearly all: dividing only adds messages

_DTYPES = {name: dtype for dtype, name in DTYPES.items()}


def why_at_first(federation: Federation) -> str | None:
    """Return why fusing is the work of rank 0 alone, in words; None: it can be divided."""
    if federation.attack is not None or federation.rule is not None or federation.settings.privacy.of_clients:
        return "attacks, rules against them and noise look at whole replies"
    steps = [step for step in (*federation.plan.before, *federation.plan.round, *federation.plan.after) if step.up]
    sizes = [numbers_by_key(federation, step) for step in steps]
    if any(found is None for found in sizes):
        return f"{federation.method.name} does more than averaging"
    total = sum((Counter(found) for found in sizes if found), Counter())
    if not total or max(total.values()) > MOST * total.total():
        return "one tensor has most of the numbers"
    return None


def numbers_by_key(federation: Federation, step: Step) -> dict[str, int] | None:
    """Return about how many numbers are fused into every key in a step that all clients take part in.

    None: the method does more than averaging.
    """
    server, ctx = federation.server, federation.ctx
    found: dict[str, int] = {}
    for info, clients in of_each_architecture(federation.backend.infos.values()):
        keys = federation.method.fused_into(server, info, step, ctx)
        if keys is None:
            return None
        for key in keys.values():
            if key in server.state:
                found[key] = found.get(key, 0) + clients * server.state[key].numel()
    return found


def of_each_architecture(infos: Iterable[ClientInfo]) -> list[tuple[ClientInfo, int]]:
    """Return a client of each architecture, and how many have it."""
    members: dict[str, list[ClientInfo]] = {}
    for info in infos:
        members.setdefault(info.architecture, []).append(info)
    return [(some[0], len(some)) for some in members.values()]


def fusing_in_words(federation: Federation, ranks: int) -> str:
    """Return where fusing happens, for people."""
    why = why_at_first(federation)
    return f"fusing at rank 0 ({why})" if why else f"fusing divided over {ranks} processes by tensor"


def divided(sizes: Mapping[str, int], ranks: int) -> dict[str, int]:
    """Return which rank fuses which key: the largest goes to whoever has least so far."""
    load = [0] * ranks
    owner: dict[str, int] = {}
    for key in sorted(sizes, key=lambda key: (-sizes[key], key)):
        rank = load.index(min(load))
        owner[key] = rank
        load[rank] += max(1, sizes[key])
    return owner


def sizes_of(method: Method, server: Party, replies: Mapping[int, Message], step: Step, ctx: Context) -> dict[str, int]:
    """Return how many numbers clients tell of every key."""
    sizes: dict[str, int] = {}
    for client, reply in replies.items():
        keys = keys_of(method, server, client, step, ctx)
        for name, tensor in reply.tensors():
            if name in keys:
                sizes[keys[name]] = sizes.get(keys[name], 0) + tensor.numel()
    return sizes


def keys_of(method: Method, server: Party, client: int, step: Step, ctx: Context) -> dict[str, str]:
    """Return the key that each tensor of a client's reply belongs to."""
    keys = method.fused_into(server, ctx.infos[client], step, ctx)
    assert keys is not None, f"{method.name} says of some replies only where they are fused"
    return keys


def part_of(reply: Message, keys: Mapping[str, str], owner: Mapping[str, int], rank: int) -> Message:
    """Return a reply with the tensors that a rank fuses; what belongs to no key goes to rank 0."""

    def is_its(name: str) -> bool:
        return owner.get(keys.get(name, ""), 0) == rank

    params = {m: {n: t for n, t in state.items() if is_its(f"params/{m}/{n}")} for m, state in reply.params.items()}
    data = {n: t for n, t in reply.data.items() if is_its(f"data/{n}")}
    return Message({model: state for model, state in params.items() if state}, data, reply.meta)


def fuse_share(
    method: Method,
    server: Party,
    replies: Mapping[int, Message],
    clients: Sequence[int],
    owner: Mapping[str, int],
    step: Step,
    ctx: Context,
    link: Link,
) -> None:
    """Give every rank the tensors that it fuses of this rank's replies, and fuse those that are this rank's.

    All ranks do this at the same time; `clients` are those of all ranks whose replies count, in ascending order.
    """
    keys = {client: keys_of(method, server, client, step, ctx) for client in replies}
    parts = [
        {client: part_of(reply, keys[client], owner, rank) for client, reply in replies.items()}
        for rank in range(link.size)
    ]
    found = parts[link.number]
    for tree in link.swap([packed(part) for part in parts]):
        found.update(unpacked(tree))
    with one_thread():
        method.fuse(server, {client: found[client] for client in clients}, step, ctx)


# --- what rank 0 is told of replies that stay where they are ---


def outlined(replies: Mapping[int, Message]) -> Tree:
    """Return all of replies but their numbers. Those that hold NaN or infinity stay whole: rank 0 refuses them."""
    broken = {c: reply for c, reply in replies.items() if not all_finite(*(t for _, t in reply.tensors()))}
    outlines = {
        str(client): {
            "params": {m: {n: _outline(t) for n, t in state.items()} for m, state in reply.params.items()},
            "data": {n: _outline(t) for n, t in reply.data.items()},
            "meta": dict(reply.meta),
        }
        for client, reply in replies.items()
        if client not in broken
    }
    return {"outlines": outlines, "broken": packed(broken)}


def from_outlines(tree: Tree) -> dict[int, Message]:
    """Return the replies with tensors that have a shape, and no numbers: their bytes can be counted."""
    found = unpacked(tree["broken"])
    for client, outline in tree["outlines"].items():
        params = {m: {n: _shape(t) for n, t in state.items()} for m, state in outline["params"].items()}
        data = {n: _shape(t) for n, t in outline["data"].items()}
        found[int(client)] = Message(params, data, outline["meta"])
    return found


def _outline(tensor: torch.Tensor) -> list[object]:
    return [DTYPES[tensor.dtype], list(tensor.shape)]


def _shape(outline: list[Any]) -> torch.Tensor:
    return torch.empty(outline[1], dtype=_DTYPES[outline[0]], device="meta")
