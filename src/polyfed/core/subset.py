"""Some public samples a round, the same rows in the same order for every party: only the seed of the draw travels."""

from __future__ import annotations

import torch

from polyfed.core.message import Message
from polyfed.core.party import Context, Party
from polyfed.core.rng import seed_of
from polyfed.core.samples import Samples

SEED = "subset_seed"  # in messages, and in the memory of those who know it


def subset_seed(ctx: Context) -> int:
    """Return the seed of this round's public subset."""
    return seed_of(ctx.seed, "public-subset", ctx.round)


def tell_subset(message: Message, ctx: Context) -> Message:
    """Put the seed of this round's subset into a message."""
    message.meta[SEED] = subset_seed(ctx)
    return message


def note_subset(party: Party, seed: int) -> None:
    """Let a party know the subset of this seed."""
    party.memory[SEED] = seed


def hear_subset(client: Party) -> None:
    """Let a client know the subset that its message tells of, if it does."""
    if SEED in client.inbox.meta:
        note_subset(client, int(client.inbox.meta[SEED]))


def known_subset(party: Party) -> int | None:
    """Return the seed of the last subset that a party knows; None: it knows of none."""
    seed: int | None = party.memory.get(SEED)
    return seed


def public_subset(party: Party, size: int | None) -> Samples:
    """Return the samples of the last subset that a party knows (None: as many as there are)."""
    rng = torch.Generator().manual_seed(party.memory[SEED])
    order = torch.randperm(len(party.public), generator=rng)
    return party.public.select(order[:size])
