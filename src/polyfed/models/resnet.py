"""ResNets for small images, with the layouts that the papers count.

`resnet10|14|18|22|26|34` have basic blocks, `resnet50|101|152` bottlenecks, `resnet:<blocks>` any basic layout.
Options: `w<width>` (of the first stage, 64), `stem=3x3|7x7|fedin|pool`, `stem_width=<channels>`, `pre`
(pre-activation, HeteroFL's layout) and `exits` (see `polyfed.models.exits`). A block of the same place
has the same name at every depth.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch.nn.functional as F
from torch import Tensor, nn

from polyfed.core.errors import InputError, unknown
from polyfed.models.exits import OPTION, MultiExit, take_exits
from polyfed.models.network import Network, image_shape
from polyfed.models.registry import Options, register
from polyfed.models.width import Groups, Scaler, Wire, scaled

BASIC = {
    10: (1, 1, 1, 1),
    14: (1, 1, 2, 2),
    18: (2, 2, 2, 2),
    22: (2, 2, 3, 3),
    26: (3, 3, 3, 3),
    34: (3, 4, 6, 3),
}
BOTTLENECK = {50: (3, 4, 6, 3), 101: (3, 4, 23, 3), 152: (3, 8, 36, 3)}

# kernel, stride, max-pool kernel (with stride 2; 0: no pooling)
STEMS = {"3x3": (3, 1, 0), "7x7": (7, 2, 3), "fedin": (3, 2, 3), "pool": (3, 1, 2)}

OPTIONS = {
    "w<width>": "channels of the first stage, twice as many in every further one; 64 without it",
    "stem=" + "|".join(STEMS): (
        "the first convolution: 3x3; 7x7, stride 2, and pooling; FedIN's, 3x3, stride 2, and pooling; 3x3 and pooling. "
        "3x3 without it"
    ),
    "stem_width=<channels>": "channels of the first convolution; those of the first stage without it",
    **OPTION,
}
PRE = {"pre": "norm and activation before each convolution; behind it without this"}


def register_depth(depth: int, blocks: tuple[int, ...], block: str) -> None:
    """Register `resnet<depth>`."""
    options = OPTIONS | PRE if block == "basic" else OPTIONS
    summary = f"ResNet, {block} blocks {'-'.join(map(str, blocks))}"

    @register(f"resnet{depth}", example=f"resnet{depth}:w16", summary=summary, options=options)
    def build_depth(options: Options, input_shape: Sequence[int], num_classes: int, rate: float) -> ResNet | MultiExit:
        return read_options(options, input_shape, num_classes, blocks, block, rate)


def read_options(
    options: Options, input_shape: Sequence[int], num_classes: int, blocks: Sequence[int], block: str, rate: float
) -> ResNet | MultiExit:
    """Build a ResNet with the options that all depths share."""
    if block == "basic" and options.take("pre"):
        block = "pre"
    found = options.take(r"w([1-9]\d*)")
    width = int(found[1]) if found else 64
    found = options.take(r"stem_width=([1-9]\d*)")
    stem_width = int(found[1]) if found else width
    found = options.take(r"stem=(.*)")
    stem = found[1] if found else "3x3"
    if stem not in STEMS:
        raise unknown(f"stem in the model '{options.spec}'", stem, STEMS)
    exits = take_exits(options, len(blocks))
    if exits and block == "pre":
        raise InputError(f"The model '{options.spec}' cannot have exits: leave out pre, whose maps are not activated.")
    channels = [width * 2**stage for stage in range(len(blocks))]
    name = {"basic": "resnet", "pre": "preresnet", "bottleneck": "bottleneck"}[block]
    family = f"{name}-w{width}-{stem}"
    if stem_width != width:
        family += f"-from{stem_width}"
    if len(blocks) != 4:
        family += f"-{len(blocks)}stages"
    net = ResNet(input_shape, num_classes, blocks, channels, block, stem, stem_width, rate=rate, family=family)
    return MultiExit(net, exits, from_stem=False) if exits else net


@register(
    "resnet",
    example="resnet:1-2,w16",
    summary="ResNet, basic blocks, any number in any number of stages",
    options={"<blocks>-<blocks>...": "blocks of each stage; must be given", **OPTIONS, **PRE},
)
def build_resnet(options: Options, input_shape: Sequence[int], num_classes: int, rate: float) -> ResNet | MultiExit:
    """Build `resnet:<blocks>-<blocks>...`, with as many stages as numbers."""
    found = options.take(r"[1-9]\d*(-[1-9]\d*)+")
    if not found:
        raise InputError(f"The model '{options.spec}' needs its blocks per stage: write for instance 'resnet:1-2,w16'.")
    blocks = [int(number) for number in found[0].split("-")]
    return read_options(options, input_shape, num_classes, blocks, "basic", rate)


for _depth, _blocks in BASIC.items():
    register_depth(_depth, _blocks, "basic")
for _depth, _blocks in BOTTLENECK.items():
    register_depth(_depth, _blocks, "bottleneck")


class ConvNorm(nn.Module):
    """Convolution, scaler, batch norm; with `bare`, the convolution alone (pre-activation nets norm later)."""

    def __init__(
        self,
        inputs: int,
        outputs: int,
        kernel: int,
        stride: int = 1,
        rate: float = 1.0,
        bare: bool = False,
        bias: bool = False,
    ) -> None:
        super().__init__()
        # A 1x1 convolution with a stride reads only every second pixel. Those are picked first: as fast, and it keeps
        # narrow networks able to run channels last (see `is_safe` in `polyfed.core.layout`).
        self.pick = stride if kernel == 1 else 1
        self.conv = nn.Conv2d(inputs, outputs, kernel, 1 if kernel == 1 else stride, kernel // 2, bias=bias)
        # Fan-out He initialization keeps the scale of gradients over depth, as in the ResNet papers.
        nn.init.kaiming_normal_(self.conv.weight, mode="fan_out", nonlinearity="relu")
        self.scaler = None if bare else Scaler(rate)
        self.norm = None if bare else nn.BatchNorm2d(outputs)

    def forward(self, x: Tensor) -> Tensor:
        """Return the map before its activation."""
        x = F.avg_pool2d(x, 1, self.pick) if self.pick > 1 else x  # faster than slicing: its gradient keeps the layout
        x = self.conv(x)
        if self.scaler is not None and self.norm is not None:
            x = self.norm(self.scaler(x))
        return x

    def wires(self, name: str, source: str | None, target: str) -> dict[str, Wire]:
        """Return the wires of the layers, under a prefix."""
        wires = {f"{name}.conv": Wire(source, target)}
        return wires if self.norm is None else wires | {f"{name}.norm": Wire(target, target)}


class Activation(nn.Module):
    """Scaler, batch norm, ReLU: what a pre-activation net does before a convolution."""

    def __init__(self, channels: int, rate: float) -> None:
        super().__init__()
        self.scaler = Scaler(rate)
        self.norm = nn.BatchNorm2d(channels)

    def forward(self, x: Tensor) -> Tensor:
        """Return the activated map."""
        x = self.norm(self.scaler(x))
        return x.relu_()  # in place here and below: nothing needs the map before it, and memory is the bottleneck


class Stem(nn.Module):
    """First convolution and, if the kind of stem has them, its activation and max-pool."""

    def __init__(self, inputs: int, outputs: int, kind: str, rate: float, bare: bool, bias: bool) -> None:
        super().__init__()
        kernel, stride, self.pool = STEMS[kind]
        self.first = ConvNorm(inputs, outputs, kernel, stride, rate, bare, bias)
        self.bare = bare

    def forward(self, x: Tensor) -> Tensor:
        """Return `s_in`, the input of the first stage."""
        x = self.first(x) if self.bare else self.first(x).relu_()
        return F.max_pool2d(x, self.pool, 2, padding=self.pool // 3) if self.pool else x


class Block(nn.Module):
    """Residual block: a basic block has two 3x3 convolutions, a bottleneck 1x1, 3x3 and 1x1.

    `project` puts a 1x1 convolution on the shortcut. The caller decides it from the unscaled widths: two widths that
    differ may become equal after scaling, and all rates must have the same layers.
    """

    def __init__(
        self, inputs: int, widths: Sequence[int], kernels: Sequence[int], stride: int, project: bool, rate: float
    ) -> None:
        super().__init__()
        layers = []
        for place, (source, target, kernel) in enumerate(zip([inputs, *widths], widths, kernels, strict=False)):
            # The stride sits on the first 3x3 convolution, in bottlenecks too.
            layers.append(ConvNorm(source, target, kernel, stride if place == kernels.index(3) else 1, rate))
        self.layers = nn.ModuleList(layers)
        self.shortcut = ConvNorm(inputs, widths[-1], 1, stride, rate) if project else None

    def forward(self, x: Tensor) -> Tensor:
        """Return the activated sum."""
        residual = x if self.shortcut is None else self.shortcut(x)
        *inner, last = self.layers
        for layer in inner:
            x = layer(x).relu_()
        x = last(x)
        x += residual
        return x.relu_()

    def wires(self, name: str, source: str, target: str) -> dict[str, Wire]:
        """Return the wires of the layers, under a prefix."""
        wires: dict[str, Wire] = {}
        last = source
        for number, layer in enumerate(self.layers):
            assert isinstance(layer, ConvNorm)
            goal = target if number == len(self.layers) - 1 else f"{name}.{number}"
            wires |= layer.wires(f"{name}.layers.{number}", last, goal)
            last = goal
        return wires if self.shortcut is None else wires | self.shortcut.wires(f"{name}.shortcut", source, target)


class PreBlock(nn.Module):
    """Pre-activation basic block; the shortcut convolution sees the activated input."""

    def __init__(self, inputs: int, outputs: int, stride: int, project: bool, rate: float, bias: bool) -> None:
        super().__init__()
        self.before1 = Activation(inputs, rate)
        self.conv1 = ConvNorm(inputs, outputs, 3, stride, bare=True, bias=bias)
        self.before2 = Activation(outputs, rate)
        self.conv2 = ConvNorm(outputs, outputs, 3, bare=True, bias=bias)
        self.shortcut = ConvNorm(inputs, outputs, 1, stride, bare=True, bias=bias) if project else None

    def forward(self, x: Tensor) -> Tensor:
        """Return the sum, not activated."""
        activated = self.before1(x)
        residual = x if self.shortcut is None else self.shortcut(activated)
        x = self.conv2(self.before2(self.conv1(activated)))
        x += residual
        return x

    def wires(self, name: str, source: str, target: str) -> dict[str, Wire]:
        """Return the wires of the layers, under a prefix."""
        inner = f"{name}.0"
        wires = {f"{name}.before1.norm": Wire(source, source), f"{name}.before2.norm": Wire(inner, inner)}
        wires |= self.conv1.wires(f"{name}.conv1", source, inner) | self.conv2.wires(f"{name}.conv2", inner, target)
        return wires if self.shortcut is None else wires | self.shortcut.wires(f"{name}.shortcut", source, target)


class ResNet(Network):
    """Stem, stages of residual blocks (each after the first halves the map), global average, linear head.

    Parameters
    ----------
    blocks, channels
        Number of blocks and (unscaled) width of each stage.
    block
        "basic", "bottleneck" (outputs are four times as wide) or "pre" (pre-activation basic).
    stem, stem_width
        A kind of `STEMS` and its (unscaled) output channels.
    bias
        Biases on the convolutions (pre-activation only).
    """

    stem: Stem

    def __init__(
        self,
        input_shape: Sequence[int],
        num_classes: int,
        blocks: Sequence[int],
        channels: Sequence[int],
        block: str = "basic",
        stem: str = "3x3",
        stem_width: int = 64,
        bias: bool = False,
        rate: float = 1.0,
        family: str = "resnet",
    ) -> None:
        super().__init__()
        self.family = family
        pre, growth = block == "pre", 4 if block == "bottleneck" else 1
        self.growth = growth
        image_channels, _, _ = image_shape(input_shape, family)
        inputs, full_inputs = scaled(stem_width, rate), stem_width
        self.stem = Stem(image_channels, inputs, stem, rate, pre, bias)
        stages = []
        for number, (count, full) in enumerate(zip(blocks, channels, strict=True)):
            stage: list[Block | PreBlock] = []
            width = scaled(full, rate)
            for place in range(count):
                stride = 2 if number and not place else 1
                project = stride > 1 or full_inputs != full * growth
                if pre:
                    stage.append(PreBlock(inputs, width, stride, project, rate, bias))
                elif block == "basic":
                    stage.append(Block(inputs, (width, width), (3, 3), stride, project, rate))
                else:
                    stage.append(Block(inputs, (width, width, 4 * width), (1, 3, 1), stride, project, rate))
                inputs, full_inputs = width * growth, full * growth
            stages.append(nn.Sequential(*stage))
        self.stages = nn.Sequential(*stages)
        self.last = Activation(inputs, rate) if pre else None
        self.add_head(inputs, num_classes)

    def middle(self, s: Tensor) -> Tensor:
        """Return the channel means of the last map."""
        s = self.stages(s)
        s = s if self.last is None else self.last(s)
        return s.mean((2, 3))

    def wires(self) -> dict[str, Wire]:
        """Return the groups: one per stage (residual additions tie its blocks) and one per inner convolution."""
        wires, source = self.stem.first.wires("stem.first", None, "stem"), "stem"
        for number, stage in enumerate(self.stages):
            assert isinstance(stage, nn.Sequential)
            # Without a projection the stage adds onto its input, so it is tied to what came before.
            target = source if stage[0].shortcut is None else f"stages.{number}"
            for place, block in enumerate(stage):
                assert isinstance(block, Block | PreBlock)
                wires |= block.wires(f"stages.{number}.{place}", source, target)
                source = target
        if self.last is not None:
            wires["last.norm"] = Wire(source, source)
        return wires | {"head": Wire(source, None)}

    def width_groups(self) -> Groups:
        """Return the hidden-channel axes; the outputs of bottlenecks widen by four, one for each inner channel."""
        groups, outputs = super().width_groups(), {f"stages.{number}" for number in range(len(self.stages))}
        return {
            name: tuple((axis[0], self.growth) if axis and axis[0] in outputs else axis for axis in axes)
            for name, axes in groups.items()
        }
