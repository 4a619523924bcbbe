"""Proxy models: what FML, FedMRL, pFedAFM, FedKD and FedType share.

A small model of one architecture travels and is averaged; the private networks, of any architecture, stay where they
are. What proxy and private network do for each other at a client is the method.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import nn

from polyfed.core.errors import InputError
from polyfed.core.message import Message
from polyfed.core.method import Combination, Method, Step
from polyfed.core.party import Blueprint, ClientInfo, Context, Party, load_state, shared_state
from polyfed.core.traffic import Symbol, Traffic, model_size
from polyfed.models import build
from polyfed.ops.aggregate import mean_state


@dataclass(frozen=True)
class Proxies(Method):
    """A small common model travels. At a client it is `models["proxy"]`, at the server the main model.

    Parameters
    ----------
    proxy
        The common model g, as a model string.
    weighting
        Weight of a client in the mean: `uniform`, or `samples`, which then travel (8 bytes).
    """

    family: ClassVar[str] = "proxies"
    sends: ClassVar[str] = "the weights of a small common model"
    shares: ClassVar[frozenset[str]] = frozenset({"proxy"})
    combines: ClassVar[Mapping[str, Combination]] = {"params/proxy": "mean"}
    traffic: ClassVar[Mapping[str, Traffic]] = {"main": Traffic("4*G", "4*G + [weighting == 'samples']*8")}
    symbols: ClassVar[Mapping[str, Symbol]] = {"G": model_size("proxy", "numbers of the small common model")}

    proxy: str = "mlp:1x64"
    weighting: Literal["samples", "uniform"] = "uniform"

    def misfit(
        self, infos: Sequence[ClientInfo], blueprints: Mapping[str, Blueprint], input_shape: tuple[int, ...]
    ) -> str | None:
        """Return why the common model cannot take the data."""
        try:
            with torch.random.fork_rng(devices=()):  # built to be looked at: nobody's random numbers are used up
                build(self.proxy, input_shape, blueprints[infos[0].architecture].num_classes)
        except InputError as error:
            reason = str(error).rstrip(".")
            return f"a common model that takes the data, but '{self.proxy}' does not ({reason}): set proxy"
        return None

    def build_proxy(self, ctx: Context) -> nn.Module:
        """Build the common model; the weights come from a seed of their own, equal at all parties."""
        return build(self.proxy, ctx.input_shape, ctx.num_classes)

    # --- server ---

    def setup_server(self, server: Party, infos: Mapping[int, ClientInfo], ctx: Context) -> None:
        """Make the common model."""
        server.models["main"] = ctx.initialized("proxy", lambda: self.build_proxy(ctx))

    def send(self, server: Party, info: ClientInfo, step: Step, ctx: Context) -> Message:
        """Send the common model."""
        return Message(params={"proxy": shared_state(server.main)})

    def weights(self, replies: Mapping[int, Message]) -> list[float]:
        """Return the clients' weights in the mean."""
        by_samples = self.weighting == "samples"
        return [float(reply.meta["samples"]) if by_samples else 1.0 for reply in replies.values()]

    def fuse(self, server: Party, replies: Mapping[int, Message], step: Step, ctx: Context) -> None:
        """Take the mean of the clients' common models."""
        states = (reply.params["proxy"] for reply in replies.values())
        load_state(server.main, mean_state(states, self.weights(replies)))

    def beyond_training(self) -> str | None:
        """Only weights leave."""
        return None

    # --- client ---

    def setup_client(self, client: Party, ctx: Context) -> None:
        """Make the client's copy of the common model."""
        client.models["proxy"] = ctx.initialized("proxy", lambda: self.build_proxy(ctx))

    def reply(self, client: Party) -> Message:
        """Return the client's common model, and the number of samples where it counts."""
        meta = {"samples": len(client.train)} if self.weighting == "samples" else {}
        return Message(params={"proxy": shared_state(client.models["proxy"])}, meta=dict(meta))
