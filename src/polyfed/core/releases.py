"""What a client tells of its samples beside its trained network: sums by class, exact, or private with a number.

Methods that send class means, moments, mean logits or counts make them here, so that each of them is private where the
settings ask for it, without code of its own. A sum over samples has a sensitivity: one sample more or less changes it
by at most that sample's vector, which is shortened to a bound, and the count of its class by one. All sums of one
release get Gaussian noise as one mechanism and go into the client's ledger, together with its training (DP-SGD).

What is made of noisy sums costs nothing more. Which classes a client holds is private too: a class is told where its
noisy count sticks out of the noise. Means are pulled back to the ball in which all means of shortened vectors lie.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from polyfed.core.dpsgd import Source
from polyfed.core.party import Context, Party
from polyfed.core.passes import pass_over
from polyfed.core.privacy import added, note, spent_of
from polyfed.core.rng import generator
from polyfed.ops.moments import Moments, class_moments

Look = Callable[[Tensor], Tensor]  # inputs -> a vector for each of them
COUNTS = "counts"
STICKS_OUT = 2.0  # a class is told where its noisy count is so many deviations of the noise


def released(client: Party, ctx: Context, purpose: str, sums: dict[str, tuple[Tensor, float]]) -> dict[str, Tensor]:
    """Return sums with noise, and note what that spends.

    Each is a sum over all samples, with the longest that one sample can make its share of it. Together one sample
    moves them by the root of the sum of squares of those bounds; in units of its bound each gets the same noise.

    Raises
    ------
    BudgetSpent
        Before the client's budget would be exceeded.
    """
    privacy = ctx.privacy
    multiplier = privacy.release_multiplier(ctx.releases)
    before = spent_of(client.memory)
    after = added(before, 1.0, multiplier, 1)  # every sample is in it: a rate of one
    privacy.check_budget(str(client), before, after)
    source = Source(None if ctx.secure else generator(ctx.seed, f"release/{purpose}", ctx.round, client.id))
    scale = multiplier * math.sqrt(len(sums))
    noisy = {
        name: table.double() + scale * bound * source.normal(table.shape).to(table.device).double()
        for name, (table, bound) in sums.items()
    }
    note(client.memory, after, privacy.delta)
    return noisy


def shortened_rows(rows: Tensor, bound: float) -> Tensor:
    """Return vectors [n, d] of which none is longer than the bound; those that are not finite become zero."""
    norms = rows.double().norm(dim=1, keepdim=True)
    factor = torch.where(norms > bound, bound / norms * (1 - 1e-6), 1.0)
    return torch.where(torch.isfinite(norms), rows * factor.to(rows), 0.0)


def class_sums_of(client: Party, ctx: Context, look: Look, bound: float | None) -> tuple[Tensor, Tensor]:
    """Return the sum [C, d] of the samples' vectors of each class, and the counts [C], in prediction mode."""
    classes = ctx.num_classes
    counts = torch.zeros(classes, device=ctx.device)

    def piece(x: Tensor, y: Tensor) -> Tensor:
        rows = look(x)
        rows = rows if bound is None else shortened_rows(rows, bound)
        counts.add_(torch.bincount(y, minlength=classes))
        return rows.new_zeros(classes, rows.shape[1]).index_add_(0, y, rows)

    return torch.stack(pass_over(client.main, client.train, piece)).sum(0), counts


def class_means_of(client: Party, ctx: Context, look: Look, purpose: str) -> tuple[Tensor, Tensor]:
    """Return the mean vector [C, d] of each class, and its count [C]: 0 where a class is not told."""
    if not ctx.privacy.on:
        sums, counts = class_sums_of(client, ctx, look, None)
        return sums / counts.clamp(min=1).unsqueeze(1), counts
    bound = ctx.privacy.release_norm
    sums, counts = class_sums_of(client, ctx, look, bound)
    noisy = released(client, ctx, purpose, {"sums": (sums, bound), COUNTS: (counts, 1.0)})
    told = told_counts(noisy[COUNTS], 2, client, ctx)
    means = shortened_rows(noisy["sums"] / told.clamp(min=1).unsqueeze(1), bound)
    return means.to(sums), told.to(counts)


def class_counts(client: Party, ctx: Context) -> Tensor:
    """Return how many samples of each class a client has [C], as int32."""
    counts = torch.tensor(client.train.label_counts(ctx.num_classes))
    if ctx.privacy.on:
        noisy = released(client, ctx, COUNTS, {COUNTS: (counts, 1.0)})
        counts = told_counts(noisy[COUNTS], 1, client, ctx)
    return counts.to(torch.int32)


def client_moments(client: Party, ctx: Context, look: Look, kind: str) -> Moments:
    """Return count, mean and covariance (see `ops/moments.py`) of the samples' vectors by class."""
    rows = torch.cat(pass_over(client.main, client.train, lambda x, _: look(x)))
    labels = client.train.labels().to(rows.device)
    if not ctx.privacy.on:
        return class_moments(rows, labels, kind)
    bound, classes = ctx.privacy.release_norm, ctx.num_classes
    short = shortened_rows(rows, bound).double()
    members = torch.nn.functional.one_hot(labels, classes).double()
    sums: dict[str, tuple[Tensor, float]] = {"sums": (members.T @ short, bound), COUNTS: (members.sum(0), 1.0)}
    if kind == "shared":
        squares = short.T @ short
    elif kind == "diag":
        squares = members.T @ short.pow(2)
    else:
        squares = torch.stack([short[labels == c].T @ short[labels == c] for c in range(classes)])
    noisy = released(client, ctx, "moments", {**sums, "squares": (squares, bound**2)})
    counts = told_counts(noisy[COUNTS], 3, client, ctx)
    held = torch.nonzero(counts).flatten()
    means = shortened_rows(noisy["sums"][held] / counts[held].unsqueeze(1), bound)
    if kind == "shared":
        between = (means * counts[held].unsqueeze(1)).T @ means
        covariance = nearest_covariance((noisy["squares"] - between) / counts.sum(), bound)
    elif kind == "diag":
        covariance = (noisy["squares"][held] / counts[held].unsqueeze(1) - means.pow(2)).clamp(0, bound**2)
    else:
        second = noisy["squares"][held] / counts[held].view(-1, 1, 1)
        covariance = torch.stack(
            [nearest_covariance(s - torch.outer(m, m), bound) for s, m in zip(second, means, strict=True)]
        )
    return Moments(held, counts[held].long(), means.to(rows), covariance.to(rows))


def nearest_covariance(matrix: Tensor, bound: float) -> Tensor:
    """Return the symmetric matrix with the same directions whose eigenvalues are variances within a ball."""
    values, vectors = torch.linalg.eigh((matrix + matrix.T) / 2)
    found: Tensor = (vectors * values.clamp(0, bound**2)) @ vectors.T
    return found


def told_counts(noisy: Tensor, sums: int, client: Party, ctx: Context) -> Tensor:
    """Return whole numbers where counts stick out of the noise, and 0 elsewhere; the largest always does.

    Together they are at most as many as the client has samples, which is taken as known.
    """
    limit = STICKS_OUT * ctx.privacy.release_multiplier(ctx.releases) * math.sqrt(sums)
    kept = noisy >= max(1.0, limit)
    kept[int(noisy.argmax())] = True
    told = torch.where(kept, noisy.round().clamp(min=1), 0.0)
    total = len(client.train)
    if float(told.sum()) > total:
        told = torch.where(kept, (told * (total / told.sum())).floor().clamp(min=1), 0.0)
    return told
