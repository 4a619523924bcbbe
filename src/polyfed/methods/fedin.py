"""FedIN: Federated Intermediate Layers Learning for Model Heterogeneity (anonymous, under review).

Every model is cut in three: extractor e (stem), intermediate layers m (middle), classifier c (head); only the depth
of m differs. A client sends, with its weights, one batch of feature pairs (s_in, s_out), the input and output of its
middle. In the next round others regress their own middle on such pairs while they train on their data as in FedProx;
the two gradients of the middle are combined so that they do not fight. Noise on the features protects the images.

Deviations (more in docs/methods/fedin.md):
    Where there are no pairs (the first round, a lone participant, a middle without parameters) the step is FedProx's
    (with noise, if any): the factor kappa = lambda/2 of extractor and classifier belongs to the simplified rule.
    The paper's optimum contains no supervised gradient where the two agree, and the paper does not run it;
    `analytic_add_local` adds one. "Without alleviation" is read as the plain sum of the two gradients.
    Pairs are those of other clients, drawn without replacement for each client (`pairs` has two other readings).
    There is no adapter for s_in (a 1x1 convolution at the end of the extractor): different stems are refused.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any, ClassVar, Literal, cast

import torch
from torch import Tensor
from torch.nn import functional as F

from polyfed.core.errors import MessageError
from polyfed.core.fields import AtLeastOne, NotNegative
from polyfed.core.message import Message
from polyfed.core.method import EVALUATE, Combination, Local, Step
from polyfed.core.needs import REMEDIES
from polyfed.core.nets import EVAL, mode
from polyfed.core.party import Blueprint, ClientInfo, Context, Party, state_of
from polyfed.core.stage import Aux, Batch, Draw, Grads, Stage
from polyfed.core.traffic import Symbol, Told, Traffic
from polyfed.methods.fedavg import WEIGHTS
from polyfed.methods.fedprox import FedProx
from polyfed.models.contract import trainable_names
from polyfed.ops.distance import squared_distance
from polyfed.ops.gradients import add_local, project
from polyfed.ops.noise import noisy

CUTS = ("s_in", "s_out")  # the input and the output of the middle


def check_pairs(reply: Message, info: ClientInfo, blueprint: Blueprint) -> None:
    """Refuse features of other shapes than the network's: strangers are left out then, and the others count."""
    if reply.data.keys() != {*CUTS} or len(reply.data["s_in"]) != len(reply.data["s_out"]):
        raise MessageError(f"Message from {info} refused: its features do not come in pairs.")
    for cut, agreed in blueprint.cuts.items():
        shape = tuple(reply.data[cut].shape[1:])
        if shape != agreed:
            problem = f"{cut} is {list(shape)}, but {list(agreed)} at the others: {REMEDIES[cut]}"
            raise MessageError(f"Message from {info} refused: {problem}.")


PAIRS = Traffic(f"{WEIGHTS} + 4*F_k*S", f"{WEIGHTS} + 8 + [use_in]*4*min(feature_batch, n)*S")


def pair_size(told: Told) -> int:
    """Return how many numbers one pair has."""
    return sum(prod(told.blueprint.cuts[cut]) for cut in CUTS)


def pairs_told(told: Told) -> int:
    """Return how many pairs a message holds."""
    return len(told.message.data.get("s_in", ()))


@dataclass(frozen=True)
class FedIN(FedProx):
    """FedProx plus regression of the middle layers on other clients' features.

    Without features (`use_in=False`) this is FedProx with the same view, and FedAvg when also mu = 0, exactly.

    Parameters
    ----------
    view, buffers
        `owned` (layer-wise) or `same_arch`; `auto` takes layer-wise for models of one family. Each client keeps its own
        running statistics of BatchNorm (`local`).
    mu, prox_anchor
        The penalty is (mu/2)·||w - w0||^2, and the paper's mu/2 is 0.05; 0: "w/o Prox". w0: the weights `received` at
        the start of the round, or the client's `own` at the end of its previous one.
    use_in
        Exchange features and learn from them. False: "w/o IN"; noise then plays no part either.
    combine
        How the middle follows both gradients. `simple`: Z = G_IN + (lam/2)·G_local (Eq. 13); `analytic`: G_IN projected
        onto the half-space that agrees with G_local (Eq. 12); `none`: Z = G_IN + G_local ("w/o Opt").
    lam
        Weight lambda of the simplified rule and of what `analytic_add_local` adds. 0: the middle follows features only,
        and stem and head stand still unless `outer_scale` is `unit`.
    alleviation_scope, analytic_add_local
        Project each `tensor` on its own, or all of the middle's tensors as one vector (`global`); add (lam/2)·G_local
        to the projection, which still agrees with G_local.
    outer_scale
        Gradient of stem and head under the simplified rule: `same` = (lam/2)·G_local; `unit` = G_local, as elsewhere.
    noise, sigma, noise_at
        zeta, in standard deviations of the features (one number for a `tensor`, or one for each `channel`): in local
        training at both cuts, and on the features sent (`everywhere`), or only on what is `sent`. The paper's protected
        variant has 0.8; 0: none.
    feature_batch, feature_samples
        Number B of pairs that a client sends (at most as many as it has samples), and that it receives (None: B).
    pairs
        Where they come from: the `pool` of all other clients of the last round, `one_client` of them drawn at random,
        or one `common` draw for everybody, which may hold a client's own.
    """

    name: ClassVar[str] = "fedin"
    paper: ClassVar[str] = "FedIN (anonymous, under review)"
    family: ClassVar[str] = "depth"
    needs: ClassVar[frozenset[str]] = frozenset({"split3", "s_in", "s_out"})
    sends: ClassVar[str] = "model weights, one small batch of features before and after the middle, number of samples"
    combines: ClassVar[Mapping[str, Combination]] = {
        "params/main": "mean",
        "data/s_in": "rows",
        "data/s_out": "rows",
    }
    traffic: ClassVar[Mapping[str, Traffic]] = {"main": PAIRS, "pretrain": Traffic(WEIGHTS, PAIRS.up)}
    symbols: ClassVar[Mapping[str, Symbol]] = {
        "S": Symbol("numbers of a sample before and after the middle", pair_size),
        "F_k": Symbol("pairs that the client gets, feature_samples if there are so many; at first none", pairs_told),
    }

    buffers: Literal["average", "local"] = "local"
    mu: NotNegative = 0.1
    prox_anchor: Literal["received", "own"] = "received"
    use_in: bool = True
    combine: Literal["simple", "analytic", "none"] = "simple"
    lam: NotNegative = 1.0
    alleviation_scope: Literal["tensor", "global"] = "tensor"
    analytic_add_local: bool = False
    outer_scale: Literal["same", "unit"] = "same"
    noise: NotNegative = 0.0
    sigma: Literal["tensor", "channel"] = "tensor"
    noise_at: Literal["everywhere", "sent"] = "everywhere"
    feature_batch: AtLeastOne = 16
    feature_samples: AtLeastOne | None = None
    pairs: Literal["pool", "common", "one_client"] = "pool"

    def requirements(self) -> frozenset[str]:
        """Without features any model will do."""
        return self.needs if self.use_in else frozenset()

    def misfit(
        self, infos: Sequence[ClientInfo], blueprints: Mapping[str, Blueprint], input_shape: tuple[int, ...]
    ) -> str | None:
        """Features are exchanged also where no weights are common."""
        return None if self.use_in else super().misfit(infos, blueprints, input_shape)

    def beyond_training(self) -> str | None:
        """Features are those of samples."""
        return "features of their samples" if self.use_in else None

    @property
    def kappa(self) -> float:
        """Factor of G_local for stem and head, where there are pairs."""
        return self.lam / 2 if self.combine == "simple" and self.outer_scale == "same" else 1.0

    # --- server ---

    def send(self, server: Party, info: ClientInfo, step: Step, ctx: Context) -> Message:
        """Send the client's layers and, once there is a pool, a batch of pairs S."""
        message = super().send(server, info, step, ctx)
        if self.use_in and step.name != EVALUATE.name and "pool" in server.memory:
            rows = self.sample_pairs(server.memory["pool"]["sender"], info.id, ctx)
            if len(rows):
                message.data = {cut: server.memory["pool"][cut][rows] for cut in CUTS}
        return message

    def sample_pairs(self, sender: Tensor, client: int, ctx: Context) -> Tensor:
        """Return which pairs of the pool a client gets: without replacement, fewer where there are not enough."""
        rng = ctx.rng("fedin/pairs", None if self.pairs == "common" else client)
        rows = torch.nonzero(sender != client).flatten()
        if self.pairs == "common" and len(rows):
            rows = torch.arange(len(sender))
        if self.pairs == "one_client" and len(rows):
            others = torch.unique(sender[rows])
            chosen = others[int(torch.randint(len(others), (1,), generator=rng))]
            rows = torch.nonzero(sender == chosen).flatten()
        return rows[torch.randperm(len(rows), generator=rng)[: self.feature_samples or self.feature_batch]]

    def fuse(self, server: Party, replies: Mapping[int, Message], step: Step, ctx: Context) -> None:
        """Average layers over the clients that have them; this round's pairs replace the pool."""
        if self.use_in:
            for client, reply in replies.items():
                check_pairs(reply, ctx.infos[client], ctx.blueprints[ctx.infos[client].architecture])
            pool = {cut: torch.cat([reply.data[cut] for reply in replies.values()]) for cut in CUTS}
            pool["sender"] = torch.cat([torch.full((len(r.data["s_in"]),), c) for c, r in replies.items()])
            server.memory["pool"] = pool
        super().fuse(server, replies, step, ctx)

    # --- client ---

    def loss(self, nets: Mapping[str, Any], batch: Batch, aux: Aux) -> Tensor:
        """Return l_local = CE(c(m(e(x))), y) + (mu/2)·||w - w0||^2, with noise at both cuts if there is any."""
        if "noise_in" not in batch:
            return super().loss(nets, batch, aux)
        net = nets["main"]
        s_in = noisy(net.stem(batch.x), self.noise, batch["noise_in"], self.sigma)
        s_out = noisy(net.middle(s_in), self.noise, batch["noise_out"], self.sigma)
        loss = batch.loss(net.head(s_out))
        return loss + self.mu / 2 * squared_distance(net.parameters(), aux["anchor"]) if self.mu else loss

    def feature_loss(self, nets: Mapping[str, Any], batch: Batch, aux: Aux) -> Tensor:
        """Return l_IN = MSE(m(s_in), s_out) on the received pairs, the same at every step of the round."""
        # Others' features must not enter the statistics that this client's own predictions use; one pair has none.
        net = nets["main"].eval() if len(aux["s_in"]) == 1 else nets["main"].still()
        return F.mse_loss(net.middle(aux["s_in"]), aux["s_out"])

    def joint_loss(self, nets: Mapping[str, Any], batch: Batch, aux: Aux) -> Tensor:
        """Return l_IN + kappa·l_local, whose gradient is the rule: kappa is lambda/2 for `simple` and 1 for `none`."""
        if len(aux["s_in"]) > 1:
            return self.feature_loss(nets, batch, aux) + self.kappa * self.loss(nets, batch, aux)
        # Local first: it moves the statistics of BatchNorm, which the backward pass of a single pair still reads.
        local = self.loss(nets, batch, aux)
        return self.feature_loss(nets, batch, aux) + self.kappa * local

    def alleviate(self, gradients: tuple[Grads, ...], aux: Aux) -> Grads:
        """Return Z for the middle and kappa·G_local for the rest, from (G_local, G_IN); `none` needs only their sum."""
        local, feature = gradients[0]["main"], {name: gradients[1]["main"][name] for name in aux["middle"]}
        z = feature if self.combine == "simple" else project(feature, local, self.alleviation_scope)
        if self.combine == "simple" or self.analytic_add_local:
            z = add_local(z, local, self.lam)
        return {"main": {name: z[name] if name in z else self.kappa * g for name, g in local.items()}}

    def stage(self, client: Party, ctx: Context) -> Stage:
        """Return FedProx's stage, with noise, and with the second loss where there are pairs to learn from."""
        stage = super().stage(client, ctx)
        if not self.use_in:
            return stage
        if self.noise and self.noise_at == "everywhere":
            cuts = ctx.blueprints[client.architecture].cuts
            stage.draws = {"noise_in": Draw((None, *cuts["s_in"])), "noise_out": Draw((None, *cuts["s_out"]))}
        middle = self.middle_names(client, ctx)
        if not client.inbox.data or not middle:
            return stage
        stage.aux = {**stage.aux, **client.inbox.data}
        if self.combine == "none" or (self.combine == "simple" and self.outer_scale == "same"):
            stage.loss = self.joint_loss  # one backward pass gives both gradients, already combined
            return stage
        stage.loss, stage.gradients = (self.loss, self.feature_loss), self.alleviate
        stage.aux = {**stage.aux, "middle": {name: torch.ones(()) for name in middle}}  # only the names count
        return stage

    def anchor(self, client: Party) -> dict[str, Tensor]:
        """Return w0: the received parameters, or those that the client itself had at the end of its last round."""
        received = super().anchor(client)
        own = client.memory.get("own", {}) if self.prox_anchor == "own" else {}
        return {name: own.get(name, tensor) for name, tensor in received.items()}

    def middle_names(self, client: Party, ctx: Context) -> tuple[str, ...]:
        """Return which of this client's parameters belong to its middle and may move."""
        make = partial(trainable_names, client.main, ctx.input_shape, "middle")
        names: tuple[str, ...] = ctx.cached(("fedin/middle", client.architecture), make)
        return names

    def local(self, client: Party, step: Step, ctx: Context) -> Local:
        """Train on data and pairs; return the weights and a batch of the client's own pairs."""
        reply = yield from super().local(client, step, ctx)
        assert reply is not None
        if self.prox_anchor == "own" and self.mu:
            own = state_of(client.main, buffers=False)
            client.memory["own"] = {name: own[name].clone() for name in self.anchor(client)}
        if self.use_in:
            reply.data = self.features(client, ctx)
        return reply

    def features(self, client: Party, ctx: Context) -> dict[str, Tensor]:
        """Return (s_in, s_out) of a random batch, with the final weights, in prediction mode, as they may leave."""
        rows = torch.randperm(len(client.train), generator=ctx.rng("fedin/batch", client))[: self.feature_batch]
        rng, main = ctx.rng("fedin/noise", client), cast(Any, client.main)

        def protected(s: Tensor) -> Tensor:
            unit = torch.randn(s.shape, generator=rng).to(s.device)
            return noisy(s, self.noise, unit, self.sigma) if self.noise else s

        with torch.no_grad(), mode(main, EVAL):
            s_in = protected(main.stem(client.train.inputs(rows).to(ctx.device)))
            return {"s_in": s_in, "s_out": protected(main.middle(s_in))}
