"""Look at what a generative method has learned: synthetic images by class, and a PNG grid of them (FedVTC)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from polyfed.core.errors import InputError
from polyfed.core.party import Party, load_state
from polyfed.core.prototypes import Prototypes
from polyfed.core.rundir import RunDirectory
from polyfed.models.vtc import VTC, decode, recalibrated
from polyfed.ops.gaussian import class_latents


def class_samples(
    source: Any, count: int = 8, classes: Sequence[int] | None = None, seed: int = 0
) -> dict[int, Tensor]:
    """Return synthetic images `[count, channels, height, width]` in [0, 1] by class.

    Parameters
    ----------
    source
        A result of `polyfed.run`, the directory of a finished run, the server, or a client at work.
    count, classes
        How many of which classes (None: all that have a prototype).
    seed
        The same seed gives the same images.

    Raises
    ------
    InputError
        When the decoders were never averaged, or a class has no prototype.
    """
    vtc, packed, sigma = shared_decoder(source)
    known = packed["classes"].tolist() if "classes" in packed else []
    wanted = known if classes is None else list(classes)
    for label in wanted:
        if label not in known:
            raise InputError(f"fedvtc: class {label} has no prototype, nobody held it; known are {known}.")
    rng = torch.Generator()
    return {
        label: decode(
            vtc, class_latents(packed["prototypes"][known.index(label)], sigma, count, rng.manual_seed(seed + label))
        )
        for label in wanted
    }


def sample_grid(
    path: str | Path, source: Any, count: int = 8, classes: Sequence[int] | None = None, seed: int = 0, zoom: int = 2
) -> Path:
    """Save synthetic images as a PNG: a row for each class, `count` columns; see `class_samples`."""
    from PIL import Image  # only here: it takes a while to import

    rows = class_samples(source, count, classes, seed).values()
    cells = torch.stack(list(rows))  # [classes, count, channels, height, width]
    cells = cells if cells.shape[2] == 3 else cells[:, :, :1]
    cells = F.pad(cells, (1, 1, 1, 1), value=1.0)  # a white line between images
    picture = (cells.permute(0, 3, 1, 4, 2).flatten(2, 3).flatten(0, 1) * 255).round().to(torch.uint8)
    image = Image.fromarray(picture.squeeze(2).numpy())
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    image.resize((image.width * zoom, image.height * zoom), Image.Resampling.NEAREST).save(path, format="PNG")
    return path


def shared_decoder(source: Any) -> tuple[nn.Module, Prototypes, Tensor]:
    """Return decoder, prototypes and sigma of a result, a run directory, the server, or a client at work."""
    if isinstance(source, Party) and "vtc" in source.models:
        return source.models["vtc"], source.inbox.data, source.inbox.data["sigma"]
    if isinstance(source, str | Path):
        RunDirectory.read_config(Path(source))
        directory = RunDirectory(Path(source))
        found = directory.load() if (directory.path / "result.json").is_file() else None
        memory = found[1]["memory"] if found else {}
    else:
        memory = getattr(source, "server", source).memory
    if "vtc" not in memory:
        raise InputError(
            "fedvtc: there is no mean decoder here: finish a run of fedvtc with finetune=True or vtc_upload='round'."
        )
    vtc: nn.Module = VTC(len(memory["sigma"]), memory["image_shape"])
    load_state(vtc, memory["vtc"])
    packed, sigma = memory["prototypes"], memory["sigma"]
    if memory.get("norm_statistics") == "recalibrated":
        vtc = recalibrated(vtc, packed, sigma, torch.Generator().manual_seed(0))
    return vtc, packed, sigma
