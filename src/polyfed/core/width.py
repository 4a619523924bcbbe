"""Which entries of a wide network's tensors a narrow one holds: the tensor side of width slicing.

For every tensor of a state, `Groups` has one entry per axis: `None` (never sliced: image channels, class outputs,
kernel axes) or `(group, repeat)`. Axes of one group use the same channels, because one feeds the other or because a
residual addition ties them; `repeat` is the number of consecutive columns that one channel owns (height x width where a
convolution is flattened into a linear layer, four at the output of a bottleneck, otherwise 1).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from polyfed.core.errors import InputError
from polyfed.core.stage import Aux, Grads

Shapes = Mapping[str, tuple[int, ...]]
Axis = tuple[str, int] | None
Groups = dict[str, tuple[Axis, ...]]
Index = tuple[Tensor | None, ...]
Channels = Callable[[str, int, int], Tensor]


def scaled(channels: int, rate: float) -> int:
    """Return the width of a layer at a rate, `ceil(rate * channels)`, at least one."""
    # 0.7 * 10 is 7.000000000000001 in floating point; the margin keeps it from becoming 8.
    return max(1, math.ceil(rate * channels - 1e-9))


def shapes_at(
    groups: Mapping[str, Sequence[Axis]], shapes: Mapping[str, Sequence[int]], rate: float
) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a network whose hidden layers have a share `rate` of the channels of the given one."""

    def size(axis: Axis, full: int) -> int:
        return full if axis is None else axis[1] * scaled(full // axis[1], rate)

    return {name: tuple(map(size, groups[name], shape)) for name, shape in shapes.items()}


def channels_of(groups: Mapping[str, Sequence[Axis]], shapes: Mapping[str, Sequence[int]]) -> dict[str, int]:
    """Return how many channels a network has in each of its width groups."""
    axes = [pair for name, shape in shapes.items() for pair in zip(groups[name], shape, strict=True)]
    return {axis[0]: size // axis[1] for axis, size in axes if axis is not None}


def rolled(start: int) -> Channels:
    """Return windows of consecutive channels from `start` on, which wrap around."""
    return lambda group, full, count: (start + torch.arange(count)) % full


def drawn(generator: Callable[[str], torch.Generator]) -> Channels:
    """Return random channels, in ascending order, drawn for each group with the generator of its name."""
    return lambda group, full, count: torch.randperm(full, generator=generator(group))[:count].sort().values


def channel_index(
    groups: Mapping[str, Sequence[Axis]],
    full_shapes: Mapping[str, Sequence[int]],
    sub_shapes: Mapping[str, Sequence[int]],
    channels: Channels,
) -> dict[str, Index]:
    """Say which entries of a wide model's tensors a narrow model holds.

    Parameters
    ----------
    groups
        The `width_groups()` of the wide model.
    full_shapes, sub_shapes
        Name -> shape in the wide and in the narrow model; the answer has the names of `sub_shapes`.
    channels
        `channels(group, full, count)` gives the `count` of `full` channels that a group's axes hold: `rolled(0)` is
        HeteroFL, `rolled(round)` is FedRolex, `drawn` is any.

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
            held = channels(group, full, sub)
            whole = sub == full and torch.equal(held, torch.arange(full))
            windows[group] = (full, sub, None if whole else held)
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


def cut(state: Mapping[str, Tensor], shapes: Shapes) -> dict[str, Tensor]:
    """Return the first entries of every tensor along every axis."""
    return {name: tensor[_corner(shapes[name])] for name, tensor in state.items()}


def put(state: Mapping[str, Tensor], part: Mapping[str, Tensor]) -> None:
    """Put first entries into whole tensors; the rest is as in a network whose channels there do nothing."""
    for name, tensor in part.items():
        state[name].fill_(1.0 if name.endswith("running_var") else 0.0)[_corner(tensor.shape)] = tensor


def corner_of(state: Mapping[str, Tensor], shapes: Shapes) -> dict[str, Tensor]:
    """Return ones at the first entries of every tensor, and zeros elsewhere."""
    held = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    for name, tensor in held.items():
        tensor[_corner(shapes[name])] = 1
    return held


def inside(grads: tuple[Grads, ...], aux: Aux) -> Grads:
    """Return the gradient of the entries that a stage's `aux["held"]` has ones for (see `corner_of`)."""
    return {"main": {name: gradient * aux["held"][name] for name, gradient in grads[0]["main"].items()}}


def _corner(shape: Sequence[int]) -> tuple[slice, ...]:
    return tuple(slice(0, size) for size in shape)


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
