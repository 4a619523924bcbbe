"""What the networks of the zoo share."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from polyfed.core.errors import InputError
from polyfed.models.width import Groups, Wire, groups_of


def image_shape(input_shape: Sequence[int], name: str) -> tuple[int, int, int]:
    """Return (channels, height, width), or say that a convolutional net needs images."""
    if len(input_shape) != 3:
        raise InputError(
            f"The model '{name}' needs images of shape (channels, height, width), but the data has shape "
            f"{tuple(input_shape)}: use an mlp."
        )
    channels, height, width = input_shape
    return channels, height, width


class Network(nn.Module):
    """A classifier in three parts: `stem` (a module), `middle` (a method) and `head` (a linear layer).

    Subclasses register `stem`, call `add_head`, and define `middle` and `wires`.
    """

    stem: nn.Module
    head: nn.Linear
    family: str
    feature_dim: int
    num_classes: int

    def add_head(self, feature_dim: int, num_classes: int) -> None:
        """Register the last layer and its sizes."""
        self.feature_dim, self.num_classes = feature_dim, num_classes
        self.head = nn.Linear(feature_dim, num_classes)

    def middle(self, s: Tensor) -> Tensor:
        """Return the features of a stem output."""
        raise NotImplementedError

    def wires(self) -> dict[str, Wire]:
        """Return, for every layer with weights, the width groups at its input and output."""
        raise NotImplementedError

    def features(self, x: Tensor) -> Tensor:
        """Return the input of the last layer, `[B, feature_dim]`."""
        return self.middle(self.stem(x))

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits."""
        logits: Tensor = self.head(self.features(x))
        return logits

    def width_groups(self) -> Groups:
        """Return the hidden-channel axes of every tensor, see `polyfed.models.width`."""
        return groups_of(self, self.wires())
