"""PFNM of modules: one network whose hidden units are the matched ones of several (`ops/matching.py`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from polyfed.core.passes import count_right
from polyfed.core.samples import Samples
from polyfed.fusion.chain import layers_of, write_chain
from polyfed.ops.matching import GRID, Matching, match_networks
from polyfed.ops.selection import class_weights


def matched(
    networks: Sequence[nn.Module], options: Matching, rng: torch.Generator, counts: Tensor | None = None
) -> nn.Module:
    """Return a network like the first one that holds the matched units of all.

    Parameters
    ----------
    networks
        Chains that are known to be alike (`chain.check_alike`).
    options, rng
        Settings, and the order of the sweeps.
    counts
        `[J, C]`: a network counts for the weights into an output by its share of the samples of the class; None: fully.
    """
    shares = None if counts is None else list(class_weights(counts))
    found = match_networks([layers_of(network) for network in networks], options, rng, shares)
    return write_chain(networks[0], found.layers)


def candidates(options: Matching, grid: Sequence[tuple[float, float, float]] = GRID) -> list[Matching]:
    """Return the settings of a grid to search over; what is not in the grid is as given."""
    return [replace(options, sigma2=s, sigma0_2=s0, gamma=g) for s, s0, g in grid]


def accuracy_of(model: nn.Module, data: Samples) -> float:
    """Return the share of samples that a module gets right."""
    return count_right(model, data) / len(data)
