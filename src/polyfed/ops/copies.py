"""Soft labels for learners that know only hard ones: each sample becomes several weighted copies, one for each class.

The weighted log loss of the copies is the cross-entropy with the soft label, term by term:

    sum_c w·p_c · (-log q_c(x))  =  w · CE(p, q(x))                                                             (1)

so whoever minimises a weighted loss over hard labels minimises the soft one, with no change to the learner.
"""

from __future__ import annotations

import torch
from torch import Tensor

NEGLIGIBLE = 1e-3  # copies that weigh less of their sample are left out; the others take over what they weighed


def weighted_copies(labels: Tensor, weights: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return `(rows, classes, weights)` of the copies of some samples, in the order of the samples.

    Parameters
    ----------
    labels
        Class numbers `[n]` (one copy each), or probabilities `[n, C]`.
    weights
        What each sample weighs, `[n]`: so much do its copies weigh together.
    """
    if not labels.is_floating_point():
        return torch.arange(len(labels)), labels, weights
    kept = torch.where(labels >= NEGLIGIBLE, labels.double(), 0.0)
    kept = kept / kept.sum(1, keepdim=True)
    rows, classes = kept.nonzero(as_tuple=True)
    return rows, classes, weights[rows] * kept[rows, classes]
