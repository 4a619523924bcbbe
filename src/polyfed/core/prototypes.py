"""Class means (and covariances) of features: collected at a client, packed for the wire, averaged at the server."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from polyfed.core.party import Context, Party
from polyfed.core.releases import class_means_of
from polyfed.ops.moments import Moments

Prototypes = dict[str, Tensor]  # "prototypes" [C_k, d], "classes" [C_k], "counts" [C_k]


def class_means(client: Party, ctx: Context) -> Prototypes:
    """Return the mean feature of every class that a client holds, in prediction mode; private where that is asked for.

    `classes` is uint8 where it can be (int16 past 256 classes) and `counts` int32, so that C_k classes of d features
    cost 4·C_k·d + 4·C_k + C_k bytes on the wire.
    """
    main: Any = client.main
    means, counts = class_means_of(client, ctx, lambda x: main.features(x), "prototypes")
    held = torch.nonzero(counts).flatten()
    return {
        "prototypes": means[held],
        "classes": class_numbers(held, ctx.num_classes),
        "counts": counts[held].to(torch.int32),
    }


def packed_means(sums: Tensor, counts: Tensor, num_classes: int, passes: int = 1) -> Prototypes:
    """Return sums of features [C, d] as means, where every sample was counted so many times."""
    present = torch.nonzero(counts).flatten()
    return {
        "prototypes": sums[present] / counts[present].unsqueeze(1),
        "classes": class_numbers(present, num_classes),
        "counts": (counts[present] / passes).round().to(torch.int32),
    }


def class_sums(features: Tensor, labels: Tensor, num_classes: int) -> dict[str, Tensor]:
    """Return the sum of the features and the number of samples of each class: what a loss may add up over its steps."""
    numbers = torch.arange(num_classes, device=labels.device)
    members = (labels.unsqueeze(1) == numbers).to(features.dtype)  # [B, C]; a mask instead of indexing, for vmap
    return {"features": members.T @ features.detach(), "counts": members.sum(dim=0)}


def class_numbers(classes: Tensor, num_classes: int) -> Tensor:
    """Return class numbers in the smallest type that holds them."""
    return classes.to(torch.uint8 if num_classes <= 256 else torch.int16)


def spread(packed: Prototypes, num_classes: int, dim: int) -> tuple[Tensor, Tensor]:
    """Return `([C, d], [C])`: all prototypes with zeros for unknown classes, and 1 where a class is known."""
    device = packed["prototypes"].device if "prototypes" in packed else None
    full = torch.zeros(num_classes, dim, device=device)
    known = torch.zeros(num_classes, device=device)
    if "prototypes" in packed:
        classes = packed["classes"].long()
        full = full.index_copy(0, classes, packed["prototypes"].to(full.dtype))
        known = known.index_fill(0, classes, 1.0)
    return full, known


def mean_prototypes(replies: Iterable[Prototypes], num_classes: int, weighting: str = "samples") -> Prototypes:
    """Return, for every class that somebody holds, the mean of the clients' prototypes.

    `samples`: `P[c] = sum_k n_kc P_k[c] / sum_k n_kc`; `uniform`: the plain mean over holders.
    """
    total: Tensor | None = None
    for reply in replies:
        classes, device = reply["classes"].long(), reply["prototypes"].device
        a = reply["counts"].float() if weighting == "samples" else torch.ones(len(classes), device=device)
        if total is None:
            total = torch.zeros(num_classes, reply["prototypes"].shape[1], device=device)
            weight = torch.zeros(num_classes, device=device)
        total[classes] += reply["prototypes"] * a.unsqueeze(1)
        weight[classes] += a
    assert total is not None, "no replies"
    present = torch.nonzero(weight).flatten()
    return {
        "prototypes": total[present] / weight[present].unsqueeze(1),
        "classes": class_numbers(present, num_classes),
    }


def merged(old: Prototypes, new: Prototypes, num_classes: int) -> Prototypes:
    """Return the new prototypes, and the old ones of classes that nobody held this time."""
    if not old:
        return new
    dim = new["prototypes"].shape[1]
    full, known = spread(old, num_classes, dim)
    fresh, renewed = spread(new, num_classes, dim)
    full = torch.where(renewed.unsqueeze(1) > 0, fresh, full)
    present = torch.nonzero(known + renewed).flatten()
    return {"prototypes": full[present], "classes": class_numbers(present, num_classes)}


def packed_moments(found: Moments, num_classes: int, counts: bool = True) -> dict[str, Tensor]:
    """Return moments as they travel: counts only where somebody pools them."""
    classes = class_numbers(found.classes, num_classes)
    told = {"classes": classes, "means": found.means, "covariance": found.covariance}
    return told | {"counts": found.counts.to(torch.int32)} if counts else told


def unpacked_moments(told: Mapping[str, Tensor]) -> Moments:
    """Return moments that travelled."""
    classes = told["classes"].long()
    return Moments(classes, told.get("counts", torch.zeros_like(classes)).long(), told["means"], told["covariance"])
