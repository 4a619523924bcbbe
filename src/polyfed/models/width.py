"""Width slicing: which axes of a model's tensors are hidden channels, and which channels a narrower model holds.

`model.width_groups()` gives, for every tensor of the state dict, one entry per axis: `None` (never sliced: image
channels, class outputs, kernel axes) or `(group, repeat)`. Axes of one group use the same channels, because one feeds
the other or because a residual addition ties them; `repeat` is the number of consecutive columns that one channel
owns (height x width where a convolution is flattened into a linear layer, otherwise 1).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from polyfed.core.errors import InputError, unknown

Axis = tuple[str, int] | None
Groups = dict[str, tuple[Axis, ...]]
Index = tuple[Tensor | None, ...]

LEVELS = {  # channel rates that papers give to letters
    "fedfd": {letter: (10 - place) / 10 for place, letter in enumerate("abcdefghij")},
    "heterofl": {letter: 0.5**place for place, letter in enumerate("abcde")},
}


def scaled(channels: int, rate: float) -> int:
    """Return the width of a layer at a rate, `ceil(rate * channels)`, at least one."""
    # 0.7 * 10 is 7.000000000000001 in floating point; the margin keeps it from becoming 8.
    return max(1, math.ceil(rate * channels - 1e-9))


def channel_index(
    groups: Mapping[str, Sequence[Axis]],
    full_shapes: Mapping[str, Sequence[int]],
    sub_shapes: Mapping[str, Sequence[int]],
    start: Callable[[str, int], int],
) -> dict[str, Index]:
    """Say which entries of a wide model's tensors a narrow model holds.

    Parameters
    ----------
    groups
        The `width_groups()` of the wide model.
    full_shapes, sub_shapes
        Name -> shape in the wide and in the narrow model; the answer has the names of `sub_shapes`.
    start
        `start(group, full_width)` is the first channel of the window, which then wraps around.
        `lambda group, width: 0` is HeteroFL, `lambda group, width: round` is FedRolex.

    Returns
    -------
    dict
        Name -> one entry per axis: a LongTensor of indices, or None for the whole axis. See `take` and `mesh`.

    Raises
    ------
    InputError
        A name is unknown, an axis is wider than the full one, or a group has two widths.
    """
    windows: dict[str, tuple[int, int, Tensor | None]] = {}

    def window(name: str, group: str, full: int, sub: int) -> Tensor | None:
        if group not in windows:
            first = start(group, full) % full
            whole = sub == full and first == 0
            windows[group] = (full, sub, None if whole else (first + torch.arange(sub)) % full)
        known_full, known_sub, index = windows[group]
        if (known_full, known_sub) != (full, sub):
            raise InputError(
                f"'{name}' has {sub} of {full} channels in the width group '{group}', but another tensor of the group "
                f"has {known_sub} of {known_full}: the two models are not width-scaled versions of each other."
            )
        return index

    result = {}
    for name, sub_shape in sub_shapes.items():
        if name not in groups or name not in full_shapes:
            raise InputError(f"The wide model has no tensor '{name}': both models must be of one family.")
        full_shape, axes = full_shapes[name], groups[name]
        if not len(full_shape) == len(sub_shape) == len(axes):
            raise InputError(f"'{name}' has different numbers of axes in the two models and their width groups.")
        result[name] = tuple(
            _axis_index(name, axis, full, sub, window)
            for axis, full, sub in zip(axes, full_shape, sub_shape, strict=True)
        )
    return result


def take(tensor: Tensor, index: Index) -> Tensor:
    """Return the part of a tensor that an entry of `channel_index` names (a copy where anything is left out)."""
    for axis, positions in enumerate(index):
        if positions is not None:
            tensor = tensor.index_select(axis, positions.to(tensor.device))
    return tensor


def mesh(index: Index, shape: Sequence[int]) -> tuple[Tensor, ...]:
    """Turn an entry of `channel_index` into open index grids, so that `tensor[mesh(...)]` can be read and assigned."""
    axes = [
        torch.arange(size) if positions is None else positions for positions, size in zip(index, shape, strict=True)
    ]
    return tuple(axis.view(-1, *[1] * (len(axes) - place - 1)) for place, axis in enumerate(axes))


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


def activate_scalers(module: nn.Module, active: bool = True, reference: float = 1.0) -> None:
    """Switch every `Scaler` of a model on or off; `reference` is the width rate of the global model."""
    for layer in module.modules():
        if isinstance(layer, Scaler):
            layer.active, layer.reference = active, reference


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
    if decay not in LEVELS:
        raise unknown("table of width levels", decay, LEVELS)
    if "@" in model:
        raise InputError(f"The model '{model}' has a width rate already: levels(...) takes one without '@'.")
    models = []
    for entry in mix.split("-"):
        letter, times = entry[:1], entry[1:] or "1"
        if letter not in LEVELS[decay] or not times.isdigit() or int(times) < 1:
            known = f"{min(LEVELS[decay])} to {max(LEVELS[decay])}"
            raise InputError(
                f"'{entry}' in the mix '{mix}' is not a width level: write letters from {known}, each with a number if "
                "it is to be repeated, such as a-d-g or a2-d1."
            )
        models += [f"{model}@{LEVELS[decay][letter]:g}"] * int(times)
    return models


def _axis_index(name: str, axis: Axis, full: int, sub: int, window: Callable[..., Tensor | None]) -> Tensor | None:
    if axis is None:
        if full != sub:
            raise InputError(f"'{name}' has {sub} instead of {full} entries on an axis that is never sliced.")
        return None
    group, repeat = axis
    if sub > full or full % repeat or sub % repeat:
        raise InputError(f"'{name}' cannot hold {sub} of {full} columns with {repeat} columns to a channel.")
    index = window(name, group, full // repeat, sub // repeat)
    if index is None or repeat == 1:
        return index
    return (index[:, None] * repeat + torch.arange(repeat)).flatten()


class Wire(NamedTuple):
    """The width groups at the input (with its repeat) and at the output of one layer; None is never sliced."""

    source: str | None
    target: str | None
    repeat: int = 1


class Scaler(nn.Module):
    """HeteroFL's scaler: in training, divide by the width rate, so that narrow models match the wide one in scale.

    It does nothing until a method sets `active`, nothing in evaluation mode, and holds no tensors. `reference` is the
    rate of the global model, which is left as it is.
    """

    def __init__(self, rate: float = 1.0) -> None:
        super().__init__()
        self.rate = rate
        self.reference = 1.0
        self.active = False

    def forward(self, x: Tensor) -> Tensor:
        """Return `x / (rate / reference)` in active training, else `x`."""
        return x * (self.reference / self.rate) if self.active and self.training else x

    def extra_repr(self) -> str:
        """Show the rate."""
        return f"rate={self.rate:g}"
