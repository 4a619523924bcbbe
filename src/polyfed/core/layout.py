"""Memory layout of convolutional networks: channels last is 1.2 to 1.7 times faster on a CPU.

Only the weights are laid out anew, and only while a network trains or is measured; the layout then spreads to its
activations. Stored states, messages and batches keep the usual order of axes. A network with a convolution that some
processors compute wrongly in this layout (`is_safe`) keeps the usual order as a whole: the layout of the activations
alone is enough to meet the fault.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from polyfed.core.nets import EVAL, mode

ALIGNMENT = 64  # bytes: tensors that torch makes in the processor's memory begin at multiples of it
BLOCK = 16  # input channels that the kernels of oneDNN treat together: 8 with AVX2, 16 with AVX-512

_able: WeakKeyDictionary[nn.Module, bool] = WeakKeyDictionary()


@contextmanager
def channels_last(models: Mapping[str, nn.Module], input_shape: tuple[int, ...]) -> Iterator[None]:
    """Run the block with convolution weights laid out channels last; afterwards the old tensors hold the new values."""
    swapped: list[tuple[Tensor, Tensor]] = []
    for module in models.values():
        if not is_able(module, input_shape):
            continue
        for weight in convolution_weights(module):
            swapped.append((weight, weight.data))
            weight.data = laid_out(weight.data)
    try:
        yield
    finally:
        for weight, old in reversed(swapped):  # a shared weight was laid out twice
            old.copy_(weight.data)
            weight.data = old
            weight.grad = None


def aligned(tree: Any) -> Any:
    """Return a tree whose tensors begin where torch itself would put them; the others are copied.

    The last bits of a convolution depend on where its weights begin, and tensors that came from a message or a file may
    begin anywhere: a network out of them must compute the same as one that never left this process.
    """
    return tree_map(lambda leaf: leaf.clone() if isinstance(leaf, Tensor) and _is_astray(leaf) else leaf, tree)


def _is_astray(tensor: Tensor) -> bool:
    return tensor.device.type == "cpu" and tensor.data_ptr() % ALIGNMENT != 0


def beside_weights(tree: Any, models: Mapping[str, nn.Module]) -> Any:
    """Return a tree in which tensors with the name and shape of a weight that is channels last are so, too.

    Penalties compare the weights with such an anchor at every step, and arithmetic across two layouts is slow.
    """
    names = {
        (name, weight.shape)
        for module in models.values()
        for name, weight in module.named_parameters()
        if weight.dim() == 4 and not weight.is_contiguous()
    }
    return _beside(tree, names) if names else tree


def _beside(tree: Any, names: set[tuple[str, torch.Size]]) -> Any:
    if not isinstance(tree, Mapping):
        return tree
    return {
        name: laid_out(leaf) if isinstance(leaf, Tensor) and (name, leaf.shape) in names else _beside(leaf, names)
        for name, leaf in tree.items()
    }


def convolution_weights(module: nn.Module) -> list[Tensor]:
    """Return the weights of all two-dimensional convolutions."""
    return [layer.weight for layer in convolutions(module)]


def convolutions(module: nn.Module) -> list[nn.Conv2d | nn.ConvTranspose2d]:
    """Return all two-dimensional convolutions."""
    return [layer for layer in module.modules() if isinstance(layer, nn.Conv2d | nn.ConvTranspose2d)]


def laid_out(weight: Tensor) -> Tensor:
    """Return a copy that is channels last also where there is one input channel.

    Such a weight counts as channels last already, and `contiguous` would return it with its old strides, from which the
    convolution does not take the layout of its output.
    """
    return torch.empty_like(weight, memory_format=torch.channels_last).copy_(weight)


def is_safe(weight: Tensor, stride: Sequence[int]) -> bool:
    """Tell whether a convolution is computed rightly channels last, on every processor.

    The weight gradient of a 1x1 convolution with a stride writes past its workspace if there are fewer input channels
    than a block (oneDNN, issue 6035): wrong gradients, a crash or no end, seen with AVX2 below 8 channels. The answer
    must not depend on the processor, or results would.
    """
    return max(weight.shape[2:]) > 1 or max(stride) == 1 or weight.shape[1] >= BLOCK


def is_able(module: nn.Module, input_shape: tuple[int, ...]) -> bool:
    """Tell whether a network works channels last.

    Some have convolutions that are not safe so; others call `view` on a map, which that order does not allow. A network
    that is fed with something else than samples says with what shape, in `takes`.
    """
    found = _able.get(module)
    if found is None:
        shape = getattr(module, "takes", input_shape if len(input_shape) == 3 else None)
        found = shape is not None and bool(convolution_weights(module)) and _try(module, shape)
        _able[module] = found
    return found


def _try(module: nn.Module, input_shape: tuple[int, ...]) -> bool:
    weights = convolution_weights(module)
    old = [weight.data for weight in weights]
    calls = Convolutions()
    try:
        # Layers that only training or another method than `forward` reaches, then those that are plain function calls.
        if not all(is_safe(layer.weight, layer.stride) for layer in convolutions(module)):
            return False
        for weight in weights:
            weight.data = laid_out(weight.data)
        x = torch.zeros(2, *input_shape, dtype=old[0].dtype, device=old[0].device)
        with mode(module, EVAL), torch.no_grad(), calls:
            module(x)
    except Exception:
        # Any failure of the trial means the usual order: a network that is really broken fails in training, with its
        # own message.
        return False
    finally:
        for weight, data in zip(weights, old, strict=True):
            weight.data = data
    return calls.safe


class Convolutions(TorchDispatchMode):
    """Looks at every convolution that runs, in `safe` whether all of them are."""

    def __init__(self) -> None:
        super().__init__()
        self.safe = True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Do without torch's guard against its compiler, which it would import for it: two seconds for nothing."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Look at the call, then make it."""
        if func is torch.ops.aten.convolution.default:
            self.safe = self.safe and is_safe(args[1], args[3])
        return func(*args, **(kwargs or {}))
