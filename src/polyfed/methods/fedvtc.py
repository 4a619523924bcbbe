"""FedVTC: Bridging Generalization Gap of Heterogeneous Federated Clients Using Generative Models.

Clients of any architecture exchange class means of their features (prototypes) and one vector of standard deviations.
Beside its classifier each client trains a small decoder of transposed convolutions, as the decoder of a variational
autoencoder whose encoder is the client's own feature extractor and whose prior is a Gaussian around the *global*
prototype of the class (its loss L_vtc, Eq. 1 to 6: `variational.py`). At the end the decoders are averaged once, and
every client fine-tunes its network on images decoded from the global class Gaussians, of all classes alike. Equation
numbers are those of docs/methods/fedvtc.md.

Deviations (more in docs/methods/fedvtc.md):
    The paper's formulas were rebuilt from its prose and its cost table; where it is silent a field has the alternative.
    Errors, KL and matching are means over pixels and latents (`reduction`): sums diverge at p = 4096 with SGD 0.01.
    Backbones of another size reach the common latent size p by a linear map without activation (`feature_dim`).
    Before a class has a global prototype, its KL term has no pull on the mean and it takes no part in matching.
    The number of fine-tuning rounds R is T/20 (rounded), which the paper's cost table implies; they are one stage.
    A client that never trained sends no decoder; one with a single sample is not skipped.
    Class numbers travel with the prototypes (one byte each), and the decoder's BatchNorm statistics with its weights.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar, Literal, cast

import torch
from torch import Tensor
from torch.nn import functional as F

from polyfed.core.errors import InputError
from polyfed.core.fields import AtLeastOne, OptimizerName, Positive
from polyfed.core.message import Message
from polyfed.core.method import EVALUATE, Combination, Local, Plan, Step
from polyfed.core.party import Blueprint, ClientInfo, Context, Party, load_state
from polyfed.core.prototypes import class_means, mean_prototypes, merged
from polyfed.core.samples import Samples
from polyfed.core.stage import Aux, Batch, Stage, Update, turns_by_epoch
from polyfed.core.traffic import Symbol, Traffic, model_size
from polyfed.methods.variational import VariationalLoss
from polyfed.models.contract import trainable_names
from polyfed.models.vtc import VTC, latent_misfit, recalibrated, synthetic_set
from polyfed.ops.aggregate import plain_mean

TUNE = Step("tune", who="all", up=False, evaluate="after_finetuning")
KNOWN = "C_m*(4*F + c) + 4*F"  # bytes of prototypes and sigma, as they come down and go up
OWN = "C_k*(4*F + c + [weighting == 'samples']*4) + 4*F"


def head_loss(nets: Mapping[str, Any], batch: Batch, aux: Aux) -> Tensor:
    """Return cross-entropy for the head alone: the extractor is in prediction mode."""
    return F.cross_entropy(nets["main"].head(nets["main"].eval().features(batch.x)), batch.y)


@dataclass(frozen=True)
class FedVTC(VariationalLoss):
    """Exchange prototypes, train a decoder on the side, fine-tune on decoded images of all classes.

    With `rec_weight=0, kl_weight=0, lambda_dm=0, finetune=False` it is local training exactly, but for a last batch of
    one sample: it joins the batch before it, since the decoder has BatchNorm.

    Parameters
    ----------
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
    family: ClassVar[str] = "prototypes"
    needs: ClassVar[frozenset[str]] = frozenset({"feature_dim", "images", "classes"})
    knows_rounds: ClassVar[bool] = True
    sends: ClassVar[str] = "the mean feature of each class it holds, a vector of standard deviations, its decoder"
    shares: ClassVar[frozenset[str]] = frozenset({"vtc"})
    combines: ClassVar[Mapping[str, Combination]] = {
        "params/vtc": "mean",
        "data/prototypes": "classes",
        "data/sigma": "mean",
    }
    traffic: ClassVar[Mapping[str, Traffic]] = {
        "main": Traffic(f"{KNOWN} + [vtc_upload == 'round' and t > 1]*4*D", f"{OWN} + [vtc_upload == 'round']*4*D"),
        "decoders": Traffic(up="[vtc_upload == 'final']*4*D"),
        "tune": Traffic(f"{KNOWN} + 4*D"),
    }
    symbols: ClassVar[Mapping[str, Symbol]] = {"D": model_size("vtc", "numbers of the decoder", "decoder.")}

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
        return None if size is None else latent_misfit(size, input_shape)

    def plan(self) -> Plan:
        """Prototypes in the rounds; then decoders go up, their mean comes down, and clients fine-tune."""
        decoders = Step("decoders", who="all", down=False, up=self.vtc_upload == "final", evaluate="before_finetuning")
        return Plan(after=(decoders, TUNE) if self.finetune else ())

    # --- server ---

    def setup_server(self, server: Party, infos: Mapping[int, ClientInfo], ctx: Context) -> None:
        """No class has a prototype yet; sigma is the initial one."""
        size = next(iter(ctx.blueprints.values())).feature_dim
        assert size is not None  # one of the needs
        server.memory.update(prototypes={}, sigma=torch.full((size,), self.sigma_init))
        # For those who look at the images later (analysis/synthetic.py).
        server.memory.update(image_shape=list(ctx.input_shape), norm_statistics=self.norm_statistics)

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
        data = class_means(client, ctx)
        if self.weighting == "uniform":
            del data["counts"]  # nobody needs to know them
        reply = Message(data={**data, "sigma": vtc.sigma})
        if self.vtc_upload == "round":
            reply.params["vtc"] = vtc.shared()
        return reply

    def stages(self, client: Party, ctx: Context) -> Local:
        """Yield the local training: model and decoder in turn on each batch, in each epoch, or at once."""
        if not (self.rec_weight or self.kl_weight or self.lambda_dm):
            yield Stage(self.loss)
            return None
        training = ctx.training
        decoder = replace(training, lr=self.vtc_lr or training.lr, optimizer=self.vtc_optimizer or training.optimizer)
        updates = (
            Update((self.model_loss,), {"main": None}),
            Update((self.decoder_loss,), {"vtc": None}, training=decoder),
        )
        fields = (self.lambda_dm, self.kl_weight, self.rec_weight, self.reduction, self.dm_mode, self.dm_latents)
        # Runs that differ after their rounds only share them; a subclass may have more in its losses.
        key = ("L_vtc", self.joint_training, *fields) if type(self) is FedVTC else None
        stage = Stage(updates=updates, aux=self.aux(client, ctx), draws=self.draws(client), key=key)
        if self.joint_training:
            yield replace(stage, updates=(Update((self.joint_loss,), {"main": None, "vtc": None}),))
        elif self.alternate == "batch":
            yield stage
        else:
            yield from turns_by_epoch(stage, training)
        return None

    # --- losses ---

    def joint_loss(self, nets: Mapping[str, Any], batch: Batch, aux: Aux) -> Tensor:
        """Return L_ce + L_vtc for everything at once; decoded images move no running statistics of the model."""
        main = nets["main"]
        z = main.features(batch.x)
        return F.cross_entropy(main.head(z), batch.y) + self.vtc_loss(main.still(), nets["vtc"], z, batch, aux)

    def model_loss(self, nets: Mapping[str, Any], batch: Batch, aux: Aux) -> Tensor:
        """Return L_ce + L_vtc for the model (Eq. 7): the decoder's running statistics do not move either."""
        return self.joint_loss({**nets, "vtc": nets["vtc"].still()}, batch, aux)

    def decoder_loss(self, nets: Mapping[str, Any], batch: Batch, aux: Aux) -> Tensor:
        """Return L_vtc for decoder and sigma (Eq. 8); the model is in prediction mode."""
        main = nets["main"].eval()
        return self.vtc_loss(main, nets["vtc"], main.features(batch.x), batch, aux)

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
            trainable={"main": trainable_names(client.main, ctx.input_shape, "head") if head else None},
            data=Samples(images, labels, scaling=replace(client.train.scaling, divisor=1.0)),
            epochs=self.finetune_epochs or rounds * ctx.training.epochs,
            training=replace(ctx.training, lr=self.finetune_lr or ctx.training.lr),
        )
