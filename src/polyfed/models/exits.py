"""Networks with a classifier behind every stage: `resnet18:w16,exits` and `cnn:16-32-64,exits`.

`exits=2` is the same network cut after its second exit. Tensors have the names of the whole network, so that the cut
one is a part of it: by name at one width, by name and slice at several (`resnet18:w16,exits=2@0.7`).
"""

from __future__ import annotations

from typing import cast

from torch import Tensor, nn

from polyfed.core.errors import InputError
from polyfed.models.network import Network
from polyfed.models.registry import Options
from polyfed.models.width import Wire

OPTION = {"exits[=<number>]": "a classifier behind every stage, or behind the first ones; without it only at the end"}


def take_exits(options: Options, stages: int) -> int:
    """Return how many exits are asked for (0: an ordinary network), out of as many as there are stages."""
    found = options.take(r"exits(=(\d+))?")
    if not found:
        return 0
    count = int(found[2]) if found[2] else stages
    if not 1 <= count <= stages:
        raise InputError(f"The model '{options.spec}' has {stages} stages: write exits, or exits=1 to exits={stages}.")
    return count


class Heads(nn.ModuleList):
    """A classifier for each exit; called, it is the last one."""

    def forward(self, z: Tensor) -> Tensor:
        """Return the logits of the last exit's features."""
        logits: Tensor = self[-1](z)
        return logits


class MultiExit(Network):
    """The first stages of a network, each with a classifier: the mean over its map and a linear layer.

    As an ordinary model it is its last exit: that is what `features`, `head` and `forward` are.

    Parameters
    ----------
    body
        A network with `stem` and `stages`, whose tensors are taken over; its own classifier is not.
    count
        The number of exits.
    from_stem
        Whether the stem counts as the first stage.
    """

    def __init__(self, body: Network, count: int, from_stem: bool) -> None:
        super().__init__()
        self.family, self.num_classes, self.from_stem = f"{body.family}-exits", body.num_classes, from_stem
        self.stem = body.stem
        self.stages = nn.Sequential(*list(cast(nn.Sequential, body.stages))[: count - from_stem])
        names = ["stem"] * from_stem + [f"stages.{number}" for number in range(len(self.stages))]
        kept = tuple(f"{name}." for name in {"stem", *names})
        self._wires = {name: wire for name, wire in body.wires().items() if name.startswith(kept)}
        heads = []
        for number, name in enumerate(names):
            last, wire = [item for item in self._wires.items() if item[0].startswith(f"{name}.")][-1]
            self.feature_dim = len(next(self.get_submodule(last).parameters()))  # a stage ends in its last layer
            heads.append(nn.Linear(self.feature_dim, self.num_classes))
            self._wires[f"head.{number}"] = Wire(wire.target, None)
        self.head = Heads(heads)

    def middle(self, s: Tensor) -> Tensor:
        """Return the channel means of the last map."""
        return cast(Tensor, self.stages(s)).mean((2, 3))

    def exits(self, x: Tensor) -> list[Tensor]:
        """Return the logits of every exit, the earliest first."""
        s = self.stem(x)
        maps = [s] if self.from_stem else []
        for stage in self.stages:
            s = stage(s)
            maps.append(s)
        return [head(s.mean((2, 3))) for head, s in zip(cast(Heads, self.head), maps, strict=True)]

    def wires(self) -> dict[str, Wire]:
        """Return the groups of the body, with each classifier behind its stage's."""
        return self._wires
