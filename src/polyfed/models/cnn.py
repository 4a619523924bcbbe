"""Small convolutional nets: `cnn:<channels>[,bn][,exits]`, `cnn2` and `convnet`."""

from __future__ import annotations

from collections.abc import Sequence

import torch.nn.functional as F
from torch import Tensor, nn

from polyfed.models.exits import OPTION, MultiExit, take_exits
from polyfed.models.mlp import Dense
from polyfed.models.network import Network, image_shape
from polyfed.models.registry import Options, register
from polyfed.models.width import Scaler, Wire, scaled

NORM = {"bn": "BatchNorm behind every convolution; without it none"}


@register(
    "cnn",
    example="cnn:16-32-64",
    summary="3x3 convolutions with pooling, global average, linear head",
    options={"<channels>-<channels>...": "channels of each convolution, 16-32-64 without it", **NORM, **OPTION},
)
def build_cnn(options: Options, input_shape: Sequence[int], num_classes: int, rate: float) -> ConvNet | MultiExit:
    """Build `cnn:<channels>[,bn][,exits]`; 16-32-64 by default."""
    norm = options.take("bn") is not None
    found = options.take(r"[1-9]\d*(-[1-9]\d*)*")
    channels = [int(number) for number in (found[0] if found else "16-32-64").split("-")]
    exits = take_exits(options, len(channels))
    net = ConvNet(input_shape, num_classes, channels, norm=norm, rate=rate)
    return MultiExit(net, exits, from_stem=True) if exits else net


@register("cnn2", example="cnn2", summary="FedAvg's net: two 5x5 convolutions (32, 64), 512 units", options=NORM)
def build_cnn2(options: Options, input_shape: Sequence[int], num_classes: int, rate: float) -> ConvNet:
    """Build the two-convolution net of McMahan et al."""
    norm = options.take("bn") is not None
    return ConvNet(input_shape, num_classes, [32, 64], kernel=5, hidden=512, norm=norm, rate=rate)


@register("convnet", example="convnet", summary="AMS's net: 3x3 convolutions 32-64-64, 64 units", options=NORM)
def build_convnet(options: Options, input_shape: Sequence[int], num_classes: int, rate: float) -> ConvNet:
    """Build the three-convolution, two-linear-layer net of AMS."""
    norm = options.take("bn") is not None
    return ConvNet(input_shape, num_classes, [32, 64, 64], hidden=64, norm=norm, rate=rate)


class ConvStage(nn.Module):
    """Convolution, scaler, norm if asked for, 2x2 max-pool if asked for, ReLU."""

    def __init__(self, inputs: int, outputs: int, kernel: int, norm: bool, pool: bool, rate: float) -> None:
        super().__init__()
        self.conv = nn.Conv2d(inputs, outputs, kernel, padding=kernel // 2, bias=not norm)
        self.scaler = Scaler(rate)
        self.norm = nn.BatchNorm2d(outputs) if norm else None
        self.pool = pool

    def forward(self, x: Tensor) -> Tensor:
        """Return the map, halved if pooled."""
        x = self.scaler(self.conv(x))
        x = x if self.norm is None else self.norm(x)
        # Pooling first gives the same values and gradients with a quarter of the work for the ReLU.
        x = F.max_pool2d(x, 2) if self.pool else x
        return x.relu_()


class ConvNet(Network):
    """Convolution stages, then a global average or (`hidden`) a flattened map and a hidden linear layer.

    A stage pools only while the map keeps at least 2 pixels, so that 8x8 images work too.
    """

    def __init__(
        self,
        input_shape: Sequence[int],
        num_classes: int,
        channels: Sequence[int],
        kernel: int = 3,
        hidden: int | None = None,
        norm: bool = False,
        rate: float = 1.0,
    ) -> None:
        super().__init__()
        inputs, height, width = image_shape(input_shape, "cnn")
        layout = [f"{kernel}x{kernel}", *map(str, channels), *([f"fc{hidden}"] if hidden else []), *["bn"] * norm]
        self.family = "cnn-" + "-".join(layout)
        stages = []
        for full in channels:
            outputs, pool = scaled(full, rate), min(height, width) >= 4
            stages.append(ConvStage(inputs, outputs, kernel, norm, pool, rate))
            inputs, height, width = outputs, *((height // 2, width // 2) if pool else (height, width))
        self.stem, self.stages = stages[0], nn.Sequential(*stages[1:])
        self.pixels = height * width if hidden else 1
        self.hidden = Dense(inputs * self.pixels, scaled(hidden, rate), rate) if hidden else None
        self.add_head(scaled(hidden, rate) if hidden else inputs, num_classes)

    def middle(self, s: Tensor) -> Tensor:
        """Return the hidden activations, or the channel means of the last map."""
        s = self.stages(s)
        return s.mean((2, 3)) if self.hidden is None else self.hidden(s)

    def wires(self) -> dict[str, Wire]:
        """Return one width group per convolution and one for the hidden layer."""
        wires, last = {}, None
        for name in ["stem", *[f"stages.{number}" for number in range(len(self.stages))]]:
            wires[f"{name}.conv"] = Wire(last, name)
            if self.stem.norm is not None:
                wires[f"{name}.norm"] = Wire(name, name)
            last = name
        if self.hidden is not None:
            wires["hidden.linear"] = Wire(last, "hidden", self.pixels)
            last = "hidden"
        return wires | {"head": Wire(last, None)}
