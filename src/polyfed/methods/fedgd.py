"""FedGD, as FedFD's tables cite it: HeteroFL, and data-free distillation at the server by TARGET's generator.

Zhang, Chen, Zhuang, Lyu, "TARGET: Federated Class-Continual Learning via Exemplar-Free Distillation", ICCV 2023.
https://arxiv.org/abs/2303.06937

After HeteroFL's average the server makes images that the uploaded networks z_k know well, Eq. (1) to (4) of
`synthesizing.py`; they go to a pool, and the ensemble z = mean_k z_k is distilled into the global network there:

    min_student  T² · KL(softmax(z / T) || softmax(student / T)),  on the pool                           (5)

Deviations:
    FedFD names FedGD and cites TARGET, a continual method; its figures lie near HeteroFL's: weights are averaged too.
    Another method is really named FedGD (Zhang et al., IEEE Transactions on Computers 2023: a generator against all
    local networks as discriminators, logits instead of weights); it is not offered.
    Those of `synthesizing.py`.
    The pool lasts a round; G is kept over rounds. Distillation is FedFD's: SGD, learning rate 0.01.
    BatchNorm statistics must be uploaded for Eq. (2), so `static_bn` is off: they are averaged entry by entry.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from polyfed.core.distill import distill_by, put_back
from polyfed.core.fields import AtLeastOne, Count, NotNegative, PartShare, Positive
from polyfed.core.message import Message
from polyfed.core.method import Combination
from polyfed.core.party import ClientInfo, Context, Party
from polyfed.core.samples import unlabeled
from polyfed.core.uploads import ensemble_logits, uploaded_copies
from polyfed.core.views import Blueprints, largest_first
from polyfed.methods.heterofl import HeteroFL
from polyfed.methods.synthesizing import Synthesizing


@dataclass(frozen=True)
class FedGD(Synthesizing, HeteroFL):
    """HeteroFL with distillation on images that the server makes up.

    Parameters
    ----------
    temperature
        T of Eq. (5).
    distill_steps, distill_batch, distill_lr, distill_momentum, distill_weight_decay
        Steps on the pool after each synthesis but the first ones (`warm_up`), and how (SGD); 0 steps give HeteroFL
        exactly.
    view, weighting, scaler, global_rate, static_bn, mask, clip, measure
        As in HeteroFL; `static_bn` is off here, and can be on for networks without BatchNorm.
    """

    name: ClassVar[str] = "fedgd"
    paper: ClassVar[str] = "TARGET, Zhang et al. 2023"
    family: ClassVar[str] = "distillation"
    combines: ClassVar[Mapping[str, Combination]] = {"params/main": "apart"}  # also a teacher

    static_bn: bool = False
    temperature: Positive = 20.0
    distill_steps: Count = 50
    distill_batch: AtLeastOne = 128
    distill_lr: Positive = 0.01
    distill_momentum: PartShare = 0.9
    distill_weight_decay: NotNegative = 1e-4

    def misfit(self, infos: Sequence[ClientInfo], blueprints: Blueprints, input_shape: tuple[int, ...]) -> str | None:
        """Return what to do when networks would be uploaded without their BatchNorm statistics."""
        without = self.static_bn or self.buffers == "local"
        if self.distill_steps and without and any(b.running_statistics() for b in blueprints.values()):
            return "the BatchNorm statistics of uploaded networks: set static_bn=false and buffers=average"
        return super().misfit(infos, blueprints, input_shape)

    @property
    def generates(self) -> bool:
        """Whether images are made to distill on."""
        return self.distill_steps > 0

    def refine(self, server: Party, replies: Mapping[int, Message], ctx: Context) -> None:
        """Make images and distill on them in turn, then put the network back among the shared tensors."""
        if not self.generates:
            return
        teachers = uploaded_copies(replies, ctx)
        pool, targets, losses = [], [], []
        for number in range(self.syntheses):
            images = self.synthesize(server, teachers, number, ctx)
            pool.append(images)
            targets.append(ensemble_logits(teachers, images))
            if number >= self.warm_up:
                data, target = unlabeled(torch.cat(pool)), torch.cat(targets)
                losses.append(distill_by(self, server.main, data, target, ctx, name=f"distill/{number}"))  # Eq. (5)
        ctx.log("distill_loss", losses[-1])
        put_back(server.main, self.held(server, largest_first(ctx.blueprints)[0], ctx))
