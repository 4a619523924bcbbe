"""InclusiveFL: No One Left Behind: Inclusive Federated Learning over Heterogeneous Devices.

Liu, Wu, Wu, Wang, Lyu, Chen, Xie, KDD 2022. https://arxiv.org/abs/2202.08036

Clients have networks of several depths. Layers are averaged over all sizes that hold them, but for the top block of a
stack and the classifier, of which every size has its own. The top block of a small network stands for the blocks that a
larger one has in its place, so its update learns from theirs ("momentum distillation"), for sizes 1 .. M by depth:

    g_m[top]  <-  (1 - beta) · g_m[top] + beta · mean of g_{m+1}[j],   j = top of size m .. top of size m+1        (1)

where g is the update of a size: the weights that it had less the mean of its clients.

Deviations:
    Written for transformers; here for any network with numbered blocks. Each stack (a stage of a ResNet) has a top: its
    last block, if that has the layers and shapes of the deepest network's last one. The first block of a stage, which
    changes the width, has not: it is shared by all sizes and takes no part in Eq. (1).
    The classifier is shared by all sizes by default, as in comparisons on ResNets; `share_head=False` is the paper's.
    Averages of weights after local epochs instead of gradients that drive an AdamW of the server.
    In the released program the mean over j keeps its last term only and does not reach the update; here is the formula.
    Eq. (1) takes the updates as they came, of all sizes, and concerns parameters, not BatchNorm's statistics.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import ClassVar, Literal

import torch

from polyfed.core.depth import place_of, stacks_of, top_names
from polyfed.core.errors import InputError
from polyfed.core.fields import Share
from polyfed.core.message import Message, State
from polyfed.core.method import Step
from polyfed.core.party import Blueprint, ClientInfo, Context, Party
from polyfed.core.views import Blueprints, OwnedBut, largest_first
from polyfed.methods.fedavg import FedAvg
from polyfed.ops.aggregate import mean_state


@dataclass(frozen=True)
class InclusiveFL(FedAvg):
    """Layer-wise averages with top blocks of each size that learn from larger sizes.

    Parameters
    ----------
    beta
        Share of the larger network's update in that of the top blocks; 0: none.
    share_head, share_top
        Average the classifier, and the top blocks, over all sizes. Both and beta = 0 are layer-wise FedAvg exactly.
    delay
        Rounds until the larger network's update is used: 0, or 1 as in the released program.
    weighting, buffers, pretrain_epochs
        As in FedAvg. `view` is not used.
    """

    name: ClassVar[str] = "inclusivefl"
    paper: ClassVar[str] = "Liu et al. 2022"
    family: ClassVar[str] = "depth"
    needs: ClassVar[frozenset[str]] = frozenset({"family"})

    beta: Share = 0.2
    share_head: bool = True
    share_top: bool = False
    delay: Literal[0, 1] = 0

    def check(self) -> None:
        """Refuse a view, and a top block that is both shared and its size's own."""
        self.must_stay("layers are shared but for top blocks", view="auto")
        if self.share_top and self.beta:
            raise InputError(f"{self.name}: share_top needs beta=0: a shared top block stands for no other blocks.")

    def misfit(self, infos: Sequence[ClientInfo], blueprints: Blueprints, input_shape: tuple[int, ...]) -> str | None:
        """Return what to do when no size has blocks in the place of a smaller one's top block: it would be FedAvg."""
        problem = super().misfit(infos, blueprints, input_shape)
        if problem or not self.beta or len(blueprints) < 2:
            return problem
        sizes = pairwise(reversed(largest_first(blueprints)))
        if any(any(donors_of(small, large, blueprints).values()) for small, large in sizes):
            return None
        return (
            "a smaller network whose last block is like one of the larger network's: the first block of a ResNet's "
            "stage is like none, so take resnet18 and resnet26, for instance, or set beta=0"
        )

    def policy(self, ctx: Context) -> OwnedBut:
        """Return the view: by layers, but for what every size has of its own."""
        return BySize(self.buffers == "average", self.share_head, self.share_top)

    @torch.no_grad()
    def fuse(self, server: Party, replies: Mapping[int, Message], step: Step, ctx: Context) -> None:
        """Average, then blend the updates of top blocks."""
        donated = self.donated(server, replies, ctx) if self.beta else {}
        if self.delay:
            donated, server.memory["donated"] = server.memory.get("donated", {}), donated
        start = {key: server.state[key].clone() for key in donated}
        super().fuse(server, replies, step, ctx)  # the global model has the largest size, which takes from none
        for key, w in start.items():  # Eq. (1): w - (1 - beta) · (w - mean) - beta · donated
            server.state[key].copy_(w.lerp(server.state[key], 1 - self.beta) - self.beta * donated[key])

    def donated(self, server: Party, replies: Mapping[int, Message], ctx: Context) -> State:
        """Return, for every parameter of a top block, the mean update of the blocks of the next size in its place."""
        found: State = {}
        for small, large in pairwise(reversed(largest_first(ctx.blueprints))):
            theirs = [reply for client, reply in replies.items() if ctx.infos[client].architecture == large.name]
            mine, slots = self.slots_of(small, ctx), self.slots_of(large, ctx)  # without what is frozen
            donors = ctx.cached(("donors", small.name), partial(donors_of, small, large, ctx.blueprints))
            wanted = {name for names in donors.values() for name in names if name in slots}
            states = ({name: reply.params["main"][name] for name in wanted} for reply in theirs)
            mean = mean_state(states, map(self.weight, theirs))
            for name, names in donors.items():
                pairs = [(server.state[slots[donor].key], mean[donor]) for donor in names if donor in mean]
                updates = [w - trained.to(w) for w, trained in pairs]
                if name in mine and updates:
                    found[mine[name].key] = torch.stack(updates).mean(dim=0)
        return found


@dataclass(frozen=True)
class BySize(OwnedBut):
    """Layer-wise, but every size has top blocks and a classifier of its own, where they are not shared."""

    share_head: bool = True
    share_top: bool = False

    def own_names(self, blueprint: Blueprint, blueprints: Blueprints) -> set[str]:
        """Return the names of what a size has of its own."""
        own = set() if self.share_top else set(top_names(blueprint, blueprints))
        return own if self.share_head else own | {name for name in blueprint.shapes if name.split(".")[0] == "head"}


def donors_of(small: Blueprint, large: Blueprint, blueprints: Blueprints) -> dict[str, list[str]]:
    """Return, for every parameter of the smaller network's top blocks, the larger one's in whose place it is."""
    stacks = stacks_of(large.shapes)
    found = {}
    for name in filter(lambda name: name not in small.buffers, top_names(small, blueprints)):
        stack, top, inner = place_of(name) or ("", 0, "")
        blocks = [block for number, block in stacks.get(stack, {}).items() if number >= top]
        found[name] = [block[inner] for block in blocks if large.shapes.get(block.get(inner, "")) == small.shapes[name]]
    return found
