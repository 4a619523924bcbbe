"""InCo: Internal Cross-layer Gradients for Extending Homogeneity to Heterogeneity in Federated Learning.

Chan, Zhou, Zhao, Ngai, ICLR 2024. https://arxiv.org/abs/2308.11464

Deep layers are held by fewer clients, and their updates are less alike. After layer-wise averaging the server mixes the
mean update g_k of every convolution in the blocks 1, 2, ... of a stage with that of block 0's last convolution, g_0,
kernel by kernel:

    theta = min(|<g_0, g_k>| / <g_0, g_0>, 5)                                                      (1)
    g     = (g_k/|g_k| + theta · g_0/|g_0|) · (|g_k| + |g_0|)/2,   every entry within [-0.1, 0.1]      (2)

Nothing more travels. With `mu` this is InCoProx, else InCoAvg.

Deviations:
    Eq. (1, 2) are what the released program computes. The text derives another mixture, which only acts where the two
    updates oppose each other: g_k - <g_0, g_k>/<g_0, g_0> · g_0, `rule="projection"`.
    g_0 is the last tensor of block 0 that has the shape of g_k and a place in g_k's block: the second convolution in
    basic blocks. Only weights with such a partner are mixed. Kernels of one pixel and linear layers count as one vector
    each; the released program has neither (in transformers it mixes two vectors of each block's norms).
    Clients weigh by samples (`weighting="uniform"` is the released program's). The paper mixes the updates of SCAFFOLD,
    FedNova and MOON, too: not offered.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from polyfed.core.depth import stacks_of
from polyfed.core.fields import NotNegative, Positive
from polyfed.core.message import Message
from polyfed.core.method import Step
from polyfed.core.party import ClientInfo, Context, Party
from polyfed.core.views import Blueprints
from polyfed.methods.fedprox import FedProx

TINY = 1e-7  # added to what is divided by


@dataclass(frozen=True)
class InCo(FedProx):
    """Layer-wise averaging whose deep updates follow those of shallow layers.

    Parameters
    ----------
    rule
        How two updates are mixed: `code`, Eq. (2); `projection`, the text's; `none` gives FedAvg (FedProx with mu)
        exactly.
    theta_max
        Upper limit of theta, Eq. (1).
    clip
        Limit of every entry of a mixed update; None: none.
    mu, straggler_share
        As in FedProx; 0: none.
    view, weighting, buffers, pretrain_epochs
        As in FedAvg.
    """

    name: ClassVar[str] = "inco"
    paper: ClassVar[str] = "Chan et al. 2024"
    family: ClassVar[str] = "depth"

    rule: Literal["code", "projection", "none"] = "code"
    theta_max: Positive = 5.0
    clip: Positive | None = 0.1
    mu: NotNegative = 0.0

    def misfit(self, infos: Sequence[ClientInfo], blueprints: Blueprints, input_shape: tuple[int, ...]) -> str | None:
        """Return what to do when no network has anything to mix: it would be FedAvg."""
        problem = super().misfit(infos, blueprints, input_shape)
        if problem or self.rule == "none" or any(partners(blueprint.shapes) for blueprint in blueprints.values()):
            return problem
        return "two blocks with weights of one shape in a stage: take resnet14 or resnet18, for example, or rule=none"

    @torch.no_grad()
    def fuse(self, server: Party, replies: Mapping[int, Message], step: Step, ctx: Context) -> None:
        """Average, then mix the updates of deep layers with those of shallow ones."""
        shapes = {name: tuple(tensor.shape) for name, tensor in server.state.items()}
        pairs = ctx.cached("inco/pairs", lambda: partners(shapes)) if self.rule != "none" else {}
        start = {name: server.state[name].clone() for name in {*pairs, *pairs.values()}}
        super().fuse(server, replies, step, ctx)
        updates = {name: server.state[name] - w for name, w in start.items()}
        for deep, shallow in pairs.items():
            mixed = self.mixed(updates[shallow], updates[deep])
            limited = mixed if self.clip is None else mixed.clamp(-self.clip, self.clip)
            server.state[deep].copy_(start[deep] + limited)
        if pairs:
            self.refresh(server, ctx)

    def mixed(self, g0: Tensor, gk: Tensor) -> Tensor:
        """Return Eq. (2), or the projection, for each kernel."""
        axes = (2, 3) if gk.dim() == 4 and gk[0, 0].numel() > 1 else tuple(range(gk.dim()))
        b, a = ((g0 * g).sum(axes, keepdim=True) for g in (gk, g0))
        if self.rule == "projection":
            return gk - b.clamp(max=0) / (a + TINY) * g0
        theta = (b.abs() / (a + TINY)).clamp(max=self.theta_max)
        size_k, size_0 = (torch.linalg.vector_norm(g, dim=axes, keepdim=True) for g in (gk, g0))
        mixed: Tensor = (gk / (size_k + TINY) + theta * g0 / (size_0 + TINY)) * (size_k + size_0) / 2
        return mixed


def partners(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, str]:
    """Return, for every weight of the blocks 1, 2, ... of a stack, the weight of block 0 whose update it is mixed with.

    That is the last one of the same shape which a deeper block has, too: a shortcut's convolution is none.
    """
    found: dict[str, str] = {}
    for blocks in stacks_of(shapes).values():
        for number, block in blocks.items():
            first = [blocks[0][inner] for inner in block if inner in blocks.get(0, {})] if number else []
            for name in block.values():
                equal = [other for other in first if shapes[other] == shapes[name]]
                if equal and len(shapes[name]) > 1:
                    found[name] = equal[-1]
    return found
