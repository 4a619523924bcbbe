"""Diagonal Gaussians around class means: the variational losses of FedVTC. Equation numbers as in its documentation."""

from __future__ import annotations

import torch
from torch import Tensor


def reparameterized(mean: Tensor, sd: Tensor, noise: Tensor) -> Tensor:
    """Return `v = mean + sd * noise` (Eq. 1): a sample of N(mean, diag(sd^2)) with a gradient in mean and sd."""
    return mean + sd * noise


def gaussian_kl(
    mean: Tensor, sd: Tensor, prior_mean: Tensor, prior_sd: Tensor | float = 1.0, known: Tensor | None = None
) -> Tensor:
    """Return `KL(N(mean, diag(sd^2)) || N(prior_mean, diag(prior_sd^2)))` of every row (Eq. 3).

    `sum_j ln(r_j / s_j) + (s_j^2 + (m_j - c_j)^2) / (2 r_j^2) - 1/2`, with s, r the two standard deviations and m, c
    the two means.

    Parameters
    ----------
    mean, sd
        Of the posterior: [B, p], and [B, p] or [p].
    prior_mean, prior_sd
        Of the prior.
    known
        [B], 1 where the row has a prior mean; rows with 0 keep only the terms of the standard deviations.
    """
    r = prior_sd if isinstance(prior_sd, Tensor) else torch.full_like(sd, prior_sd)
    difference = mean - prior_mean
    if known is not None:
        difference = difference * known.unsqueeze(1)
    return (r.log() - sd.log() + (sd.pow(2) + difference.pow(2)) / (2 * r.pow(2)) - 0.5).sum(dim=1)


def reconstruction_error(images: Tensor, target: Tensor, reduction: str = "sum") -> Tensor:
    """Return the squared error of decoded images (Eq. 2), mean over the batch; over pixels its `sum` or `mean`."""
    error = (images - target).pow(2).flatten(1)
    return (error.sum(dim=1) if reduction == "sum" else error.mean(dim=1)).mean()


def distribution_matching(
    features: Tensor, labels: Tensor, prototypes: Tensor, known: Tensor, mode: str = "class_mean"
) -> Tensor:
    """Return how far the features of decoded images are from the prototypes of their classes (Eq. 5).

    Parameters
    ----------
    features, labels
        Of the batch: [B, p] and [B].
    prototypes, known
        All prototypes [C, p], and 1 where a class has one [C]; other classes do not count.
    mode
        `class_mean`: squared distance of the mean feature of each class, mean over the classes in the batch;
        `pointwise`: squared distance of each feature, mean over the samples.
    """
    if mode == "pointwise":
        distance = (features - prototypes[labels]).pow(2).sum(dim=1)
        counted = known[labels]
        return (distance * counted).sum() / counted.sum().clamp(min=1)
    numbers = torch.arange(len(prototypes), device=labels.device)
    members = (labels.unsqueeze(1) == numbers).to(features.dtype)  # [B, C]; a mask instead of indexing, for vmap
    size = members.sum(dim=0)
    means = members.T @ features / size.clamp(min=1).unsqueeze(1)
    counted = (size > 0).to(features.dtype) * known
    return ((means - prototypes).pow(2).sum(dim=1) * counted).sum() / counted.sum().clamp(min=1)


def class_latents(prototype: Tensor, sd: Tensor, count: int, rng: torch.Generator) -> Tensor:
    """Draw latents of one class from `N(prototype, diag(sd^2))` (Eq. 9)."""
    noise = torch.randn(count, len(prototype), generator=rng, dtype=prototype.dtype)
    return reparameterized(prototype, sd, noise.to(prototype.device))
