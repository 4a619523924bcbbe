"""Convolutional networks in a stack: torch's numbers up to rounding, and the same bits whoever shares the stack."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import polyfed as pf
from polyfed.core.nets import EVAL, TRAIN, mode
from polyfed.engines.convolutions import Convolution, Normalization, Now, is_small, twin
from polyfed.models.registry import build


@pytest.mark.parametrize(
    ("kernel", "stride", "padding", "size"),
    [(3, 1, 1, (8, 8)), (3, 2, 1, (7, 8)), (5, 1, 2, (6, 9)), (1, 1, 0, (4, 4)), (3, 2, 0, (8, 6)), (7, 2, 3, (9, 9))],
)
def test_a_convolution_is_torchs(kernel: int, stride: int, padding: int, size: tuple[int, int]) -> None:
    rng = torch.Generator().manual_seed(0)
    clients, samples, inputs, outputs = 3, 4, 2, 5
    x = torch.randn(clients, samples, inputs, *size, generator=rng, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(clients, outputs, inputs, kernel, kernel, generator=rng, dtype=torch.float64)
    bias = torch.randn(clients, outputs, generator=rng, dtype=torch.float64)
    leaves = x, weight.requires_grad_(), bias.requires_grad_()
    found = Convolution.apply(x.flatten(0, 1), weight, bias, (stride, stride), (padding, padding))
    expected = torch.cat([F.conv2d(x[c], weight[c], bias[c], stride, padding) for c in range(clients)])
    assert torch.allclose(found, expected, atol=1e-12)
    delta = torch.randn(expected.shape, generator=rng, dtype=torch.float64)
    for ours, theirs in zip(*(torch.autograd.grad(out, leaves, delta) for out in (found, expected)), strict=True):
        assert torch.allclose(ours, theirs, atol=1e-11)


def test_normalization_is_torchs() -> None:
    rng = torch.Generator().manual_seed(0)
    x = torch.randn(3, 4, 5, 2, 3, generator=rng, dtype=torch.float64, requires_grad=True)
    weight, bias = (torch.randn(3, 5, generator=rng, dtype=torch.float64, requires_grad=True) for _ in range(2))
    found, mean, variance = Normalization.apply(x.flatten(0, 1), weight, bias, 1e-5)
    expected = torch.cat([F.batch_norm(x[c], None, None, weight[c], bias[c], training=True) for c in range(3)])
    assert torch.allclose(found, expected, atol=1e-12)
    assert torch.allclose(mean, x.mean((1, 3, 4)))
    assert torch.allclose(variance, x.var((1, 3, 4), correction=0))
    delta = torch.randn(expected.shape, generator=rng, dtype=torch.float64)
    leaves = x, weight, bias
    for ours, theirs in zip(*(torch.autograd.grad(out, leaves, delta) for out in (found, expected)), strict=True):
        assert torch.allclose(ours, theirs, atol=1e-12)


def passed(module: nn.Module, states: dict[str, Tensor], x: Tensor, lone: bool = False) -> dict[str, Tensor]:
    """Return outputs, gradients and statistics after one pass of the stacked clients."""
    parameters = {name for name, _ in module.named_parameters()}
    tensors = {name: tensor.clone().requires_grad_(name in parameters) for name, tensor in states.items()}
    network = twin(module, "", Now(tensors, moving=True))
    with mode(network, EVAL if lone else TRAIN):
        out = network(x.flatten(0, 1)).unflatten(0, x.shape[:2])
    names = sorted(parameters)
    grads = torch.autograd.grad(out, [tensors[name] for name in names], out.detach().cos())
    statistics = {name: tensor for name, tensor in tensors.items() if name not in parameters}
    return {"out": out.detach(), **dict(zip(names, grads, strict=True)), **statistics}


def several(module: nn.Module, clients: int, rng: torch.Generator) -> dict[str, Tensor]:
    """Return the state of a network for several clients, each a little different."""

    def near(tensor: Tensor) -> Tensor:
        return tensor + 0.05 * torch.rand(tensor.shape, generator=rng) if tensor.is_floating_point() else tensor

    return {name: torch.stack([near(t) for _ in range(clients)]) for name, t in module.state_dict().items()}


MODELS = [
    "cnn:4-8",
    "cnn:5-7,bn",
    "cnn:16-32,bn",
    "convnet",
    "resnet10:w3",
    "resnet10:w4,pre",
    "resnet10:w8,stem=fedin",
]
STACKS: Sequence[list[int]] = [[0], [8], [5, 3], [1, 8, 4], [6, 5, 4, 3, 2, 1, 0]]


@pytest.mark.parametrize("shape", [(1, 8, 8), (3, 9, 11)], ids=["8x8", "9x11"])
@pytest.mark.parametrize("model", MODELS)
def test_a_client_has_the_same_bits_in_every_stack(model: str, shape: tuple[int, int, int]) -> None:
    rng = torch.Generator().manual_seed(0)
    module = build(model, shape, 10)
    states = several(module, 9, rng)
    for samples in (1, 7, 16):
        lone = samples == 1
        x = torch.randn(9, samples, *shape, generator=rng)
        everybody = passed(module, states, x, lone)
        for some in STACKS:
            fewer = passed(module, {name: tensor[some] for name, tensor in states.items()}, x[some], lone)
            different = [name for name, tensor in fewer.items() if not torch.equal(tensor, everybody[name][some])]
            assert not different


def test_which_networks_are_small() -> None:
    assert is_small(build("cnn:16-32", (1, 8, 8), 10), (1, 8, 8), 16)
    assert not is_small(build("cnn:16-32", (1, 8, 8), 10), (1, 8, 8), 64)
    projected: Any = pf.with_feature_dim(build("cnn:4-8", (1, 8, 8), 10), 16)
    assert is_small(projected, (1, 8, 8), 16)
    assert not is_small(build("mlp:1x8", (1, 8, 8), 10), (1, 8, 8), 16)
    assert not is_small(nn.Sequential(nn.Conv2d(1, 2, 3)), (1, 8, 8), 1)  # its code is not known


@pytest.mark.long  # a process of its own
def test_a_first_round_imports_nothing_that_only_a_compiler_needs() -> None:
    code = (
        "import sys, polyfed as pf\n"
        "from polyfed.engines import convolutions\n"
        "steps, take = [], convolutions.ConvolutionProgram.gradients\n"
        "convolutions.ConvolutionProgram.gradients = lambda *given: steps.append(1) or take(*given)\n"
        "pf.run('fedavg', pf.split('digits', clients=4, by='iid'), 'cnn:4-8', 1)\n"
        "print(bool(steps), *({'sympy', 'torch._dynamo'} & sys.modules.keys()))"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.split() == ["True"]
