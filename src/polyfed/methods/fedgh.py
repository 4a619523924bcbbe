"""FedGH: Heterogeneous Federated Learning with Generalized Global Header.

Yi, Wang, Liu, Shi, Yu, ACM MM 2023. https://arxiv.org/abs/2303.13137

Extractors of any architecture, one common head. Clients train the head that they receive together with their own
extractor and return the mean feature of each class; the server trains the head on these prototypes as if they were
samples, and sends it out again:

    h  <-  h - eta · grad CE(h(p), c)         over all uploaded pairs (p, c)          (1)

Deviations:
    The authors' program steps a client's optimizer after the server's loss, so that its head never moves: here Eq. (1)
    is done.
    Prototypes are collected after training in prediction mode; all count alike, however many samples they stand for.
    The first head is the initial one of the largest architecture, at all clients.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import nn

from polyfed.core.fields import AtLeastOne, Count, Positive
from polyfed.core.heads import head_misfit, head_stage, linear_head, train_head
from polyfed.core.message import Message
from polyfed.core.method import Combination, Local, Method, Step
from polyfed.core.party import Blueprint, ClientInfo, Context, Party, load_state
from polyfed.core.privacy import Releases
from polyfed.core.prototypes import class_means
from polyfed.core.samples import Samples
from polyfed.core.stage import Stage
from polyfed.core.traffic import Traffic
from polyfed.core.views import largest_first
from polyfed.ops.aggregate import IndexMap, extract


@dataclass(frozen=True)
class FedGH(Method):
    """Train one head at the server, on the clients' prototypes.

    Parameters
    ----------
    server_epochs
        Passes over the prototypes of a round (the authors have 1, a public benchmark 100); with 0 every round begins
        with the initial head.
    server_lr, server_batch
        Learning rate eta and batch size of Eq. (1), plain SGD (None: the run's own).
    """

    name: ClassVar[str] = "fedgh"
    paper: ClassVar[str] = "Yi et al. 2023"
    family: ClassVar[str] = "prototypes"
    needs: ClassVar[frozenset[str]] = frozenset({"feature_dim", "classes"})
    sends: ClassVar[str] = "the mean feature vector of each class that it holds"
    shares: ClassVar[frozenset[str]] = frozenset({"main"})
    combines: ClassVar[Mapping[str, Combination]] = {"data/prototypes": "classes"}
    traffic: ClassVar[Mapping[str, Traffic]] = {"main": Traffic("4*H", "C_k*(4*F + c)")}

    server_epochs: Count = 1
    server_lr: Positive | None = None
    server_batch: AtLeastOne | None = None

    def misfit(
        self, infos: Sequence[ClientInfo], blueprints: Mapping[str, Blueprint], input_shape: tuple[int, ...]
    ) -> str | None:
        """Return what to do with a network whose head cannot be replaced."""
        return head_misfit(blueprints)

    # --- server ---

    def setup_server(self, server: Party, infos: Mapping[int, ClientInfo], ctx: Context) -> None:
        """Begin with the head of the largest architecture."""
        largest = largest_first(ctx.blueprints)[0]
        initial = {slot.key: largest.initial[name] for name, slot in self.slots_of(largest, ctx).items()}
        classes, size = initial["weight"].shape
        server.models["head"] = ctx.initialized("head", lambda: nn.Linear(size, classes))
        load_state(server.models["head"], initial)

    def slots_of(self, blueprint: Blueprint, ctx: Context) -> IndexMap:
        """Return which tensors of an architecture are the head's."""
        slots: IndexMap = ctx.cached(("head", blueprint.name), lambda: linear_head(blueprint))
        return slots

    def send(self, server: Party, info: ClientInfo, step: Step, ctx: Context) -> Message:
        """Send the head, by the names that this client's network has for it."""
        slots = self.slots_of(ctx.blueprints[info.architecture], ctx)
        return Message(params={"main": extract(server.tensors("head"), slots)})

    def fuse(self, server: Party, replies: Mapping[int, Message], step: Step, ctx: Context) -> None:
        """Train the head on all prototypes of the round, Eq. (1)."""
        if not self.server_epochs:
            return
        prototypes = torch.cat([reply.data["prototypes"] for reply in replies.values()])
        labels = torch.cat([reply.data["classes"].long() for reply in replies.values()])
        stage = head_stage(self, "server", Samples(prototypes, labels), ctx)
        train_head(server.tensors("head"), stage, ctx, "head")

    def beyond_training(self) -> str | None:
        """Only class means leave."""
        return None

    def releases(self) -> Releases:
        """Tell prototypes in every round."""
        return Releases(each_round=1)

    # --- client ---

    def local(self, client: Party, step: Step, ctx: Context) -> Local:
        """Train extractor and head, then tell the prototypes."""
        yield Stage(self.loss)
        told = class_means(client, ctx)
        return Message(data={"prototypes": told["prototypes"], "classes": told["classes"]})
