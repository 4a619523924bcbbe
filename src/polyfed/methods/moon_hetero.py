"""MOON with width slices, as in FedFD's tables (MOON-hetero).

Li, He, Song, CVPR 2021; see `moon`.

HeteroFL's slices are trained with MOON's Eq. (3) and averaged. The received network and a client's previous ones are
slices of its own width, so that their features are of one size.

Deviations:
    As in `moon` and `heterofl`; FedFD says no more than "-hetero".
    With static BatchNorm, slices have no statistics of their own in training: the networks beside the trained one use
    those of the batch at hand, as it does itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from torch import Tensor

from polyfed.core.message import State
from polyfed.core.method import Local, Step
from polyfed.core.party import Context, Party
from polyfed.core.stage import Aux, Batch
from polyfed.methods.heterofl import STATISTICS, HeteroFL, masked
from polyfed.methods.moon import Moon


@dataclass(frozen=True)
class MoonHetero(Moon, HeteroFL):
    """HeteroFL with a contrastive term on the features.

    Parameters
    ----------
    mu
        As in MOON; 0 gives HeteroFL exactly.
    view, weighting
        As in HeteroFL.
    """

    name: ClassVar[str] = "moon_hetero"
    needs: ClassVar[frozenset[str]] = frozenset()

    view: str = "prefix"
    weighting: Literal["samples", "uniform"] = "uniform"

    def requirements(self) -> frozenset[str]:
        """Need widths, as HeteroFL does, and features of any size."""
        return super().requirements() | {"features"}

    def loss(self, nets: Mapping[str, Any], batch: Batch, aux: Aux) -> Tensor:
        """Return MOON's loss of the slice as HeteroFL trains it."""
        net = nets["main"].still() if self.static_bn else nets["main"]
        return super().loss({**nets, "main": net}, batch, aux)

    def beside(self, net: Any, state: State) -> Any:
        """Return another network of the slice's width: with static BatchNorm, in the mode of the trained one."""
        return net.replaced(state) if self.static_bn else super().beside(net, state)

    def label_loss(self, logits: Tensor, batch: Batch, aux: Aux) -> Tensor:
        """Return the loss with logits of absent classes set to 0."""
        return super().label_loss(masked(logits, aux), batch, aux)

    def local(self, client: Party, step: Step, ctx: Context) -> Local:
        """Do as MOON does; collecting statistics trains nothing."""
        if step.name == STATISTICS.name:
            return (yield from HeteroFL.local(self, client, step, ctx))
        return (yield from super().local(client, step, ctx))
