"""FedIN: Federated Intermediate Layers Learning for Model Heterogeneity (anonymous, under review).

Every model is cut in three: extractor e (stem), intermediate layers m (middle), classifier c (head); only the depth
of m differs. A client sends, with its weights, one batch of feature pairs (s_in, s_out), the input and output of its
middle. In the next round others regress their own middle on such pairs while they train on their data as in FedProx;
the two gradients of the middle are combined so that they do not fight. Noise on the features protects the images.

Deviations:
    Where there are no pairs (the first round, a lone participant, a middle without parameters) the step is FedProx's
    (with noise, if any): the factor kappa = lambda/2 of extractor and classifier belongs to the simplified rule and is
    1 without it.
    The paper's optimum contains no supervised gradient where the two agree, and the paper does not run it;
    `analytic_add_local` adds one. "Without alleviation" is read as the plain sum of the two gradients.
    The paper draws one batch of pairs and does not say how: here pairs of other clients, drawn without replacement
    for each client (`pairs` has two other readings).
    The noise level is one standard deviation for a tensor (`sigma="channel"`: one for each channel that has more than
    one value), over the current batch, with the gradient stopped.
    A last batch of one sample joins the batch before it instead of being dropped; a single pair, which has no batch
    statistics, passes through the middle in prediction mode. A client with one sample and BatchNorm trains in
    prediction mode altogether, pairs included.
    There is no adapter for s_in (a 1x1 convolution at the end of the extractor): different stems are refused.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from polyfed.core.errors import InputError, MessageError
from polyfed.core.fields import AtLeastOne, NotNegative
from polyfed.core.message import Message
from polyfed.core.method import EVALUATE, Local, Step
from polyfed.core.nets import EVAL, frozen_names, mode
from polyfed.core.party import Blueprint, ClientInfo, Context, Party, state_of
from polyfed.core.stage import Aux, Batch, Draw, Grads, Stage
from polyfed.methods.fedprox import FedProx
from polyfed.models.contract import evaluating, parameter_parts, sample_input
from polyfed.ops.distance import squared_distance
from polyfed.ops.gradients import add_local, project

Shape = tuple[int, ...]

CUTS = ("s_in", "s_out")  # the input and the output of the middle
REMEDIES = {
    "s_in": "give all models the same stem (its width and stride)",
    "s_out": "set feature_dim to give all models features of one size",
}


def noisy(s: Tensor, scale: float, unit: Tensor, sigma: str = "tensor") -> Tensor:
    """Return s + zeta·sigma(s)·epsilon, with sigma(s) the standard deviation of s (no gradient flows through it).

    `scale` is zeta, `unit` the standard normal epsilon, and `sigma` says what sigma(s) is taken over.
    """
    fixed = s.detach()
    if sigma == "channel" and s.numel() > s.shape[1]:  # a channel of one value has no spread: no noise would be added
        spread = fixed.std(dim=[d for d in range(s.dim()) if d != 1], correction=0, keepdim=True)
    else:
        spread = fixed.std(correction=0)
    return s + scale * spread * unit


def cut_shapes(module: nn.Module, input_shape: Shape) -> tuple[Shape, Shape]:
    """Return the shapes of s_in and s_out of one sample."""
    with evaluating(module), torch.no_grad():
        model: Any = module  # torch declares every attribute of a module a tensor or a module
        s_in = model.stem(sample_input(module, input_shape))
        return tuple(s_in.shape[1:]), tuple(model.middle(s_in).shape[1:])


def check_cuts(method: str, infos: Mapping[int, ClientInfo], cuts: Mapping[str, Mapping[int, Shape]]) -> None:
    """Refuse clients whose features cannot be exchanged; `cuts` holds the shapes that are known, by cut and client.

    Raises
    ------
    InputError
        With two clients and their shapes.
    """
    for cut, shapes in cuts.items():
        for client, shape in shapes.items():
            first = next(iter(shapes))
            if shape != shapes[first]:
                a, b = infos[first], infos[client]
                raise InputError(
                    f"{method} needs {cut} of one shape at every client, but it is {list(shapes[first])} at {a} "
                    f"({a.architecture}) and {list(shape)} at {b} ({b.architecture}): {REMEDIES[cut]}."
                )


@dataclass(frozen=True)
class FedIN(FedProx):
    """FedProx plus regression of the middle layers on other clients' features.

    Without features (`use_in=False`) this is FedProx with the same view, and FedAvg when also mu = 0, exactly.

    Parameters
    ----------
    view
        `owned` (layer-wise) or `same_arch`; `auto` takes layer-wise for models of one family.
    buffers
        BatchNorm's running statistics: each client keeps its own (`local`).
    mu
        Proximal weight: the penalty is (mu/2)·||w - w0||^2, and the paper's mu/2 is 0.05. 0: "w/o Prox".
    prox_anchor
        w0: the weights `received` at the start of the round, or the client's `own` at the end of its previous one.
    use_in
        Exchange features and learn from them. False: "w/o IN"; noise then plays no part either.
    combine
        How the middle follows both gradients. `simple`: Z = G_IN + (lam/2)·G_local (Eq. 13); `analytic`: G_IN projected
        onto the half-space that agrees with G_local (Eq. 12); `none`: Z = G_IN + G_local ("w/o Opt").
    lam
        Weight lambda of the simplified rule and of what `analytic_add_local` adds. 0: the middle follows features only,
        and stem and head stand still unless `outer_scale` is `unit`.
    alleviation_scope
        Project each `tensor` on its own, or all of the middle's tensors as one vector (`global`).
    analytic_add_local
        Add (lam/2)·G_local to the projection, which still agrees with G_local.
    outer_scale
        Gradient of stem and head under the simplified rule: `same` = (lam/2)·G_local, as the rule reads where
        G_IN = 0; `unit` = G_local. Other rules use G_local.
    noise
        zeta, in standard deviations of the features: in local training at both cuts, and on the features sent. The
        paper's protected variant has 0.8; 0: none.
    sigma
        The standard deviation is one number for a `tensor`, or one for each `channel`.
    feature_batch
        Number B of pairs that a client sends (at most as many as it has samples).
    feature_samples
        Number of pairs that a client receives; None: as many as `feature_batch`.
    pairs
        Where they come from: the `pool` of all other clients of the last round, `one_client` of them drawn at random,
        or one `common` draw for everybody, which may hold a client's own.
    """

    name: ClassVar[str] = "fedin"
    paper: ClassVar[str] = "FedIN (anonymous, under review)"
    family: ClassVar[str] = "parameters and features"
    needs: ClassVar[frozenset[str]] = frozenset({"split3"})
    sends: ClassVar[str] = "model weights, one small batch of features before and after the middle, number of samples"
    additive: ClassVar[bool] = False  # the server keeps each client's features apart

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

    @property
    def kappa(self) -> float:
        """Factor of G_local for stem and head, where there are pairs."""
        return self.lam / 2 if self.combine == "simple" and self.outer_scale == "same" else 1.0

    # --- server ---

    def setup_server(self, server: Party, infos: Mapping[int, ClientInfo], ctx: Context) -> None:
        """Compare the shapes at the cuts; then lay out the shared tensors."""
        if self.use_in:
            cuts = self.known_cuts(infos, ctx)
            check_cuts(self.name, infos, cuts)
            server.memory["cuts"] = {cut: list(next(iter(known.values()))) for cut, known in cuts.items() if known}
        super().setup_server(server, infos, ctx)

    def known_cuts(self, infos: Mapping[int, ClientInfo], ctx: Context) -> dict[str, dict[int, Shape]]:
        """Return the shapes of s_in and s_out as far as the server knows them; the first pool tells the rest."""
        cuts: dict[str, dict[int, Shape]] = {cut: {} for cut in CUTS}
        for client, info in sorted(infos.items()):
            blueprint = ctx.blueprints[info.architecture]
            if blueprint.build is not None:
                key, model = ("fedin/cuts", info.architecture), ctx.replica(info.architecture)
                cuts["s_in"][client], cuts["s_out"][client] = ctx.cached(
                    key, partial(cut_shapes, model, ctx.input_shape)
                )
            elif blueprint.feature_dim is not None:
                cuts["s_out"][client] = (blueprint.feature_dim,)
        return cuts

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
        wanted = self.feature_samples or self.feature_batch
        return rows[torch.randperm(len(rows), generator=rng)[:wanted]]

    def fuse(self, server: Party, replies: Mapping[int, Message], step: Step, ctx: Context) -> None:
        """Average layers over the clients that have them; this round's pairs replace the pool."""
        if self.use_in:
            for client, reply in replies.items():
                self.check_pairs(reply, ctx.infos[client], server.memory.setdefault("cuts", {}))
            pool = {cut: torch.cat([reply.data[cut] for reply in replies.values()]) for cut in CUTS}
            pool["sender"] = torch.cat([torch.full((len(r.data["s_in"]),), c) for c, r in replies.items()])
            server.memory["pool"] = pool
        super().fuse(server, replies, step, ctx)

    def check_pairs(self, reply: Message, info: ClientInfo, cuts: dict[str, list[int]]) -> None:
        """Refuse features of other shapes than the agreed ones; the first reply settles what is not agreed yet.

        Raises
        ------
        MessageError
            With the client and its shape. In a federation of strangers it is left out, and the others count.
        """
        if reply.data.keys() != {*CUTS} or len(reply.data["s_in"]) != len(reply.data["s_out"]):
            raise MessageError(f"Message from {info} refused: its features do not come in pairs.")
        for cut in CUTS:
            shape = list(reply.data[cut].shape[1:])
            if shape != cuts.setdefault(cut, shape):
                raise MessageError(
                    f"Message from {info} refused: {cut} is {shape}, but {cuts[cut]} at the others: {REMEDIES[cut]}."
                )

    # --- client ---

    def loss(self, nets: Mapping[str, Any], batch: Batch, aux: Aux) -> Tensor:
        """Return l_local = CE(c(m(e(x))), y) + (mu/2)·||w - w0||^2, with noise at both cuts if there is any."""
        if "noise_in" not in batch:
            return super().loss(nets, batch, aux)
        net = nets["main"]
        s_in = noisy(net.stem(batch.x), self.noise, batch["noise_in"], self.sigma)
        s_out = noisy(net.middle(s_in), self.noise, batch["noise_out"], self.sigma)
        loss = F.cross_entropy(net.head(s_out), batch.y)
        if self.mu == 0:
            return loss
        return loss + self.mu / 2 * squared_distance(net.parameters(), aux["anchor"])

    def feature_loss(self, nets: Mapping[str, Any], batch: Batch, aux: Aux) -> Tensor:
        """Return l_IN = MSE(m(s_in), s_out) on the received pairs, the same at every step of the round."""
        # Others' features must not enter the statistics that this client's own predictions use.
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
        if self.noise:
            s_in, s_out = self.cuts(client, ctx)
            stage.draws = {"noise_in": Draw((None, *s_in)), "noise_out": Draw((None, *s_out))}
        middle = self.middle_names(client, ctx)
        if not client.inbox.data or not middle:
            return stage
        stage.aux = {**stage.aux, **client.inbox.data}
        if self.combine == "none" or (self.combine == "simple" and self.outer_scale == "same"):
            stage.loss = self.joint_loss  # one backward pass gives both gradients, already combined
            return stage
        stage.loss = (self.loss, self.feature_loss)
        stage.gradients = self.alleviate
        stage.aux = {**stage.aux, "middle": {name: torch.ones(()) for name in middle}}  # only the names count
        return stage

    def anchor(self, client: Party) -> dict[str, Tensor]:
        """Return w0: the received parameters, or those that the client itself had at the end of its last round."""
        received = super().anchor(client)
        own = client.memory.get("own", {}) if self.prox_anchor == "own" else {}
        return {name: own.get(name, tensor) for name, tensor in received.items()}

    def cuts(self, client: Party, ctx: Context) -> tuple[Shape, Shape]:
        """Return the shapes of this client's s_in and s_out."""
        assert client.info is not None
        key = "fedin/cuts", client.info.architecture
        shapes: tuple[Shape, Shape] = ctx.cached(key, lambda: cut_shapes(client.main, ctx.input_shape))
        return shapes

    def middle_names(self, client: Party, ctx: Context) -> tuple[str, ...]:
        """Return which of this client's parameters belong to its middle and may move."""
        assert client.info is not None

        def make() -> tuple[str, ...]:
            parts, frozen = parameter_parts(client.main, ctx.input_shape), frozen_names(client.main)
            return tuple(name for name, part in parts.items() if part == "middle" and name not in frozen)

        names: tuple[str, ...] = ctx.cached(("fedin/middle", client.info.architecture), make)
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
        """Return (s_in, s_out) of a random batch, with the final weights, in prediction mode."""
        rows = torch.randperm(len(client.train), generator=ctx.rng("fedin/batch", client))[: self.feature_batch]
        rng = ctx.rng("fedin/noise", client)
        main: Any = client.main
        with torch.no_grad(), mode(main, EVAL):
            s_in = self.protected(main.stem(client.train.inputs(rows).to(ctx.device)), rng)
            s_out = self.protected(main.middle(s_in), rng)
        return {"s_in": s_in, "s_out": s_out}

    def protected(self, s: Tensor, rng: torch.Generator) -> Tensor:
        """Return features as they may leave the client."""
        if not self.noise:
            return s
        return noisy(s, self.noise, torch.randn(s.shape, generator=rng).to(s.device), self.sigma)
