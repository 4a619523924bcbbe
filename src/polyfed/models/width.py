"""Width-scalable networks: how wide their layers are at a rate, and which of their axes are hidden channels.

`model.width_groups()` says the latter for every tensor of the state dict (see `polyfed.core.width`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import NamedTuple

from torch import Tensor, nn

from polyfed.core.errors import InputError, unknown
from polyfed.core.width import Axis, Groups, Index, channel_index, mesh, scaled, take

__all__ = [
    "Axis",
    "Groups",
    "Index",
    "Scaler",
    "Wire",
    "activate_scalers",
    "at_level",
    "channel_index",
    "groups_of",
    "levels",
    "mesh",
    "rate_of",
    "rates",
    "scaled",
    "take",
]

LEVELS = {  # channel rates that papers give to letters
    "fedfd": {letter: (10 - place) / 10 for place, letter in enumerate("abcdefghij")},
    "heterofl": {letter: 0.5**place for place, letter in enumerate("abcde")},
}


def groups_of(module: nn.Module, wires: Mapping[str, Wire]) -> Groups:
    """Build `width_groups()` from layer name -> wire, for convolutions, linear layers and norms."""
    groups: Groups = {}
    for layer, wire in wires.items():
        target = (wire.target, 1) if wire.target else None
        source = (wire.source, wire.repeat) if wire.source else None
        for name, tensor in module.get_submodule(layer).state_dict().items():
            axes = (target, source) if tensor.dim() > 1 else (target,)
            groups[f"{layer}.{name}"] = (*axes, *[None] * (tensor.dim() - 2))[: tensor.dim()]
    return groups


def activate_scalers(module: nn.Module, active: bool = True, reference: float = 1.0, predicting: bool = False) -> None:
    """Switch every `Scaler` of a model on or off, in training only or when `predicting`, too.

    `reference` is the width rate of the global model.
    """
    for layer in module.modules():
        if isinstance(layer, Scaler):
            layer.active, layer.reference, layer.predicting = active, reference, predicting


@contextmanager
def at_level(module: nn.Module, level: Tensor) -> Iterator[None]:
    """Let every scaler of a network divide by a share `level` of its rate, in this block."""
    scalers = [layer for layer in module.modules() if isinstance(layer, Scaler)]
    kept = [scaler.rate for scaler in scalers]
    for scaler in scalers:
        scaler.rate = scaler.rate * level  # type: ignore[assignment]
    try:
        yield
    finally:
        for scaler, rate in zip(scalers, kept, strict=True):
            scaler.rate = rate


def rate_of(module: nn.Module) -> float:
    """Return the width rate that a network was built with, as its scalers know it (1 without any)."""
    return next((layer.rate for layer in module.modules() if isinstance(layer, Scaler)), 1.0)


def levels(model: str, mix: str, decay: str = "fedfd") -> list[str]:
    """Return the model strings of a mix of width levels: `levels("cnn:16-32", "a-d")` is `cnn:16-32@1, cnn:16-32@0.7`.

    Parameters
    ----------
    model
        A model string without a rate.
    mix
        Level letters joined by `-`; a number after a letter repeats it, so `a2-g1` is two wide clients to a narrow one.
        Clients take the models in turn.
    decay
        What the letters mean: `fedfd`, a to j = 1.0, 0.9, ... 0.1; `heterofl`, a to e = 1, 1/2, 1/4, 1/8, 1/16.

    Raises
    ------
    InputError
        The model has a rate already, or a letter or the table is unknown.
    """
    if "@" in model:
        raise InputError(f"The model '{model}' has a width rate already: levels(...) takes one without '@'.")
    return [f"{model}@{rate:g}" for rate in rates(mix, decay)]


def rates(mix: str, decay: str = "fedfd") -> list[float]:
    """Return the width rates of a mix of level letters, see `levels`."""
    if decay not in LEVELS:
        raise unknown("table of width levels", decay, LEVELS)
    found = []
    for entry in mix.split("-"):
        letter, times = entry[:1], entry[1:] or "1"
        if letter not in LEVELS[decay] or not times.isdigit() or int(times) < 1:
            known = f"{min(LEVELS[decay])} to {max(LEVELS[decay])}"
            raise InputError(
                f"'{entry}' in the mix '{mix}' is not a width level: write letters from {known}, each with a number if "
                "it is to be repeated, such as a-d-g or a2-d1."
            )
        found += [LEVELS[decay][letter]] * int(times)
    return found


class Wire(NamedTuple):
    """The width groups at the input (with its repeat) and at the output of one layer; None is never sliced."""

    source: str | None
    target: str | None
    repeat: int = 1


class Scaler(nn.Module):
    """HeteroFL's scaler: in training, divide by the width rate, so that narrow models match the wide one in scale.

    It does nothing until a method sets `active`, nothing in evaluation mode unless it sets `predicting` (ScaleFL), and
    holds no tensors. `reference` is the rate of the global model, which is left as it is.
    """

    def __init__(self, rate: float = 1.0) -> None:
        super().__init__()
        self.rate = rate
        self.reference = 1.0
        self.active = False
        self.predicting = False

    def forward(self, x: Tensor) -> Tensor:
        """Return `x / (rate / reference)` where it is active, else `x`."""
        scales = self.active and (self.training or self.predicting)
        return x * (self.reference / self.rate) if scales else x

    def extra_repr(self) -> str:
        """Show the rate."""
        return f"rate={self.rate:g}"
