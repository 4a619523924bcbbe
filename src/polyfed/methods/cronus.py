"""Cronus: Robust and Heterogeneous Collaborative Learning with Black-Box Knowledge Transfer.

Chang, Shejwalkar, Shokri, Houmansadr, 2019. https://arxiv.org/abs/1912.11279

FedMD with a robust mean: predictions have only C dimensions, where the mean of many can be estimated well although a
share eps of the clients answers falsely. Each public sample has a robust mean of its own (`ops/robust.py`).

    y(x) = robust mean over clients of softmax(z_k(x));    clients train on (x, y) with soft cross-entropy     (1)

Deviations:
    No program of the authors is known. The form of the filter (with kappa = 9), its use sample by sample, and the order
    of the two trainings (public first, as in FedMD) are this library's reading.
    What travels down is log y, of the same size: FedMD's loss applies the softmax.
    With a false share of one half or more nothing can be said, so eps is below it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import torch
from annotated_types import Ge, Lt
from torch import Tensor

from polyfed.core.fields import Count, Positive
from polyfed.core.party import Context, Party
from polyfed.methods.fedmd import FedMD
from polyfed.ops.distance import log_of
from polyfed.ops.robust import filtered_mean, median_mean, trimmed_mean


@dataclass(frozen=True)
class Cronus(FedMD):
    """Exchange probabilities on public data; the server takes a robust mean.

    Parameters
    ----------
    eps
        Share of clients that may answer falsely; 0 is the plain mean exactly.
    aggregate
        `filter`: take weight from what sticks out; `trimmed`: without the share eps at either end, number by number;
        `median`; `mean`.
    kappa
        The filter leaves vectors alone whose variance is at most kappa times its robust estimate.
    subset, digest_epochs, digest_loss, digest_lr, digest_batch
        As in FedMD; `digest_loss` is `ce`, Eq. (1), or `kl`. With `digest_epochs=0` and no pre-training clients train
        locally exactly.
    public_epochs, private_epochs
        As in FedMD: clients first train on their own data; none on public labels here.
    """

    name: ClassVar[str] = "cronus"
    paper: ClassVar[str] = "Chang et al. 2019"
    family: ClassVar[str] = "distillation"
    needs: ClassVar[frozenset[str]] = frozenset({"public", "classes"})
    sends: ClassVar[str] = "predicted probabilities on public samples"

    digest_loss: Literal["ce", "kl"] = "ce"  # targets are probabilities
    public_epochs: Count = 0
    eps: Annotated[float, Ge(0), Lt(0.5)] = 0.2
    aggregate: Literal["filter", "trimmed", "median", "mean"] = "filter"
    kappa: Positive = 9.0

    def answer(self, client: Party) -> Tensor:
        """Return P_k, the probabilities of a client."""
        return super().answer(client).softmax(1)

    def consensus(self, answers: Sequence[Tensor], ctx: Context) -> Tensor:
        """Return log y, the vector whose softmax is the robust mean of Eq. (1)."""
        if self.aggregate == "mean" or (self.eps == 0 and self.aggregate != "median"):
            return log_of(super().consensus(answers, ctx))
        stacked = torch.stack([answer.double() for answer in answers])
        if self.aggregate == "median":
            mean = median_mean(stacked)
        elif self.aggregate == "trimmed":
            mean = trimmed_mean(stacked, self.eps)
        else:
            mean = filtered_mean(stacked, self.eps, self.kappa)
        return log_of(mean).to(answers[0].dtype)
