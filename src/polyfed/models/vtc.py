"""FedVTC's decoder: four transposed convolutions from a latent vector to an image in [0, 1]; and images of classes."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from polyfed.core.errors import InputError
from polyfed.core.message import State
from polyfed.core.nets import EVAL, mode
from polyfed.core.party import state_of
from polyfed.core.prototypes import Prototypes
from polyfed.models.network import image_shape as as_image
from polyfed.ops.gaussian import class_latents

WIDTHS = (32, 64, 64)
KERNELS = ((3, 1), (4, 2), (3, 1), (4, 2))  # kernel and stride: two of the layers double the map


def start_size(image_shape: Sequence[int]) -> tuple[int, int]:
    """Return the map that the decoder starts from: a quarter of the image, rounded up."""
    _, height, width = as_image(image_shape, "decoder")
    return math.ceil(height / 4), math.ceil(width / 4)


def latent_misfit(size: int, image_shape: Sequence[int]) -> str | None:
    """Return what to do when latents of this size do not fill the decoder's first map."""
    height, width = start_size(image_shape)
    step = height * width
    if size % step == 0:
        return None
    below = size // step * step
    near = f"{below} or {below + step}" if below else f"{step}"
    return (
        f"features that fill maps of {height}x{width} pixels (a quarter of the image), but they have {size} "
        f"numbers: set feature_dim (--feature-dim) to {near}"
    )


@torch.no_grad()
def decode(vtc: nn.Module, latents: Tensor, chunk: int = 512) -> Tensor:
    """Return the images of latents, in prediction mode."""
    with mode(vtc, EVAL):
        return torch.cat([vtc(part) for part in latents.split(chunk)])


@torch.no_grad()
def recalibrated(
    vtc: nn.Module, packed: Prototypes, sigma: Tensor, rng: torch.Generator, count: int = 512
) -> nn.Module:
    """Return a copy whose norm layers have the statistics of about `count` latents, of all classes alike."""
    vtc = copy.deepcopy(vtc)
    for layer in vtc.modules():
        if isinstance(layer, nn.modules.batchnorm._BatchNorm):
            layer.momentum = 1.0  # one pass then replaces the statistics
    prototypes = packed.get("prototypes", sigma.new_zeros(0, len(sigma)))
    if len(prototypes):
        each = math.ceil(count / len(prototypes))
        vtc.train()(torch.cat([class_latents(prototype, sigma, each, rng) for prototype in prototypes]))
    return vtc


def synthetic_set(
    vtc: nn.Module, packed: Prototypes, sigma: Tensor, count: int, rng: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Return `count` images in [0, 1] and labels of every class that has a prototype, class after class (Eq. 9)."""
    if "prototypes" not in packed:
        raise InputError("fedvtc: no class has a prototype yet, so there is nothing to decode: train a round first.")
    pairs = list(zip(packed["classes"].tolist(), packed["prototypes"], strict=True))
    images = torch.cat([decode(vtc, class_latents(prototype, sigma, count, rng)) for _, prototype in pairs])
    return images, torch.tensor([label for label, _ in pairs]).repeat_interleave(count)


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


class VTC(nn.Module):
    """A decoder psi and the standard deviations sigma = exp(s) of the latents it is fed with."""

    def __init__(self, latent_dim: int, image_shape: Sequence[int], sigma: float = 0.1) -> None:
        super().__init__()
        self.takes = (latent_dim,)
        self.decoder = Decoder(latent_dim, image_shape)
        self.log_sigma = nn.Parameter(torch.full((latent_dim,), math.log(sigma)))

    @property
    def sigma(self) -> Tensor:
        """The standard deviations, detached."""
        return self.log_sigma.detach().exp()

    def shared(self) -> State:
        """Return the decoder's weights and running statistics: what is averaged (sigma travels by itself)."""
        return {n: t for n, t in state_of(self).items() if n.startswith("decoder.") and t.is_floating_point()}

    def forward(self, latents: Tensor) -> Tensor:
        """Return images in [0, 1]."""
        images: Tensor = self.decoder(latents)
        return images
