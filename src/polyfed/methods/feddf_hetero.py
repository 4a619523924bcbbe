"""FedFusion, as FedFD's tables call it: FedDF's distillation of the ensemble, with width slices.

Lin, Kong, Stich, Jaggi, NeurIPS 2020. https://arxiv.org/abs/2006.07242

HeteroFL's average is the start, uploaded slices are the teachers of FedDF's Eq. (2), and the widest network is the
student.

Deviations:
    As in `feddf`. The distillation set, optimizer and length are not named: public data, and FedFD's choices here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

from polyfed.core.fields import AtLeastOne, Count, OptimizerName, PartShare, Positive
from polyfed.core.message import Message
from polyfed.core.method import Step
from polyfed.core.party import Blueprint, Context, Party
from polyfed.core.views import largest_first
from polyfed.methods.distillation import EnsembleDistillation
from polyfed.methods.heterofl import STATISTICS, HeteroFL


@dataclass(frozen=True)
class FedDFHetero(EnsembleDistillation, HeteroFL):
    """FedFusion: HeteroFL with distillation of the ensemble into the widest network.

    Parameters
    ----------
    distill_steps, distill_epochs, distill_lr, distill_batch, distill_optimizer, distill_momentum, distill_clip
        As in FedDF, with FedFD's values: one epoch of SGD.
    distill_cosine
        As in FedDF; off here.
    """

    name: ClassVar[str] = "feddf_hetero"
    paper: ClassVar[str] = "Lin et al. 2020"

    view: str = "prefix"
    weighting: Literal["samples", "uniform"] = "uniform"
    distill_steps: Count | None = None
    distill_lr: Positive = 0.01
    distill_batch: AtLeastOne = 64
    distill_optimizer: OptimizerName = "sgd"
    distill_momentum: PartShare = 0.9
    distill_clip: Positive | None = None
    distill_cosine: bool = False

    def fuse(self, server: Party, replies: Mapping[int, Message], step: Step, ctx: Context) -> None:
        """Do as HeteroFL does, whose average ends with `refine`; statistics come from everybody."""
        kept = replies if step.name == STATISTICS.name else self.kept(server, replies, ctx)
        super().fuse(server, kept, step, ctx)

    def students(self, ctx: Context) -> list[Blueprint]:
        """Return the widest network alone: the others are its slices."""
        return largest_first(ctx.blueprints)[:1]
