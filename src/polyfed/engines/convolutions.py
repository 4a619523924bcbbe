"""Stacks of small convolutional networks: clients folded into the batch, every convolution a matrix product a client.

The samples of all clients go through the network as one batch. Pooling, activations and sums treat each sample by
itself and need not know; only layers with weights do. A convolution copies the windows that its kernel sees side by
side and is then one batched matrix product, which computes each client's matrix as if it were alone: so a client's
numbers do not depend on who shares its stack. (`vmap` makes one grouped convolution of them, whose rounding depends on
the number of groups.) Where images are small it is also faster: oneDNN spends most of a tiny convolution on getting
ready for it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.autograd import Function

from polyfed.core.nets import EVAL, TRAIN, mode
from polyfed.core.stage import Sums
from polyfed.engines.cut import Cut, CutProgram, NotCut
from polyfed.engines.stack import Program, Tensors
from polyfed.engines.stackdata import StackedBatch
from polyfed.models.cnn import ConvNet
from polyfed.models.project import Projected
from polyfed.models.resnet import ResNet


def is_convolutional(module: nn.Module) -> bool:
    """Tell whether a network is one whose layers without weights are known to treat each sample by itself."""
    return type(module.model if type(module) is Projected else module) in (ConvNet, ResNet)


# Numbers that a convolution unfolds in a step of one client. Measured (`python -m benchmarks.rule`): up to here a stack
# of twenty is nearly twice as fast as whole clients, or faster. Beyond, `vmap` is used where bits need not be exact.
WINDOWS = 50_000

_unfolded: WeakKeyDictionary[nn.Module, float] = WeakKeyDictionary()  # modules serve round after round


def is_small(module: nn.Module, input_shape: tuple[int, ...], batch_size: int) -> bool:
    """Tell whether a network is convolutional, and small enough for its windows to be worth copying."""
    if not is_convolutional(module):
        return False
    if module not in _unfolded:
        _unfolded[module] = unfolded(module, input_shape)
    return batch_size * _unfolded[module] <= WINDOWS


def unfolded(module: nn.Module, input_shape: tuple[int, ...]) -> float:
    """Return how many numbers the windows of a convolution are for one sample, in the mean over the convolutions."""
    found: list[int] = []

    def note(layer: nn.Module, inputs: Any, output: Tensor) -> None:
        assert isinstance(layer, nn.Conv2d)
        found.append(output[0, 0].numel() * layer.weight[0].numel())

    hooks = [part.register_forward_hook(note) for part in module.modules() if isinstance(part, nn.Conv2d)]
    with torch.no_grad(), mode(module, EVAL):
        first = next(module.parameters())
        module(torch.zeros(1, *input_shape, dtype=first.dtype, device=first.device))
    for hook in hooks:
        hook.remove()
    return sum(found) / len(found)


def folded(program: Program) -> ConvolutionProgram | None:
    """Return the program with its clients folded into the batch, or None where it cannot be, or would be slower."""
    batch_size, input_shape = program.training.batch_size, program.ctx.input_shape
    if list(program.modules) != ["main"] or not is_small(program.modules["main"], input_shape, batch_size):
        return None
    found = ConvolutionProgram.__new__(ConvolutionProgram)
    found.__dict__.update(program.__dict__)
    found.now = Now()
    found.network = twin(program.modules["main"], "", found.now)
    try:
        found.look()
    except NotCut:
        return None
    return found


class ConvolutionProgram(CutProgram):
    """A program whose one network is convolutional."""

    network: nn.Module
    now: Now

    def handle(self, x: Tensor, features: Tensor, logits: Tensor, params: dict[str, Tensor]) -> Cut:
        """Return what a loss sees in place of the network."""
        return TrainingCut(x, features, logits, params)

    def outputs(
        self, params: dict[str, Tensor], buffers: dict[str, Tensor], x: Tensor, moving: bool = False
    ) -> tuple[Tensor, Tensor]:
        """Return features and logits, `[clients, batch, ...]`; running statistics move if asked."""
        lone = self.normed and x.shape[1] == 1  # a single sample has no statistics of its own
        self.now.tensors = {**params, **buffers}
        self.now.moving = moving and not lone
        network: Any = self.network
        with mode(network, EVAL if lone else TRAIN):
            features = network.features(x.flatten(0, 1))
            logits = network.head(features)
        return features.unflatten(0, x.shape[:2]), logits.unflatten(0, x.shape[:2])

    def gradients(
        self, number: int, place: int, batch: StackedBatch, moved: Tensors, params: Tensors, buffers: Tensors
    ) -> tuple[Tensors, Tensor, Sums]:
        """Return the gradients of one loss for every client, its values, and what it gave beside itself."""
        uses = self.uses[number, place]
        moving = {name: tensor.detach().requires_grad_() for name, tensor in moved["main"].items()}
        used = {**params["main"], **moving}
        features, logits = self.outputs(used, buffers["main"], batch.x, uses is None or uses.moving)
        with torch.no_grad():
            found = self.loss_gradients(number, place, features.detach(), logits.detach(), used, batch)
        # One number whose gradients by the outputs are those of the loss: `grad_outputs` would import sympy (0.5 s).
        total = (logits * found.logits).sum()
        if found.features is not None:
            total = total + (features * found.features).sum()
        through = torch.autograd.grad(total, list(moving.values()), materialize_grads=True)
        grads = dict(zip(moving, through, strict=True))
        if found.params is not None:
            grads = {name: grad + found.params[name] for name, grad in grads.items()}
        return {"main": grads}, found.values, found.sums


class TrainingCut(Cut):
    """A network that may predict otherwise than it trains."""

    def eval(self) -> Cut:
        """Refuse: only the outputs of training are known."""
        self._refuse()
        return self


# --- the network: its own code, with layers that have the weights of every client ---


@dataclass
class Now:
    """What the layers of a stack compute with: the tensors of the clients whose turn it is, by name."""

    tensors: dict[str, Tensor] = field(default_factory=dict)
    moving: bool = False  # running statistics

    def get(self, name: str) -> Tensor | None:
        """Return a tensor `[clients, ...]`, or None where the layer has none of this name."""
        return self.tensors.get(name)


def twin(module: nn.Module, name: str, now: Now) -> nn.Module:
    """Return a network of the same code whose layers with weights are those of a stack; the other layers are shared."""
    if type(module) in LAYERS:
        return LAYERS[type(module)](module, name, now)
    if not any(True for _ in module.children()):
        return module
    found = copy.copy(module)
    found._modules = {
        key: None if part is None else twin(part, f"{name}.{key}".lstrip("."), now)
        for key, part in module._modules.items()
    }
    return found


class StackedLayer(nn.Module):
    """A layer whose tensors are those of several clients, and whose batch has their samples one after the other."""

    def __init__(self, layer: Any, name: str, now: Now) -> None:
        super().__init__()
        self.layer = [layer]  # in a list: its tensors are not this layer's
        self.name, self.now = name, now

    def tensor(self, name: str) -> Tensor:
        """Return one of the layer's tensors, `[clients, ...]`."""
        return self.now.tensors[f"{self.name}.{name}"]

    def bias(self) -> Tensor | None:
        """Return the layer's bias, if it has one."""
        return self.now.get(f"{self.name}.bias")


class StackedLinear(StackedLayer):
    """A linear layer."""

    def forward(self, x: Tensor) -> Tensor:
        """Return one product a client."""
        weight, bias = self.tensor("weight"), self.bias()
        rows = x.reshape(len(weight), -1, weight.shape[2])
        if bias is None:
            return torch.bmm(rows, weight.mT).flatten(0, 1)
        return torch.baddbmm(bias.unsqueeze(1), rows, weight.mT).flatten(0, 1)


class StackedConvolution(StackedLayer):
    """A convolution in two dimensions, without groups and dilation."""

    def forward(self, x: Tensor) -> Tensor:
        """Return one product a client."""
        (layer,) = self.layer
        out: Tensor = Convolution.apply(x, self.tensor("weight"), self.bias(), layer.stride, layer.padding)
        return out


class StackedNorm(StackedLayer):
    """BatchNorm over the samples of one client."""

    def forward(self, x: Tensor) -> Tensor:
        """Normalize by the batch, or (prediction mode) by running statistics."""
        (layer,) = self.layer
        weight, bias = self.tensor("weight"), self.tensor("bias")
        mean, variance = self.tensor("running_mean"), self.tensor("running_var")
        if not self.training:
            rows = by_client(x, len(weight))
            scale = (variance + layer.eps).rsqrt() * weight
            found: Tensor = (rows - mean.unsqueeze(1)) * scale.unsqueeze(1) + bias.unsqueeze(1)
            return found.view(len(x), *x.shape[2:], -1).permute(0, 3, 1, 2)
        out: Tensor
        out, batch_mean, batch_variance = Normalization.apply(x, weight, bias, layer.eps)
        if self.now.moving:
            count = x.numel() // (len(weight) * x.shape[1])
            mean.lerp_(batch_mean, layer.momentum)
            variance.lerp_(batch_variance * (count / max(1, count - 1)), layer.momentum)
            self.tensor("num_batches_tracked").add_(1)
        return out


LAYERS: dict[type[nn.Module], Callable[[Any, str, Now], StackedLayer]] = {
    nn.Linear: StackedLinear,
    nn.Conv2d: StackedConvolution,
    nn.BatchNorm2d: StackedNorm,
}


def by_client(maps: Tensor, clients: int) -> Tensor:
    """Return maps `[clients * batch, channels, height, width]` as `[clients, pixels of the batch, channels]`."""
    return maps.permute(0, 2, 3, 1).reshape(clients, -1, maps.shape[1])


def empty_maps(like: Tensor, *shape: int) -> Tensor:
    """Return maps that are laid out channels last, so that `by_client` is a view of them."""
    return torch.empty(shape, dtype=like.dtype, device=like.device, memory_format=torch.channels_last)


def windows(image: Tensor, kernel: tuple[int, int], size: tuple[int, int], stride: tuple[int, int]) -> Tensor:
    """Return what a kernel sees at each of its places, `[samples, height, width, kernel, kernel * channels]`, a view.

    The image is `[samples, height, width, channels]`, contiguous: a row of a window is then contiguous, too.
    """
    by_sample, by_row, by_pixel, _ = image.stride()
    shape = (len(image), *size, kernel[0], kernel[1] * image.shape[3])
    return image.as_strided(shape, (by_sample, by_row * stride[0], by_pixel * stride[1], by_row, 1))


class Convolution(Function):
    """A convolution of each client's maps with its own kernels, as products of their windows."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, stride: tuple[int, int], padding: tuple[int, int]
    ) -> Tensor:
        """Return `[clients * batch, outputs, height, width]`."""
        clients, outputs, inputs, high, wide = weight.shape
        samples, _, height, width = x.shape
        top, left = padding
        image = x.permute(0, 2, 3, 1)
        if top or left:
            padded = x.new_zeros(samples, height + 2 * top, width + 2 * left, inputs)
            padded[:, top : top + height, left : left + width] = image
            image = padded
        size = (image.shape[1] - high) // stride[0] + 1, (image.shape[2] - wide) // stride[1] + 1
        seen = windows(image.contiguous(), (high, wide), size, stride).reshape(clients, -1, high * wide * inputs)
        flat = weight.permute(0, 1, 3, 4, 2).reshape(clients, outputs, -1).mT
        out = empty_maps(x, samples, outputs, *size)
        if bias is None:
            torch.bmm(seen, flat, out=by_client(out, clients))
        else:
            torch.baddbmm(bias.unsqueeze(1), seen, flat, out=by_client(out, clients))
        ctx.save_for_backward(seen, weight)
        ctx.sizes = x.shape, stride, padding
        return out

    @staticmethod
    def backward(ctx: Any, delta: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        """Return the gradients by maps, kernels and biases."""
        seen, weight = ctx.saved_tensors
        clients, outputs, inputs, *kernel = weight.shape
        of_maps, of_kernels, of_biases, *_ = ctx.needs_input_grad
        rows = by_client(delta, clients)
        maps = kernels = biases = None
        if of_kernels:
            kernels = torch.bmm(rows.mT, seen).view(clients, outputs, *kernel, inputs).permute(0, 1, 4, 2, 3)
        if of_biases:
            biases = rows.sum(1)
        if of_maps:
            maps = Convolution._maps(delta, weight, *ctx.sizes)
        return maps, kernels, biases, None, None

    @staticmethod
    def _maps(
        delta: Tensor, weight: Tensor, shape: torch.Size, stride: tuple[int, int], padding: tuple[int, int]
    ) -> Tensor:
        """Return the gradient by the maps: a convolution of the gradient, spread out by the stride, turned round."""
        clients, outputs, inputs, high, wide = weight.shape
        samples, _, height, width = shape
        spread = delta.new_zeros(samples, height + high - 1, width + wide - 1, outputs)
        top, left = high - 1 - padding[0], wide - 1 - padding[1]
        spread[:, top :: stride[0], left :: stride[1]][:, : delta.shape[2], : delta.shape[3]] = delta.permute(
            0, 2, 3, 1
        )
        seen = windows(spread, (high, wide), (height, width), (1, 1)).reshape(clients, -1, high * wide * outputs)
        turned = weight.flip(3, 4).permute(0, 3, 4, 1, 2).reshape(clients, -1, inputs)
        maps = empty_maps(delta, samples, inputs, height, width)
        torch.bmm(seen, turned, out=by_client(maps, clients))
        return maps


class Normalization(Function):
    """BatchNorm of each client's maps by their own mean and variance, which are also returned."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, epsilon: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the normalized maps, the means and the variances."""
        rows = by_client(x, len(weight))
        mean = rows.mean(1, keepdim=True)
        normal = rows - mean
        variance = normal.square().mean(1, keepdim=True)
        inverse = variance.add(epsilon).rsqrt_()
        normal *= inverse
        out = empty_maps(x, *x.shape)
        torch.addcmul(bias.unsqueeze(1), normal, weight.unsqueeze(1), out=by_client(out, len(weight)))
        ctx.save_for_backward(normal, inverse, weight)
        mean, variance = mean.squeeze(1), variance.squeeze(1)
        ctx.mark_non_differentiable(mean, variance)
        return out, mean, variance

    @staticmethod
    def backward(ctx: Any, delta: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        """Return the gradients by maps, weights and biases."""
        normal, inverse, weight = ctx.saved_tensors
        rows = by_client(delta, len(weight))
        count = rows.shape[1]
        biases = rows.sum(1, keepdim=True)
        weights = (rows * normal).sum(1, keepdim=True)
        maps = empty_maps(delta, *delta.shape)
        found = by_client(maps, len(weight))
        torch.addcmul(rows, normal, weights, value=-1 / count, out=found)
        found.sub_(biases, alpha=1 / count).mul_(inverse * weight.unsqueeze(1))
        return maps, weights.squeeze(1), biases.squeeze(1), None
