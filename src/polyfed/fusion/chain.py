"""Read a module as a chain of linear or convolutional layers, and write a chain of other widths back into it.

A chain is what neuron matching can work on: every layer feeds the next one only, and between two layers there are
only maps that treat all units alike (ReLU, pooling, flattening). Whether a module is such a chain is not guessed from
its class: its hidden units are shuffled, and its outputs must not change.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from contextlib import suppress

import torch
from torch import Tensor, nn

from polyfed.core.errors import InputError
from polyfed.models.contract import evaluating
from polyfed.ops.matching import Layer

WeightLayer = nn.Linear | nn.Conv2d


def weight_layers(module: nn.Module) -> list[tuple[str, WeightLayer]]:
    """Return the layers with weights in order of registration; other layers with parameters are refused."""
    kind = type(module).__name__
    layers: list[tuple[str, WeightLayer]] = []
    for name, layer in module.named_modules():
        if next(layer.parameters(recurse=False), None) is None:
            continue
        if not isinstance(layer, nn.Linear | nn.Conv2d) or (isinstance(layer, nn.Conv2d) and layer.groups != 1):
            raise InputError(
                f"Matching is not applicable to {kind}: its layer '{name}' is a {type(layer).__name__}, "
                "and only plain linear and convolutional layers have units that can be matched."
            )
        layers.append((name, layer))
    return layers


def sample_inputs(module: nn.Module, input_shape: Sequence[int] | None = None, number: int = 4) -> Tensor:
    """Return some fixed random inputs for a module; without a shape, its first layer must be linear."""
    first = next((layer for layer in module.modules() if isinstance(layer, nn.Linear | nn.Conv2d)), None)
    if input_shape is None:
        if not isinstance(first, nn.Linear):
            raise InputError(f"The input shape of {type(module).__name__} is not known: pass input_shape=(C, H, W).")
        input_shape = (first.in_features,)
    x = torch.randn((number, *input_shape), generator=torch.Generator().manual_seed(0))
    return x if first is None else x.to(first.weight)


def read_chain(module: nn.Module, input_shape: Sequence[int] | None = None) -> list[Layer]:
    """Return the layers of a module as `[out, in, r]` weights with their biases, from the input up (no copies).

    Raises
    ------
    InputError
        If the module is no chain, or has no hidden layer.
    """
    chain = layers_of(module)
    _check_exchangeable(module, chain, sample_inputs(module, input_shape))
    return chain


def layers_of(module: nn.Module) -> list[Layer]:
    """Return what `read_chain` returns, of a module that is known to be a chain."""
    kind = type(module).__name__
    layers = weight_layers(module)
    if len(layers) < 2:
        raise InputError(f"Matching is not applicable to {kind}: it has no hidden layer.")
    chain: list[Layer] = []
    below: int | None = None
    for _, layer in layers:
        flat = layer.weight.detach().flatten(1)
        incoming = flat.shape[1] if below is None else below
        if flat.shape[1] % incoming:
            raise _no_chain(kind)
        view = flat.reshape(len(flat), incoming, -1)
        chain.append(Layer(view, None if layer.bias is None else layer.bias.detach()))
        below = len(flat)
    return chain


def write_chain(module: nn.Module, chain: Sequence[Layer]) -> nn.Module:
    """Return a copy of the module that holds the given layers, of whatever widths."""
    copied = copy.deepcopy(module)
    layers = weight_layers(copied)
    for place, ((_, layer), given) in enumerate(zip(layers, chain, strict=True)):
        kernel = tuple(layer.weight.shape[2:])
        # One input unit owns a kernel (convolution), or a number of columns (linear layer on a flattened map). The
        # first layer's inputs are the data's, never matched: it keeps its own shape but for the number of units.
        units = len(given.weight)
        if place == 0:
            shape: tuple[int, ...] = (units, *layer.weight.shape[1:])
        elif kernel:
            shape = (units, given.weight.shape[1], *kernel)
        else:
            shape = (units, given.weight[0].numel())
        weight = given.weight.reshape(shape).to(layer.weight).clone()
        bias = None if given.bias is None else given.bias.to(layer.weight).clone()
        _resize(layer, weight, bias)
    _note_features(copied)
    return copied


def load_chain(module: nn.Module, state: dict[str, Tensor]) -> nn.Module:
    """Return a copy of the module that holds a state whose layers may have other widths (from `write_chain`)."""
    copied = copy.deepcopy(module)
    for name, layer in weight_layers(copied):
        prefix = f"{name}." if name else ""
        _resize(layer, state[f"{prefix}weight"].to(layer.weight).clone(), _maybe(state.get(f"{prefix}bias"), layer))
    _note_features(copied)
    return copied


def shuffled(chain: Sequence[Layer], rng: torch.Generator) -> list[Layer]:
    """Return the same network with its hidden units in random order."""
    result = list(chain)
    for place in range(len(chain) - 1):
        order = torch.randperm(len(result[place].weight), generator=rng)
        layer, above = result[place], result[place + 1]
        result[place] = Layer(layer.weight[order], None if layer.bias is None else layer.bias[order])
        result[place + 1] = Layer(above.weight[:, order], above.bias)
    return result


@torch.no_grad()
def check_alike(modules: Mapping[str, nn.Module], input_shape: Sequence[int] | None) -> None:
    """Refuse all but chains that are the same function of the same weights: the fused network can only be like one.

    Raises
    ------
    InputError
        One of them is no chain; or two have other biases, or something else between their layers.
    """
    for module in modules.values():
        read_chain(module, input_shape)
    (first, own), *others = modules.items()
    layers = layers_of(own)
    expected = _outputs(own, input_shape)
    for name, other in others:
        found = None
        if [a.bias is None for a in layers] == [b.bias is None for b in layers_of(other)]:
            with suppress(RuntimeError, ValueError):  # kernels, maps or inputs of other sizes
                found = _outputs(write_chain(other, layers), input_shape)
        if found is None or found.shape != expected.shape or not torch.allclose(found, expected, rtol=1e-4, atol=1e-5):
            raise InputError(
                f"Matching is not applicable: {first} and {name} differ in more than their widths (biases, activations "
                "or other layers); AMS and the ensemble take any networks."
            )


def _outputs(module: nn.Module, input_shape: Sequence[int] | None) -> Tensor:
    with evaluating(module):
        outputs: Tensor = module(sample_inputs(module, input_shape))
    return outputs.double().cpu()


def _check_exchangeable(module: nn.Module, chain: Sequence[Layer], x: Tensor) -> None:
    other = write_chain(module, shuffled(chain, torch.Generator().manual_seed(1)))
    with torch.no_grad(), evaluating(module), evaluating(other):
        try:
            expected, found = module(x), other(x)
        except (RuntimeError, ValueError, IndexError, TypeError) as error:
            raise InputError(
                f"{type(module).__name__} cannot take inputs of shape {list(x.shape[1:])}: pass the input_shape "
                "of your data."
            ) from error
    scale = float(expected.abs().max()) + 1.0
    if expected.shape != found.shape or not torch.allclose(expected, found, rtol=0.0, atol=1e-4 * scale):
        raise _no_chain(type(module).__name__)


def _resize(layer: WeightLayer, weight: Tensor, bias: Tensor | None) -> None:
    layer.weight = nn.Parameter(weight)
    layer.bias = None if bias is None else nn.Parameter(bias)
    if isinstance(layer, nn.Linear):
        layer.out_features, layer.in_features = weight.shape
    else:
        layer.out_channels, layer.in_channels = weight.shape[:2]


def _note_features(module: nn.Module) -> None:
    """Keep `feature_dim` true where the model declares it."""
    last = weight_layers(module)[-1][1]
    if isinstance(last, nn.Linear) and isinstance(getattr(module, "feature_dim", None), int):
        module.feature_dim = last.in_features  # type: ignore[assignment]


def _maybe(bias: Tensor | None, layer: WeightLayer) -> Tensor | None:
    return None if bias is None else bias.to(layer.weight).clone()


def _no_chain(kind: str) -> InputError:
    return InputError(
        f"Matching is not applicable to {kind}: exchanging its hidden units changes its outputs, so it is not a chain "
        "of layers (a branch, a skip connection or a norm)."
    )
