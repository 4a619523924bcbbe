"""Training with large kernels on a processor: frequencies instead of a direct convolution, where that is faster.

Any call of `conv2d` in a network is looked at, so networks of other people gain as well. Which way is taken depends on
the shapes alone, and both are equal up to rounding. Private training and stacks of clients have ways of their own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from polyfed.ops.frequency import Shape, convolve

SMALLEST = 5  # the side of a kernel from which on a network is looked at


class LargeKernels(TorchFunctionMode):
    """Within this block, convolutions with large kernels are computed with frequencies."""

    def __init__(self, models: Mapping[str, nn.Module], able: bool = True) -> None:
        super().__init__()
        layers = (layer for model in models.values() for layer in model.modules())
        self.needed = able and any(
            isinstance(layer, nn.Conv2d) and min(layer.kernel_size) >= SMALLEST for layer in layers
        )

    def __enter__(self) -> LargeKernels:
        return super().__enter__() if self.needed else self

    def __exit__(self, *details: Any) -> None:
        if self.needed:
            super().__exit__(*details)

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function is torch.conv2d:
            chosen = _shape(*args, **kwargs)
            if chosen is not None:
                x, weight, bias = (_argument(place, name, args, kwargs) for place, name in enumerate(FIRST))
                return convolve(x, weight, bias, chosen.padding)
        return function(*args, **kwargs)


FIRST = ("input", "weight", "bias")


def _argument(place: int, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    return args[place] if place < len(args) else kwargs.get(name)


def _shape(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> Shape | None:
    """Return the shape of a convolution that is faster with frequencies; none for all others."""
    tensors = [tensor for tensor in (input, weight, bias) if tensor is not None]
    plain = _pair(stride) == _pair(dilation) == (1, 1) and groups == 1 and input.dim() == weight.dim() == 4
    fits = plain and input.shape[1] == weight.shape[1] and (bias is None or len(bias) == len(weight))
    if not fits or any(tensor.dtype != torch.float32 or tensor.device.type != "cpu" for tensor in tensors):
        return None
    size, kernel = (input.shape[2], input.shape[3]), (weight.shape[2], weight.shape[3])
    if padding == "same":
        if not (kernel[0] % 2 and kernel[1] % 2):
            return None
        padding = kernel[0] // 2, kernel[1] // 2
    shape = Shape(size, kernel, (0, 0) if padding == "valid" else _pair(padding))
    inside = all(p < k for p, k in zip(shape.padding, kernel, strict=True))
    return shape if inside and min(shape.out) > 0 and shape.pays(len(input), *reversed(weight.shape[:2])) else None


def _pair(value: int | Sequence[int]) -> tuple[int, int]:
    return (value, value) if isinstance(value, int) else (value[0], value[-1])
