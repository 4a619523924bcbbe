"""FedMRL: Federated Model Heterogeneous Matryoshka Representation Learning.

Yi, Yu, Ren, Wang, Liu, Li, NeurIPS 2024. https://arxiv.org/abs/2406.00488

A small common model and the private network look at an input side by side; a private linear projector fuses their
features. The fused vector is read at two granularities, like a matryoshka: its first d1 coordinates by the common
head, all of it by the private head. Both are trained together; only the small model travels.

Deviations:
    The mean is over this round's own replies, weighted by training samples; released code averages references to one
    network (the last client's) and counts test samples too.
    Projector and optimizers belong to each client; released code shares the optimizers among clients, and a common
    benchmark forgets the trained projector after every round.
    With `clip` all three networks are clipped together, not each for itself.
    `projector` other than `trained` is not in the paper: the limit cases.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, cast

import torch
from torch import Tensor, nn

from polyfed.core.errors import InputError
from polyfed.core.fields import AtLeastOne, NotNegative
from polyfed.core.method import Local, Step
from polyfed.core.party import Blueprint, ClientInfo, Context, Party
from polyfed.core.stage import Aux, Batch, Stage
from polyfed.methods.proxies import Proxies
from polyfed.models import build, with_feature_dim


@dataclass(frozen=True)
class FedMRL(Proxies):
    """A projector fuses the features of a common and a private network, read at two granularities.

    Parameters
    ----------
    proxy, d1
        The small model g as a model string, and the size d1 of its features (None: as the model has them); at most
        that of the private networks, d2.
    m_g, m_k
        Weights of the two losses: of the common head on the first d1 coordinates, and of the private head.
    projector
        `trained`, or fixed: at [0|I] (`private`), which with m_g = 0 gives local training exactly, or at [I|0]
        (`common`), which with m_k = 0 gives FedAvg of the small model.
    weighting
        A client's weight in the mean.
    """

    name: ClassVar[str] = "fedmrl"
    paper: ClassVar[str] = "Yi et al. 2024"
    needs: ClassVar[frozenset[str]] = frozenset({"features"})
    sends: ClassVar[str] = "the weights of a small common model and the number of samples"

    weighting: Literal["samples", "uniform"] = "samples"
    d1: AtLeastOne | None = None
    m_g: NotNegative = 1.0
    m_k: NotNegative = 1.0
    projector: Literal["trained", "private", "common"] = "trained"

    def check(self) -> None:
        """Refuse a loss of nothing."""
        if not self.m_g and not self.m_k:
            raise InputError(f"{self.name}: m_g and m_k are both 0, so nothing would be trained: set one of them.")

    def misfit(
        self, infos: Sequence[ClientInfo], blueprints: Mapping[str, Blueprint], input_shape: tuple[int, ...]
    ) -> str | None:
        """Return which private network has fewer features than the small model."""
        if (found := super().misfit(infos, blueprints, input_shape)) is not None:
            return found
        with torch.random.fork_rng(devices=()):
            common = self.common_model(input_shape, blueprints[infos[0].architecture].num_classes)
        for info in infos:
            own = blueprints[info.architecture].feature_dim or 0
            if own < common.feature_dim:
                return (
                    f"private networks with at least as many features as the small model has ({common.feature_dim}), "
                    f"but {info} has {info.architecture} with {own}: set a smaller d1"
                )
        return None

    def common_model(self, input_shape: tuple[int, ...], num_classes: int) -> Any:
        """Return the small model with d1 features."""
        model = build(self.proxy, input_shape, num_classes)
        return model if self.d1 is None else with_feature_dim(model, self.d1)

    def build_proxy(self, ctx: Context) -> nn.Module:
        """Build the small model."""
        model: nn.Module = self.common_model(ctx.input_shape, ctx.num_classes)
        return model

    def setup_client(self, client: Party, ctx: Context) -> None:
        """Add the small model and the projector P, linear from d1 + d2 to d2."""
        super().setup_client(client, ctx)
        d1, d2 = (cast(int, client.models[name].feature_dim) for name in ("proxy", "main"))
        client.models["projector"] = ctx.initialized("projector", lambda: self.build_projector(d1, d2))

    def build_projector(self, d1: int, d2: int) -> nn.Module:
        """Build P as torch does, or so that q is a piece of [f_g; f_k]: its beginning, or all of f_k."""
        projector = nn.Linear(d1 + d2, d2)
        if self.projector != "trained":
            with torch.no_grad():
                projector.weight.zero_()[:, d1 if self.projector == "private" else 0 :].fill_diagonal_(1.0)
                projector.bias.zero_()
        return projector

    def serves(self, server: Party) -> bool:
        """Return False: the small model is not trained to predict alone."""
        return False

    def loss(self, nets: Mapping[str, Any], batch: Batch, aux: Aux) -> Tensor:
        """Return m_g·CE(h_g(q[:d1])) + m_k·CE(h_k(q)) with q = P[f_g(x); f_k(x)]."""
        common = nets["proxy"].features(batch.x)
        q = nets["projector"](torch.cat([common, nets["main"].features(batch.x)], dim=1))
        terms = []
        if self.m_g:
            terms.append(self.m_g * batch.loss(nets["proxy"].head(q[:, : common.shape[1]])))
        if self.m_k:
            terms.append(self.m_k * batch.loss(nets["main"].head(q)))
        return torch.stack(terms).sum()

    def local(self, client: Party, step: Step, ctx: Context) -> Local:
        """Train everything together and return the small model."""
        moved = ("main", "proxy", *(["projector"] if self.projector == "trained" else []))
        yield Stage(self.loss, trainable=dict.fromkeys(moved))
        return self.reply(client)

    def predict(self, party: Party, x: Tensor, ctx: Context) -> Tensor:
        """Return h_k(q)."""
        own: Any = party.main
        common: Any = party.models["proxy"]
        logits: Tensor = own.head(party.models["projector"](torch.cat([common.features(x), own.features(x)], dim=1)))
        return logits
