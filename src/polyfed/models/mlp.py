"""Multi-layer perceptrons: `mlp:<hidden layers>[x<width>]`."""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import Tensor, nn

from polyfed.core.errors import InputError
from polyfed.core.shape import InputShape
from polyfed.models.network import FITTING, Network
from polyfed.models.registry import Options, register
from polyfed.models.width import Scaler, Wire, scaled


@register(
    "mlp",
    example="mlp:2x64",
    summary="hidden layers of equal width, ReLU",
    options={"<depth>[x<width>]": "hidden layers and their units; 100 units, and one layer, without it"},
)
def build_mlp(options: Options, input_shape: Sequence[int], num_classes: int, rate: float) -> MLP:
    """Build `mlp:<depth>[x<width>]`; one hidden layer of 100 units by default."""
    if InputShape(input_shape).words:
        raise InputError(f"The model 'mlp' takes numbers, but the inputs are token ids: use {FITTING['text']}.")
    found = options.take(r"([1-9]\d*)(?:x([1-9]\d*))?")
    depth, width = (int(found[1]), int(found[2] or 100)) if found else (1, 100)
    return MLP(input_shape, num_classes, depth, width, rate)


class Dense(nn.Module):
    """Flatten, linear, scaler, ReLU."""

    def __init__(self, inputs: int, outputs: int, rate: float) -> None:
        super().__init__()
        self.linear = nn.Linear(inputs, outputs)
        self.scaler = Scaler(rate)

    def forward(self, x: Tensor) -> Tensor:
        """Return the activations, `[B, outputs]`."""
        x = self.scaler(self.linear(x.flatten(1)))
        return x.relu_()


class MLP(Network):
    """Perceptron with `depth` hidden layers of `width` units; the first is the stem."""

    def __init__(
        self, input_shape: Sequence[int], num_classes: int, depth: int = 1, width: int = 100, rate: float = 1.0
    ) -> None:
        super().__init__()
        hidden = scaled(width, rate)
        self.family = f"mlp{width}"
        self.stem = Dense(math.prod(input_shape), hidden, rate)
        self.layers = nn.Sequential(*[Dense(hidden, hidden, rate) for _ in range(depth - 1)])
        self.add_head(hidden, num_classes)

    def middle(self, s: Tensor) -> Tensor:
        """Return the activations of the last hidden layer."""
        z: Tensor = self.layers(s)
        return z

    def wires(self) -> dict[str, Wire]:
        """Return one width group per hidden layer."""
        wires, last = {"stem.linear": Wire(None, "stem")}, "stem"
        for number in range(len(self.layers)):
            wires[f"layers.{number}.linear"] = Wire(last, f"layers.{number}")
            last = f"layers.{number}"
        return wires | {"head": Wire(last, None)}
