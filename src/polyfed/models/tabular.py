"""A perceptron for tables: every column of words has an embedding of its own. `tabular:<hidden layers>[x<width>]`."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from polyfed.core.errors import InputError
from polyfed.core.shape import InputShape
from polyfed.models.network import FITTING, Classifier, refuse_rate
from polyfed.models.registry import Options, register

LARGEST = 16  # numbers in the embedding of a column with many values


@register(
    "tabular",
    example="tabular:2x64",
    summary="for tables: an embedding for each column of words, then hidden layers, ReLU",
    options={"<depth>[x<width>]": "hidden layers and their units; 2x64 without it"},
    inputs=InputShape((12,), groups=(3, 5)),
)
def build_tabular(options: Options, input_shape: Sequence[int], num_classes: int, rate: float) -> Tabular:
    """Build `tabular:<depth>[x<width>]`; two hidden layers of 64 units by default."""
    refuse_rate(rate, "tabular")
    shape = InputShape(input_shape)
    if shape.kind != "table":
        raise InputError(
            f"The model 'tabular' takes rows of a table, but the data has shape {tuple(shape)} ({shape.kind}): "
            f"use {FITTING[shape.kind]}."
        )
    found = options.take(r"([1-9]\d*)(?:x([1-9]\d*))?")
    depth, width = (int(found[1]), int(found[2] or 64)) if found else (2, 64)
    return Tabular(shape, num_classes, depth, width)


class Embeddings(nn.Module):
    """Numbers stay; each group of 0 and 1 becomes the row of its value (none of its values: zeros)."""

    def __init__(self, numbers: int, groups: Sequence[int]) -> None:
        super().__init__()
        self.sizes = [numbers, *groups]
        self.tables = nn.ParameterList(
            nn.Parameter(torch.randn(size, min(LARGEST, (size + 1) // 2)) * 0.1) for size in groups
        )
        self.outputs = numbers + sum(table.shape[1] for table in self.tables)

    def forward(self, x: Tensor) -> Tensor:
        """Return numbers and embeddings side by side, `[B, outputs]`."""
        numbers, *groups = x.split(self.sizes, dim=-1)
        return torch.cat([numbers, *(group @ table for group, table in zip(groups, self.tables, strict=True))], dim=-1)


class Tabular(Classifier):
    """Embeddings and the first hidden layer are the stem; the other hidden layers are the middle."""

    def __init__(self, input_shape: InputShape, num_classes: int, depth: int = 2, width: int = 64) -> None:
        super().__init__()
        self.family = f"tabular{width}"
        embeddings = Embeddings(input_shape[0] - sum(input_shape.groups), input_shape.groups)
        self.stem = nn.Sequential(embeddings, nn.Linear(embeddings.outputs, width), nn.ReLU())
        self.layers = nn.Sequential(*[nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(depth - 1)])
        self.add_head(width, num_classes)

    def middle(self, s: Tensor) -> Tensor:
        """Return the activations of the last hidden layer."""
        z: Tensor = self.layers(s)
        return z

    def features(self, x: Tensor) -> Tensor:  # noqa: D102
        return self.middle(self.stem(x))
