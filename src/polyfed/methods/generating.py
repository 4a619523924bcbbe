"""What FedGen, DaFKD and FedGD share: a generator G beside averaged weights, made alike wherever it is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import nn

from polyfed.core.message import Message
from polyfed.core.method import Method
from polyfed.core.party import ClientInfo, Context, Party
from polyfed.models.generators import averaged_state


@dataclass(frozen=True)
class Generating(Method):
    """A generator beside another method: `models["generator"]` of the server, and of clients that are given one.

    It stands before the method that it is added to, `class FedGen(Generating, FedAvg)`, and has no options of its own.
    """

    @property
    def generates(self) -> bool:
        """Whether there is a generator at all: without it nothing of it is made or sent."""
        return True

    def build_generator(self, ctx: Context) -> nn.Module:
        """Build G; its weights come from a seed of their own, equal at all parties."""
        raise NotImplementedError

    def new_generator(self, ctx: Context) -> nn.Module:
        """Return G as it is at the start."""
        return ctx.initialized("generator", lambda: self.build_generator(ctx))

    def add_generator(self, party: Party, ctx: Context) -> None:
        """Give a party G."""
        if self.generates:
            party.models["generator"] = self.new_generator(ctx)

    def put_generator(self, party: Party, message: Message) -> None:
        """Put a party's G into a message."""
        message.params["generator"] = averaged_state(party.models["generator"])

    def setup_server(self, server: Party, infos: Mapping[int, ClientInfo], ctx: Context) -> None:
        """Give the server G."""
        super().setup_server(server, infos, ctx)
        self.add_generator(server, ctx)
