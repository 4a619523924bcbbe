"""Networks as users write them, for the tests of the memory layout."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def shortcut(channels: int, groups: int = 1) -> nn.Module:
    """Return a network with torchvision's shortcut: a 1x1 convolution with stride 2."""
    first, second = nn.Conv2d(3, channels, 3, padding=1), nn.Conv2d(channels, 2 * channels, 1, 2, groups=groups)
    return nn.Sequential(first, nn.ReLU(), second, nn.Flatten(), nn.Linear(32 * channels, 3))


def dilated() -> nn.Module:
    """Return a network with grouped and dilated convolutions."""
    first, second = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=2, dilation=2, groups=8)
    return nn.Sequential(first, second, nn.Conv2d(8, 12, 1, groups=4), nn.Conv2d(12, 6, 3, 2), nn.Flatten())


class Functional(nn.Module):
    """Calls the strided 1x1 convolution as a function."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 4, 3, padding=1)
        self.weight = nn.Parameter(torch.randn(8, 4, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        return F.conv2d(self.first(x), self.weight, stride=2).mean((2, 3))


class Hidden(nn.Module):
    """Has a strided 1x1 convolution that only training reaches."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 8, 1, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        return (self.second(x) if self.training else x).mean((2, 3))


NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "narrow shortcut": lambda: shortcut(4),
    "wide shortcut": lambda: shortcut(16),
    "grouped shortcut": lambda: shortcut(16, groups=4),
    "depthwise shortcut": lambda: shortcut(16, groups=16),
    "transposed": lambda: nn.Sequential(nn.Conv2d(3, 16, 3), nn.ConvTranspose2d(16, 4, 1, 2)),
    "one-dimensional": lambda: nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.Flatten(2), nn.Conv1d(4, 8, 1, 2)),
    "dilated": dilated,
    "functional": Functional,
    "hidden": Hidden,
}
ABLE = {"wide shortcut", "dilated"}
