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
        """Return network inputs for stored values `x` (first dimension: samples)."""
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
        return self.scaling.apply(self.x[self.rows(index)])

    def labels(self, index: Tensor | None = None) -> Tensor:
        """Return the labels of the given positions (None: all)."""
        return self.y[self.rows(index)]

    def select(self, index: Tensor) -> Samples:
        """Return a smaller view of the same storage."""
        rows = self.rows(index)
        assert isinstance(rows, Tensor)
        return replace(self, index=rows)

    def label_counts(self, num_classes: int) -> tuple[int, ...]:
        """Return how many samples of each class this view holds."""
        return tuple(torch.bincount(self.labels(), minlength=num_classes).tolist())

    def chunks(self, size: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield inputs and labels in order, in large pieces: for evaluation and statistics."""
        for start in range(0, len(self), size):
            index = torch.arange(start, min(start + size, len(self)))
            yield self.inputs(index), self.labels(index)
