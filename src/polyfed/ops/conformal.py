"""Conformal prediction sets (regularized adaptive sets): which labels a network cannot rule out.

Labels are ranked by probability. The score of the label at rank r is the probability of all labels before it, a part u
of its own, and a penalty `lam·max(0, r - k_reg)` that keeps sets small; a set holds the labels whose scores stay below
a quantile of the true labels' scores on calibration data.

Angelopoulos, Bates, Jordan, Malik, "Uncertainty Sets for Image Classifiers using Conformal Prediction", ICLR 2021.
"""

from __future__ import annotations

import torch
from torch import Tensor

from polyfed.ops.selection import fit_temperature


def ranked_scores(
    logits: Tensor, temperature: Tensor | float, lam: Tensor | float, k_reg: int, u: Tensor | float
) -> tuple[Tensor, Tensor]:
    """Return the scores of the ranks, `[B, C]` and rising, and the label at each rank."""
    ordered, order = torch.softmax(logits / temperature, dim=1).sort(dim=1, descending=True, stable=True)
    ranks = torch.arange(1, logits.shape[1] + 1, device=logits.device)
    penalty = lam * (ranks - k_reg).clamp_min(0)
    share = u.unsqueeze(1) if isinstance(u, Tensor) else u
    return ordered.cumsum(1) - (1 - share) * ordered + penalty, order


def label_scores(
    logits: Tensor,
    labels: Tensor,
    temperature: Tensor | float,
    lam: Tensor | float,
    k_reg: int,
    u: Tensor | None = None,
) -> Tensor:
    """Return the score of each sample's label; without draws `u` its whole probability counts."""
    scores, order = ranked_scores(logits, temperature, lam, k_reg, 1.0 if u is None else u)
    return (scores * (order == labels.unsqueeze(1))).sum(1)


def threshold(scores: Tensor, alpha: float) -> Tensor:
    """Return the (1 - alpha) quantile Q, taken high: at least a share 1 - alpha of the scores is not above it."""
    return torch.quantile(scores, 1 - alpha, interpolation="higher")


def calibrate(
    logits: Tensor, labels: Tensor, alpha: float, lam: Tensor | float, k_reg: int, u: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return the temperature that fits a network's answers best, and the quantile Q of its true labels' scores."""
    labels = labels.to(logits.device)
    temperature = torch.tensor(fit_temperature(logits, labels), dtype=logits.dtype, device=logits.device)
    return temperature, threshold(label_scores(logits, labels, temperature, lam, k_reg, u), alpha)


def prediction_sets(
    logits: Tensor,
    temperature: Tensor | float,
    q: Tensor | float,
    lam: Tensor | float,
    k_reg: int,
    u: Tensor | None = None,
) -> Tensor:
    """Return for each sample which labels are in its set, `[B, C]`, never none.

    Without draws `u`: the shortest beginning of the ranking whose score exceeds Q. With them the last label is in only
    if its own score, with the part u of its probability, is not above Q.
    """
    scores, order = ranked_scores(logits, temperature, lam, k_reg, 1.0 if u is None else u)
    inside = scores <= q
    if u is None:
        inside = inside.roll(1, dims=1)
    first = torch.arange(logits.shape[1], device=logits.device) == 0
    return torch.zeros_like(inside).scatter(1, order, inside | first)


def agreement(private: Tensor, proxy: Tensor) -> Tensor:
    """Return for each sample how much two sets agree: the common labels among all, or among the proxy's.

    Among all where the private set is not the larger one; otherwise among the proxy's.
    """
    both, either = (private & proxy).sum(1), (private | proxy).sum(1)
    smaller = private.sum(1) <= proxy.sum(1)
    return both / torch.where(smaller, either, proxy.sum(1))


def ranking_loss(logits: Tensor, sets: Tensor) -> Tensor:
    """Return by how much labels outside of the sets exceed labels inside, mean over all pairs and then the batch.

    `1/(|S||S^c|) sum_{c in S} sum_{c' not in S} relu(z[c'] - z[c])`; 0 where a set holds all labels.
    """
    pairs = sets.unsqueeze(2) & ~sets.unsqueeze(1)  # [B, c, c']
    excess = torch.relu(logits.unsqueeze(1) - logits.unsqueeze(2)) * pairs
    return (excess.sum((1, 2)) / pairs.sum((1, 2)).clamp_min(1)).mean()
