"""A view of labelled (or unlabeled) samples: shared storage, an index, and normalisation on the fly."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor


@dataclass(frozen=True)
class Scaling:
    """How stored values become network inputs: `(x / divisor - mean) / std`, per channel (dimension 1)."""

    mean: tuple[float, ...] = (0.0,)
    std: tuple[float, ...] = (1.0,)
    divisor: float = 1.0  # 255 for images kept as uint8

    def apply(self, x: Tensor) -> Tensor:
        """Return network inputs for stored values `x` (first dimension: samples); token ids (int64) stay."""
        if x.dtype == torch.int64:
            return x
        own = not x.is_floating_point()  # a fresh tensor, which may be changed in place
        x = x.to(torch.get_default_dtype()) if own else x
        if self.divisor != 1.0:
            x, own = x.div_(self.divisor) if own else x / self.divisor, True
        if self.mean == (0.0,) and self.std == (1.0,):
            return x
        mean, std = self._channel(self.mean, x), self._channel(self.std, x)
        return (x.sub_(mean) if own else x - mean).div_(std)

    def undo(self, x: Tensor) -> Tensor:
        """Return values before mean and std were applied: images in [0, 1]."""
        return x * self._channel(self.std, x) + self._channel(self.mean, x)

    def channels(self) -> dict[str, Tensor]:
        """Return `mean` and `std` of images as tensors, for losses that undo the scaling: `x * std + mean`."""
        return {"mean": torch.tensor(self.mean).view(1, -1, 1, 1), "std": torch.tensor(self.std).view(1, -1, 1, 1)}

    @staticmethod
    def _channel(values: tuple[float, ...], x: Tensor) -> Tensor:
        shape = (1, len(values)) + (1,) * (x.dim() - 2) if x.dim() > 1 else (1,)
        return torch.tensor(values, dtype=x.dtype, device=x.device).view(shape)


@dataclass(frozen=True)
class Samples:
    """Some rows of a data set.

    `x` and `y` are the whole storage and are shared between views; `index` says which rows belong to this
    view (None: all). So ten thousand clients cost ten thousand small index tensors and one copy of the data.
    """

    x: Tensor
    y: Tensor
    index: Tensor | None = None
    scaling: Scaling = field(default_factory=Scaling)

    def __len__(self) -> int:
        return len(self.x) if self.index is None else len(self.index)

    def rows(self, index: Tensor | None = None) -> Tensor | slice:
        """Translate positions in this view into rows of the storage."""
        if self.index is None:
            return slice(None) if index is None else index
        return self.index if index is None else self.index[index]

    def inputs(self, index: Tensor | None = None) -> Tensor:
        """Return normalized network inputs of the given positions (None: all)."""
        return self.scaling.apply(taken(self.x, self.rows(index)))

    def labels(self, index: Tensor | None = None) -> Tensor:
        """Return the labels of the given positions (None: all)."""
        return taken(self.y, self.rows(index))

    def select(self, index: Tensor) -> Samples:
        """Return a smaller view of the same storage."""
        rows = self.rows(index)
        assert isinstance(rows, Tensor)
        return replace(self, index=rows)

    def is_labeled(self) -> bool:
        """Tell whether every sample has a label: a class number, or values."""
        labels = self.labels()
        return not bool((labels.isnan() if labels.is_floating_point() else labels < 0).any())

    def label_counts(self, num_classes: int) -> tuple[int, ...]:
        """Return how many samples of each class this view holds (with several labels a sample: how many have each)."""
        if self.y.dim() > 1:
            return tuple(self.labels().sum(0).int().tolist())
        return tuple(torch.bincount(self.labels(), minlength=num_classes).tolist())

    def chunks(self, size: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield inputs and labels in order, in large pieces: for evaluation and statistics."""
        for start in range(0, len(self), size):
            index = torch.arange(start, min(start + size, len(self)))
            yield self.inputs(index), self.labels(index)


def taken(table: Tensor, rows: Tensor | slice) -> Tensor:
    """Return rows of a table. `index_select` copies whole rows: for images ten times as fast as `table[rows]`."""
    return table[rows] if isinstance(rows, slice) else table.index_select(0, rows.to(table.device))


def unlabeled(x: Tensor) -> Samples:
    """Return inputs as samples whose labels play no part."""
    return Samples(x, torch.zeros(len(x), dtype=torch.long, device=x.device))


def split_off(data: Samples, share: float, rng: torch.Generator) -> tuple[Samples, Samples]:
    """Return a share of the samples, drawn at random, and before it the rest; neither is empty.

    A single sample, or a share of 0, is not split: both are all of it.
    """
    if len(data) == 1 or not share:
        return data, data
    order = torch.randperm(len(data), generator=rng)
    apart = min(max(1, round(share * len(data))), len(data) - 1)
    return data.select(order[apart:]), data.select(order[:apart])


def drawn(data: Samples, count: int, rng: torch.Generator) -> Samples:
    """Return so many samples at random, in a random order; all, where there are no more."""
    return data.select(torch.randperm(len(data), generator=rng)[:count])


def set_apart(data: Samples, count: int, rng: torch.Generator) -> tuple[Samples, Samples]:
    """Return so many samples, drawn at random, and before them the others, both in their order.

    A single sample is not split: both are it.
    """
    if len(data) == 1:
        return data, data
    order = torch.randperm(len(data), generator=rng)
    return data.select(order[count:].sort().values), data.select(order[:count].sort().values)
