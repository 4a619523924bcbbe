"""t-SNE of features by class and by network, with a number to go with the picture.

FedIN Fig. 3 and 8, FedFD Fig. 1: features of different clients either form one cloud for a class (they agree) or one
cloud for each network (they do not).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from polyfed.analysis.opening import OpenedRun, first_samples, stage_outputs
from polyfed.core.errors import InputError


def embed(features: Tensor | np.ndarray, seed: int = 0, perplexity: float = 30.0) -> np.ndarray:
    """Return a t-SNE embedding in two dimensions, `[n, 2]`; the same seed gives the same picture.

    Raises
    ------
    InputError
        For fewer than four rows.
    """
    from sklearn.manifold import TSNE  # type: ignore[import-untyped]

    values = np.asarray(features, dtype=np.float64)
    if len(values) < 4:
        raise InputError(f"t-SNE needs at least 4 rows, got {len(values)}.")
    near = min(perplexity, (len(values) - 1) / 3)
    return np.asarray(TSNE(2, perplexity=near, init="pca", random_state=seed).fit_transform(values))


def separation(features: Tensor | np.ndarray, groups: Tensor | np.ndarray) -> float:
    """Return the mean silhouette of groups in feature space: 1 far apart, 0 mixed, below 0 interleaved."""
    from sklearn.metrics import silhouette_score  # type: ignore[import-untyped]

    groups = np.asarray(groups)
    if len(np.unique(groups)) < 2 or len(np.unique(groups)) >= len(groups):
        return float("nan")
    return float(silhouette_score(np.asarray(features, dtype=np.float64), groups))


def embed_clients(
    run: OpenedRun,
    samples: int = 200,
    clients: int = 5,
    label: int | None = None,
    stage: str = "features",
    seed: int = 0,
) -> dict[str, Any]:
    """Embed what several clients make of the same test samples.

    Parameters
    ----------
    run
        A finished run. Features of different sizes are filled up with zeros, as slices of one network are nested;
        those of unrelated networks are then far apart whatever they know.
    samples, clients
        How many test samples and clients.
    label
        Only samples of this class (FedIN Fig. 8).
    stage
        `stem`, `stage N`, `features` or `logits`.

    Returns
    -------
    dict
        `points` by row with `label`, `client` and `network`, and the silhouettes of classes and of clients.

    Raises
    ------
    InputError
        When a client lacks the stage.
    """
    chosen = _one_of_each(run, clients)
    x, y = first_samples(run, samples, label)
    parts = []
    for client in chosen:
        outputs = stage_outputs(run.models[client], x)
        if stage not in outputs:
            raise InputError(
                f"Client {client} ({run.architectures[client]}) has no '{stage}': it has {', '.join(outputs)}."
            )
        parts.append(outputs[stage])
    features = torch.cat(_one_size(parts))
    labels = y.repeat(len(chosen))
    owners = torch.tensor(chosen).repeat_interleave(len(x))
    return {
        "method": run.label,
        "seed": run.seed,
        "stage": stage,
        "points": embed(features, seed).tolist(),
        "label": labels.tolist(),
        "client": owners.tolist(),
        "network": {str(client): run.architectures[client] for client in chosen},
        "silhouette_classes": separation(features, labels),
        "silhouette_clients": separation(features, owners),
    }


def _one_size(parts: Sequence[Tensor]) -> list[Tensor]:
    """Fill rows up with zeros to the longest."""
    width = max(part.shape[1] for part in parts)
    return [torch.nn.functional.pad(part, (0, width - part.shape[1])) for part in parts]


def embed_ensemble(run: OpenedRun, samples: int = 300, seed: int = 0) -> dict[str, Any]:
    """Embed what all clients together make of test samples: mean logits, and mean features of each size side by side.

    FedFD, Fig. 1. Features are scaled to unit length before they are averaged, so that no size outweighs the others.

    Returns
    -------
    dict
        `kinds`: for `logits` and `features` the `points` and the `silhouette` of the true classes; `label` by row.
    """
    x, y = first_samples(run, samples)
    logits: list[Tensor] = []
    sizes: dict[int, list[Tensor]] = {}
    for _, model in sorted(run.models.items()):
        outputs = stage_outputs(model, x)
        logits.append(outputs["logits"])
        features = torch.nn.functional.normalize(outputs["features"], dim=1)
        sizes.setdefault(features.shape[1], []).append(features)
    kinds = {
        "logits": torch.stack(logits).mean(0),
        "features": torch.cat([torch.stack(parts).mean(0) for _, parts in sorted(sizes.items())], dim=1),
    }
    return {
        "method": run.label,
        "seed": run.seed,
        "label": y.tolist(),
        "kinds": {
            kind: {"points": embed(rows, seed).tolist(), "silhouette": separation(rows, y)}
            for kind, rows in kinds.items()
        },
    }


def ensemble_figures(found: Mapping[str, Any]) -> dict[str, Any]:
    """Return a picture of each kind of knowledge, coloured by class."""
    from polyfed.analysis.figures import scatter

    classes = [str(label) for label in found["label"]]
    return {
        kind: scatter(f"Mean {kind} by class (silhouette {part['silhouette']:.2f})", np.array(part["points"]), classes)
        for kind, part in found["kinds"].items()
    }


def _one_of_each(run: OpenedRun, number: int) -> list[int]:
    """Return clients with different networks first, then others."""
    first: dict[str, int] = {}
    for client, network in sorted(run.architectures.items()):
        first.setdefault(network, client)
    rest = [client for client in sorted(run.models) if client not in first.values()]
    return [*first.values(), *rest][:number]


def embedding_figures(found: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return two pictures of each run: coloured by class, and by network."""
    from polyfed.analysis.figures import scatter

    figures = {}
    for run in found:
        name = f"{run['method']}-seed{run['seed']}"
        points = np.array(run["points"])
        classes = [str(label) for label in run["label"]]
        networks = [run["network"][str(client)] for client in run["client"]]
        for kind, groups, score in (
            ("classes", classes, run["silhouette_classes"]),
            ("networks", networks, run["silhouette_clients"]),
        ):
            title = f"{run['method']}: {run['stage']} by {kind} (silhouette {score:.2f})"
            figures[f"{kind}-{name}"] = scatter(title, points, groups)
    return figures
