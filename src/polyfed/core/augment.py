"""Random crops and flips of training images, drawn for each sample of each batch from the client's own stream.

A client's own samples are augmented while it trains on them; test, validation and public data never are.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from polyfed.core.errors import InputError

if TYPE_CHECKING:
    from polyfed.core.party import Context, Party
    from polyfed.core.samples import Samples, Scaling
    from polyfed.core.settings import Training
    from polyfed.core.stage import Stage


@dataclass(frozen=True)
class Augmentation:
    """Shift images by up to `crop` pixels along both axes (what comes in is black), and mirror every second one."""

    crop: int = 0
    flip: bool = False

    def draw(self, samples: int, rng: torch.Generator) -> Tensor:
        """Return for each sample its shifts, from 0 to 2·crop, and whether it is mirrored: `[samples, 3]`."""
        shifts = torch.randint(0, 2 * self.crop + 1, (samples, 2), generator=rng)
        mirrored = torch.randint(0, 2, (samples, 1), generator=rng) * self.flip
        return torch.cat([shifts, mirrored], dim=1)

    def apply(self, x: Tensor, drawn: Tensor, scaling: Scaling) -> Tensor:
        """Return images `[samples, channels, height, width]` shifted and mirrored as drawn."""
        drawn = drawn.to(x.device)
        samples, channels, height, width = x.shape
        crop = self.crop
        black = scaling.apply(x.new_zeros(1, channels, 1, 1))  # what a pixel of value zero is for the network
        padded = black.expand(samples, channels, height + 2 * crop, width + 2 * crop).clone()
        padded[:, :, crop : crop + height, crop : crop + width] = x
        rows = drawn[:, 0, None] + torch.arange(height, device=x.device)
        across = torch.arange(width, device=x.device)
        columns = drawn[:, 1, None] + torch.where(drawn[:, 2, None] > 0, across.flip(0), across)
        place = torch.arange(samples, device=x.device)[:, None, None, None]
        plane = torch.arange(channels, device=x.device)[None, :, None, None]
        return padded[place, plane, rows[:, None, :, None], columns[:, None, None, :]]


def read_augmentation(text: str) -> Augmentation:
    """Read `crop:4+flip`, `crop:2` or `flip`, which the settings have checked."""
    words = text.split("+")
    return Augmentation(
        crop=next((int(word.partition(":")[2]) for word in words if word.startswith("crop:")), 0), flip="flip" in words
    )


def augmentation_of(stage: Stage, party: Party, ctx: Context) -> Augmentation | None:
    """Return how the samples of a stage are augmented: only a client's own training samples are."""
    wanted = (stage.training or ctx.training).augment
    if wanted is None or party.data.train is None:
        return None
    own = stage.data is None or is_part(stage.data, party.data.train)
    return read_augmentation(wanted) if own else None


def is_part(some: Samples, whole: Samples) -> bool:
    """Tell whether samples are among others; public ones may lie in the same storage."""
    if some.x is not whole.x:
        return False
    if whole.index is None:
        return True
    return some.index is not None and bool(torch.isin(some.index, whole.index).all())


def check_images(training: Training, input_shape: tuple[int, ...]) -> None:
    """Refuse to augment what is no image, or to shift images until nothing of them is left.

    Raises
    ------
    InputError
        With the shape of the inputs.
    """
    if training.augment is None:
        return
    if len(input_shape) != 3:
        raise InputError(
            f"training: augment='{training.augment}' changes images (channels, height, width), but inputs have shape "
            f"{list(input_shape)}: leave it out."
        )
    if read_augmentation(training.augment).crop >= min(input_shape[1:]):
        raise InputError(
            f"training: augment='{training.augment}' may shift images of {input_shape[1]} x {input_shape[2]} pixels "
            "out of sight: give fewer pixels."
        )


def refuse_changes(training: Training, name: str, what: str, instead: str) -> None:
    """Refuse to augment where a method computes columns over clients' own samples before it trains on them.

    Such columns are of the images as they are; a network that sees changed ones would learn the wrong targets.

    Parameters
    ----------
    training
        The run's.
    name, what
        The method, and what it computes.
    instead
        How to do without the columns, after "or".

    Raises
    ------
    InputError
        With both ways out.
    """
    if training.augment is not None:
        raise InputError(
            f"{name}: {what} computed once for unchanged images, and augment='{training.augment}' changes them: "
            f"leave augment out, or {instead}."
        )
