"""What the networks of the zoo share."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from polyfed.core.errors import InputError
from polyfed.core.shape import InputShape
from polyfed.models.width import Groups, Wire, groups_of

FITTING = {  # which networks take inputs of a kind
    "image": "a cnn or a resnet",
    "signal": "cnn1d, lstm or an mlp",
    "text": "transformer, lstm or cnn1d",
    "table": "tabular or an mlp",
}


def image_shape(input_shape: Sequence[int], name: str) -> tuple[int, int, int]:
    """Return (channels, height, width), or say that a convolutional net needs images."""
    if len(input_shape) != 3:
        kind = InputShape(input_shape).kind
        raise InputError(
            f"The model '{name}' needs images of shape (channels, height, width), but the data has shape "
            f"{tuple(input_shape)} ({'an' if kind[0] in 'aeiou' else 'a'} {kind}): use {FITTING[kind]}."
        )
    channels, height, width = input_shape
    return channels, height, width


def refuse_rate(rate: float, name: str) -> None:
    """Say that a network has no narrower versions."""
    if rate != 1.0:
        raise InputError(f"The model '{name}' has no width rates: write it without '@{rate:g}'.")


class Classifier(nn.Module):
    """A network with features and a linear head; subclasses call `add_head` and define `features`."""

    head: nn.Module
    feature_dim: int
    num_classes: int

    def add_head(self, feature_dim: int, num_classes: int) -> None:
        """Register the last layer and its sizes."""
        self.feature_dim, self.num_classes = feature_dim, num_classes
        self.head = nn.Linear(feature_dim, num_classes)

    def features(self, x: Tensor) -> Tensor:
        """Return the input of the last layer, `[B, feature_dim]`."""
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits."""
        logits: Tensor = self.head(self.features(x))
        return logits


class Network(Classifier):
    """A classifier in three parts: `stem` (a module), `middle` (a method) and `head` (a linear layer).

    Subclasses register `stem`, call `add_head`, and define `middle` and `wires`.
    """

    stem: nn.Module
    family: str

    def middle(self, s: Tensor) -> Tensor:
        """Return the features of a stem output."""
        raise NotImplementedError

    def wires(self) -> dict[str, Wire]:
        """Return, for every layer with weights, the width groups at its input and output."""
        raise NotImplementedError

    def features(self, x: Tensor) -> Tensor:
        """Return the input of the last layer, `[B, feature_dim]`."""
        return self.middle(self.stem(x))

    def width_groups(self) -> Groups:
        """Return the hidden-channel axes of every tensor, see `polyfed.models.width`."""
        return groups_of(self, self.wires())
