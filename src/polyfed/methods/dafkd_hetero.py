"""DaFKD with width slices, as in FedFD's tables (DaFKD-hetero).

Wang, Li, Xu, Li, Zhan, Zeng, CVPR 2023; see `dafkd`.

HeteroFL's average is the start, uploaded slices are the teachers of DaFKD's Eq. (3), and the widest network is the
student.

Deviations:
    As in `dafkd`, with the server's training of FedFD.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

from polyfed.core.fields import OptimizerName, PartShare, Positive
from polyfed.core.traffic import Traffic
from polyfed.methods.dafkd import GENERATED, DaFKD
from polyfed.methods.heterofl import SLICED, HeteroFL


@dataclass(frozen=True)
class DaFKDHetero(DaFKD, HeteroFL):
    """HeteroFL with distillation of an ensemble weighted by discriminators.

    Parameters
    ----------
    distill_lr, distill_optimizer, distill_momentum
        As in DaFKD, with FedFD's values.
    """

    name: ClassVar[str] = "dafkd_hetero"
    needs: ClassVar[frozenset[str]] = frozenset()
    sends: ClassVar[str] = (
        "the weights of the client's width slice, BatchNorm's statistics, a generator, scores of generated samples, "
        "the number of samples of each class"
    )
    traffic: ClassVar[Mapping[str, Traffic]] = {
        **HeteroFL.traffic,
        "main": Traffic(f"{SLICED} + {GENERATED}", f"{SLICED} + 8 + [G > 0]*4*(G + samples)"),
    }

    view: str = "prefix"
    weighting: Literal["samples", "uniform"] = "uniform"
    distill_lr: Positive = 0.01
    distill_optimizer: OptimizerName = "sgd"
    distill_momentum: PartShare = 0.9
