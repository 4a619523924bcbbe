"""FedVTC's decoder: four transposed convolutions from a latent vector to an image in [0, 1]."""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import Tensor, nn

from polyfed.core.errors import InputError
from polyfed.models.network import image_shape as as_image

WIDTHS = (32, 64, 64)
KERNELS = ((3, 1), (4, 2), (3, 1), (4, 2))  # kernel and stride: two of the layers double the map


def start_size(image_shape: Sequence[int]) -> tuple[int, int]:
    """Return the map that the decoder starts from: a quarter of the image, rounded up."""
    _, height, width = as_image(image_shape, "decoder")
    return math.ceil(height / 4), math.ceil(width / 4)


class Decoder(nn.Module):
    """Latent `[B, latent_dim]` to image `[B, *image_shape]`.

    Parameters
    ----------
    latent_dim
        Must be channels x the start map (`start_size`): 980 for 1x28x28, 4096 for 3x32x32.
    image_shape
        (channels, height, width); sides that are not multiples of four are decoded larger and cropped.
    c0
        Channels of the start map, if they are to be checked; by default `latent_dim` divided by the start map.
    """

    def __init__(self, latent_dim: int, image_shape: Sequence[int], c0: int | None = None) -> None:
        super().__init__()
        height, width = start_size(image_shape)
        first = latent_dim // (height * width) if c0 is None else c0
        if first < 1 or first * height * width != latent_dim:
            near = max(1, round(latent_dim / (height * width))) * height * width
            raise InputError(
                f"The latent dimension {latent_dim} is not {c0 or 'a number of'} channels of {height}x{width} pixels, "
                f"a quarter of the image {tuple(image_shape)}: use for instance {near}."
            )
        self.latent_dim = latent_dim
        self.image_shape = tuple(image_shape)
        self.start = (first, height, width)
        channels = [first, *WIDTHS, image_shape[0]]
        self.layers = nn.Sequential(
            *[
                UpConv(channels[place], channels[place + 1], kernel, stride, nn.LeakyReLU(0.01, inplace=True))
                for place, (kernel, stride) in enumerate(KERNELS)
            ]
        )
        self.layers[-1].activation = nn.Sigmoid()

    def forward(self, latent: Tensor) -> Tensor:
        """Return images with values in [0, 1]."""
        _, height, width = self.image_shape
        images: Tensor = self.layers(latent.unflatten(1, self.start))
        return images[..., :height, :width]


class UpConv(nn.Module):
    """Transposed convolution, batch norm, activation."""

    def __init__(self, inputs: int, outputs: int, kernel: int, stride: int, activation: nn.Module) -> None:
        super().__init__()
        self.conv = nn.ConvTranspose2d(inputs, outputs, kernel, stride, padding=1)
        self.norm = nn.BatchNorm2d(outputs)
        self.activation = activation

    def forward(self, x: Tensor) -> Tensor:
        """Return the map, twice as large for stride 2."""
        x = self.activation(self.norm(self.conv(x)))
        return x
