"""Fewer networks to fuse: those that cover all labels, or one of each group of similar ones."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from polyfed.core.samples import Samples
from polyfed.fusion.networks import scores_on
from polyfed.ops.selection import cluster_heads, greedy_cover


def choose(
    networks: Sequence[nn.Module],
    how: str,
    keep: int | None,
    counts: Tensor | None,
    samples: Sequence[float],
    public: Samples | None,
) -> list[int]:
    """Return the places of the networks that are kept, in order.

    Parameters
    ----------
    networks
        In prediction mode.
    how, keep
        `greedy`: by label coverage, from `counts [J, C]`, at most `keep` (None: no limit); `cluster`: `keep` groups by
        similar outputs on `public`, of each the one with the most `samples`.
    """
    if how == "greedy":
        assert counts is not None, "the caller has looked"
        return greedy_cover(counts, keep)
    assert public is not None and keep is not None, "the caller has looked"
    return cluster_heads(torch.stack([scores_on(network, public) for network in networks]), samples, keep)
