"""Small generators: from noise to features of a label, to images, or to plain vectors.

Images and vectors are made as networks see them, after scaling: a last BatchNorm gives each channel (or number) a mean
and a deviation that can be learned, 0 and 1 at the start.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from polyfed.core.message import State
from polyfed.core.nets import EVAL, mode
from polyfed.core.party import state_of
from polyfed.core.samples import Samples, unlabeled


def input_generator(noise_dim: int, input_shape: Sequence[int], width: int) -> nn.Module:
    """Return a generator of inputs of any shape: by convolutions for images, otherwise fully connected."""
    kind = ImageGenerator if len(input_shape) == 3 else VectorGenerator
    return kind(noise_dim, input_shape, width)


def averaged_state(module: nn.Module) -> State:
    """Return what parties exchange of a generator: all of its tensors but counters."""
    return {name: tensor for name, tensor in state_of(module).items() if tensor.is_floating_point()}


@torch.no_grad()
def generated(generator: nn.Module, noise: Tensor, chunk: int = 512) -> Tensor:
    """Return what a generator makes of some noise, in prediction mode."""
    with mode(generator, EVAL):
        return torch.cat([generator(part) for part in noise.split(chunk)])


def generated_samples(generator: nn.Module, seed: int, count: int, noise_dim: int) -> Samples:
    """Return samples that a generator makes, the same wherever it and the seed of its noise are known."""
    noise = torch.randn(count, noise_dim, generator=torch.Generator().manual_seed(seed))
    return unlabeled(generated(generator, noise.to(next(generator.parameters()).device)))


class FeatureGenerator(nn.Module):
    """Noise `[B, noise_dim]` and labels `[B]` to features `[B, feature_dim]`: two layers (FedGen)."""

    def __init__(self, noise_dim: int, num_classes: int, hidden: int, feature_dim: int) -> None:
        super().__init__()
        self.num_classes = num_classes
        self.hidden = nn.Linear(noise_dim + num_classes, hidden)
        self.norm = nn.BatchNorm1d(hidden)
        self.output = nn.Linear(hidden, feature_dim)

    def forward(self, noise: Tensor, labels: Tensor) -> Tensor:
        """Return features of the labels."""
        # Not `one_hot`, which looks at the values: this also runs for many clients at once.
        chosen = labels.unsqueeze(1) == torch.arange(self.num_classes, device=labels.device)
        z: Tensor = self.norm(self.hidden(torch.cat([noise, chosen.to(noise)], dim=1)))
        return self.output(z.relu())  # type: ignore[no-any-return]


class ImageGenerator(nn.Module):
    """Noise `[B, noise_dim]` to images: a linear layer to a quarter of it, then twice upsampling and convolution.

    Sides that are not multiples of four are made larger and cropped. `width` is the number of channels of the last
    hidden layer; the others have twice as many.
    """

    def __init__(self, noise_dim: int, image_shape: Sequence[int], width: int) -> None:
        super().__init__()
        channels, height, breadth = image_shape
        self.takes = (noise_dim,)
        self.image_shape = (channels, height, breadth)
        self.start = (2 * width, math.ceil(height / 4), math.ceil(breadth / 4))
        self.first = nn.Linear(noise_dim, math.prod(self.start))
        self.layers = nn.Sequential(
            nn.BatchNorm2d(2 * width),
            nn.Upsample(scale_factor=2),
            nn.Conv2d(2 * width, 2 * width, 3, padding=1, bias=False),
            nn.BatchNorm2d(2 * width),
            nn.LeakyReLU(0.2),
            nn.Upsample(scale_factor=2),
            nn.Conv2d(2 * width, width, 3, padding=1, bias=False),
            nn.BatchNorm2d(width),
            nn.LeakyReLU(0.2),
            nn.Conv2d(width, channels, 3, padding=1, bias=False),
            nn.BatchNorm2d(channels),
        )

    def forward(self, noise: Tensor) -> Tensor:
        """Return images."""
        _, height, breadth = self.image_shape
        images: Tensor = self.layers(self.first(noise).unflatten(1, self.start))
        # Flat once: gradients that come back from networks of another memory layout then have one order.
        cut: Tensor = images[..., :height, :breadth].flatten(1).unflatten(1, self.image_shape)
        return cut


class VectorGenerator(nn.Module):
    """Noise `[B, noise_dim]` to inputs that are no images: one hidden layer of `4 * width` units."""

    def __init__(self, noise_dim: int, input_shape: Sequence[int], width: int) -> None:
        super().__init__()
        self.input_shape = tuple(input_shape)
        self.layers = nn.Sequential(
            nn.Linear(noise_dim, 4 * width),
            nn.BatchNorm1d(4 * width),
            nn.LeakyReLU(0.2),
            nn.Linear(4 * width, math.prod(input_shape), bias=False),
            nn.BatchNorm1d(math.prod(input_shape)),
        )

    def forward(self, noise: Tensor) -> Tensor:
        """Return inputs."""
        x: Tensor = self.layers(noise)
        return x.view(-1, *self.input_shape)


class Noise(nn.Module):
    """Noise that is trained: Adam's steps do not know the scale of a gradient, so `speed` makes them larger."""

    def __init__(self, drawn: Tensor, speed: float) -> None:
        super().__init__()
        self.speed = speed
        self.values = nn.Parameter(drawn / speed)

    def forward(self, like: Tensor) -> Tensor:
        """Return the noise, whatever the input."""
        return self.speed * self.values
