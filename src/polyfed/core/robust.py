"""Robust fusing at the level of messages: what a method's `fuse` gets to see when a rule is switched on.

A rule either finds one value for every entry that clients hold (`median`, `trimmed`, `geometric`): each reply then says
that value wherever its sender holds the entry, so that the method's own mean, with any weights, is the rule's value. Or
it looks at each sender: those that stick out are left out (`krum`, `multikrum`, `distance`, `cosine`), or their change
is shortened (`norm`), and the method does with the rest what it always does. docs/decisions/0015-robust.md says why.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from polyfed.core.blob import all_finite
from polyfed.core.errors import InputError, MessageError
from polyfed.core.message import Message
from polyfed.core.method import Method
from polyfed.core.party import ClientInfo, Context, Party
from polyfed.core.places import Place, kind_of
from polyfed.core.trust import REPLACING, Rule
from polyfed.ops.robust import (
    cosines,
    held_mean,
    held_median,
    held_trimmed_mean,
    krum_scores,
    majority_distances,
    squared_distances,
)

Replies = Mapping[int, Message]
SHOWN = 6  # methods that are named as alternatives
FAR = 3.0  # a bag of rows whose mean is so many times farther from the middle than usual is left out
SMOOTH, TURNS, CLOSE = (
    1e-6,
    100,
    1e-9,
)  # Weiszfeld's algorithm as in RFA: smallest distance, turns, when it stands still


@dataclass
class Common:
    """One common tensor: what each client says of it, [clients, entries], and which entries it holds (None: all)."""

    kind: str
    values: Tensor
    held: Tensor | None
    names: list[str | None]  # the tensor's name in each client's message


def check_rule(rule: Rule | None, method: Method, alternatives: Callable[[], Sequence[Method]]) -> None:
    """Refuse a rule that a method's replies cannot be combined by.

    Raises
    ------
    InputError
        Naming methods that can.
    """
    controls = method.family == "control"  # they stand in every comparison, and exchange nothing
    if rule is None or rule.does_nothing or controls or fits(rule, method):
        return
    able = sorted(other.name for other in alternatives() if fits(rule, other))
    more = f" and {len(able) - SHOWN} more" if len(able) > SHOWN else ""
    others = "" if not method.combines else " (krum, multikrum, distance, cosine and norm can be used with it)"
    raise InputError(
        f"robust={rule.name}: the replies of {method.name} are not averaged entry by entry{others}. Methods with which "
        f"{rule.name} works: {', '.join(able[:SHOWN])}{more}."
    )


def fits(rule: Rule, method: Method) -> bool:
    """Tell whether a rule can be used with a method."""
    kinds = set(method.combines.values())
    return bool(kinds & {"mean", "classes"}) and "apart" not in kinds if rule.name in REPLACING else bool(kinds)


def finite_only(replies: Replies, infos: Mapping[int, ClientInfo], missing: dict[int, str]) -> dict[int, Message]:
    """Return the replies without those that hold NaN or infinity; their senders are named in `missing`."""
    good: dict[int, Message] = {}
    for client, message in replies.items():
        bad = next((name for name, tensor in message.tensors() if not all_finite(tensor)), None)
        bad = bad or next((k for k, v in message.meta.items() if isinstance(v, float) and not math.isfinite(v)), None)
        if bad is None:
            good[client] = message
        else:
            missing[client] = f"Message from {infos[client]} refused: '{bad}' holds NaN or infinite values."
    return good


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


@torch.no_grad()
def combined(
    rule: Rule,
    method: Method,
    server: Party,
    sent: Mapping[int, Message],
    replies: Replies,
    ctx: Context,
    missing: dict[int, str],
) -> dict[int, Message]:
    """Return the replies as the rule lets the method see them; who was left out is logged as `left_out`."""
    placed = placed_replies(method, server, replies, ctx, missing)
    replies = {client: replies[client] for client in placed}
    if len(replies) < 2 or rule.does_nothing:
        return dict(replies)
    bags = bags_of(method, replies)
    if rule.name in REPLACING:
        replies = _without(far_bags(bags, list(replies)), replies, ctx)
        table = tabled(placed, replies)
        return replaced(table, replaced_values(rule, table), placed, replies)
    reference = {client: reference_of(client, sent, replies, placed, ctx) for client in replies}
    table = tabled(placed, replies, reference)
    if rule.name == "norm":
        return shortened(rule, method, table, placed, replies, reference)
    return _without(outside(rule, table + bags, list(replies)), replies, ctx)


# --- replies as tables ---


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
        means = {c: _tensor(m, kind).flatten(1).mean(0) for c, m in replies.items() if _has_rows(m, kind)}
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


# --- rules that find one value for all ---


def replaced_values(rule: Rule, table: Sequence[Common]) -> list[Tensor]:
    """Return the rule's value of every common tensor."""
    if rule.name == "median":
        return [held_median(common.values, common.held) for common in table]
    if rule.name == "trimmed":
        assert rule.value is not None
        return [held_trimmed_mean(common.values, rule.value, common.held) for common in table]
    kinds = dict.fromkeys(common.kind for common in table)
    middles = {kind: iter(geometric_median([c for c in table if c.kind == kind])) for kind in kinds}
    return [next(middles[common.kind]) for common in table]


def geometric_median(table: Sequence[Common]) -> list[Tensor]:
    """Return the point with the smallest sum of distances to all clients (RFA, Pillutla et al. 2022; equal weights).

    Distances are over the entries that a client holds, as if it held all of them.
    """
    clients = len(table[0].values)
    weights = torch.ones(clients, dtype=torch.float64)
    entries = sum(common.values.shape[1] for common in table)
    own = sum((held_by(common) for common in table), torch.zeros(clients, dtype=torch.float64))
    middle = [held_mean(common.values.double(), weights, common.held) for common in table]
    last = math.inf
    for _ in range(TURNS):
        squares = sum((squares_of(c, z) for c, z in zip(table, middle, strict=True)), torch.zeros_like(weights))
        distances = (squares * entries / own.clamp(min=1)).sqrt()
        total = float(distances.sum())
        if abs(last - total) <= CLOSE * total:
            break
        last = total
        weights = torch.where(own > 0, 1 / distances.clamp(min=SMOOTH), 0.0)
        middle = [held_mean(common.values.double(), weights, common.held) for common in table]
    return [z.to(common.values.dtype) for z, common in zip(middle, table, strict=True)]


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


# --- rules that look at senders ---


def outside(rule: Rule, table: Sequence[Common], clients: Sequence[int]) -> list[int]:
    """Return who is left out; never everybody."""
    if rule.name == "cosine":
        assert rule.value is not None
        least = torch.ones(len(clients), dtype=torch.float64)
        for common_kind in dict.fromkeys(common.kind for common in table):
            mine = [common for common in table if common.kind == common_kind]
            values = torch.cat([common.values for common in mine], 1)
            held = torch.cat([held_entries(common) for common in mine], 1)
            least = torch.minimum(least, cosines(values, held_median(values, held), held))
        bad = least < rule.value
        return [] if bad.all() else [client for client, out in zip(clients, bad.tolist(), strict=True) if out]
    assert rule.value is not None
    squares = pair_distances(table, len(clients))
    if rule.name == "distance":
        away = majority_distances(squares)
        known = away[torch.isfinite(away)]
        usual = float(known.median()) if len(known) else math.inf
        return [
            client for client, far in zip(clients, away.tolist(), strict=True) if usual * rule.value < far < math.inf
        ]
    number = math.ceil(rule.value * len(clients) - 1e-9)
    scores = krum_scores(squares, number)
    kept = 1 if rule.name == "krum" else max(1, len(clients) - number)
    order = torch.sort(scores, stable=True).indices[:kept].tolist()
    return [client for place, client in enumerate(clients) if place not in order]


def pair_distances(table: Sequence[Common], clients: int) -> Tensor:
    """Return squared distances of all pairs over their common entries, as if they had all of them in common.

    Several kinds (weights and control variates) count alike: each in units of its median distance.
    """
    total = torch.zeros(clients, clients, dtype=torch.float64)
    shared = torch.zeros(clients, clients, dtype=torch.bool)
    kinds = dict.fromkeys(common.kind for common in table)
    for kind in kinds:
        squares, both = torch.zeros_like(total), torch.zeros_like(total)
        entries = 0
        for common in table:
            if common.kind == kind:
                more, entries_both = squared_distances(common.values, common.held)
                squares, both, entries = squares + more, both + entries_both, entries + common.values.shape[1]
        scaled = squares * entries / both.clamp(min=1)
        known = (both > 0) & ~torch.eye(clients, dtype=torch.bool)
        unit = scaled[known].median().clamp(min=1e-300) if known.any() and len(kinds) > 1 else torch.ones(())
        total += torch.where(known, scaled / unit, 0.0)
        shared |= known
    return torch.where(shared, total, math.inf)


def shortened(
    rule: Rule,
    method: Method,
    table: Sequence[Common],
    placed: Mapping[int, Mapping[str, Place]],
    replies: Replies,
    reference: Mapping[int, Mapping[str, Tensor]],
) -> dict[int, Message]:
    """Return replies whose changes are at most as long as the bound, kind by kind.

    Without a bound it is the median over clients, in root mean squares of what each holds: for equal holdings, the
    median of the norms.
    """
    found = {client: dict(message.tensors()) for client, message in replies.items()}
    for kind in dict.fromkeys(common.kind for common in table):
        mine = [common for common in table if common.kind == kind]
        squares = sum((squares_of(c, torch.zeros(c.values.shape[1])) for c in mine), torch.zeros(len(replies)).double())
        own = sum((held_by(common) for common in mine), torch.zeros(len(replies)).double())
        norms = squares.sqrt()
        if rule.value is not None:
            bounds = torch.full_like(norms, rule.value)
        else:
            size = (norms / own.clamp(min=1).sqrt())[own > 0]
            bounds = torch.quantile(size, 0.5) * own.sqrt()
        for client, norm, bound in zip(replies, norms.tolist(), bounds.tolist(), strict=True):
            if norm > bound:
                for name in (n for n in placed[client] if kind_of(n) == kind):
                    start, tensor = reference[client][name], found[client][name]
                    found[client][name] = start + (tensor - start) * (bound / norm)
    for kind in (kind for kind, how in method.combines.items() if how == "rows"):
        bags = {client: found[client][kind] for client, message in replies.items() if _has_rows(message, kind)}
        lengths = {client: bag.flatten(1).norm(dim=1) for client, bag in bags.items()}
        if not bags:
            continue
        bound = rule.value or float(torch.quantile(torch.stack([length.max() for length in lengths.values()]), 0.5))
        for client, bag in bags.items():
            factor = (bound / lengths[client].clamp(min=1e-30)).clamp(max=1.0)
            found[client][kind] = bag * factor.view(-1, *(1,) * (bag.dim() - 1))
    return {client: rebuilt(message, found[client]) for client, message in replies.items()}


def far_bags(bags: Sequence[Common], clients: Sequence[int]) -> list[int]:
    """Return whose features lie far from the middle of all: `FAR` times as far as usual."""
    out: set[int] = set()
    for common in bags:
        away = (common.values - held_median(common.values, common.held)).pow(2).sum(1).sqrt()
        limit = FAR * float(torch.quantile(away, 0.5))
        out |= {client for client, distance in zip(clients, away.tolist(), strict=True) if distance > limit}
    return sorted(out) if len(out) < len(clients) else []


# --- small parts ---


def _check(name: str, tensor: Tensor, place: Place, info: ClientInfo) -> None:
    """Try a place: class numbers out of range and shapes that do not fit are refused with their sender."""
    probe = torch.zeros(place.shape, dtype=torch.bool)
    target = probe if place.part is None else probe[place.part]
    source = tensor if place.rows is None else tensor[place.rows]
    if target.shape != source.shape:
        raise MessageError(f"'{name}' is {list(source.shape)}, but {list(target.shape)} belongs there")


def _without(out: Sequence[int], replies: Replies, ctx: Context) -> dict[int, Message]:
    if out:
        ctx.log("left_out", sorted({*ctx.records.get("left_out", []), *out}))
    return {client: message for client, message in replies.items() if client not in out}


def _tensor(message: Message, name: str) -> Tensor:
    """Return a tensor by its name on the wire."""
    part, _, rest = name.partition("/")
    if part == "data":
        return message.data[rest]
    model, _, parameter = rest.partition("/")
    return message.params[model][parameter]


def _has_rows(message: Message, kind: str) -> bool:
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
