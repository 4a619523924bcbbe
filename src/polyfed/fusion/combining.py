"""A fused network that combines the logits of several by a small trained network, the combiner.

Clients that learn a combiner ask each other's networks, so these travel, and are built by their names (`network_of`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from polyfed.core.message import Message, State
from polyfed.core.party import Context, Party
from polyfed.core.passes import logits_of
from polyfed.core.samples import Samples
from polyfed.core.stage import Aux, Batch
from polyfed.core.traffic import Symbol, Told, buffer_size, trained_size
from polyfed.fusion.networks import Several
from polyfed.models import build, with_feature_dim

BETWEEN = "|"  # names of architectures in one word


class Combiner(nn.Module):
    """Scores `[B, C]` out of the logits `[B, J, C]` of J networks.

    Parameters
    ----------
    kind
        `mlp`: a hidden layer of `hidden` units for each network; `class`: a weight for each network and class;
        `client`: a weight for each network, and one bias. The weights start as the mean of the logits.
    networks, classes
        J and C.
    hidden
        d, for `mlp`.
    """

    def __init__(self, kind: str, networks: int, classes: int, hidden: int = 2) -> None:
        super().__init__()
        self.recipe = {"kind": kind, "networks": networks, "classes": classes, "hidden": hidden}
        self.layers: nn.Sequential | None = None
        if kind == "mlp":
            inside = networks * hidden
            first = nn.Linear(networks * classes, inside)
            self.layers = nn.Sequential(nn.Flatten(), first, nn.ReLU(), nn.Linear(inside, classes))
        else:
            shape = (networks, classes if kind == "class" else 1)
            self.weight = nn.Parameter(torch.full(shape, 1 / networks))
            self.bias = nn.Parameter(torch.zeros(1)) if kind == "client" else None

    def forward(self, logits: Tensor) -> Tensor:
        """Return the scores."""
        if self.layers is not None:
            scores: Tensor = self.layers(logits)
            return scores
        mixed = (self.weight * logits).sum(dim=1)
        return mixed if self.bias is None else mixed + self.bias


class Combined(Several):
    """The combined logits of all networks.

    Parameters
    ----------
    networks
        Any modules with logits of one size.
    combiner
        The combiner, or the arguments to make one of (its weights are then part of the state to load).
    """

    kind = "combined"

    def __init__(self, networks: Sequence[nn.Module], combiner: Combiner | dict[str, Any]) -> None:
        super().__init__(networks)
        self.combiner = combiner if isinstance(combiner, Combiner) else Combiner(**combiner)

    def forward(self, x: Tensor) -> Tensor:
        """Return the scores, `[B, C]`."""
        scores: Tensor = self.combiner(self.logits(x).transpose(0, 1))
        return scores

    def recipe(self) -> dict[str, Any]:
        """Return the other arguments of the constructor, as plain values."""
        return {"combiner": self.combiner.recipe}


def network_of(architecture: str, state: State, ctx: Context) -> nn.Module:
    """Build a network of somebody else: its architecture is known here, or built by its name."""
    known = ctx.blueprints.get(architecture)
    if known is not None and known.build is not None:
        network = known.build().to(ctx.device)
    else:
        network = ctx.initialized("peer", lambda: build_by_name(architecture, ctx))
    network.load_state_dict(state, strict=False)  # integer buffers do not travel
    return network.eval()


def build_by_name(architecture: str, ctx: Context) -> nn.Module:
    """Build a network from a model string; `>d` behind it stands for d features."""
    spec, _, features = architecture.partition(">")
    network = build(spec, ctx.input_shape, ctx.num_classes)
    return with_feature_dim(network, int(features)) if features else network


def networks_message(states: Mapping[int, State], ctx: Context) -> Message:
    """Return the networks of some clients for another one: their states, and the names to build them by."""
    names = BETWEEN.join(ctx.infos[client].architecture for client in states)
    params = {str(client): dict(state) for client, state in states.items()}
    return Message(params=params, meta={"architectures": names} if states else {})


def numbers_of_others(told: Told) -> int:
    """Return how many numbers the message with all other clients' networks has."""
    return sum(map(trained_size, told.others)) + sum(map(buffer_size, told.others))


def letters_of_others(told: Told) -> int:
    """Return how many letters the names in it have, with those between them."""
    return len(BETWEEN.join(architecture.name for architecture in told.others))


OTHERS = {  # what `networks_message` costs, with the networks of all other clients: 4*O + A
    "O": Symbol("numbers of all other clients' networks", numbers_of_others),
    "A": Symbol("letters of the names of their architectures", letters_of_others),
}


def combined_loss(nets: Mapping[str, Any], batch: Batch, aux: Aux) -> Tensor:
    """Return the task's loss of a combiner's scores; the inputs are logits of all networks."""
    return batch.loss(nets["combiner"](batch.x))


def logits_of_everybody(client: Party, data: Samples, ctx: Context) -> Tensor:
    """Return the logits of a client's network and of those that it was sent, `[n, J, C]` in the order of clients."""
    received = client.inbox.params
    others = sorted(map(int, received))
    names = str(client.inbox.meta["architectures"]).split(BETWEEN) if others else []
    answers = {client.id: logits_of(client.main, data)}
    for other, name in zip(others, names, strict=True):
        answers[other] = logits_of(network_of(name, received[str(other)], ctx), data)
    return torch.stack([answers[place] for place in sorted(answers)], dim=1).cpu()
