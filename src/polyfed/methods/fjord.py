"""FjORD: Fair and Accurate Federated Learning under heterogeneous targets with Ordered Dropout.

Horváth, Laskaridis, Almeida, Leontiadis, Venieris, Lane, NeurIPS 2021. https://arxiv.org/abs/2102.13451

Ordered dropout: for every batch a client of rate p_max draws a width and trains the first channels only,

    p ~ U{p in P : p <= p_max},    loss = CE(net_p(x), y)                                              (1)

so that channels are ordered by importance, and narrow prefixes are good networks. With self-distillation the client's
whole network learns the labels, and teaches the drawn one:

    loss = CE(net_max(x), y) + CE(net_p(x), softmax(net_max(x)))                                       (2)

The server averages every entry over the clients that hold it, weighted by their samples.

Deviations:
    BatchNorm: HeteroFL's static one (batch statistics in training; statistics for testing are collected for each
    client's whole width, by the clients of that width) instead of running statistics for every width of P.
    A client whose rate is not in P draws from the smaller widths of P and its own.
    Width p of a client of rate r has ceil(p/r · n) of its n channels: where n was rounded up, one more than ceil(p · c)
    of the full c at most.
    In Eq. (2) the soft term is left out where the whole network was drawn: its gradient is zero.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

from torch import Tensor

from polyfed.core.errors import InputError
from polyfed.core.fields import Positive, SomeShare
from polyfed.core.party import Context, Party
from polyfed.core.stage import Aux, Batch, Draw, Stage
from polyfed.core.width import Index, channel_index, rolled, shapes_at, take
from polyfed.methods.heterofl import HeteroFL, masked
from polyfed.models.width import rate_of
from polyfed.ops.distance import soft_cross_entropy


@dataclass(frozen=True)
class FjORD(HeteroFL):
    """HeteroFL whose clients train prefixes of drawn width.

    Parameters
    ----------
    widths
        P, the width rates that are drawn. `widths=(1.0,)` with clients of rate 1 and `static_bn=False` is FedAvg; with
        clients of several rates, HeteroFL weighted by samples without scaler, mask and clipping.
    kd
        Self-distillation, Eq. (2).
    weighting, static_bn, statistics, mask, clip, measure
        As in HeteroFL, with other defaults. `scaler` and `global_rate` stay: the drawn widths have no scaler.
    """

    name: ClassVar[str] = "fjord"
    paper: ClassVar[str] = "Horváth et al. 2021"
    family: ClassVar[str] = "width"
    sends: ClassVar[str] = "the weights of the client's width slice, BatchNorm's statistics, and the number of samples"

    weighting: Literal["samples", "uniform"] = "samples"
    scaler: bool = False
    mask: bool = False
    clip: Positive | None = None
    widths: tuple[SomeShare, ...] = (0.2, 0.4, 0.6, 0.8, 1.0)
    kd: bool = False

    def requirements(self) -> frozenset[str]:
        """Learning from the whole network's probabilities needs classes."""
        return super().requirements() | ({"classes"} if self.kd else set())

    def check(self) -> None:
        """Refuse an empty P, and a scaler."""
        super().check()
        if not self.widths:
            raise InputError(f"{self.name}: widths is empty: name at least one width rate, such as 1.0.")
        self.must_stay("a prefix is trained as it will be used", scaler=False, global_rate=1.0)

    def narrower(self, client: Party) -> list[float]:
        """Return the widths below the client's own that it draws from, as shares of its own."""
        rate = rate_of(client.main)
        return [width / rate for width in sorted(set(self.widths)) if width < rate - 1e-9]

    def stage(self, client: Party, ctx: Context) -> Stage:
        """Train with a uniform number for each batch, which says the width, and the prefixes of all narrower widths."""
        stage = super().stage(client, ctx)
        narrower = self.narrower(client)
        if not narrower:
            return stage
        assert client.info is not None
        blueprint = ctx.blueprints[client.info.architecture]
        groups, shapes = blueprint.width_groups, blueprint.shapes
        prefixes: list[dict[str, Index]] = ctx.cached(
            ("prefixes", blueprint.name),
            lambda: [channel_index(groups, shapes, shapes_at(groups, shapes, p), rolled(0)) for p in narrower],
        )
        return replace(stage, aux={**stage.aux, "prefixes": prefixes}, draws={"width": Draw((), "uniform")})

    def loss(self, nets: Mapping[str, Any], batch: Batch, aux: Aux) -> Tensor:
        """Return the loss of the drawn width, Eq. (1) or (2)."""
        whole = nets["main"].still() if self.static_bn else nets["main"]
        prefixes: list[dict[str, Index]] = aux.get("prefixes", [])
        drawn = int(batch["width"] * (len(prefixes) + 1)) if prefixes else 0  # a value: such stages cannot be stacked
        if drawn == len(prefixes):  # p = p_max
            return batch.loss(masked(whole(batch.x), aux))
        held = {**whole.parameters(), **dict(whole.module.named_buffers())}
        part = whole.replaced({name: take(held[name], index) for name, index in prefixes[drawn].items()})
        logits = masked(part(batch.x), aux)
        if not self.kd:
            return batch.loss(logits)
        teacher = masked(whole(batch.x), aux)
        return batch.loss(teacher) + soft_cross_entropy(logits, teacher.detach())
