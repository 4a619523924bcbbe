"""Robust fusing at the level of messages: what a method's `fuse` gets to see when a rule is switched on.

A rule either finds one value for every entry that clients hold (`median`, `trimmed`, `geometric`): each reply then says
that value wherever its sender holds the entry, so that the method's own mean, with any weights, is the rule's value. Or
it looks at each sender: those that stick out are left out (`krum`, `multikrum`, `distance`, `cosine`), or their change
is shortened (`norm`), and the method does with the rest what it always does. docs/decisions/0015-robust.md says why.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from polyfed.core.blob import all_finite
from polyfed.core.errors import InputError
from polyfed.core.message import Message
from polyfed.core.method import Method
from polyfed.core.party import ClientInfo, Context, Party
from polyfed.core.places import Place, kind_of
from polyfed.core.replies import (
    Common,
    Replies,
    bags_of,
    has_rows,
    held_by,
    held_entries,
    placed_replies,
    rebuilt,
    reference_of,
    replaced,
    squares_of,
    tabled,
)
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

SHOWN = 6  # names in a sentence
MAJORITY = 3  # so few clients have one
FAR = 3.0  # a bag of rows whose mean is so many times farther from the middle than usual is left out
SMOOTH, TURNS, CLOSE = (
    1e-6,
    100,
    1e-9,
)  # Weiszfeld's algorithm as in RFA: smallest distance, turns, when it stands still


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


def nobody_to_compare(rule: Rule | None, method: Method, server: Party, ctx: Context) -> str | None:
    """Say of which architectures fewer than three clients hold some weights: no majority knows there who is wrong.

    `norm` compares lengths, whoever else has the network.
    """
    if rule is None or rule.does_nothing or rule.name == "norm" or "params/main" not in method.combines:
        return None
    clients = Counter(info.architecture for info in ctx.infos.values())
    parts: dict[str, list[tuple[str, Any]]] = {}  # of the server's tensors that an architecture holds
    holders = {key: torch.zeros(tensor.shape, dtype=torch.int32) for key, tensor in server.state.items()}
    for architecture, info in {info.architecture: info for info in ctx.infos.values()}.items():
        slots = [slot for slot in method.slots(server, info, ctx).values() if slot.key in holders]
        parts[architecture] = [(slot.key, ... if slot.part is None else slot.part) for slot in slots]
        for key, part in parts[architecture]:
            holders[key][part] += clients[architecture]
    few = []
    for architecture, number in sorted(clients.items()):
        least = min((int(holders[key][part].min()) for key, part in parts[architecture]), default=number)
        if least < MAJORITY:
            few.append(f"{architecture} ({number} client{'s' if number > 1 else ''})")
    if not few:
        return None
    more = f" and {len(few) - SHOWN} more" if len(few) > SHOWN else ""
    krum = ", and who shares nothing with others is left out whatever it sends" if "krum" in rule.name else ""
    return (
        f"robust={rule.name}: there are weights of {', '.join(few[:SHOWN])}{more} that fewer than {MAJORITY} clients "
        f"hold, and no majority says which of them is wrong: a bad reply is not noticed there{krum}. Give each "
        "architecture more clients, use a method that exchanges logits or class means, or robust=norm."
    )


def finite_only(replies: Replies, infos: Mapping[int, ClientInfo], missing: dict[int, str]) -> dict[int, Message]:
    """Return the replies without those that hold NaN or infinity; their senders are named in `missing`."""
    good: dict[int, Message] = {}
    for client, message in replies.items():
        bad = next((k for k, v in message.meta.items() if isinstance(v, float) and not math.isfinite(v)), None)
        if not all_finite(*(tensor for _, tensor in message.tensors())):
            bad = next(name for name, tensor in message.tensors() if not all_finite(tensor))
        if bad is None:
            good[client] = message
        else:
            missing[client] = f"Message from {infos[client]} refused: '{bad}' holds NaN or infinite values."
    return good


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
        bags = {client: found[client][kind] for client, message in replies.items() if has_rows(message, kind)}
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


def _without(out: Sequence[int], replies: Replies, ctx: Context) -> dict[int, Message]:
    if out:
        ctx.log("left_out", sorted({*ctx.records.get("left_out", []), *out}))
    return {client: message for client, message in replies.items() if client not in out}
