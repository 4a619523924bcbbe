"""Computes convolutions in both layouts and compares them with float64, which oneDNN has no part in.

`test_layout.py` runs it in processes of their own, on smaller processors than the machine's: a fault there may be a
crash or a hang. The last line that was printed names the convolution.
"""

from __future__ import annotations

import copy
import math
import sys
from collections.abc import Iterator
from itertools import product

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, stack_module_state, vmap
from user_networks import NETWORKS

from polyfed.core.layout import channels_last, convolutions, is_safe, laid_out
from polyfed.models import build
from polyfed.models.registry import names, parse
from polyfed.models.resnet import STEMS
from polyfed.models.vtc import Decoder, start_size

WIDTHS = (2, 3, 4, 8, 12, 16, 32, 64)
BATCHES = (1, 2, 5)
LARGE = 48  # height and width of a map at which a fault with AVX-512 shows
FEW, MANY = 2_500, 100_000  # weights of a layer: below, large maps are cheap enough; above, one batch size must do
SHAPES = ((1, 8, 8), (3, 8, 8))
TOLERANCE = 1e-4

Case = tuple[type, dict[str, object], tuple[int, int]]


def zoo(shape: tuple[int, ...]) -> Iterator[nn.Module]:
    """Yield every image network of the registry, each kind of network at all widths, and FedVTC's decoder."""
    for name in names() if shape == SHAPES[0] else ():  # the deepest take long, and another image adds a stem only
        entry = parse(name)[0]
        if entry.package is None and entry.inputs is None:  # for images, and of our own
            yield build(entry.example, shape, 10)
    for width in WIDTHS:
        for stem in STEMS:
            yield build(f"resnet10:w{width},stem={stem}", shape, 10)
        rate = min(1.0, width / 32)
        others = [f"resnet10:w{width},pre", f"resnet50:w{width}", f"resnet:1-1,w{width},stem_width={2 * width}"]
        others += [f"cnn:{width}-{2 * width}-{4 * width}", f"cnn2@{rate}", f"convnet@{rate}", f"wrn-10-2@{rate}"]
        for spec in others:
            yield build(spec, shape, 10)
        yield Decoder(width * math.prod(start_size(shape)), shape)


def collect() -> list[Case]:
    """Return the kind, arguments and map of all different convolutions in the zoo, found without computing them."""
    found: dict[str, Case] = {}

    def see(layer: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        assert isinstance(layer, nn.Conv2d | nn.ConvTranspose2d)
        height, width = inputs[0].shape[2:]
        options = ("in_channels", "out_channels", "kernel_size", "stride", "padding", "dilation", "groups")
        arguments = {option: getattr(layer, option) for option in options} | {"bias": layer.bias is not None}
        sizes = [(height, width), (LARGE, LARGE)] if layer.weight.numel() <= FEW else [(height, width)]
        for size in sizes:
            found[f"{type(layer).__name__} {arguments} {size}"] = (type(layer), arguments, size)

    with torch.device("meta"):
        for shape in SHAPES:
            for network in zoo(shape):
                for layer in convolutions(network):
                    layer.register_forward_pre_hook(see)
                latent = getattr(network, "latent_dim", None)
                if convolutions(network):
                    network(torch.empty(2, latent) if latent else torch.empty(2, *shape))
    return list(found.values())


def batches(kind: type, arguments: dict[str, object], size: tuple[int, int]) -> tuple[int, ...]:
    """Return the batch sizes at which a convolution is checked."""
    with torch.device("meta"):
        weights = kind(**arguments).weight.numel()
    return (2,) if weights > MANY or size == (LARGE, LARGE) else BATCHES


def check_layer(kind: type, arguments: dict[str, object], size: tuple[int, int], batch: int) -> None:
    """Compare output and gradients of one convolution in the usual layout and, where it is safe, channels last."""
    torch.manual_seed(0)
    layer = kind(**arguments)
    x = torch.randn(batch, layer.in_channels, *size)
    direction = torch.randn(layer(x).shape)
    expected = results(copy.deepcopy(layer).double(), x.double(), direction.double())
    compare(results(layer, x, direction), expected, "usual layout")
    if is_safe(layer.weight, layer.stride):
        layer.weight.data = laid_out(layer.weight.data)
        compare(results(layer, laid_out(x), direction), expected, "channels last")


def results(layer: nn.Module, x: Tensor, direction: Tensor) -> dict[str, Tensor]:
    """Return the output, and the gradients of the parameters and of the input."""
    x = x.detach().requires_grad_()
    layer.zero_grad()
    output = layer(x)
    output.backward(direction)
    assert x.grad is not None
    return {"output": output, "input": x.grad} | {name: value.grad for name, value in layer.named_parameters()}


def check_network(network: nn.Module, shape: tuple[int, ...], batch: int) -> None:
    """Compare the gradients of a network where training may lay it out, and in a stack of clients, with float64."""
    x = torch.randn(batch, *shape)
    exact = copy.deepcopy(network).double()
    direction = torch.randn(network(x).shape)
    expected = results(exact, x.double(), direction.double())
    with channels_last({"main": network}, shape):
        compare(results(network, x, direction), expected, "network")
    parameters, buffers = stack_module_state([network, network])

    def score(parameters: dict[str, Tensor], buffers: dict[str, Tensor]) -> Tensor:
        return (functional_call(network, (parameters, buffers), (x,)) * direction).sum()

    stacked = vmap(grad(score))(parameters, buffers)
    compare({name: value[1] for name, value in stacked.items()}, expected, "stack of clients")


def compare(found: dict[str, Tensor], expected: dict[str, Tensor], where: str) -> None:
    """Exit if a tensor is not what it should be."""
    for name, tensor in found.items():
        exact = expected[name]
        error = float((tensor.detach() - exact.detach()).abs().max() / exact.detach().abs().max().clamp(min=1e-6))
        if not error < TOLERANCE:
            sys.exit(f"{where}: '{name}' is off by {error:.2g}")


def main() -> None:
    """Check the convolutions of the zoo, then whole networks."""
    torch.set_num_threads(1)
    layers = collect()
    for case in layers:
        for batch in batches(*case):
            print(*case, "batch", batch, flush=True)
            check_layer(*case, batch)
    for batch, (name, make) in product(BATCHES, NETWORKS.items()):
        print(name, "batch", batch, flush=True)
        torch.manual_seed(0)
        check_network(make(), (3, 8, 8), batch)
    print(len(layers), "convolutions are right")


if __name__ == "__main__":
    main()
