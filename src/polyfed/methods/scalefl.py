"""ScaleFL: Resource-Adaptive Federated Learning with Heterogeneous Clients.

Ilhan, Su, Liu, CVPR 2023.
https://openaccess.thecvf.com/content/CVPR2023/html/Ilhan_ScaleFL_Resource-Adaptive_Federated_Learning_With_Heterogeneous_Clients_CVPR_2023_paper.html

Width and depth shrink together: a client of level l holds a narrower network that is cut after its l-th exit. Every
entry is averaged over the clients that hold it. All exits are trained, and the last one teaches the earlier ones:

    L = sum_{j <= l} j · L_j / (l (l + 1) / 2)                                                                   (1)
    L_l = CE(z_l, y)
    L_j = CE(z_j, y) + gamma · T^2 / C · KL(softmax(z_l / T) || softmax(z_j / T)),    j < l                     (2)

for C classes, the KL part only after the first quarter of the rounds. Give clients their levels with the model:
`resnet18:w16,exits` is the whole network, `resnet18:w16,exits=2@0.7` has two exits at 0.7 of the width.

Deviations:
    An exit is a mean over the map and a linear layer behind a stage; the paper's ResNet has three convolutions before
    that, and exits inside of stages.
    The teacher z_l is held fixed; `official=True` lets gradients through it, as the released program does. That
    program has gamma = 0 in its commands for images and 0.05 in those for text, which is the default here, and starts
    the KL part one round later.
    BatchNorm has no running statistics in training, as there; to predict, they are HeteroFL's static ones, not those
    of the batch at hand.
    Only what a level uses travels: the released program ships deeper stages as well, but never averages them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from polyfed.core.fields import NotNegative, Positive, Share
from polyfed.core.party import Context, Party
from polyfed.core.stage import Aux, Batch, Stage
from polyfed.methods.heterofl import HeteroFL, masked
from polyfed.models.width import activate_scalers
from polyfed.ops.distance import kl_divergence


@dataclass(frozen=True)
class ScaleFL(HeteroFL):
    """Average nested widths and depths of one network with several exits.

    Parameters
    ----------
    gamma, temperature
        Weight of the distillation from the last exit, Eq. (2), and its temperature T; gamma = 0: none.
    start
        Share of the rounds before the distillation begins.
    official
        Let gradients through the teacher.
    scaler, global_rate
        Divide activations by r / global_rate, in training and when predicting.
    static_bn, statistics, mask, clip, measure, weighting
        As in HeteroFL; there is no mask and no limit of the gradient here. With one exit, one width and
        `static_bn=False` it is FedAvg with uniform weights exactly.
    """

    name: ClassVar[str] = "scalefl"
    paper: ClassVar[str] = "Ilhan et al. 2023"
    knows_rounds: ClassVar[bool] = True
    sends: ClassVar[str] = (
        "the weights of the client's stages and exits at its width, BatchNorm's statistics, and the number of samples"
    )

    mask: bool = False
    clip: Positive | None = None
    gamma: NotNegative = 0.05
    temperature: Positive = 3.0
    start: Share = 0.25
    official: bool = False

    def requirements(self) -> frozenset[str]:
        """Widths of one network with several exits."""
        return super().requirements() | {"exits", "classes"}

    def setup_client(self, client: Party, ctx: Context) -> None:
        """Switch the scalers of narrow networks on."""
        activate_scalers(client.main, self.scaler, self.global_rate, predicting=True)

    def collect_on_public(self, server: Party, ctx: Context) -> None:
        """Collect the statistics of networks that scale as those of the clients do."""
        for architecture in ctx.blueprints:
            activate_scalers(ctx.replica(architecture), self.scaler, self.global_rate, predicting=True)
        super().collect_on_public(server, ctx)

    def loss(self, nets: Mapping[str, Any], batch: Batch, aux: Aux) -> Tensor:
        """Return L, Eq. (1)."""
        net = nets["main"].still() if self.static_bn else nets["main"]
        exits = [masked(z, aux) for z in net.call("exits", batch.x)]
        terms = [j * self.exit_loss(z, exits[-1], batch.y, aux) for j, z in enumerate(exits, start=1)]
        return torch.stack(terms).sum() / (len(exits) * (len(exits) + 1) / 2)

    def exit_loss(self, z: Tensor, last: Tensor, y: Tensor, aux: Aux) -> Tensor:
        """Return L_j, Eq. (2)."""
        loss = F.cross_entropy(z, y)
        if z is last or "gamma" not in aux:
            return loss
        teacher = last if self.official else last.detach()
        weight: Tensor = aux["gamma"] * self.temperature**2 / z.shape[1]
        return loss + weight * kl_divergence(z, teacher, self.temperature)

    def stage(self, client: Party, ctx: Context) -> Stage:
        """Train all exits, with distillation in later rounds."""
        stage = super().stage(client, ctx)
        if self.gamma == 0 or ctx.round <= self.start * ctx.rounds:
            return stage
        return replace(stage, aux={**stage.aux, "gamma": torch.tensor(self.gamma)})
