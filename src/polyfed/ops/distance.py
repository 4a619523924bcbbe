"""Distances between model states and between predictions."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn import functional as F


def squared_distance(params: Mapping[str, Tensor], anchor: Mapping[str, Tensor]) -> Tensor:
    """Return ||w - w0||^2 over the names of the anchor."""
    # One operation for each tensor: a deep network has a hundred, and each costs more to start than to compute.
    terms = [F.mse_loss(params[name], value, reduction="sum") for name, value in anchor.items()]
    return torch.stack(terms).sum() if terms else torch.zeros(())


def l1(student: Tensor, teacher: Tensor) -> Tensor:
    """Return the mean absolute difference over batch and outputs."""
    return F.l1_loss(student, teacher)


def l2(student: Tensor, teacher: Tensor) -> Tensor:
    """Return the mean squared difference over batch and outputs."""
    return F.mse_loss(student, teacher)


def l1_norm(parameters: Mapping[str, Tensor]) -> Tensor:
    """Return the sum of absolute values over all parameters."""
    sums = [parameter.abs().sum() for parameter in parameters.values()]
    return torch.stack(sums).sum() if sums else torch.tensor(0.0)  # a learner has none


def soft_cross_entropy(student: Tensor, teacher: Tensor, temperature: float = 1.0) -> Tensor:
    """Return `-sum_j p_j log q_j`, p from the teacher's logits and q from the student's, mean over the batch."""
    target = torch.softmax(teacher / temperature, dim=1)
    return -(target * torch.log_softmax(student / temperature, dim=1)).sum(dim=1).mean()


def kl_divergence(student: Tensor, teacher: Tensor, temperature: float = 1.0) -> Tensor:
    """Return `KL(p || q)`, p from the teacher's logits and q from the student's, mean over the batch."""
    log_target = torch.log_softmax(teacher / temperature, dim=1)
    log_student = torch.log_softmax(student / temperature, dim=1)
    return (log_target.exp() * (log_target - log_student)).sum(dim=1).mean()


def log_of(probabilities: Tensor) -> Tensor:
    """Return logarithms whose softmax is the given distribution; those of zero stay finite."""
    return probabilities.clamp_min(1e-30).log()


def entropy(logits: Tensor) -> float:
    """Return the entropy of the softmax in nats, mean over the rows."""
    log_p = torch.log_softmax(logits.double(), dim=1)
    return float(-(log_p.exp() * log_p).sum(dim=1).mean())


def diversity(noise: Tensor, made: Tensor) -> Tensor:
    """Return exp(-mean_ij ||e_i - e_j||² · |g_i - g_j|) of noise e and what was made of it (FedGen).

    It is 1 where all that was made coincides, less the further apart it is for unlike noise.
    """
    between = (noise.unsqueeze(0) - noise.unsqueeze(1)).square().mean(2)
    apart = (made.unsqueeze(0) - made.unsqueeze(1)).abs().mean(2)
    return torch.exp(-(between * apart).mean())


LOGIT_LOSSES = {"l1": l1, "l2": l2, "ce": soft_cross_entropy, "kl": kl_divergence}
