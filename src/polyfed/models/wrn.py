"""Wide ResNets: `wrn-<depth>-<factor>`, as FedMD+Global counts them (pre-activation, convolutions with biases)."""

from __future__ import annotations

from collections.abc import Sequence

from polyfed.core.errors import InputError
from polyfed.models.registry import Options, register
from polyfed.models.resnet import ResNet


@register(
    "wrn",
    example="wrn-10-1",
    summary="wide ResNet, pre-activation, three groups of 16/32/64 times a factor",
    options={"<depth>-<factor>": "layers, 6n + 4 of them, and how much wider than 16/32/64; both must be given"},
)
def build_wrn(options: Options, input_shape: Sequence[int], num_classes: int, rate: float) -> ResNet:
    """Build `wrn-<depth>-<factor>`."""
    found = options.take(r"(\d+)-([1-9]\d*)")
    depth, factor = (int(found[1]), int(found[2])) if found else (0, 0)
    if depth < 10 or depth % 6 != 4:
        raise InputError(
            f"The model '{options.spec}' needs a depth of 10, 16, 22, 28, ... and a factor: "
            "write for instance 'wrn-16-1'."
        )
    return ResNet(
        input_shape,
        num_classes,
        blocks=[(depth - 4) // 6] * 3,
        channels=[16 * factor, 32 * factor, 64 * factor],
        block="pre",
        stem_width=16,
        bias=True,
        rate=rate,
        family=f"wrn-{factor}",
    )
