"""FedGen with width slices, as in FedFD's tables (FedGen-hetero).

Zhu, Hong, Zhou, ICML 2021; see `fedgen`.

HeteroFL's slices are trained with FedGen's Eq. (4) and averaged. A slice of rate r has ceil(r·d) of the d features that
the widest network has: G makes d, and the head of a slice, at the server and at its client, is given the first of them.

Deviations:
    As in `fedgen` and `heterofl`. FedFD says no more than "-hetero": the first outputs of G go with the first features.
    With `mask`, rows of the classifier that a client trained on generated features only do not enter the mean.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from torch import Tensor

from polyfed.core.stage import Aux, Batch
from polyfed.core.traffic import Traffic
from polyfed.methods.fedgen import COUNTED, GENERATED, FedGen
from polyfed.methods.heterofl import SLICED, HeteroFL


@dataclass(frozen=True)
class FedGenHetero(FedGen, HeteroFL):
    """HeteroFL with generated features beside the clients' data.

    Parameters
    ----------
    share
        Slices of the whole `model`.
    alpha, beta
        As in FedGen; both 0 give HeteroFL exactly.
    view, weighting
        As in HeteroFL.
    """

    name: ClassVar[str] = "fedgen_hetero"
    needs: ClassVar[frozenset[str]] = frozenset()
    sends: ClassVar[str] = HeteroFL.sends
    traffic: ClassVar[Mapping[str, Traffic]] = {
        **HeteroFL.traffic,
        "main": Traffic(f"{SLICED} + {GENERATED}", f"{SLICED} + {COUNTED}"),
        "pretrain": Traffic(SLICED, f"{SLICED} + {COUNTED}"),
    }

    share: Literal["model"] = "model"
    view: str = "prefix"
    weighting: Literal["samples", "uniform"] = "uniform"

    def requirements(self) -> frozenset[str]:
        """Need widths, as HeteroFL does, and features of any size."""
        return super().requirements() | {"features"}

    def own_loss(self, nets: Mapping[str, Any], batch: Batch, aux: Aux) -> tuple[Tensor, Tensor]:
        """Return logits and loss as HeteroFL trains: with static BatchNorm and masked classes."""
        return HeteroFL.own_loss(self, nets, batch, aux)
