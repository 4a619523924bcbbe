"""Replies as tables: what each client says of every common tensor, and back to messages a method can fuse.

Rules against bad senders (`robust.py`), noise on means (`clientnoise.py`) and attacks (`attack.py`) work on them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from polyfed.core.errors import MessageError
from polyfed.core.message import Message
from polyfed.core.method import Method
from polyfed.core.party import ClientInfo, Context, Party
from polyfed.core.places import Place, kind_of

Replies = Mapping[int, Message]


@dataclass
class Common:
    """One common tensor: what each client says of it, [clients, entries], and which entries it holds (None: all)."""

    kind: str
    values: Tensor
    held: Tensor | None
    names: list[str | None]  # the tensor's name in each client's message


def placed_replies(
    method: Method, server: Party, replies: Replies, ctx: Context, missing: dict[int, str]
) -> dict[int, dict[str, Place]]:
    """Return where the entries of each reply belong; who sent something that belongs nowhere is left out by name."""
    placed: dict[int, dict[str, Place]] = {}
    for client, message in replies.items():
        try:
            placed[client] = method.places(server, ctx.infos[client], message, ctx)
            for name, place in placed[client].items():
                _check(name, _tensor(message, name), place, ctx.infos[client])
        except (RuntimeError, ValueError, KeyError, IndexError, TypeError, MessageError) as error:
            missing[client] = f"Message from {ctx.infos[client]} refused: it cannot be compared ({error})."
            placed.pop(client, None)
    return placed


def tabled(
    placed: Mapping[int, Mapping[str, Place]],
    replies: Replies,
    reference: Mapping[int, Mapping[str, Tensor]] | None = None,
) -> list[Common]:
    """Return what clients say of every common tensor, less the reference where there is one."""
    clients = list(replies)
    holders: dict[str, dict[int, str]] = {}
    for client in clients:
        for name, place in placed[client].items():
            holders.setdefault(place.key, {})[client] = name
    tables = []
    for named in holders.values():
        first = next(iter(named))
        shape = placed[first][named[first]].shape
        whole = len(named) == len(clients)
        values = torch.zeros(len(clients), *shape, dtype=_tensor(replies[first], named[first]).dtype)
        held = torch.zeros(values.shape, dtype=torch.bool)
        for row, client in enumerate(clients):
            if client not in named:
                continue
            place, tensor = placed[client][named[client]], _tensor(replies[client], named[client])
            if reference is not None:
                tensor = tensor - reference[client][named[client]]
            tensor = tensor if place.rows is None else tensor[place.rows]
            where = (...,) if place.part is None else place.part
            values[row][where] = tensor.to(values)
            held[row][where] = True
            whole = whole and place.part is None and place.rows is None
        flat = None if whole else held.flatten(1)
        tables.append(Common(kind_of(named[first]), values.flatten(1), flat, [named.get(client) for client in clients]))
    return tables


def bags_of(method: Method, replies: Replies) -> list[Common]:
    """Return the mean rows of what comes as a bag of samples' features: bags are compared by them."""
    kinds = [kind for kind, how in method.combines.items() if how == "rows"]
    tables = []
    for kind in kinds:
        means = {c: _tensor(m, kind).flatten(1).mean(0) for c, m in replies.items() if has_rows(m, kind)}
        if not means:
            continue
        like = next(iter(means.values()))
        values = torch.stack([means.get(client, torch.zeros_like(like)) for client in replies])
        held = torch.tensor([client in means for client in replies]).unsqueeze(1).expand(values.shape)
        tables.append(Common(kind, values, None if len(means) == len(replies) else held, [kind] * len(replies)))
    return tables


def reference_of(
    client: int, sent: Mapping[int, Message], replies: Replies, placed: Mapping[int, Mapping[str, Place]], ctx: Context
) -> dict[str, Tensor]:
    """Return what each tensor of a reply is a change of: what was sent, the common start of a network, or zero."""
    message, reply = sent.get(client, Message()), replies[client]
    known = dict(message.tensors())
    initial = ctx.blueprints[ctx.infos[client].architecture].initial
    found = {}
    for name, place in placed[client].items():
        tensor = _tensor(reply, name)
        start = known.get(name)
        if start is None and name.startswith("params/main/"):
            start = initial.get(name.removeprefix("params/main/"))
        if place.part is not None and "classes" in message.data and name in known and "classes" in reply.data:
            common = tensor.new_zeros(place.shape)
            common[message.data["classes"].long()] = known[name].to(common)
            start = common[reply.data["classes"].long()]
        same = start is not None and start.shape == tensor.shape
        found[name] = start.to(tensor) if same and start is not None else torch.zeros_like(tensor)
    return found


def replaced(
    table: Sequence[Common], values: Sequence[Tensor], placed: Mapping[int, Mapping[str, Place]], replies: Replies
) -> dict[int, Message]:
    """Return replies that all say the same wherever they hold an entry."""
    found = {client: dict(message.tensors()) for client, message in replies.items()}
    for common, value in zip(table, values, strict=True):
        for client, name in zip(replies, common.names, strict=True):
            if name is None:
                continue
            place, tensor = placed[client][name], found[client][name]
            whole = value.view(place.shape)
            new = (whole if place.part is None else whole[place.part]).to(tensor)
            if place.rows is not None:
                kept = tensor.clone()
                kept[place.rows] = new
                new = kept
            found[client][name] = new.reshape(tensor.shape)
    return {client: rebuilt(message, found[client]) for client, message in replies.items()}


def _check(name: str, tensor: Tensor, place: Place, info: ClientInfo) -> None:
    """Try a place: class numbers out of range and shapes that do not fit are refused with their sender."""
    probe = torch.zeros(place.shape, dtype=torch.bool)
    target = probe if place.part is None else probe[place.part]
    source = tensor if place.rows is None else tensor[place.rows]
    if target.shape != source.shape:
        raise MessageError(f"'{name}' is {list(source.shape)}, but {list(target.shape)} belongs there")


def _tensor(message: Message, name: str) -> Tensor:
    """Return a tensor by its name on the wire."""
    part, _, rest = name.partition("/")
    if part == "data":
        return message.data[rest]
    model, _, parameter = rest.partition("/")
    return message.params[model][parameter]


def has_rows(message: Message, kind: str) -> bool:
    """Tell whether a reply has a bag of samples' features of this kind."""
    name = kind.removeprefix("data/")
    return name in message.data and len(message.data[name]) > 0


def rebuilt(message: Message, tensors: Mapping[str, Tensor]) -> Message:
    """Return a message with other values: what came may still be a client's own memory."""
    return Message(
        {m: {n: tensors[f"params/{m}/{n}"] for n in state} for m, state in message.params.items()},
        {n: tensors[f"data/{n}"] for n in message.data},
        dict(message.meta),
    )


def held_entries(common: Common) -> Tensor:
    """Return which entries each client holds."""
    return torch.ones(common.values.shape, dtype=torch.bool) if common.held is None else common.held


def held_by(common: Common) -> Tensor:
    """Return how many entries each client holds."""
    return held_entries(common).sum(1).double()


def squares_of(common: Common, middle: Tensor) -> Tensor:
    """Return each client's squared distance to a point, over what it holds."""
    away = common.values.double() - middle.double()
    return (away if common.held is None else torch.where(common.held, away, 0.0)).pow(2).sum(1)
