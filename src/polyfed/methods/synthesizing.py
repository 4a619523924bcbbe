"""Images that a server makes up: the data-free half of TARGET (Zhang, Chen, Zhuang, Lyu, ICCV 2023).

https://arxiv.org/abs/2303.06937

The server trains a generator G and the noise e that it is fed with, until the uploaded networks z_k are sure of the
labels y of the images, see in them what their BatchNorm layers saw in training, and know better than its own network:

    z(x) = mean_k z_k(x)                                                                                 (1)
    L_bn = mean_k sum_l ||mean_l(x) - running mean_l|| + ||var_l(x) - running var_l||,  over BatchNorm layers l  (2)
    L_adv = mean( 1[student and teacher agree] · KL(teacher || student) )                                (3)
    min_{G, e}  bn_weight · L_bn + label_weight · CE(z(G(e)), y) - adversarial_weight · L_adv            (4)

Deviations:
    TARGET has one teacher; here it is the mean of the uploaded networks, and Eq. (2) a mean over them.
    G takes the steps itself (Reptile with a step of 1), where TARGET has a fast copy and first-order MAML; noise is new
    for each synthesis. Images of the last step are taken, not those of the smallest loss. Adam has its usual betas.
    Images are not augmented; they are inputs as networks see them, after scaling.
    The released preset for CIFAR-100 has fewer syntheses than `warm_up`, so that nothing is learned from them: refused.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from polyfed.core.errors import InputError
from polyfed.core.fields import AtLeastOne, AtLeastTwo, Count, NotNegative, Positive
from polyfed.core.nets import STILL, mode
from polyfed.core.party import Context, Party
from polyfed.core.samples import Samples
from polyfed.core.stage import Aux, Batch, Stage
from polyfed.core.statistics import distances_to_statistics
from polyfed.methods.generating import InputGenerating
from polyfed.models.generators import Noise

TEACHER = "teacher/"  # names of the uploaded networks in a stage


@dataclass(frozen=True)
class Synthesizing(InputGenerating):
    """A server that makes images of what uploaded networks know; only the server has the generator.

    Parameters
    ----------
    syntheses, warm_up
        Batches of images that are made in a round; Eq. (3) counts after `warm_up` of them.
    synthesis_batch, generator_steps, generator_lr, noise_lr
        Images of a synthesis, steps of Eq. (4) for it (Adam), learning rates of G and of the noise.
    bn_weight, label_weight, adversarial_weight
        Weights of Eq. (4).
    """

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

    def check(self) -> None:
        """Refuse settings with which nothing would be learned from the images."""
        super().check()
        if self.warm_up >= self.syntheses:
            raise InputError(f"{self.name}: warm_up must be below syntheses ({self.syntheses}), got {self.warm_up}.")

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
                training=self.generator_training(ctx, batch_size=size),
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
