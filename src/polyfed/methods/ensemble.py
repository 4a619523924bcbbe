"""Uniform ensemble: every client trains alone and uploads its network once; the server averages predictions.

The competitor of one-shot fusion methods (AMS, PFNM), built on `oneshot.py` as they are.

Deviations:
    Those of `oneshot.py`.
    With `weights="class"` probabilities are scaled to sum to 1 (the largest stays the largest).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

from torch import nn

from polyfed.core.party import Context, Party
from polyfed.core.traffic import Traffic
from polyfed.fusion.networks import Averaged
from polyfed.methods.oneshot import OneShot
from polyfed.ops.selection import class_weights


@dataclass(frozen=True)
class Ensemble(OneShot):
    """Average the predictions of all clients' networks.

    Parameters
    ----------
    space
        `prob`: mean of the softmax outputs (of a regression: of the values; of several labels: of their
        probabilities); `logit`: mean of the logits (the same labels as AMS-full).
    weights
        `uniform`, or `class`: each network weighs n_kc / sum_j n_jc for class c; its label counts are uploaded too.
    """

    name: ClassVar[str] = "ensemble"
    paper: ClassVar[str] = "uniform ensemble of one-shot networks"
    traffic: ClassVar[Mapping[str, Traffic]] = {"main": Traffic(up="4*(P + B) + [weights == 'class']*4*C")}

    space: Literal["prob", "logit"] = "prob"
    weights: Literal["uniform", "class"] = "uniform"

    def requirements(self) -> frozenset[str]:
        """Weights by class need classes."""
        return self.needs | ({"classes"} if self.weights == "class" else set())

    def takes_learners(self) -> bool:
        """Predictions are averaged, whoever makes them."""
        return True

    def tells_counts(self) -> bool:
        """Class weights need the label counts."""
        return self.weights == "class"

    def make_fused(self, server: Party, ctx: Context) -> nn.Module:
        """Return P(x) = 1/J sum_k softmax(z_k(x)) in log space: its softmax is P again; or what the task's mean is."""
        counts = self.counts(server)
        weights = None if counts is None else class_weights(counts)
        return Averaged(self.networks(server, ctx), self.space, weights, ctx.task.name)
