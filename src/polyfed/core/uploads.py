"""What the networks that clients uploaded say: teachers at the server."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping

from torch import Tensor, nn

from polyfed.core.message import Message
from polyfed.core.party import Context, load_state
from polyfed.core.passes import logits_of
from polyfed.core.samples import Samples, unlabeled
from polyfed.core.statistics import collect_statistics
from polyfed.ops.aggregate import plain_mean


class Asked(nn.Module):
    """A client's model that cannot be uploaded, as the server sees it: it is asked about every input."""

    def __init__(self, client: int, ctx: Context) -> None:
        super().__init__()
        assert ctx.ask is not None
        self.client, self.ask = client, ctx.ask

    def forward(self, x: Tensor) -> Tensor:
        """Return the outputs of the client's model."""
        return self.ask(self.client, x)


def uploaded_network(client: int, reply: Message, data: Samples, ctx: Context) -> nn.Module:
    """Return a client's network as it was uploaded, good until the next one of its architecture is asked for."""
    return ready_network(ctx.infos[client].architecture, reply.params["main"], data, ctx)


def uploaded_copies(replies: Mapping[int, Message], ctx: Context) -> list[nn.Module]:
    """Return a network of its own for every reply, as it was uploaded: where all are needed at once."""
    networks = []
    for client, reply in replies.items():
        networks.append(copy.deepcopy(ctx.replica(ctx.infos[client].architecture)))
        load_state(networks[-1], reply.params["main"])
    return networks


def ready_network(architecture: str, state: Mapping[str, Tensor], data: Samples, ctx: Context) -> nn.Module:
    """Return the server's network of an architecture with this state, ready to predict.

    Where BatchNorm's statistics are not part of the state, they are collected on `data`.
    """
    model = ctx.replica(architecture)
    load_state(model, state)
    if ctx.blueprints[architecture].running_statistics() - state.keys():
        collect_statistics(model, data, ctx.training.batch_size)
    return model


def uploaded_logits(replies: Mapping[int, Message], data: Samples, ctx: Context) -> Iterator[Tensor]:
    """Yield the logits of every uploaded network on some samples, in prediction mode, one after the other.

    Where a client gave logits in the place of a network, these are they.
    """
    for client, reply in replies.items():
        given = reply.data.get("logits")
        yield given if given is not None else logits_of(uploaded_network(client, reply, data, ctx), data)


def ensemble_logits(networks: Iterable[nn.Module], inputs: Tensor) -> Tensor:
    """Return the mean logits of some networks on inputs as they see them, in prediction mode."""
    return plain_mean(logits_of(network, unlabeled(inputs)) for network in networks)


def logits_by_architecture(replies: Mapping[int, Message], data: Samples, ctx: Context) -> dict[str, Tensor]:
    """Return the mean logits of the uploaded networks of every architecture that has some."""
    members: dict[str, dict[int, Message]] = {}
    for client, reply in replies.items():
        members.setdefault(ctx.infos[client].architecture, {})[client] = reply
    return {name: plain_mean(uploaded_logits(some, data, ctx)) for name, some in members.items()}
