"""Fuse the predictions of several networks: pick the most confident ones for each input, or average all.

`logits` is always `[J, B, C]`: J networks, B inputs, C classes. The absolute confidence of a network is the exponential
of its largest logit; it is only ever compared, so everything stays in log space (`exp` overflows float32 near 88).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

ABSENT = -1e9  # the score of a class that no chosen network knows: finite, so that losses stay numbers
NORMALIZATIONS = ("none", "temperature", "zscore")
_TINY = 1e-6


def log_confidence(logits: Tensor, present: Tensor | None = None) -> Tensor:
    """Return `[J, B]`, the largest logit of every network, over the classes it knows (`present [J, C]`, None: all)."""
    if present is not None:
        logits = torch.where(present.unsqueeze(1), logits, -torch.inf)
    return logits.amax(dim=2)


def most_confident(confidence: Tensor, k: int | None) -> Tensor:
    """Return `[J, B]`, True for the k most confident networks of each input (None: all); ties to the lowest index."""
    order = torch.sort(confidence, dim=0, descending=True, stable=True).indices
    return torch.zeros_like(confidence).scatter(0, order[:k], 1.0) > 0


def top_k_scores(
    logits: Tensor, k: int | None = 1, confidence: Tensor | None = None, present: Tensor | None = None
) -> Tensor:
    """Return `[B, C]`, the summed logits of the k most confident networks of each input.

    Parameters
    ----------
    logits
        `[J, B, C]`.
    k
        1 is AMS-top1; None, or J and more, is AMS-full, the sum of all logits.
    confidence
        `[J, B]`, what to compare; None takes the largest logit.
    present
        `[J, C]`, which classes each network knows: it abstains from the others. A class that none of the chosen
        networks knows gets the score `ABSENT`.
    """
    if confidence is None:
        confidence = log_confidence(logits, present)
    chosen = most_confident(confidence, k).unsqueeze(2)
    if present is not None:
        chosen = chosen & present.unsqueeze(1)
    scores = torch.where(chosen, logits, 0.0).sum(dim=0)
    return scores if present is None else torch.where(chosen.any(dim=0), scores, ABSENT)


def ensemble_scores(logits: Tensor, weights: Tensor | None = None, space: str = "prob") -> Tensor:
    """Return `[B, C]`, the mean probabilities of all networks (rows sum to 1), or with `logit` the mean logits.

    `weights [J, C]` (`class_weights`) weighs the networks class by class; probabilities are then scaled to sum to 1. A
    class without any weight is nobody's answer: its probability is 0, its logit `ABSENT`.
    """
    values = torch.softmax(logits, dim=2) if space == "prob" else logits
    if weights is None:
        return values.mean(dim=0)
    weights = weights.to(values)
    scores = (values * weights.unsqueeze(1)).sum(dim=0)
    if space == "prob":
        return scores / scores.sum(dim=1, keepdim=True).clamp_min(_TINY)
    return torch.where(weights.sum(dim=0) > 0, scores, ABSENT)


def class_weights(counts: Tensor) -> Tensor:
    """Return `[J, C]`, the share `n_jc / sum_j n_jc` of each network in a class; 0 where nobody has the class."""
    counts = counts.double()
    return counts / counts.sum(dim=0, keepdim=True).clamp_min(_TINY)


def normalized(logits: Tensor, how: str = "none", temperatures: Tensor | None = None) -> Tensor:
    """Return logits on a scale of their own for each network.

    `temperature`: divided by one number for each network; `zscore`: mean 0 and standard deviation 1 over the classes of
    each input; `none`: as they are.
    """
    if how == "temperature":
        assert temperatures is not None, "one temperature for each network"
        return logits / temperatures.to(logits).view(-1, 1, 1)
    if how == "zscore":
        spread = logits.std(dim=2, correction=0, keepdim=True)
        return (logits - logits.mean(dim=2, keepdim=True)) / spread.clamp_min(_TINY)
    return logits


TEMPERATURES = (0.05, 20.0)  # the least and the largest that are fitted


def fit_temperature(logits: Tensor, labels: Tensor) -> float:
    """Return the temperature T in [0.05, 20] at which `softmax(logits / T)` has the least cross-entropy.

    The cross-entropy is convex in 1/T, so over log T it has one minimum.
    """
    from scipy.optimize import minimize_scalar  # type: ignore[import-untyped]

    def cost(log_temperature: float) -> float:
        return float(torch.nn.functional.cross_entropy(logits.double() / math.exp(log_temperature), labels))

    bounds = math.log(TEMPERATURES[0]), math.log(TEMPERATURES[1])
    return math.exp(minimize_scalar(cost, bounds=bounds, method="bounded", options={"xatol": 1e-9}).x)


def greedy_cover(counts: Tensor, keep: int | None = None) -> list[int]:
    """Choose networks until their labels cover all labels that anybody has, or there are `keep` of them.

    Each step adds the network with the most new labels; ties go to the one with more samples, then the lower index.
    """
    held = counts > 0
    samples = counts.sum(dim=1)
    chosen: list[int] = []
    covered = torch.zeros(counts.shape[1], dtype=torch.bool)
    while len(chosen) < (len(counts) if keep is None else keep):
        gains = (held & ~covered).sum(dim=1).tolist()
        best = max(range(len(counts)), key=lambda j: (gains[j], int(samples[j]), -j))
        if gains[best] == 0:
            break
        chosen.append(best)
        covered |= held[best]
    return sorted(chosen)


def cluster_heads(outputs: Tensor, samples: Sequence[float], keep: int) -> list[int]:
    """Group networks by the cosine similarity of their outputs `[J, N, C]` on common inputs; keep the largest of each.

    Average linkage down to `keep` groups; the largest is the one with the most samples, ties to the lowest index.
    """
    from scipy.cluster.hierarchy import fcluster, linkage  # type: ignore[import-untyped]

    if keep >= len(outputs):
        return list(range(len(outputs)))
    flat = torch.nn.functional.normalize(outputs.detach().double().flatten(1), dim=1)
    distance = (1.0 - flat @ flat.T).clamp_min(0.0).cpu().numpy()
    above = np.triu_indices(len(outputs), 1)
    groups = fcluster(linkage(distance[above], method="average"), keep, criterion="maxclust")
    members = [[j for j, own in enumerate(groups) if own == group] for group in np.unique(groups)]
    return sorted(max(group, key=lambda j: (samples[j], -j)) for group in members)
