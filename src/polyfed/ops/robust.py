"""Means of vectors that a few false ones cannot move far.

First what methods use by themselves, on answers [clients, samples, outputs]; then the rules of `--robust` on values
[clients, entries], of which a client may hold only some (`core/replies.py` puts replies into that form).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

PIECE = 256  # samples at once: each has a covariance matrix of its own


def whole(share: float) -> int:
    """Return a share of some clients as a number of them, rounded up: 0.07 · 100 is 7.000000000000001 to a computer."""
    return math.ceil(share - 1e-9)


def median_mean(answers: Tensor) -> Tensor:
    """Return the median over clients of every number; of an even number of clients, the middle of the middle two."""
    return torch.quantile(answers, 0.5, dim=0)


def trimmed_mean(answers: Tensor, eps: float) -> Tensor:
    """Return the mean of every number without the share `eps` of the clients at either end."""
    clients = len(answers)
    cut = min(whole(eps * clients), (clients - 1) // 2)
    return answers.sort(dim=0).values[cut : clients - cut].mean(dim=0)


def filtered_mean(answers: Tensor, eps: float, kappa: float) -> Tensor:
    """Return the mean of each sample's vectors after a filter took away weight from those that stick out.

    At most `ceil(2 · eps · clients)` times, along the direction of the largest variance `l` of a sample's vectors: if
    `l <= kappa · (1.4826 · MAD)²` there, nothing sticks out; otherwise a vector loses the share of its weight that its
    squared distance to the mean has of the largest one, so that the most extreme vector drops out.
    """
    rounds = whole(2 * eps * len(answers))
    return torch.cat([_filtered(piece, rounds, kappa) for piece in answers.split(PIECE, dim=1)])


def _filtered(y: Tensor, rounds: int, kappa: float) -> Tensor:
    weights = torch.ones(y.shape[:2], dtype=y.dtype, device=y.device)
    for _ in range(rounds):
        share = weights / weights.sum(0)
        away = y - _mean(y, weights)
        covariance = torch.einsum("kn,kni,knj->nij", share, away, away)
        variances, directions = torch.linalg.eigh(covariance)
        along = torch.einsum("kni,ni->kn", y, directions[:, :, -1])
        spread = 1.4826 * median_mean((along - median_mean(along)).abs())
        sticks_out = variances[:, -1] > kappa * spread**2 + 1e-12
        if not sticks_out.any():
            break
        distance = torch.einsum("kni,ni->kn", away, directions[:, :, -1]) ** 2
        largest = torch.where(weights > 0, distance, 0).amax(0)  # of those that are still in
        less = weights * (1 - distance / largest).clamp_min(0)
        weights = torch.where(sticks_out & (less.sum(0) > 0), less, weights)
    return _mean(y, weights)


def _mean(y: Tensor, weights: Tensor) -> Tensor:
    """Return the weighted mean over clients."""
    return (weights.unsqueeze(2) * y).sum(0) / weights.sum(0).unsqueeze(1)


# --- rules over what is held: values are [clients, entries], held tells which entries a client has (None: all) ---


def held_median(values: Tensor, held: Tensor | None = None) -> Tensor:
    """Return the median over its holders of every entry; of an even number of holders, the middle of the middle two.

    An entry that nobody holds is 0.
    """
    held = torch.ones_like(values, dtype=torch.bool) if held is None else held
    ordered, holders = _ordered(values, held)
    low = ordered.gather(0, ((holders - 1).clamp(min=0) // 2).unsqueeze(0))[0]
    high = ordered.gather(0, (holders // 2).clamp(max=len(values) - 1).unsqueeze(0))[0]
    return torch.where(holders > 0, (low + high) / 2, 0)


def held_trimmed_mean(values: Tensor, share: float, held: Tensor | None = None) -> Tensor:
    """Return the mean of every entry over its holders, without `ceil(share · holders)` of them at either end.

    At least one holder (of an even number: two) is left. An entry that nobody holds is 0.
    """
    held = torch.ones_like(values, dtype=torch.bool) if held is None else held
    ordered, holders = _ordered(values, held)
    cut = torch.minimum(torch.ceil(share * holders - 1e-9).long(), (holders - 1).clamp(min=0) // 2)
    place = torch.arange(len(values), device=values.device).unsqueeze(1)
    kept = (place >= cut) & (place < holders - cut)
    return torch.where(kept, ordered, 0).sum(0) / kept.sum(0).clamp(min=1)


def held_mean(values: Tensor, weights: Tensor, held: Tensor | None = None) -> Tensor:
    """Return the weighted mean of every entry over its holders; an entry that nobody holds is 0."""
    weights = weights.to(values).unsqueeze(1).expand_as(values)
    if held is not None:
        weights, values = weights * held, torch.where(held, values, 0)
    return (weights * values).sum(0) / weights.sum(0).clamp(min=torch.finfo(values.dtype).tiny)


def squared_distances(values: Tensor, held: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return the squared distances of all pairs over their common entries, and how many entries those are."""
    clients = len(values)
    total = torch.zeros(clients, clients, dtype=torch.float64)
    common = torch.full((clients, clients), float(values.shape[1]), dtype=torch.float64)
    for i in range(clients):  # differences, not a Gram matrix: it would lose small distances beside large norms
        away = (values - values[i]).double()
        if held is not None:
            both = held & held[i]
            away = torch.where(both, away, 0)
            common[i] = both.sum(1)
        total[i] = away.pow(2).sum(1)
    return total, common


def krum_scores(distances: Tensor, bad: int) -> Tensor:
    """Return each client's score: the sum of its `n - bad - 2` smallest squared distances to others (at least one).

    Blanchard et al. 2017. A distance that is not known (no common entries) is infinite; a client's score is then the
    sum over as many as it has, in the same proportion.
    """
    clients = len(distances)
    scores = torch.full((clients,), float("inf"), dtype=distances.dtype)
    wanted = max(1, clients - bad - 2)
    for i in range(clients):
        others = torch.cat([distances[i, :i], distances[i, i + 1 :]])
        known = others[torch.isfinite(others)].sort().values
        if len(known):
            nearest = known[: max(1, min(wanted, len(known) - bad - 1 if len(known) < clients - 1 else wanted))]
            scores[i] = nearest.sum() * (wanted / len(nearest))
    return scores


def majority_distances(squares: Tensor) -> Tensor:
    """Return how far each client has to reach until it has, with itself, more than half of the clients.

    Fewer than half of the clients, however near to each other, do not come near a majority; an honest client that is
    unlike the others is about as far from them as they are from it. Over the clients that it can be compared with
    (finite distances); infinite where there are none.
    """
    found = torch.full((len(squares),), math.inf, dtype=squares.dtype)
    for i in range(len(squares)):
        others = torch.cat([squares[i, :i], squares[i, i + 1 :]])
        known = others[torch.isfinite(others)].sort().values
        if len(known):
            found[i] = known[(len(known) + 1) // 2 - 1].sqrt()
    return found


def cosines(values: Tensor, centre: Tensor, held: Tensor | None = None) -> Tensor:
    """Return the cosine of each client's vector with a common one, over the entries that it holds; 1 without any."""
    values, centre = values.double(), centre.double()
    seen = centre.expand_as(values) if held is None else torch.where(held, centre, 0)
    own = values if held is None else torch.where(held, values, 0)
    lengths = own.norm(dim=1) * seen.norm(dim=1)
    return torch.where(lengths > 0, (own * seen).sum(1) / lengths.clamp(min=1e-300), 1.0)


def _ordered(values: Tensor, held: Tensor) -> tuple[Tensor, Tensor]:
    """Return the values of every entry in ascending order, zeros after those of its holders; and how many hold it."""
    holders = held.sum(0)
    ordered = torch.where(held, values, float("inf")).sort(dim=0).values
    place = torch.arange(len(values), device=values.device).unsqueeze(1)
    return torch.where(place < holders, ordered, 0), holders
