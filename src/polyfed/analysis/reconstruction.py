"""The feature-reconstruction attack: reading images from what left a client.

FedIN, Fig. 4 and 10. The attacker knows the extractor e and received features s; it starts from noise and minimises
MSE(e(x), s) over the image x. Beside the pictures: error and PSNR against the true images.

Deviations: 2000 steps of Adam with lr 0.1 where the paper is silent. BatchNorm of the extractor predicts with its
running statistics, the strong attacker; `batchnorm="batch"` is one that does not have them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from polyfed.analysis.opening import OpenedRun, first_samples
from polyfed.core.errors import InputError, unknown
from polyfed.core.nets import EVAL, STILL, mode
from polyfed.ops.noise import noisy

MODES = ("statistics", "batch")


def reconstruct(
    extractor: Callable[[Tensor], Tensor],
    features: Tensor,
    shape: Sequence[int],
    steps: int = 2000,
    lr: float = 0.1,
    seed: int = 0,
) -> tuple[Tensor, list[float]]:
    """Return inputs whose features are as close as possible to those given, and the loss after every step.

    Parameters
    ----------
    extractor
        Differentiable; its parameters are not changed.
    features
        What the attacker received, `[n, ...]`.
    shape
        Of one input.
    steps, lr, seed
        Of Adam, and of the noise it starts from.
    """
    rng = torch.Generator().manual_seed(seed)
    guess = torch.randn((len(features), *shape), generator=rng, dtype=features.dtype).requires_grad_()
    optimizer = torch.optim.Adam([guess], lr=lr)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = F.mse_loss(extractor(guess), features)
        (guess.grad,) = torch.autograd.grad(loss, [guess])
        optimizer.step()
        losses.append(float(loss.detach()))
    return guess.detach(), losses


def psnr(found: Tensor, true: Tensor, peak: float = 1.0) -> float:
    """Return the peak signal-to-noise ratio in decibels (infinite for equal images)."""
    error = float(F.mse_loss(found, true))
    return 10 * math.log10(peak**2 / error) if error > 0 else math.inf


def attack(
    model: nn.Module,
    x: Tensor,
    noise: float = 0.0,
    steps: int = 2000,
    lr: float = 0.1,
    seed: int = 0,
    batchnorm: str = "statistics",
) -> dict[str, Any]:
    """Attack the stem of a model on some inputs, whose features get noise as FedIN adds it.

    Returns
    -------
    dict
        `losses`, `mse` (in the units of the inputs) and the reconstructed `inputs`.

    Raises
    ------
    InputError
        When the model has no stem, or for an unknown kind of attacker.
    """
    if not hasattr(model, "stem"):
        raise InputError("The attack reads the features after the stem, and this model has none: wrap it with adapt.")
    if batchnorm not in MODES:
        raise unknown("batchnorm", batchnorm, MODES)
    stem = cast(Callable[[Tensor], Tensor], model.stem)
    rng = torch.Generator().manual_seed(seed + 1)
    with mode(model, EVAL), torch.no_grad():
        features = stem(x)
        features = noisy(features, noise, torch.randn(features.shape, generator=rng)) if noise else features
    with mode(model, EVAL if batchnorm == "statistics" else STILL):
        found, losses = reconstruct(stem, features, x.shape[1:], steps, lr, seed)
    return {"noise": noise, "losses": losses, "mse": float(F.mse_loss(found, x)), "inputs": found}


def attack_client(
    run: OpenedRun,
    client: int = 0,
    noise: Sequence[float] = (0.0, 0.8),
    samples: int = 8,
    steps: int = 2000,
    seed: int = 0,
    batchnorm: str = "statistics",
) -> dict[str, Any]:
    """Attack the features of one client's training images, with and without noise."""
    if client not in run.models:
        raise InputError(f"There is no client {client}: they are numbered 0 to {len(run.models) - 1}.")
    held = run.clients.train[client] if client < len(run.clients) else run.clients.test
    rows = torch.arange(min(samples, len(held)))
    x = held.inputs(rows)
    if x.dim() != 4:
        x, _ = first_samples(run, samples)
    scaling = held.scaling
    true = scaling.undo(x).clamp(0, 1)
    outcomes = []
    for level in noise:
        made = attack(run.models[client], x, level, steps, seed=seed, batchnorm=batchnorm)
        images = scaling.undo(made.pop("inputs")).clamp(0, 1)
        outcomes.append({**made, "psnr": psnr(images, true), "images": images.tolist()})
    return {
        "method": run.label,
        "seed": run.seed,
        "client": client,
        "network": run.architectures[client],
        "true": true.tolist(),
        "attacks": outcomes,
    }


def reconstruction_figures(found: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the loss curves and the grid of images of each run."""
    from polyfed.analysis.figures import image_grid, lines

    figures = {}
    for run in found:
        name = f"{run['method']}-seed{run['seed']}"
        curves = {
            f"noise {a['noise']:g} (PSNR {a['psnr']:.1f} dB)": (list(range(1, len(a["losses"]) + 1)), a["losses"])
            for a in run["attacks"]
        }
        title = f"Reconstruction from features, {run['method']}, client {run['client']}"
        figures[f"loss-{name}"] = lines(title, "step", "MSE of features", curves, log=True)
        rows = {"true": torch.tensor(run["true"])}
        rows |= {f"noise {a['noise']:g}": torch.tensor(a["images"]) for a in run["attacks"]}
        figures[f"images-{name}"] = image_grid(title, rows)
    return figures
