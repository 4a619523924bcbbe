"""Convolutions with large kernels as products of frequencies: less arithmetic where there are many channels.

A convolution of maps is a product of their discrete Fourier transforms, frequency by frequency. Both transforms are
matrix products here, along the width and then along the height, and so is what happens at a frequency: a matrix of
`samples x channels in` times one of `channels in x channels out`. So everything is done by the routine that a processor
is best at. Results are off by rounding, as those of a direct convolution are, but in relation to the largest number of
a map and not to those that a kernel sees: where all of these are zero, a result is not quite zero.

The maps are no longer than needed: a kernel that reaches `padding` beyond the edge wants `size + padding` frequencies,
and what wraps around falls on places that nobody asks for.

A convolution is linear in its input and in its weight, so its gradients are the same three transforms, transposed, with
the other two at each frequency.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from polyfed.ops.memory import borrowed, returned, scratch

CHANNELS_LAST = torch.channels_last
SMALLEST = 5  # side of a kernel
LARGEST = 32  # side of a map
PRODUCTS = 170  # of a direct convolution, for each number that is transformed: from here on frequencies are used,
PER_SIDE = 4  # and so many more for each pixel of a map's side


class Shape(NamedTuple):
    """What the transforms of a convolution depend on, each as (height, width)."""

    size: tuple[int, int]
    kernel: tuple[int, int]
    padding: tuple[int, int]

    @property
    def out(self) -> tuple[int, int]:
        """The size of the result."""
        (h, w), (kh, kw), (ph, pw) = self
        return h + 2 * ph - kh + 1, w + 2 * pw - kw + 1

    @property
    def frequencies(self) -> tuple[int, int]:
        """How many there are: of real numbers, half of those along the width say all."""
        (h, w), _, (ph, pw) = self
        return h + ph, (w + pw) // 2 + 1

    def pays(self, samples: int, into: int, channels: int) -> bool:
        """Tell whether frequencies are the faster way to train on so many samples: for kernels of 5x5 or more.

        Their time goes into transforming, which the memory bounds; that of a direct convolution into its products. At
        equal speed there are 130 to 150 products for each number that is transformed on one kind of processor, and 220
        to 330 on another, whose direct convolutions are twice as fast. The line is drawn between them, higher for large
        maps: their transforms are matrices as long and as wide as a map (`benchmarks/kernels.py`, decision 0022).
        """
        products = samples * into * channels * math.prod(self.kernel) * math.prod(self.out)
        numbers = math.prod(self.frequencies) * (samples * into + samples * channels + into * channels)
        fits = min(self.kernel) >= SMALLEST and max(self.size) <= LARGEST
        return fits and 3 * products >= (PRODUCTS + PER_SIDE * max(self.size)) * 4 * numbers


def could_pay(into: int, channels: int, kernel: Sequence[int]) -> bool:
    """Tell whether there are maps and numbers of samples for which `pays` is true.

    A map has less than twice as many places as frequencies, and with many samples the weights' transforms cost nothing.
    """
    return min(kernel) >= SMALLEST and 2 * 3 * math.prod(kernel) * into * channels >= PRODUCTS * 4 * (into + channels)


class Transform:
    """Maps to frequencies and, transposed, back: along the width, then along the height.

    Real and imaginary parts are rows of their own. `there` takes maps as `[height, width, columns]` and gives
    `[2, frequencies, columns]`.
    """

    def __init__(self, wide: Tensor, high: Tensor) -> None:
        self.wide = wide.float()  # [2 * frequencies of the width, width]
        self.high = high.float()  # [2 * frequencies of the height, height * 2]
        self.size = (high.shape[1] // 2, wide.shape[1])
        self.count = (high.shape[0] // 2, wide.shape[0] // 2)

    def there(self, maps: Tensor, out: Tensor) -> None:
        """Write the frequencies of maps."""
        between = self._between(maps.shape[2])
        torch.bmm(self.wide.expand(self.size[0], -1, -1), maps, out=between)
        torch.mm(self.high, between.view(self.high.shape[1], -1), out=out.view(self.high.shape[0], -1))

    def back(self, frequencies: Tensor, out: Tensor) -> None:
        """Write what the transposed transform makes of frequencies."""
        between = self._between(out.shape[2])
        turned = self.high.T
        torch.mm(turned, frequencies.view(self.high.shape[0], -1), out=between.view(turned.shape[0], -1))
        torch.bmm(self.wide.T.expand(self.size[0], -1, -1), between, out=out)

    def _between(self, columns: int) -> Tensor:
        return scratch("between", self.size[0], 2 * self.count[1], columns)


class Plan(NamedTuple):
    """The transforms of inputs, of weights, and of results (this one goes back)."""

    inputs: Transform
    weights: Transform
    results: Transform


@lru_cache(maxsize=256)
def plan_of(shape: Shape) -> Plan:
    """Return the transforms for maps and kernels of a size."""
    high, wide = ((shape.size[axis] + shape.padding[axis]) for axis in (0, 1))
    (h, w), (kh, kw), (ph, pw) = shape
    oh, ow = shape.out
    count = shape.frequencies[1]
    # Along the width only the first half is kept; the others are their mirror image, so they count twice.
    twice = torch.full((count, 1), 2.0, dtype=torch.float64, device="cpu")
    twice[0] = 1.0
    if wide % 2 == 0:
        twice[-1] = 1.0
    inputs = Transform(_real(w, wide, count, 0), _complex(h, high, 0))
    weights = Transform(_real(kw, wide, count, 0), _complex(kh, high, 0))
    results = Transform(_real(ow, wide, count, -pw) * torch.cat([twice, twice]) / wide, _complex(oh, high, -ph) / high)
    return Plan(inputs, weights, results)


def _angles(length: int, of: int, count: int, offset: int) -> Tensor:
    places = torch.arange(length, dtype=torch.float64, device="cpu") + offset
    turns = torch.arange(count, dtype=torch.float64, device="cpu")[:, None] * places / of
    return turns.frac() * (2 * math.pi)


def _real(length: int, of: int, count: int, offset: int) -> Tensor:
    """Return the transform of real numbers: [2 (part), count] x length."""
    angles = _angles(length, of, count, offset)
    return torch.cat([angles.cos(), -angles.sin()])


def _complex(length: int, of: int, offset: int) -> Tensor:
    """Return the transform of complex numbers: [2 (part), of] x [length, 2 (part)]."""
    angles = _angles(length, of, of, offset)
    cosine, sine = angles.cos(), angles.sin()
    real = torch.stack([cosine, sine], 2).flatten(1)
    imaginary = torch.stack([-sine, cosine], 2).flatten(1)
    return torch.cat([real, imaginary])


def convolve(x: Tensor, weight: Tensor, bias: Tensor | None = None, padding: tuple[int, int] = (0, 0)) -> Tensor:
    """Return `conv2d(x, weight, bias, padding=padding)`, with the frequencies of inputs, weights and results.

    For float32 in the processor's memory; the padding is smaller than the kernel. The result is channels last where the
    input or the weight is.
    """
    tensors = [tensor for tensor in (x, weight, bias) if tensor is not None]
    kept = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)
    return _Convolution.apply(x, weight, bias, padding, kept)  # type: ignore[no-any-return, no-untyped-call]


class _Convolution(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, padding: tuple[int, int], kept: bool
    ) -> Tensor:
        samples, into, *size = x.shape
        channels, _, *kernel = weight.shape
        shape = Shape((size[0], size[1]), (kernel[0], kernel[1]), padding)
        plan = plan_of(shape)
        last = any(t.is_contiguous(memory_format=CHANNELS_LAST) and not t.is_contiguous() for t in (x, weight))
        count = math.prod(shape.frequencies)
        sizes = 2 * count * samples * into, 2 * count * channels * into
        blocks = [borrowed(number) for number in sizes]
        a = blocks[0][: sizes[0]].view(2, count, samples, into)
        b = blocks[1][: sizes[1]].view(2, count, channels, into)
        plan.inputs.there(_flat(x, "inputs"), a)
        plan.weights.there(_flat(weight, "weights"), b)
        c = scratch("frequencies", 2, count, samples, channels)
        (ar, ai), (br, bi) = a, b.transpose(2, 3)
        torch.bmm(ar, br, out=c[0]).baddbmm_(ai, bi)  # a times the conjugate of b: a kernel is not turned around
        torch.bmm(ai, br, out=c[1]).baddbmm_(ar, bi, alpha=-1)
        out = _maps(plan.results, c, (samples, channels, *shape.out), last, bias)
        if kept:
            ctx.save_for_backward(x, weight)
            ctx.frequencies, ctx.blocks, ctx.shape, ctx.last = (a, b), blocks, shape, last
        else:
            for block in blocks:
                returned(block)
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        samples, channels = x.shape[0], weight.shape[0]
        of_x, of_weight, of_bias = ctx.needs_input_grad[:3]
        # A gradient of this gradient is wanted, it is the second one of a pass, or many are taken at once.
        if torch.is_grad_enabled() or ctx.frequencies is None or is_batched(gradients[0]):
            padding, ones = list(ctx.shape.padding), [1, 1]
            wanted = [of_x, of_weight, of_bias]
            more = [channels] if of_bias else None
            settings = more, ones, padding, ones, False, [0, 0], 1, wanted
            return *torch.ops.aten.convolution_backward(gradients[0], x, weight, *settings), None, None
        (a, b), plan = ctx.frequencies, plan_of(ctx.shape)
        ctx.frequencies = None
        gradient = _flat(gradients[0], "maps")
        c = scratch("frequencies", 2, a.shape[1], samples, channels)
        plan.results.there(gradient, c)
        (ar, ai), (br, bi), (cr, ci) = a, b, c
        found: list[Tensor | None] = [None, None, None]
        if of_bias:  # first: what follows writes its maps where the gradient is
            found[2] = gradient.view(-1, samples, channels).sum((0, 1))
        if of_x:
            d = scratch("gradients", *a.shape)
            torch.bmm(cr, br, out=d[0]).baddbmm_(ci, bi, alpha=-1)
            torch.bmm(cr, bi, out=d[1]).baddbmm_(ci, br)
            found[0] = _maps(plan.inputs, d, x.shape, ctx.last)
        if of_weight:
            d = scratch("gradients", *b.shape)
            cr, ci = cr.transpose(1, 2), ci.transpose(1, 2)
            torch.bmm(cr, ar, out=d[0]).baddbmm_(ci, ai)
            torch.bmm(cr, ai, out=d[1]).baddbmm_(ci, ar, alpha=-1)
            found[1] = _maps(plan.weights, d, weight.shape, ctx.last)
        for block in ctx.blocks:
            returned(block)
        return *found, None, None


def is_batched(tensor: Tensor) -> bool:
    """Tell whether a tensor stands for many (`vmap`, `is_grads_batched`), which cannot be written into one's memory."""
    functorch = torch._C._functorch
    return functorch.is_batchedtensor(tensor) or functorch.is_legacy_batchedtensor(tensor)


def _flat(maps: Tensor, name: str) -> Tensor:
    """Return maps as [height, width, samples * channels]."""
    samples, channels, high, wide = maps.shape
    flat = scratch(name, high, wide, samples, channels)
    flat.copy_(maps.permute(2, 3, 0, 1))
    return flat.view(high, wide, samples * channels)


def _maps(
    transform: Transform, frequencies: Tensor, shape: Sequence[int], last: bool, bias: Tensor | None = None
) -> Tensor:
    """Return what the transposed transform makes of frequencies, as maps."""
    samples, channels, high, wide = shape
    flat = scratch("maps", high, wide, samples, channels)
    transform.back(frequencies, flat.view(high, wide, samples * channels))
    order = CHANNELS_LAST if last else torch.contiguous_format
    out = torch.empty(*shape, dtype=torch.float32, device="cpu", memory_format=order)
    maps = flat.permute(2, 3, 0, 1)
    return out.copy_(maps) if bias is None else torch.add(maps, bias.view(1, -1, 1, 1), out=out)
