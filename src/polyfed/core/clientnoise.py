"""Differential privacy with the client as unit: the server combines shortened changes and adds noise to their sum.

DP-FedAvg (McMahan et al. 2018), for anything that is averaged entry by entry: weights, slices, logits on public data.
It is a rule between the replies and the method, like those of `core/robust.py`: every reply then says the noisy mean
wherever its sender holds the entry, and the method's own mean of equal numbers, whatever its weights, is that number.

    d_k   =  change of client k, shortened to C_k = max_norm · sqrt(share of the entries that it holds)
    y_e   =  ( sum over the h_e holders of entry e of d_k,e  +  2 · sigma · c_e · N(0, 1) ) / h_e
    c_e   =  the largest C_k of its holders

A client's data may be replaced by any other: its change moves by at most 2·C_k, so that its own noise multiplier is
sigma · (least c_e of its entries) / C_k. A small slice of a large network spends less than the whole. Who takes part
and what each holds is taken as known, and no smaller number is claimed for a random choice of participants.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from polyfed.core.dpsgd import Source
from polyfed.core.errors import InputError
from polyfed.core.message import Message
from polyfed.core.method import Method
from polyfed.core.party import Blueprint, Context, Party
from polyfed.core.privacy import BudgetSpent, Privacy, Spent, added, epsilon_of
from polyfed.core.replies import (
    Common,
    held_by,
    held_entries,
    placed_replies,
    rebuilt,
    reference_of,
    replaced,
    squares_of,
    tabled,
)

Ledgers = dict[str, list[tuple[float, float, int]]]  # client -> what it has spent: kept in the server's memory
KEPT = "client_privacy"


def check_statistics(privacy: Privacy, blueprints: Mapping[str, Blueprint]) -> None:
    """Refuse BatchNorm: a variance with noise may be negative."""
    normed = next((b.name for b in blueprints.values() if b.running_statistics()), None)
    if privacy.of_clients and normed is not None:
        raise InputError(
            f"privacy: {normed} has BatchNorm, whose variances no noise may be added to: use GroupNorm or LayerNorm, "
            "or a network without norms (mlp, cnn without the option bn)."
        )


def planned(method: Method, rounds: int) -> int:
    """Return how many replies of a client are combined in a whole run."""
    plan = method.plan()
    return sum(s.up for s in plan.before) + rounds * sum(s.up for s in plan.round) + sum(s.up for s in plan.after)


def within_budget(
    privacy: Privacy, clients: tuple[int, ...], server: Party, ctx: Context, replies: int, missing: dict[int, str]
) -> tuple[int, ...]:
    """Return who may be asked for another reply; the others stop, by name."""
    ledgers: Ledgers = server.memory.get(KEPT, {})
    sigma = privacy.multiplier(1.0, replies)
    able = []
    for client in clients:
        spent = ledgers.get(str(client), [])
        try:  # at its most: a small slice spends less
            privacy.check_budget(str(ctx.infos[client]), spent, added(spent, 1.0, sigma, 1))
            able.append(client)
        except BudgetSpent as error:
            missing[client] = str(error)
    return tuple(able)


@torch.no_grad()
def with_noise(
    method: Method,
    server: Party,
    sent: Mapping[int, Message],
    replies: Mapping[int, Message],
    step: str,
    planned_replies: int,
    ctx: Context,
    missing: dict[int, str],
) -> dict[int, Message]:
    """Return replies that all say the noisy mean of what they hold, and note what each sender has spent."""
    privacy = ctx.privacy
    placed = placed_replies(method, server, replies, ctx, missing)
    for client in list(placed):
        loose = next((name for name, _ in replies[client].tensors() if name not in placed[client]), None)
        if loose is not None:
            why = f"nothing says how '{loose}' is averaged, so that no noise covers it"
            missing[client] = f"Message from {ctx.infos[client]} refused: {why}."
            del placed[client]
    replies = {client: replies[client] for client in placed}
    reference = {client: reference_of(client, sent, replies, placed, ctx) for client in replies}
    table = in_order(tabled(placed, replies, reference))
    if not table:
        return dict(replies)
    starts = in_order(tabled(placed, {c: rebuilt(m, dict(m.tensors()) | reference[c]) for c, m in replies.items()}))
    sigma = privacy.multiplier(1.0, planned_replies)
    entries = sum(common.values.shape[1] for common in table)
    own = sum((held_by(common) for common in table), torch.zeros(len(replies)).double())
    bounds = privacy.max_norm * (own / entries).sqrt()
    norms = sum((squares_of(c, torch.zeros(c.values.shape[1])) for c in table), torch.zeros_like(bounds)).sqrt()
    factor = torch.where(norms > bounds, bounds / norms.clamp(min=1e-300) * (1 - 1e-6), 1.0)
    source = Source(None if ctx.secure else ctx.rng(f"client-noise/{step}"))
    values, least = [], torch.full_like(bounds, torch.inf)
    for common, start in zip(table, starts, strict=True):
        value, largest = noisy_mean(common, bounds, factor, 2 * sigma, source)
        held = held_entries(common)
        values.append((middle_of(start) + value).to(common.values.dtype))
        least = torch.minimum(least, torch.where(held, largest, torch.inf).amin(1))
    spend(privacy, server, ctx, {c: sigma * float(least[i] / bounds[i]) for i, c in enumerate(replies) if bounds[i]})
    return replaced(table, values, placed, replies)


def in_order(table: list[Common]) -> list[Common]:
    """Return tables by name: a message that travelled has its tensors in another order, and noise must not differ."""
    return sorted(table, key=lambda common: [name or "" for name in common.names])


def noisy_mean(common: Common, bounds: Tensor, factor: Tensor, scale: float, source: Source) -> tuple[Tensor, Tensor]:
    """Return (sum of shortened changes + scale · c · noise) / holders of every entry, and c."""
    held = held_entries(common)
    changes = torch.where(held, common.values.double() * factor.unsqueeze(1), 0.0)
    largest = torch.where(held, bounds.unsqueeze(1), 0.0).amax(0)
    noise = source.normal(largest.shape).double()
    return (changes.sum(0) + scale * largest * noise) / held.sum(0).clamp(min=1), largest


def middle_of(start: Common) -> Tensor:
    """Return what the holders' changes are changes of: the server's value, which is the same for all of them."""
    held = held_entries(start)
    return torch.where(held, start.values.double(), 0.0).sum(0) / held.sum(0).clamp(min=1)


def spend(privacy: Privacy, server: Party, ctx: Context, multipliers: Mapping[int, float]) -> None:
    """Note one more reply of each client, and tell their epsilons in the history."""
    ledgers: Ledgers = server.memory.setdefault(KEPT, {})
    for client, multiplier in multipliers.items():
        spent: Spent = [(float(r), float(m), int(n)) for r, m, n in ledgers.get(str(client), [])]
        ledgers[str(client)] = [list(item) for item in added(spent, 1.0, round(multiplier, 9), 1)]  # type: ignore[misc]
    told = {client: epsilon_of([(r, m, n) for r, m, n in spent], privacy.delta) for client, spent in ledgers.items()}
    ordered = {client: told[client] for client in sorted(told, key=int)}
    ctx.log("privacy", {"unit": "client", "delta": privacy.delta, "epsilon": ordered})
