"""What a site weighs: the number of samples that it says it has, bounded by what the operator allows."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

from torch import Tensor

from polyfed.core.party import ClientInfo

HALF = 0.5


def bounded(samples: Mapping[int, int], share: float) -> dict[int, int]:
    """Return the samples that each client counts with, so that none has more than `share` of the whole.

    The largest are cut to one common number, the others keep theirs. With fewer clients than `1 / share` nobody could
    stay below it: then all count alike.
    """
    ordered = sorted(samples.values(), reverse=True)
    cap = float(ordered[-1])
    for cut in range(len(ordered)):
        if share * cut >= 1:
            break
        allowed = share * sum(ordered[cut:]) / (1 - share * cut)
        if ordered[cut] <= allowed:
            cap = allowed
            break
    return {client: max(1, min(count, math.floor(cap))) for client, count in samples.items()}


def bound(infos: Mapping[int, ClientInfo], share: float) -> dict[int, ClientInfo]:
    """Return the clients with the samples that they count with."""
    counts = bounded({client: info.samples for client, info in infos.items()}, share)
    found = {}
    for client, info in infos.items():
        labels = info.label_counts
        if labels is not None and counts[client] < info.samples:
            labels = tuple(_less(count, counts[client], info.samples) for count in labels)
        found[client] = replace(info, samples=counts[client], label_counts=labels)
    return found


def lessened(counts: Tensor, weighs: int, claimed: int) -> Tensor:
    """Return counts of samples in a reply as they count; a class that is there stays there."""
    if weighs >= claimed:
        return counts
    less = (counts.double() * weighs / claimed).floor().clamp(min=1)
    return less.to(counts.dtype).where(counts > 0, counts)


def _less(count: int, weighs: int, claimed: int) -> int:
    return max(1, count * weighs // claimed) if count else 0


def in_words(claimed: Mapping[int, ClientInfo], weighed: Mapping[int, ClientInfo]) -> list[str]:
    """Say for the operator what each site claims and counts with."""
    total, all_weights = (sum(info.samples for info in infos.values()) for infos in (claimed, weighed))
    lines = []
    for client, info in sorted(claimed.items()):
        weight = weighed[client].samples
        line = f"{info.name} says it has {info.samples:,} samples ({info.samples / total:.1%} of all)"
        if weight < info.samples:
            line += f" and counts as {weight:,} ({weight / all_weights:.1%}): --max-share"
        elif len(claimed) > 2 and weight > HALF * all_weights:
            line += ", more than all others together: --max-share 0.5 would bound it"
        lines.append(f"{line}.")
    return lines
