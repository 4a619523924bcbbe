"""FedGD, as FedFD's tables cite it: HeteroFL, and data-free distillation at the server by TARGET's generator.

Zhang, Chen, Zhuang, Lyu, "TARGET: Federated Class-Continual Learning via Exemplar-Free Distillation", ICCV 2023.
https://arxiv.org/abs/2303.06937

After HeteroFL's average the server trains a generator G and the noise e that it is fed with, until the uploaded
networks are sure of the labels y of the images, see in them what their BatchNorm layers saw in training, and know
better than the global network; the images go to a pool, and the ensemble is distilled into the global network there:

    z(x) = mean_k z_k(x)                                                                                 (1)
    L_bn = mean_k sum_l ||mean_l(x) - running mean_l|| + ||var_l(x) - running var_l||,  over BatchNorm layers l  (2)
    L_adv = mean( 1[student and teacher agree] · KL(teacher || student) )                                (3)
    min_{G, e}  bn_weight · L_bn + label_weight · CE(z(G(e)), y) - adversarial_weight · L_adv            (4)
    min_student  T² · KL(softmax(z / T) || softmax(student / T)),  on the pool                           (5)

Deviations:
    FedFD names FedGD and cites TARGET, a continual method; its figures lie near HeteroFL's: weights are averaged too.
    Another method is really named FedGD (Zhang et al., IEEE Transactions on Computers 2023: a generator against all
    local networks as discriminators, logits instead of weights); it is not offered.
    TARGET has one teacher; here it is the mean of the uploaded networks, and Eq. (2) a mean over them.
    G takes the steps itself (Reptile with a step of 1), where TARGET has a fast copy and first-order MAML; noise is new
    for each synthesis. Images of the last step go to the pool, not those of the smallest loss. Adam has its usual
    betas. Images are not augmented; they are inputs as networks see them, after scaling.
    The released preset for CIFAR-100 has fewer syntheses than `warm_up`, so that nothing is distilled: refused.
    The pool lasts a round; G is kept over rounds. Distillation is FedFD's: SGD, learning rate 0.01.
    BatchNorm statistics must be uploaded for Eq. (2), so `static_bn` is off: they are averaged entry by entry.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from polyfed.core.distill import distill_by, put_back
from polyfed.core.errors import InputError
from polyfed.core.fields import AtLeastOne, AtLeastTwo, Count, NotNegative, PartShare, Positive
from polyfed.core.message import Message
from polyfed.core.method import Combination
from polyfed.core.nets import STILL, mode
from polyfed.core.party import Blueprint, ClientInfo, Context, Party
from polyfed.core.passes import logits_of
from polyfed.core.samples import Samples, unlabeled
from polyfed.core.settings import training_of
from polyfed.core.stage import Aux, Batch, Stage
from polyfed.core.statistics import distances_to_statistics
from polyfed.core.uploads import uploaded_copies
from polyfed.core.views import largest_first
from polyfed.methods.generating import Generating
from polyfed.methods.heterofl import HeteroFL
from polyfed.models.generators import Noise, input_generator
from polyfed.ops.aggregate import plain_mean

TEACHER = "teacher/"  # names of the uploaded networks in a stage


@dataclass(frozen=True)
class FedGD(Generating, HeteroFL):
    """HeteroFL with distillation on images that the server makes up.

    Parameters
    ----------
    syntheses, warm_up
        Batches of images that are made in a round; Eq. (3) and the distillation begin after `warm_up` of them.
    synthesis_batch, generator_steps, generator_lr, noise_lr
        Images of a synthesis, steps of Eq. (4) for it (Adam), learning rates of G and of the noise.
    bn_weight, label_weight, adversarial_weight
        Weights of Eq. (4).
    noise_dim, width
        Sizes of G: noise, and channels of its last hidden layer.
    temperature
        T of Eq. (5).
    distill_steps, distill_batch, distill_lr, distill_momentum, distill_weight_decay
        Steps on the pool after each synthesis, and how (SGD); 0 steps give HeteroFL exactly.
    view, weighting, scaler, global_rate, static_bn, mask, clip, measure
        As in HeteroFL; `static_bn` is off here, and can be on for networks without BatchNorm.
    """

    name: ClassVar[str] = "fedgd"
    paper: ClassVar[str] = "TARGET, Zhang et al. 2023"
    family: ClassVar[str] = "distillation"
    combines: ClassVar[Mapping[str, Combination]] = {"params/main": "apart"}  # also a teacher

    static_bn: bool = False
    syntheses: AtLeastOne = 10
    warm_up: Count = 2
    synthesis_batch: AtLeastTwo = 256  # the generator has BatchNorm
    generator_steps: AtLeastOne = 10
    generator_lr: Positive = 2e-3
    noise_lr: Positive = 0.01
    bn_weight: NotNegative = 10.0
    label_weight: NotNegative = 0.5
    adversarial_weight: NotNegative = 1.0
    noise_dim: AtLeastOne = 256
    width: AtLeastOne = 64
    temperature: Positive = 20.0
    distill_steps: Count = 50
    distill_batch: AtLeastOne = 128
    distill_lr: Positive = 0.01
    distill_momentum: PartShare = 0.9
    distill_weight_decay: NotNegative = 1e-4

    def check(self) -> None:
        """Refuse settings with which nothing would be distilled."""
        super().check()
        if self.warm_up >= self.syntheses:
            raise InputError(f"{self.name}: warm_up must be below syntheses ({self.syntheses}), got {self.warm_up}.")

    def requirements(self) -> frozenset[str]:
        """Widths of one network, which the server can build."""
        return super().requirements() | {"builds", "classes"}

    def misfit(
        self, infos: Sequence[ClientInfo], blueprints: Mapping[str, Blueprint], input_shape: tuple[int, ...]
    ) -> str | None:
        """Return what to do when networks would be uploaded without their BatchNorm statistics."""
        without = self.static_bn or self.buffers == "local"
        if self.distill_steps and without and any(b.running_statistics() for b in blueprints.values()):
            return "the BatchNorm statistics of uploaded networks: set static_bn=false and buffers=average"
        return super().misfit(infos, blueprints, input_shape)

    @property
    def generates(self) -> bool:
        """Whether images are made to distill on."""
        return self.distill_steps > 0

    def build_generator(self, ctx: Context) -> nn.Module:
        """Build G, a generator of inputs; only the server has it."""
        return input_generator(self.noise_dim, ctx.input_shape, self.width)

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

    def synthesize(self, server: Party, teachers: Sequence[nn.Module], number: int, ctx: Context) -> Tensor:
        """Take some steps on Eq. (4), for labels and noise that are drawn anew, and return the images."""
        size = self.synthesis_batch
        labels = torch.randint(ctx.num_classes, (size,), generator=ctx.rng(f"synthesis-labels/{number}"))
        drawn = torch.randn(size, self.noise_dim, generator=ctx.rng(f"synthesis-noise/{number}"))
        noise = Noise(drawn, self.noise_lr / self.generator_lr).to(ctx.device)
        generator = server.models["generator"]
        models = {"generator": generator, "noise": noise, "student": server.main}
        models |= {f"{TEACHER}{place}": network for place, network in enumerate(teachers)}
        with distances_to_statistics(teachers) as distances:
            stage = Stage(
                partial(self.synthesis_loss, distances=distances),
                {"generator": None, "noise": None},
                data=Samples(torch.zeros(size, 1), labels),
                aux={"adversarial": self.adversarial_weight if number >= self.warm_up else 0.0},
                steps=self.generator_steps,
                shuffle=False,  # every image has its own noise and label
                training=training_of(self, "generator", ctx.training, batch_size=size, optimizer="adam"),
            )
            ctx.log("synthesis_loss", ctx.run(stage, models, f"synthesis/{number}").loss)
        with torch.no_grad(), mode(generator, STILL):
            images: Tensor = generator(noise(drawn))
        return images

    def synthesis_loss(self, nets: Mapping[str, Any], batch: Batch, aux: Aux, distances: list[Tensor]) -> Tensor:
        """Return Eq. (4); all classifiers predict, with the statistics that they came with."""
        images = nets["generator"](nets["noise"](batch.x))
        distances.clear()  # passes over the uploaded networks fill it
        answers = [net.eval()(images) for name, net in nets.items() if name.startswith(TEACHER)]
        teacher = torch.stack(answers).mean(0)  # Eq. (1)
        loss = self.label_weight * F.cross_entropy(teacher, batch.y)
        if distances:
            loss = loss + self.bn_weight * torch.stack(distances).sum() / len(answers)  # Eq. (2)
        if aux["adversarial"]:
            student = nets["student"].eval()(images)
            agree = (student.argmax(1) == teacher.argmax(1)).to(loss)
            apart = F.kl_div(student.log_softmax(1), teacher.log_softmax(1), reduction="none", log_target=True).sum(1)
            loss = loss - aux["adversarial"] * (agree * apart).mean()  # Eq. (3)
        return loss


def ensemble_logits(teachers: Iterable[nn.Module], images: Tensor) -> Tensor:
    """Return the mean logits of the uploaded networks, Eq. (1)."""
    return plain_mean(logits_of(network, unlabeled(images)) for network in teachers)
