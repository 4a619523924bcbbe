"""Uniform ensemble: every client trains alone and uploads its network once; the server averages predictions.

The competitor of one-shot fusion methods (AMS, PFNM). `OneShot` holds what they all share: one round in which clients
of any architecture train on their own data and upload the result.

Deviations:
    Nothing is sent to the clients: each starts from the initial state of its architecture, made from the run's seed.
    Integer buffers (BatchNorm's batch counter) and frozen parameters are not sent: the server has the latter from the
    initial state.
    With `weights="class"` probabilities are scaled to sum to 1 (the largest stays the largest).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from polyfed.core.fields import NotNegative
from polyfed.core.message import Message, State
from polyfed.core.method import Local, Method, Plan, Step
from polyfed.core.nets import EVAL, FunctionalNet, frozen_names
from polyfed.core.party import Context, Party, state_of
from polyfed.core.rng import SERVER
from polyfed.core.stage import Aux, Batch, Stage
from polyfed.ops.selection import class_weights, ensemble_scores

CHUNK = 512  # samples at once where the server looks at the outputs of several networks


@dataclass(frozen=True)
class OneShot(Method):
    """Clients train alone and upload their networks once; what the server does with them is the method.

    Parameters
    ----------
    l1
        Weight of the L1 norm of all parameters in local training; 0 is plain cross-entropy.
    """

    family: ClassVar[str] = "parameters"
    needs: ClassVar[frozenset[str]] = frozenset({"builds"})
    sends: ClassVar[str] = "the trained weights, once"
    shares: ClassVar[frozenset[str]] = frozenset({"main"})
    additive: ClassVar[bool] = False
    outcome: ClassVar[str] = "server"

    l1: NotNegative = 1e-7

    def plan(self) -> Plan:
        """One round, whatever the run asks for."""
        return Plan(rounds=1)

    # --- client ---

    def loss(self, nets: Mapping[str, Any], batch: Batch, aux: Aux) -> Tensor:
        """Return CE + l1·||w||_1."""
        loss = super().loss(nets, batch, aux)
        return loss + self.l1 * l1_norm(nets["main"].parameters()) if self.l1 else loss

    def local(self, client: Party, step: Step, ctx: Context) -> Local:
        """Train from the common initial state, then upload."""
        yield Stage(self.loss)
        return self.upload(client, ctx)

    def upload(self, client: Party, ctx: Context) -> Message:
        """Return the client's network, and its label counts if the server uses them."""
        message = Message(params={"main": shared_state(client.main)})
        if self.tells_counts():
            message.data["counts"] = torch.tensor(client.train.label_counts(ctx.num_classes), dtype=torch.int32)
        return message

    def tells_counts(self) -> bool:
        """Tell whether clients upload how many samples of each class they have (4·C bytes)."""
        return False

    # --- server ---

    def fuse(self, server: Party, replies: Mapping[int, Message], step: Step, ctx: Context) -> None:
        """Keep the uploads."""
        server.memory["uploads"] = {
            str(client): {
                "state": {name: tensor.clone() for name, tensor in self.whole(client, reply, ctx).items()},
                **{name: tensor.clone() for name, tensor in reply.data.items()},
                **reply.meta,
            }
            for client, reply in replies.items()
        }

    def whole(self, client: int, reply: Message, ctx: Context) -> State:
        """Return an uploaded network with its frozen parameters, which stayed as they were in the initial state."""
        blueprint = ctx.blueprints[ctx.infos[client].architecture]
        return {**{n: blueprint.initial[n].to(ctx.device) for n in blueprint.frozen}, **reply.params["main"]}

    def held(self, server: Party) -> list[int]:
        """Return the clients whose networks the server holds, in ascending order (a checkpoint sorts them as words)."""
        return sorted(int(client) for client in server.memory.get("uploads", {}))

    def about(self, server: Party, what: str) -> list[Any]:
        """Return one item of all uploads (`state`, `counts`, `samples`, ...) in the order of `held`."""
        return [server.memory["uploads"][str(client)][what] for client in self.held(server)]

    def module(self, client: int, ctx: Context) -> nn.Module:
        """Return a module of a client's architecture (not its weights), built once for each architecture."""
        return ctx.replica(ctx.infos[client].architecture)

    def network_output(self, server: Party, client: int, x: Tensor, ctx: Context) -> Tensor:
        """Return the logits of one uploaded network, in prediction mode."""
        return FunctionalNet(self.module(client, ctx), server.memory["uploads"][str(client)]["state"], {}, EVAL)(x)

    def network_outputs(self, server: Party, x: Tensor, ctx: Context) -> Tensor:
        """Return the logits of all uploaded networks, `[J, B, C]`."""
        return torch.stack([self.network_output(server, client, x, ctx) for client in self.held(server)])

    def serves(self, server: Party) -> bool:
        """Predict as soon as the server holds networks."""
        return bool(self.held(server))

    def predict(self, party: Party, x: Tensor, ctx: Context) -> Tensor:
        """At a client: its own network. At the server: the fused prediction."""
        return self.fused_scores(party, x, ctx) if party.id == SERVER else super().predict(party, x, ctx)

    def fused_scores(self, server: Party, x: Tensor, ctx: Context) -> Tensor:
        """Return the server's scores `[B, C]`."""
        raise NotImplementedError


@dataclass(frozen=True)
class Ensemble(OneShot):
    """Average the predictions of all clients' networks.

    Parameters
    ----------
    space
        `prob`: mean of the softmax outputs; `logit`: mean of the logits (the same labels as AMS-full).
    weights
        `uniform`, or `class`: each network weighs n_kc / sum_j n_jc for class c; its label counts are uploaded too.
    """

    name: ClassVar[str] = "ensemble"
    paper: ClassVar[str] = "uniform ensemble of one-shot networks"

    space: Literal["prob", "logit"] = "prob"
    weights: Literal["uniform", "class"] = "uniform"

    def tells_counts(self) -> bool:
        """Class weights need the label counts."""
        return self.weights == "class"

    def fused_scores(self, server: Party, x: Tensor, ctx: Context) -> Tensor:
        """Return P(x) = 1/J sum_k softmax(z_k(x)) in log space: its softmax is P again."""
        weights = class_weights(torch.stack(self.about(server, "counts"))) if self.weights == "class" else None
        scores = ensemble_scores(self.network_outputs(server, x, ctx), weights, self.space)
        return scores.clamp_min(1e-30).log() if self.space == "prob" else scores


def l1_norm(parameters: Mapping[str, Tensor]) -> Tensor:
    """Return the sum of absolute values over all parameters."""
    return torch.stack([parameter.abs().sum() for parameter in parameters.values()]).sum()


def shared_state(model: nn.Module) -> State:
    """Return what training makes of a network: parameters that are not frozen and float buffers, no integers."""
    frozen = frozen_names(model)
    return {n: tensor for n, tensor in state_of(model).items() if tensor.is_floating_point() and n not in frozen}
