"""FedVTC: Bridging Generalization Gap of Heterogeneous Federated Clients Using Generative Models.

Clients of any architecture exchange class means of their features (prototypes) and one vector of standard deviations.
Beside its classifier each client trains a small decoder of transposed convolutions, as the decoder of a variational
autoencoder whose encoder is the client's own feature extractor and whose prior is a Gaussian around the *global*
prototype of the class. At the end the decoders are averaged once, and every client fine-tunes its network on images
decoded from the global class Gaussians, of all classes alike. Equation numbers are those of docs/methods/fedvtc.md.

Deviations:
    The paper's formulas were rebuilt from its prose and its cost table; where it is silent a field has the alternative
    (`prior_cov`, `dm_mode`, `dm_latents`, `rec_reduction`, `alternate`, `keep_sigma`, `average_over`).
    Backbones of another size reach the common latent size p by a linear map without activation (the run option
    `feature_dim`); features that have this size already are taken as they are, also where they are not negative.
    Before a class has a global prototype, its KL term has no pull on the mean and it takes no part in matching.
    The number of fine-tuning rounds R is T/20 (rounded), which the paper's cost table implies; they are one stage, so a
    decay of the learning rate runs on. A client that never trained sends no decoder, and after `vtc_upload="round"` no
    further upload is needed.
    A client with a single sample is not skipped: its norm layers use their running statistics.
    With `alternate="epoch"` the optimisers start anew each epoch.
    Class numbers travel with the prototypes (one byte each), and the decoder's BatchNorm statistics with its weights.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar, Literal, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from polyfed.core.errors import InputError
from polyfed.core.fields import AtLeastOne, NotNegative, OptimizerName, Positive
from polyfed.core.message import Message, State
from polyfed.core.method import EVALUATE, Local, Method, Plan, Step
from polyfed.core.nets import EVAL, mode
from polyfed.core.party import Blueprint, ClientInfo, Context, Party, load_state, state_of
from polyfed.core.prototypes import Prototypes, class_means, mean_prototypes, merged, spread
from polyfed.core.samples import Samples, Scaling
from polyfed.core.settings import Training
from polyfed.core.stage import Aux, Batch, Draw, Stage, Update
from polyfed.models.contract import parameter_parts
from polyfed.models.vtc import Decoder, start_size
from polyfed.ops.aggregate import weighted_mean
from polyfed.ops.gaussian import (
    class_latents,
    distribution_matching,
    gaussian_kl,
    reconstruction_error,
    reparameterised,
)

TUNE = Step("tune", who="all", up=False, evaluate="after_finetuning")


class VTC(nn.Module):
    """A decoder psi and the standard deviations sigma = exp(s) of the latents it is fed with."""

    def __init__(self, latent_dim: int, image_shape: Sequence[int], sigma: float = 0.1) -> None:
        super().__init__()
        self.decoder = Decoder(latent_dim, image_shape)
        self.log_sigma = nn.Parameter(torch.full((latent_dim,), math.log(sigma)))

    @property
    def sigma(self) -> Tensor:
        """The standard deviations, detached."""
        return self.log_sigma.detach().exp()

    def shared(self) -> State:
        """Return the decoder's weights and running statistics: what is averaged (sigma travels by itself)."""
        return {n: t for n, t in state_of(self).items() if n.startswith("decoder.") and t.is_floating_point()}

    def forward(self, latents: Tensor) -> Tensor:
        """Return images in [0, 1]."""
        images: Tensor = self.decoder(latents)
        return images


@dataclass(frozen=True)
class FedVTC(Method):
    """Exchange prototypes, train a decoder on the side, fine-tune on decoded images of all classes.

    With `rec_weight=0, kl_weight=0, lambda_dm=0, finetune=False` it is local training exactly, but for a last batch of
    one sample: it joins the batch before it, since the decoder has BatchNorm.

    Parameters
    ----------
    lambda_dm
        Weight lambda of distribution matching; 0 leaves it (and its pass through the extractor) out.
    kl_weight, rec_weight
        Weights of the two parts of the negative ELBO; 1 and 1 are the plain sum.
    rec_reduction
        Squared error of an image as `sum` or `mean` over its pixels.
    dm_mode
        Matching of the mean feature of a class (`class_mean`) or of every feature (`pointwise`).
    dm_latents
        Latents that are matched: those of the `batch`, or drawn from the `global` class Gaussians.
    prior_cov
        Covariance of the prior: `identity`, or the global standard deviations (`global_sd`).
    sigma_init, keep_sigma
        First standard deviation; whether a client goes on with its own instead of taking the global one each round.
    alternate, joint_training
        Model and decoder take turns every `batch` or every `epoch`; joint training moves both in one step (for the
        comparison of memory).
    weighting
        Global prototypes: plain mean over the holders (`uniform`) or by their `samples` of the class.
    vtc_upload, average_over
        Decoders are averaged once at the end (`final`) or every `round`; at the end over the clients that `trained` at
        least once, or over `all`.
    norm_statistics
        BatchNorm statistics of the mean decoder when it makes images: `averaged` like its weights, or `recalibrated` on
        latents of all classes.
    vtc_lr, vtc_optimizer
        For decoder and sigma (None: the run's own).
    finetune, finetune_scope
        Whether to fine-tune, and what: `all`, or only the `head`.
    samples_per_class, finetune_epochs, finetune_lr
        M synthetic images of each class (None: 500 up to ten classes, otherwise 1000); epochs on them (None: R rounds
        of the run's local epochs, R = rounds/20 but at least 1); their learning rate (None: the run's own).
    """

    name: ClassVar[str] = "fedvtc"
    paper: ClassVar[str] = "FedVTC"
    family: ClassVar[str] = "prototypes and a decoder"
    needs: ClassVar[frozenset[str]] = frozenset({"feature_dim", "images"})
    sends: ClassVar[str] = "the mean feature of each class it holds, a vector of standard deviations, its decoder"
    shares: ClassVar[frozenset[str]] = frozenset({"vtc"})

    lambda_dm: NotNegative = 1.0
    kl_weight: NotNegative = 1.0
    rec_weight: NotNegative = 1.0
    rec_reduction: Literal["sum", "mean"] = "sum"
    dm_mode: Literal["class_mean", "pointwise"] = "class_mean"
    dm_latents: Literal["batch", "global"] = "batch"
    prior_cov: Literal["identity", "global_sd"] = "identity"
    sigma_init: Positive = 0.1
    keep_sigma: bool = False
    alternate: Literal["batch", "epoch"] = "batch"
    joint_training: bool = False
    weighting: Literal["uniform", "samples"] = "uniform"
    vtc_upload: Literal["final", "round"] = "final"
    average_over: Literal["trained", "all"] = "trained"
    norm_statistics: Literal["averaged", "recalibrated"] = "averaged"
    vtc_lr: Positive | None = None
    vtc_optimizer: OptimizerName | None = None
    finetune: bool = True
    finetune_scope: Literal["all", "head"] = "all"
    samples_per_class: AtLeastOne | None = None
    finetune_epochs: AtLeastOne | None = None
    finetune_lr: Positive | None = None

    def check(self) -> None:
        """Refuse choices that do not go together."""
        if self.joint_training and (self.vtc_lr is not None or self.vtc_optimizer is not None):
            raise InputError(f"{self.name}: joint_training has one optimizer, leave out vtc_lr and vtc_optimizer.")
        if self.joint_training and self.alternate != "batch":
            raise InputError(f"{self.name}: joint_training takes no turns, leave out alternate.")
        if self.vtc_upload == "round" and self.average_over != "trained":
            raise InputError(f"{self.name}: with vtc_upload='round' those who trained are averaged: no average_over.")

    def misfit(
        self, infos: Sequence[ClientInfo], blueprints: Mapping[str, Blueprint], input_shape: tuple[int, ...]
    ) -> str | None:
        """Return what to do when the latents do not fill the decoder's first map."""
        size = next(iter(blueprints.values())).feature_dim
        height, width = start_size(input_shape)
        step = height * width
        if size is None or size % step == 0:
            return None
        below = size // step * step
        near = f"{below} or {below + step}" if below else f"{step}"
        return (
            f"features that fill maps of {height}x{width} pixels (a quarter of the image), but they have {size} "
            f"numbers: set feature_dim to {near}"
        )

    def plan(self) -> Plan:
        """Prototypes in the rounds; then decoders go up, their mean comes down, and clients fine-tune."""
        decoders = Step("decoders", who="all", down=False, up=self.vtc_upload == "final", evaluate="before_finetuning")
        return Plan(after=(decoders, TUNE) if self.finetune else ())

    # --- server ---

    def setup_server(self, server: Party, infos: Mapping[int, ClientInfo], ctx: Context) -> None:
        """No class has a prototype yet; sigma is the initial one."""
        size = next(iter(ctx.blueprints.values())).feature_dim
        assert size is not None  # one of the needs
        server.memory.update(
            prototypes={},
            sigma=torch.full((size,), self.sigma_init),
            image_shape=list(ctx.input_shape),
            norm_statistics=self.norm_statistics,
        )

    def send(self, server: Party, info: ClientInfo, step: Step, ctx: Context) -> Message:
        """Send the prototypes that exist, sigma, and the mean decoder where it is wanted."""
        if step.name == EVALUATE.name:
            return Message()
        message = Message(data={**server.memory["prototypes"], "sigma": server.memory["sigma"]})
        if "vtc" in server.memory:  # from the second round on, or only at the end: as they are uploaded
            message.params["vtc"] = server.memory["vtc"]
        return message

    def fuse(self, server: Party, replies: Mapping[int, Message], step: Step, ctx: Context) -> None:
        """Average prototypes class by class over their holders, sigma and decoders over those who sent them."""
        memory = server.memory
        decoders = [reply.params["vtc"] for reply in replies.values() if "vtc" in reply.params]
        if decoders:
            memory["vtc"] = {name: plain_mean(decoder[name] for decoder in decoders) for name in decoders[0]}
        told = [reply.data for reply in replies.values() if "sigma" in reply.data]
        if not told:
            return
        fresh = mean_prototypes(told, ctx.num_classes, self.weighting)
        memory["prototypes"] = merged(memory["prototypes"], fresh, ctx.num_classes)  # others keep their old value
        memory["sigma"] = plain_mean(data["sigma"] for data in told)
        missing = set(range(ctx.num_classes)) - set(memory["prototypes"]["classes"].tolist())
        if missing:
            ctx.log("classes_without_prototype", sorted(missing))

    # --- client ---

    def setup_client(self, client: Party, ctx: Context) -> None:
        """Give the client a decoder: the same initial one for all, or their mean would mean nothing."""
        build = partial(VTC, cast(int, client.main.feature_dim), ctx.input_shape, self.sigma_init)
        client.models["vtc"] = ctx.initialized("vtc", build)

    def local(self, client: Party, step: Step, ctx: Context) -> Local:
        """Train and tell prototypes; send the decoder; or fine-tune on decoded images."""
        vtc: Any = client.models["vtc"]
        if step.name == "decoders":
            wanted = step.up and (self.average_over == "all" or "trained" in client.memory)
            return Message(params={"vtc": vtc.shared()}) if wanted else None
        if step.name == TUNE.name:
            yield self.tuning(client, ctx)
            return None
        if not self.keep_sigma:
            load_state(vtc, {"log_sigma": client.inbox.data["sigma"].log()})
        yield from self.stages(client, ctx)
        client.memory["trained"] = 1
        data = class_means(client.main, client.train, ctx.num_classes)
        if self.weighting == "uniform":
            del data["counts"]  # nobody needs to know them
        reply = Message(data={**data, "sigma": vtc.sigma})
        if self.vtc_upload == "round":
            reply.params["vtc"] = vtc.shared()
        return reply

    def stages(self, client: Party, ctx: Context) -> Local:
        """Yield the local training: model and decoder in turn on each batch, in each epoch, or at once."""
        training = ctx.training
        decoder = replace(training, lr=self.vtc_lr or training.lr, optimizer=self.vtc_optimizer or training.optimizer)
        model_update = Update((self.model_loss,), {"main": None})
        decoder_update = Update((self.decoder_loss,), {"vtc": None}, training=decoder)
        stage = Stage(updates=(model_update, decoder_update), aux=self.aux(client, ctx), draws=self.draws(client))
        if not (self.rec_weight or self.kl_weight or self.lambda_dm):
            yield replace(stage, updates=(model_update,))
        elif self.joint_training:
            yield replace(stage, updates=(Update((self.joint_loss,), {"main": None, "vtc": None}),))
        elif self.alternate == "batch":
            yield stage
        else:
            for epoch in range(training.epochs):
                for update in (model_update, decoder_update):
                    yield replace(stage, updates=(decayed(update, training, epoch),), epochs=1)
        return None

    def aux(self, client: Party, ctx: Context) -> dict[str, Tensor]:
        """Return what the losses need beside the batch: prototypes, standard deviations, the scaling of images."""
        sigma = client.inbox.data["sigma"]
        prototypes, known = spread(client.inbox.data, ctx.num_classes, len(sigma))
        return {
            "prototypes": prototypes,
            "known": known,
            "global_sd": sigma,
            "prior_sd": sigma if self.prior_cov == "global_sd" else torch.ones_like(sigma),
            **channels(client.train.scaling),
        }

    def draws(self, client: Party) -> dict[str, Draw]:
        """Return the noise of the latents."""
        draw = Draw((None, cast(int, client.main.feature_dim)))
        return {"noise": draw, "latents": draw} if self.dm_latents == "global" and self.lambda_dm else {"noise": draw}

    # --- losses ---

    def model_loss(self, nets: Mapping[str, Any], batch: Batch, aux: Aux) -> Tensor:
        """Return L_ce + L_vtc for the model (Eq. 7); decoded images and the decoder move no running statistics."""
        main = nets["main"]
        z = main.features(batch.x)
        loss = F.cross_entropy(main.head(z), batch.y)
        if not (self.rec_weight or self.kl_weight or self.lambda_dm):
            return loss
        return loss + self.vtc_loss(main.still(), nets["vtc"].still(), z, batch, aux)

    def decoder_loss(self, nets: Mapping[str, Any], batch: Batch, aux: Aux) -> Tensor:
        """Return L_vtc for decoder and sigma (Eq. 8); the model is in prediction mode."""
        main = nets["main"].eval()
        return self.vtc_loss(main, nets["vtc"], main.features(batch.x), batch, aux)

    def joint_loss(self, nets: Mapping[str, Any], batch: Batch, aux: Aux) -> Tensor:
        """Return L_ce + L_vtc for everything at once."""
        main = nets["main"]
        z = main.features(batch.x)
        return F.cross_entropy(main.head(z), batch.y) + self.vtc_loss(main.still(), nets["vtc"], z, batch, aux)

    def vtc_loss(self, main: Any, vtc: Any, z: Tensor, batch: Batch, aux: Aux) -> Tensor:
        """Return L_vtc = L_rec + L_KL + lambda·L_DM (Eq. 4 and 6), each with its weight."""
        sigma = vtc.parameters()["log_sigma"].exp()
        prototype, known = aux["prototypes"][batch.y], aux["known"][batch.y]
        loss = self.kl_weight * gaussian_kl(z, sigma, prototype, aux["prior_sd"], known).mean()  # Eq. 3
        if not (self.rec_weight or self.lambda_dm):
            return loss
        images = vtc(reparameterised(z, sigma, batch["noise"]))  # Eq. 1
        target = batch.x * aux["std"] + aux["mean"]
        loss = loss + self.rec_weight * reconstruction_error(images, target, self.rec_reduction)  # Eq. 2
        if not self.lambda_dm:
            return loss
        if self.dm_latents == "global":
            centre = torch.where(known.unsqueeze(1) > 0, prototype, z)
            images = vtc.still()(reparameterised(centre, aux["global_sd"], batch["latents"]))  # statistics: of Eq. 1
        features = main.features((images - aux["mean"]) / aux["std"])
        matching = distribution_matching(features, batch.y, aux["prototypes"], aux["known"], self.dm_mode)  # Eq. 5
        return loss + self.lambda_dm * matching

    # --- fine-tuning ---

    def tuning(self, client: Party, ctx: Context) -> Stage:
        """Return the cross-entropy training on synthetic images of every class that has a prototype."""
        packed, sigma = client.inbox.data, client.inbox.data["sigma"]
        count = self.samples_per_class or (500 if ctx.num_classes <= 10 else 1000)
        vtc = client.models["vtc"]
        if self.norm_statistics == "recalibrated":
            vtc = recalibrated(vtc, packed, sigma, ctx.rng("statistics", client))
        images, labels = synthetic_set(vtc, packed, sigma, count, ctx.rng("synthetic", client))
        rounds = max(1, round(ctx.rounds / 20))
        head = self.finetune_scope == "head"
        return Stage(
            head_loss if head else self.loss,
            trainable={"main": head_names(client.main, ctx.input_shape) if head else None},
            data=Samples(images, labels, scaling=replace(client.train.scaling, divisor=1.0)),
            epochs=self.finetune_epochs or rounds * ctx.training.epochs,
            training=replace(ctx.training, lr=self.finetune_lr or ctx.training.lr),
        )


def head_loss(nets: Mapping[str, Any], batch: Batch, aux: Aux) -> Tensor:
    """Return cross-entropy for the head alone: the extractor is in prediction mode."""
    return F.cross_entropy(nets["main"].head(nets["main"].eval().features(batch.x)), batch.y)


def head_names(model: nn.Module, input_shape: Sequence[int]) -> tuple[str, ...]:
    """Return the names of the head's parameters, for models of any make."""
    return tuple(name for name, part in parameter_parts(model, input_shape).items() if part == "head")


def decayed(update: Update, training: Training, epoch: int) -> Update:
    """Return the update for one epoch on its own, at the learning rate that this epoch would have."""
    own = update.training or training
    return replace(update, training=replace(own, lr=own.lr * own.decay ** (epoch // own.decay_every), decay=1.0))


def channels(scaling: Scaling) -> dict[str, Tensor]:
    """Return mean and standard deviation by channel: `x * std + mean` undoes the scaling of network inputs."""
    return {name: torch.tensor(getattr(scaling, name)).view(1, -1, 1, 1) for name in ("mean", "std")}


def plain_mean(tensors: Iterable[Tensor]) -> Tensor:
    """Return the mean with equal weights."""
    tensors = list(tensors)
    return weighted_mean(tensors, [1.0] * len(tensors))


# --- synthetic images ---


@torch.no_grad()
def decode(vtc: nn.Module, latents: Tensor, chunk: int = 512) -> Tensor:
    """Return the images of latents, in prediction mode."""
    with mode(vtc, EVAL):
        return torch.cat([vtc(part) for part in latents.split(chunk)])


@torch.no_grad()
def recalibrated(
    vtc: nn.Module, packed: Prototypes, sigma: Tensor, rng: torch.Generator, count: int = 512
) -> nn.Module:
    """Return a copy whose norm layers have the statistics of about `count` latents, of all classes alike."""
    vtc = copy.deepcopy(vtc)
    for layer in vtc.modules():
        if isinstance(layer, nn.modules.batchnorm._BatchNorm):
            layer.momentum = 1.0  # one pass then replaces the statistics
    prototypes = packed.get("prototypes", sigma.new_zeros(0, len(sigma)))
    if len(prototypes):
        each = math.ceil(count / len(prototypes))
        vtc.train()(torch.cat([class_latents(prototype, sigma, each, rng) for prototype in prototypes]))
    return vtc


def synthetic_set(
    vtc: nn.Module, packed: Prototypes, sigma: Tensor, count: int, rng: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Return `count` images in [0, 1] and labels of every class that has a prototype, class after class (Eq. 9)."""
    if "prototypes" not in packed:
        raise InputError("fedvtc: no class has a prototype yet, so there is nothing to decode: train a round first.")
    pairs = list(zip(packed["classes"].tolist(), packed["prototypes"], strict=True))
    images = torch.cat([decode(vtc, class_latents(prototype, sigma, count, rng)) for _, prototype in pairs])
    return images, torch.tensor([label for label, _ in pairs]).repeat_interleave(count)
