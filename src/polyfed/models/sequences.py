"""Networks for texts and signals: a small transformer, an LSTM and a one-dimensional CNN.

Texts are token ids with 0 as padding, which no output depends on; signals are (channels, time). All of them end in one
vector, the mean (of the CNN: the maximum) over the words that there are, or over time.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from polyfed.core.errors import InputError
from polyfed.core.shape import InputShape
from polyfed.models.network import FITTING, Classifier, refuse_rate
from polyfed.models.registry import Options, register

TEXT = InputShape((64,), words=1000)
SIGNAL = InputShape((3, 50))


@register(
    "transformer",
    example="transformer:2x64",
    summary="for texts: blocks of attention, mean over the words",
    options={
        "<depth>x<width>": "blocks and their width; 2x64 without it",
        "heads=<number>": "heads of each block; 4 without it",
    },
    inputs=TEXT,
)
def build_transformer(options: Options, input_shape: Sequence[int], num_classes: int, rate: float) -> Transformer:
    """Build `transformer:<depth>x<width>[,heads=<number>]`; two blocks of width 64 with four heads by default."""
    shape, depth, width = _read("transformer", options, input_shape, rate, (2, 64), ("text",))
    heads = options.take(r"heads=([1-9]\d*)")
    count = int(heads[1]) if heads else 4
    if width % count:
        raise InputError(
            f"The model 'transformer' has width {width}, which {count} heads cannot share: choose another."
        )
    return Transformer(shape, num_classes, depth, width, count)


@register(
    "lstm",
    example="lstm:1x64",
    summary="for texts and signals: recurrent layers, mean over the steps",
    options={"<layers>x<width>": "recurrent layers and their width; 1x64 without it"},
    inputs=TEXT,
)
def build_lstm(options: Options, input_shape: Sequence[int], num_classes: int, rate: float) -> LSTM:
    """Build `lstm:<layers>x<width>`; one layer of width 64 by default."""
    shape, depth, width = _read("lstm", options, input_shape, rate, (1, 64), ("text", "signal"))
    return LSTM(shape, num_classes, depth, width)


@register(
    "cnn1d",
    example="cnn1d:2x64",
    summary="for signals and texts: convolutions of five steps, maximum over the steps",
    options={"<layers>x<width>": "convolutions and their channels; 2x64 without it"},
    inputs=SIGNAL,
)
def build_cnn1d(options: Options, input_shape: Sequence[int], num_classes: int, rate: float) -> CNN1d:
    """Build `cnn1d:<layers>x<width>`; two layers of width 64 by default."""
    shape, depth, width = _read("cnn1d", options, input_shape, rate, (2, 64), ("text", "signal"))
    return CNN1d(shape, num_classes, depth, width)


def _read(
    name: str, options: Options, input_shape: Sequence[int], rate: float, usual: tuple[int, int], kinds: Sequence[str]
) -> tuple[InputShape, int, int]:
    """Return the shape, the depth and the width, or say which inputs the network takes."""
    refuse_rate(rate, name)
    shape = InputShape(input_shape)
    if shape.kind not in kinds:
        raise InputError(
            f"The model '{name}' takes a {' or a '.join(kinds)}, but the data has shape {tuple(shape)} ({shape.kind}): "
            f"use {FITTING[shape.kind]}, or load token ids with kind='tokens'."
        )
    found = options.take(r"([1-9]\d*)x([1-9]\d*)")
    depth, width = (int(found[1]), int(found[2])) if found else usual
    return shape, depth, width


class Steps(nn.Module):
    """The first layer of all of them: words become vectors; a signal is turned so that its steps come first."""

    def __init__(self, shape: InputShape, width: int) -> None:
        super().__init__()
        self.words = nn.Embedding(shape.words, width) if shape.words else None
        self.outputs = width if shape.words else shape[0]

    def forward(self, x: Tensor) -> Tensor:
        """Return `[B, steps, outputs]`."""
        vectors: Tensor = x.transpose(1, 2) if self.words is None else self.words(x)
        return vectors

    def present(self, x: Tensor) -> Tensor:
        """Return where there is a word, or a step of a signal, `[B, steps]`."""
        return (x != 0) if self.words is not None else torch.ones_like(x[:, 0], dtype=torch.bool)


def mean_over(steps: Tensor, present: Tensor) -> Tensor:
    """Return the mean over the steps that there are, `[B, width]`."""
    weights = present.unsqueeze(-1).to(steps.dtype)
    return (steps * weights).sum(1) / weights.sum(1).clamp(min=1.0)


class Block(nn.Module):
    """Attention and a perceptron, each after a norm and added to what came in."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm = nn.LayerNorm(width)
        self.into = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)
        )

    def forward(self, x: Tensor, present: Tensor) -> Tensor:
        """Return the steps after the block; nobody looks at padding."""
        batch, steps, width = x.shape
        parts = self.into(self.norm(x)).view(batch, steps, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        query, key, value = parts[0], parts[1], parts[2]
        weights = query @ key.transpose(-2, -1) / (width // self.heads) ** 0.5
        weights = weights.masked_fill(~present[:, None, None, :], -1e9).softmax(-1)
        x = x + self.out((weights @ value).transpose(1, 2).reshape(batch, steps, width))
        added: Tensor = x + self.mlp(x)
        return added


class Transformer(Classifier):
    """Words and their places, blocks, a norm, the mean over the words."""

    def __init__(self, shape: InputShape, num_classes: int, depth: int, width: int, heads: int) -> None:
        super().__init__()
        self.family = f"transformer{width}"
        self.steps = Steps(shape, width)
        self.places = nn.Parameter(torch.randn(shape[0], width) * 0.02)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.add_head(width, num_classes)

    def features(self, x: Tensor) -> Tensor:  # noqa: D102
        present = self.steps.present(x)
        steps = self.steps(x) + self.places
        for block in self.blocks:
            steps = block(steps, present)
        return mean_over(self.norm(steps), present)


class LSTM(Classifier):
    """Recurrent layers over words or steps; padding comes last, so that no word sees it."""

    def __init__(self, shape: InputShape, num_classes: int, depth: int, width: int) -> None:
        super().__init__()
        self.family = f"lstm{width}"
        self.steps = Steps(shape, width)
        self.layers = nn.LSTM(self.steps.outputs, width, depth, batch_first=True)
        self.add_head(width, num_classes)

    def features(self, x: Tensor) -> Tensor:  # noqa: D102
        return mean_over(self.layers(self.steps(x))[0], self.steps.present(x))


class CNN1d(Classifier):
    """Convolutions over words or steps; padding is silenced after each, and the maximum over the rest is taken."""

    def __init__(self, shape: InputShape, num_classes: int, depth: int, width: int) -> None:
        super().__init__()
        self.family = f"cnn1d{width}"
        self.steps = Steps(shape, width)
        inputs = [self.steps.outputs, *[width] * (depth - 1)]
        self.layers = nn.ModuleList(nn.Conv1d(count, width, 5, padding=2) for count in inputs)
        self.add_head(width, num_classes)

    def features(self, x: Tensor) -> Tensor:  # noqa: D102
        present = self.steps.present(x).unsqueeze(1)
        steps = self.steps(x).transpose(1, 2) * present
        for layer in self.layers:
            steps = F.relu(layer(steps)) * present
        strongest: Tensor = steps.amax(-1)
        return strongest
