"""LG-FedAvg: Think Locally, Act Globally: Federated Learning with Local and Global Representations.

Liang, Liu, Liu, Allen, Auerbach, Brent, Salakhutdinov, Morency, 2020. https://arxiv.org/abs/2001.01523

The lower layers of every client stay at home and learn a representation of its own data; only the top layers are
averaged, as in FedAvg. Networks may differ below the layers that they share:

    theta_g  <-  sum_k n_k / n · theta_g,k         over the names of the top layers          (1)
    theta_l,k stays with client k

Deviations:
    The authors' lists of weights for each network are replaced by a number of last layers, in the order in which the
    network registers them; a norm belongs to the layer before it.
    New clients answer with their own network: the paper's vote of all local networks for a client without data is not
    offered, nor its start from a network trained by FedAvg (`pretrain_epochs` averages the shared layers only).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from polyfed.core.errors import InputError
from polyfed.core.fields import Count
from polyfed.core.party import Blueprint, ClientInfo, Context
from polyfed.core.traffic import Symbol, Told, Traffic, floats
from polyfed.core.views import Shared, View, shared_names
from polyfed.methods.fedavg import FedAvg

ALL = "all"


def shared_size(told: Told) -> int:
    """Return how many numbers a client shares."""
    return floats({name: told.blueprint.initial[name] for name in told.method.slots_of(told.blueprint, told.ctx)})


@dataclass(frozen=True)
class LGFedAvg(FedAvg):
    """Average the top layers only.

    Parameters
    ----------
    keep
        What is averaged: a number of last layers, names (`head+layers.1`), or `all`, which gives FedAvg exactly; 0
        gives local training exactly.
    weighting, buffers, pretrain_epochs
        As in FedAvg. `view` is not used.
    """

    name: ClassVar[str] = "lg_fedavg"
    paper: ClassVar[str] = "Liang et al. 2020"
    family: ClassVar[str] = "prototypes"
    sends: ClassVar[str] = "the weights of the last layers and the number of samples"
    traffic: ClassVar[Mapping[str, Traffic]] = {
        "main": Traffic("4*S", "4*S + 8"),
        "pretrain": Traffic("4*S", "4*S + 8"),
    }
    symbols: ClassVar[Mapping[str, Symbol]] = {"S": Symbol("numbers of the shared layers", shared_size)}

    keep: Count | str = 1

    def check(self) -> None:
        """Refuse a view: `keep` says what is shared."""
        if self.view != "auto":
            raise InputError(f"{self.name}: leave view out: keep says which layers are averaged.")
        if isinstance(self.keep, str) and not all(self.keep.split("+")):
            raise InputError(f"{self.name}: keep is a number of layers, or names such as head+layers.1.")

    def misfit(
        self, infos: Sequence[ClientInfo], blueprints: Mapping[str, Blueprint], input_shape: tuple[int, ...]
    ) -> str | None:
        """Return what to do when the layers to be shared are not the same at all clients."""
        if self.keep == ALL:
            return super().misfit(infos, blueprints, input_shape)
        first, *others = blueprints.values()
        mine = self.shared_shapes(first)
        if not mine and self.keep:
            return f"layers that it can share, but {first.name} has none under '{self.keep}'"
        for other in others:
            theirs = self.shared_shapes(other)
            for name in sorted(mine.keys() | theirs.keys()):
                if mine.get(name) != theirs.get(name):
                    held = ["no such layer" if s.get(name) is None else list(s[name]) for s in (mine, theirs)]
                    return (
                        f"the same shared layers at every client, but '{name}' is {held[0]} in {first.name} and "
                        f"{held[1]} in {other.name}: set feature_dim (--feature-dim N) to give all "
                        "networks one head, or name the layers that they have in common (keep)"
                    )
        return None

    def policy(self, ctx: Context) -> View:
        """Return the view of the shared names, Eq. (1)."""
        if self.keep == ALL:
            return super().policy(ctx)
        names = {name: None for blueprint in ctx.blueprints.values() for name in self.shared_shapes(blueprint)}
        return Shared(tuple(names), self.buffers == "average")

    def shared_shapes(self, blueprint: Blueprint) -> dict[str, tuple[int, ...]]:
        """Return the shapes of an architecture's tensors that are averaged."""
        buffers = self.buffers == "average"
        if isinstance(self.keep, str):
            return {n: blueprint.shapes[n] for n in Shared(tuple(self.keep.split("+")), buffers).slots(blueprint, {})}
        top = last_layers(blueprint, self.keep)
        return {n: blueprint.shapes[n] for n in shared_names(blueprint, buffers) if n in top}


def last_layers(blueprint: Blueprint, keep: int) -> set[str]:
    """Return the tensors of the last layers: a layer begins with a module whose weight has two or more dimensions."""
    layer: dict[str, int] = {}
    count, begun = 0, ""
    for name, shape in blueprint.shapes.items():
        module = name.rpartition(".")[0]
        if len(shape) > 1 and name not in blueprint.buffers and (module != begun or not count):
            count, begun = count + 1, module
        layer[name] = max(count, 1)  # what comes before the first layer belongs to it
    return {name for name, number in layer.items() if number > count - keep}
