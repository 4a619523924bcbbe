"""Examples and small helpers shared by the model tests."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from polyfed.core.shape import InputShape
from polyfed.models import build, channel_index
from polyfed.models.width import take

SHAPES = [(1, 8, 8), (1, 28, 28), (3, 32, 32)]

# One narrow member of every registered name and option that changes the graph.
EXAMPLES = [
    "mlp:1x16",
    "mlp:3x20",
    "cnn:6-10-12",
    "cnn:6-10-12,bn",
    "cnn2",
    "convnet",
    "convnet:bn",
    "resnet:1-2,w6,stem=pool,stem_width=4",
    "resnet10:w4",
    "resnet14:w4,stem=fedin",
    "resnet18:w4,stem=7x7",
    "resnet18:w4,pre",
    "resnet22:w4",
    "resnet26:w4",
    "resnet34:w4",
    "resnet50:w4",
    "resnet101:w2",
    "resnet152:w2",
    "wrn-10-1",
    "wrn-16-2",
]
SMALL = [name for name in EXAMPLES if not name.startswith(("resnet22", "resnet26", "resnet101", "resnet152"))]

TEXT, SIGNAL, TABLE = InputShape((12,), words=30), InputShape((3, 20)), InputShape((9,), groups=(2, 3))
OTHERS = [  # networks for other inputs than images
    ("tabular:1x8", TABLE),
    ("tabular:3x8", TABLE),
    ("mlp:1x8", TABLE),
    ("transformer:2x16", TEXT),
    ("transformer:1x8,heads=2", TEXT),
    ("lstm:1x8", TEXT),
    ("lstm:2x8", SIGNAL),
    ("cnn1d:2x8", TEXT),
    ("cnn1d:1x8", SIGNAL),
    ("mlp:1x8", SIGNAL),
]


def make(spec: str, shape: tuple[int, ...] = (1, 8, 8), classes: int = 7, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return build(spec, shape, classes)


def inputs(shape: tuple[int, ...], batch: int = 4, seed: int = 1) -> Tensor:
    rng = torch.Generator().manual_seed(seed)
    if words := InputShape(shape).words:
        return torch.randint(1, words, (batch, *shape), generator=rng)
    return torch.rand((batch, *shape), generator=rng)


def shapes_of(module: nn.Module) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in module.state_dict().items()}


def sliced(full: nn.Module, sub: nn.Module, start) -> dict[str, Tensor]:
    def channels(group: str, full_width: int, count: int) -> Tensor:
        return (start(group, full_width) + torch.arange(count)) % full_width

    index = channel_index(full.width_groups(), shapes_of(full), shapes_of(sub), channels)
    return {name: take(tensor, index[name]) for name, tensor in full.state_dict().items() if name in index}


def disturb(module: nn.Module, seed: int = 2) -> None:
    """Give norms and biases values that are not all equal, so that a wrong channel order shows."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, tensor in module.state_dict().items():
            if tensor.is_floating_point() and tensor.dim() == 1:
                tensor.add_(torch.rand(tensor.shape, generator=generator) * (0.5 if "norm" in name else 0.05))
