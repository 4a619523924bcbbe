"""Training with large kernels on a processor: frequencies instead of a direct convolution, where that is faster.

In a network with such a layer every call of `conv2d` is looked at, so networks of other people gain as well; others do
not notice. Which way is taken depends on the shapes alone, and both are equal up to rounding. Private training and
stacks of clients have ways of their own; whatever is not plain training (transforms of functions, tracing, other
precisions) is left to torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from polyfed.ops.frequency import Shape, convolve, could_pay, is_batched
from polyfed.ops.memory import forget


class LargeKernels(TorchFunctionMode):
    """Within this block, convolutions with large kernels are computed with frequencies."""

    def __init__(self, models: Mapping[str, nn.Module], able: bool = True) -> None:
        super().__init__()
        layers = (layer for model in models.values() for layer in model.modules())
        self.needed = able and any(isinstance(layer, nn.Conv2d) and _may_be_faster(layer) for layer in layers)

    def __enter__(self) -> LargeKernels:
        return super().__enter__() if self.needed else self

    def __exit__(self, *details: Any) -> None:
        if self.needed:
            super().__exit__(*details)
            forget()

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function is torch.conv2d and _plainly():
            chosen = _shape(**dict(zip(ARGUMENTS, args, strict=False)), **kwargs)
            if chosen is not None:
                given = dict(zip(ARGUMENTS, args, strict=False)) | kwargs
                return convolve(given["input"], given["weight"], given.get("bias"), chosen.padding)
        return function(*args, **kwargs)


def _may_be_faster(layer: nn.Conv2d) -> bool:
    plain = set(layer.stride) == set(layer.dilation) == {1} and layer.groups == 1
    return plain and could_pay(layer.in_channels, layer.out_channels, layer.kernel_size)


ARGUMENTS = ("input", "weight", "bias", "stride", "padding", "dilation", "groups")


def _plainly() -> bool:
    """Tell whether a call is computed here and now, by torch's ordinary rules."""
    return not (
        torch._C._are_functorch_transforms_active()
        or torch.autograd.forward_ad._current_level >= 0
        or torch.is_inference_mode_enabled()
        or torch.is_autocast_enabled("cpu")
        or torch.compiler.is_compiling()
        or torch.jit.is_tracing()  # type: ignore[attr-defined]
    )


def _shape(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> Shape | None:
    """Return the shape of a convolution that is faster with frequencies; none for all others, and for what is wrong."""
    tensors = [tensor for tensor in (input, weight, bias) if tensor is not None]
    if not all(_is_plain(tensor) for tensor in tensors) or not input.dim() == weight.dim() == 4:
        return None
    if not _pair(stride) == _pair(dilation) == (1, 1) or groups != 1 or input.shape[1] != weight.shape[1]:
        return None
    if bias is not None and bias.shape != weight.shape[:1]:
        return None
    size, kernel = (input.shape[2], input.shape[3]), (weight.shape[2], weight.shape[3])
    if padding == "same":
        if not (kernel[0] % 2 and kernel[1] % 2):
            return None
        padding = kernel[0] // 2, kernel[1] // 2
    around = (0, 0) if padding == "valid" else _pair(padding)
    if around is None or not all(0 <= p < k for p, k in zip(around, kernel, strict=True)):
        return None
    shape = Shape(size, kernel, around)
    return shape if min(shape.out) > 0 and shape.pays(len(input), *reversed(weight.shape[:2])) else None


def _is_plain(tensor: Any) -> bool:
    """Tell whether something is a tensor of ordinary numbers in the processor's memory."""
    return (
        type(tensor) in (Tensor, nn.Parameter)
        and tensor.dtype == torch.float32
        and tensor.device.type == "cpu"
        and tensor.layout == torch.strided
        and not is_batched(tensor)
    )


def _pair(value: Any) -> tuple[int, int] | None:
    """Return a setting for height and width; none for what torch may know how to read."""
    if type(value) is int:
        return value, value
    if isinstance(value, Sequence) and len(value) in (1, 2) and all(type(part) is int for part in value):
        return value[0], value[-1]
    return None
