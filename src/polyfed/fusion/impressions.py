"""Inputs made from a trained network alone (data impressions), to distill it where there is no data.

Nayak, Mopuri, Shaj, Babu, Chakraborty, ICML 2019. https://arxiv.org/abs/1905.08114

For a class c, soft targets are drawn from a Dirichlet distribution whose parameters follow the similarity of the
classes in the network's last layer, and inputs are optimised until the network gives these targets.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from polyfed.core.errors import InputError
from polyfed.core.samples import Samples
from polyfed.fusion.chain import sample_inputs

_FLOOR = 1e-3  # parameters of a Dirichlet distribution must be above zero


def last_weight_name(module: nn.Module) -> str:
    """Return the name of the weights `[C, d]` of the last linear layer of a module."""
    names = [name for name, layer in module.named_modules() if isinstance(layer, nn.Linear)]
    if not names:
        raise InputError(f"{type(module).__name__} has no linear layer: class similarities cannot be read off it.")
    return f"{names[-1]}.weight".lstrip(".")


def class_similarity(weight: Tensor) -> Tensor:
    """Return `[C, C]`: cosine similarity of the rows, each row shifted and scaled to (0, 1]."""
    rows = F.normalize(weight.double(), dim=1)
    similarity = rows @ rows.T
    low = similarity.amin(dim=1, keepdim=True)
    high = similarity.amax(dim=1, keepdim=True)
    return ((similarity - low) / (high - low).clamp_min(1e-12)).clamp(_FLOOR, 1.0)


def soft_targets(
    similarity: Tensor, classes: Sequence[int], number: int, scales: Sequence[float], rng: torch.Generator
) -> Tensor:
    """Return `[len(classes)·number, C]` targets, `number` for each class, drawn from Dir(beta · similarity of c).

    The scales beta are used in turn.
    """
    draws = np.random.default_rng(int(torch.randint(2**62, (1,), generator=rng)))
    rows = [draws.dirichlet((scales[n % len(scales)] * similarity[c]).numpy()) for c in classes for n in range(number)]
    return torch.as_tensor(np.stack(rows), dtype=torch.get_default_dtype())


def impressions(
    network: Callable[[Tensor], Tensor],
    targets: Tensor,
    input_shape: Sequence[int],
    rng: torch.Generator,
    temperature: float = 20.0,
    steps: int = 1000,
    lr: float = 0.01,
) -> Tensor:
    """Optimise inputs, from uniform noise, until `softmax(network(x) / temperature)` is near the targets.

    `network` must be in prediction mode. The loss is the cross-entropy summed over inputs, so that an input's result
    does not depend on how many others are made with it.
    """
    x = torch.rand((len(targets), *input_shape), generator=rng).to(targets.device).requires_grad_(True)
    optimizer = torch.optim.Adam([x], lr=lr)
    with torch.enable_grad():  # the caller may be in the middle of predicting
        for _ in range(steps):
            logits = network(x) / temperature
            loss = -(targets * torch.log_softmax(logits, dim=1)).sum()
            (x.grad,) = torch.autograd.grad(loss, [x])
            optimizer.step()
    return x.detach()


def impressions_of(
    networks: Sequence[nn.Module],
    counts: Tensor | None,
    input_shape: Sequence[int] | None,
    number: int,
    steps: int,
    rngs: Sequence[torch.Generator],
) -> Samples:
    """Make inputs from each network, in prediction mode, for the classes it was trained on.

    Parameters
    ----------
    networks, rngs
        Each network's inputs are drawn from its own generator.
    counts
        `[J, C]`, the samples of each class that each network saw; None: all classes.
    input_shape
        Of one input; None: as a first linear layer says.
    number, steps
        Inputs for each network and class, and optimization steps.
    """
    made = []
    for place, (network, rng) in enumerate(zip(networks, rngs, strict=True)):
        weight = dict(network.named_parameters())[last_weight_name(network)].detach()
        known = torch.arange(len(weight)) if counts is None else torch.nonzero(counts[place]).flatten()
        shape = input_shape or tuple(sample_inputs(network).shape[1:])
        targets = soft_targets(class_similarity(weight.cpu()), known.tolist(), number, (1.0, 0.1), rng)
        made.append(impressions(network, targets.to(weight.device), shape, rng, steps=steps))
    x = torch.cat(made).cpu()
    return Samples(x, torch.zeros(len(x), dtype=torch.long))
