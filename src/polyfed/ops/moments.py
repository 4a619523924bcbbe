"""Means and covariances of classes: of some features, pooled over clients without loss, and as a source of samples.

A covariance is `full` [C, d, d], `diag` [C, d] (variances), or `shared` [d, d]: the one of features around their class
means, for all classes. Sums of squares are taken in double precision.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Moments:
    """Of every class that is there: its number [C], samples [C], mean [C, d]; and the covariance."""

    classes: Tensor
    counts: Tensor
    means: Tensor
    covariance: Tensor


def class_moments(features: Tensor, labels: Tensor, kind: str = "full") -> Moments:
    """Return the moments of features [n, d]; covariances divide by n_c - 1 and are 0 for a single sample."""
    classes, place, counts = labels.unique(return_inverse=True, return_counts=True)
    doubles = features.double()
    means = doubles.new_zeros(len(classes), features.shape[1]).index_add_(0, place, doubles)
    means /= counts.unsqueeze(1)
    centered = doubles - means[place]
    if kind == "shared":
        covariance = centered.T @ centered / max(1, len(labels) - len(classes))
    else:
        rows = [squares(centered[place == number], kind) for number in range(len(classes))]
        covariance = torch.stack(rows) / broad((counts - 1).clamp(min=1), kind)
    return Moments(classes, counts, means.to(features.dtype), covariance.to(features.dtype))


def pooled_moments(parts: Sequence[Moments], kind: str = "full") -> Moments:
    """Return the moments of all samples together, from those of the parts (clients).

        mu_c = sum_k n_kc mu_kc / N_c                                                                       (1)
        S_c  = sum_k (n_kc - 1)/(N_c - 1) S_kc + sum_k n_kc/(N_c - 1) (mu_kc - mu_c)(mu_kc - mu_c)^T        (2)

    The last sum equals sum_k n_kc mu_kc mu_kc^T - N_c mu_c mu_c^T, and cannot become negative by rounding.
    """
    classes, place = torch.cat([part.classes for part in parts]).unique(return_inverse=True)
    counts = torch.cat([part.counts for part in parts]).double()
    means = torch.cat([part.means for part in parts]).double()
    total = counts.new_zeros(len(classes)).index_add_(0, place, counts)
    pooled = means.new_zeros(len(classes), means.shape[1]).index_add_(0, place, means * counts.unsqueeze(1))
    pooled /= total.unsqueeze(1)
    apart = (means - pooled[place]) * counts.sqrt().unsqueeze(1)
    if kind == "shared":
        inside = [(part.counts - 1).sum() * part.covariance.double() for part in parts]
        covariance = (torch.stack(inside).sum(0) + apart.T @ apart) / (total - 1).sum().clamp(min=1)
    else:
        inside = [broad(part.counts - 1, kind) * part.covariance.double() for part in parts]
        scatter = torch.cat(inside)
        between = torch.stack([squares(apart[place == number], kind) for number in range(len(classes))])
        within = torch.zeros_like(between).index_add_(0, place, scatter)
        covariance = (within + between) / broad((total - 1).clamp(min=1), kind)
    like = parts[0].means.dtype
    return Moments(classes, total.to(parts[0].counts.dtype), pooled.to(like), covariance.to(like))


def root_of(covariance: Tensor, ridge: float = 0.0) -> Tensor:
    """Return the symmetric root A of a covariance, A A = S; of variances, the standard deviations.

    Where S is not positive definite, `ridge` times its mean variance is added to every eigenvalue first.
    """
    if covariance.dim() == 1:
        return covariance.sqrt()
    values, vectors = torch.linalg.eigh(covariance.double())
    if float(values.min()) <= 1e-12 * float(values.max()):
        values = values.clamp(min=0) + ridge * values.mean()
    root: Tensor = (vectors * values.sqrt()) @ vectors.T
    return root.to(covariance.dtype)


def gaussian_samples(found: Moments, kind: str, count: int, rng: torch.Generator, ridge: float) -> Tensor:
    """Draw `count` vectors z = mu_c + A_c e with A_c A_c = S_c of every class, class after class."""
    drawn = []
    for number, mean in enumerate(found.means):
        root = root_of(found.covariance if kind == "shared" else found.covariance[number], ridge)
        noise = torch.randn(count, len(mean), generator=rng, dtype=mean.dtype).to(mean.device)
        drawn.append(mean + (noise * root if kind == "diag" else noise @ root))
    return torch.cat(drawn)


def merged_moments(old: Moments | None, new: Moments, kind: str) -> Moments:
    """Return the new moments, and the old ones of classes that are not among them."""
    if old is None:
        return new
    kept = ~torch.isin(old.classes, new.classes)
    order = torch.cat([new.classes, old.classes[kept]]).argsort()

    def both(one: Tensor, other: Tensor) -> Tensor:
        return torch.cat([one, other[kept]])[order]

    covariance = new.covariance if kind == "shared" else both(new.covariance, old.covariance)
    return Moments(both(new.classes, old.classes), both(new.counts, old.counts), both(new.means, old.means), covariance)


def with_covariance(found: Moments, kind: str) -> Moments:
    """Return the classes that have a covariance: of more than one sample, unless one covariance is that of all."""
    if kind == "shared":
        return found
    kept = found.counts > 1
    return Moments(found.classes[kept], found.counts[kept], found.means[kept], found.covariance[kept])


def squares(rows: Tensor, kind: str) -> Tensor:
    """Return the sum of v v^T over the rows, or of the squares alone."""
    return rows.pow(2).sum(0) if kind == "diag" else rows.T @ rows


def broad(counts: Tensor, kind: str) -> Tensor:
    """Return numbers of classes in a shape that multiplies their covariances."""
    return counts.view(-1, 1) if kind == "diag" else counts.view(-1, 1, 1)
