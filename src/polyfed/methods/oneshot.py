"""One-shot learning: every client trains alone and uploads its network once; what the server makes of them is a method.

`TrainedOnce` is the training that all of them have, which a comparison then does once; `OneShot` adds the upload of
networks of any architecture, and a fused one at the server.

Deviations:
    Nothing is sent to the clients: each starts from the initial state of its architecture, made from the run's seed.
    Integer buffers (BatchNorm's batch counter) and frozen parameters are not sent: the server has the latter from the
    initial state.
    A client that is no network uploads nothing of it: the server asks it about every input, in simulation only. What
    questions and answers cost is not counted, as no predictions are.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from polyfed.core.errors import PolyfedError
from polyfed.core.fields import NotNegative
from polyfed.core.message import Message, State
from polyfed.core.method import Combination, Local, Method, Plan, Step
from polyfed.core.party import Context, Party, cloned, shared_state
from polyfed.core.privacy import Releases
from polyfed.core.releases import class_counts
from polyfed.core.rng import SERVER
from polyfed.core.samples import Samples
from polyfed.core.stage import Stage
from polyfed.core.traffic import Traffic
from polyfed.core.uploads import Asked


@dataclass(frozen=True)
class TrainedOnce(Method):
    """One round of local training from the common initial state.

    Parameters
    ----------
    l1
        Weight of the L1 norm of all parameters in local training; 0 is plain cross-entropy.
    """

    family: ClassVar[str] = "one-shot"
    outcome: ClassVar[str] = "server"

    l1: NotNegative = 1e-7

    def plan(self) -> Plan:
        """One round, whatever the run asks for."""
        return Plan(rounds=1)

    def alone(self, data: Samples | None = None) -> Stage:
        """Return the training on CE + l1·||w||_1; a comparison does it once for all one-shot methods."""
        return Stage(self.loss, data=data, l1=self.l1)


@dataclass(frozen=True)
class OneShot(TrainedOnce):
    """Clients train alone and upload their networks once; what the server does with them is the method."""

    needs: ClassVar[frozenset[str]] = frozenset({"builds"})
    sends: ClassVar[str] = "the trained weights, once"
    shares: ClassVar[frozenset[str]] = frozenset({"main"})
    keeps: ClassVar[str] = "uploads"  # what in the server's memory the fused network is made of
    combines: ClassVar[Mapping[str, Combination]] = {"params/main": "apart"}
    traffic: ClassVar[Mapping[str, Traffic]] = {"main": Traffic(up="4*(P + B)")}

    # --- client ---

    def local(self, client: Party, step: Step, ctx: Context) -> Local:
        """Train from the common initial state, then upload."""
        yield self.alone()
        return self.upload(client, ctx)

    def upload(self, client: Party, ctx: Context) -> Message:
        """Return the client's network, and its label counts if the server uses them."""
        message = Message(params={"main": shared_state(client.main)})
        if self.tells_counts():
            message.data["counts"] = class_counts(client, ctx)
        return message

    def beyond_training(self) -> str | None:
        """Only weights leave, and counts where they are used."""
        return None

    def releases(self) -> Releases:
        """Tell counts once, where they are used."""
        return Releases(once=int(self.tells_counts()))

    def tells_counts(self) -> bool:
        """Tell whether clients upload how many samples of each class they have (4·C bytes)."""
        return False

    # --- server ---

    def fuse(self, server: Party, replies: Mapping[int, Message], step: Step, ctx: Context) -> None:
        """Keep the uploads."""
        server.memory["uploads"] = {
            str(client): {
                "state": cloned(self.whole(client, reply, ctx)),
                **cloned(reply.data),
                **reply.meta,
            }
            for client, reply in replies.items()
        }

    def whole(self, client: int, reply: Message, ctx: Context) -> State:
        """Return an uploaded network with its frozen parameters, which stayed as they were in the initial state."""
        blueprint = ctx.blueprints[ctx.infos[client].architecture]
        return {**{n: blueprint.initial[n].to(ctx.device) for n in blueprint.frozen}, **reply.params.get("main", {})}

    def check_complete(self, replies: Mapping[int, Message], ctx: Context) -> None:
        """Refuse to go on without somebody's network, in methods that have a place for each."""
        missing = [str(info) for client, info in ctx.infos.items() if client not in replies]
        if missing:
            raise PolyfedError(
                f"{self.name} needs the network of {missing[0]}, which did not come: start again with it."
            )

    def held(self, server: Party) -> list[int]:
        """Return the clients whose networks the server holds, in ascending order (a checkpoint sorts them as words)."""
        return sorted(int(client) for client in server.memory.get("uploads", {}))

    def about(self, server: Party, what: str) -> list[Any]:
        """Return one item of all uploads (`state`, `counts`, `samples`, ...) in the order of `held`."""
        return [server.memory["uploads"][str(client)][what] for client in self.held(server)]

    def keep_only(self, server: Party, clients: Sequence[int]) -> None:
        """Let the server forget all uploads but those of some clients."""
        server.memory["uploads"] = {str(client): server.memory["uploads"][str(client)] for client in clients}

    def counts(self, server: Party) -> Tensor | None:
        """Return the samples of each class that each network saw, `[J, C]`, where clients tell."""
        return torch.stack(self.about(server, "counts")) if self.tells_counts() else None

    def network(self, client: int, state: State, ctx: Context) -> nn.Module:
        """Return a network of a client's architecture for predictions; it holds the given tensors, not copies."""
        if "learner" in ctx.blueprints[ctx.infos[client].architecture].properties:
            return Asked(client, ctx)
        network = copy.deepcopy(ctx.replica(ctx.infos[client].architecture))
        network.load_state_dict(state, strict=False, assign=True)  # integer buffers do not travel
        return network.requires_grad_(False).eval()

    def networks(self, server: Party, ctx: Context) -> list[nn.Module]:
        """Return the uploaded networks in the order of `held`."""
        states = zip(self.held(server), self.about(server, "state"), strict=True)
        return [self.network(client, state, ctx) for client, state in states]

    def fused(self, server: Party, ctx: Context) -> nn.Module:
        """Return the fused network, in prediction mode: made once, and anew when what the server keeps is replaced."""
        kept = server.memory[self.keeps]
        if ctx.cache.get("fused", (None,))[0] is not kept:
            with torch.inference_mode(False):  # the first to ask may be an evaluation
                ctx.cache["fused"] = kept, self.make_fused(server, ctx).to(ctx.device).eval()
        module: nn.Module = ctx.cache["fused"][1]
        return module

    def make_fused(self, server: Party, ctx: Context) -> nn.Module:
        """Make the fused network of what the server keeps: this is the method."""
        raise NotImplementedError

    def serves(self, server: Party) -> bool:
        """Predict as soon as the server holds networks."""
        return self.keeps in server.memory

    def predict(self, party: Party, x: Tensor, ctx: Context) -> Tensor:
        """At a client: its own network. At the server: the fused network, or the student that it was distilled into."""
        if party.id != SERVER or "main" in party.models:
            return super().predict(party, x, ctx)
        scores: Tensor = self.fused(party, ctx)(x)
        return scores
