"""What FedGen, DaFKD and FedGD share: a generator G beside averaged weights, made alike wherever it is.

`InputGenerating` is for those whose generator makes inputs of networks, as they see them: after scaling, images by
convolutions, anything else as plain vectors.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import nn

from polyfed.core.fields import AtLeastOne, Positive
from polyfed.core.message import Message
from polyfed.core.method import Method
from polyfed.core.party import ClientInfo, Context, Party, load_state
from polyfed.core.samples import Samples
from polyfed.core.settings import Training, training_of
from polyfed.core.traffic import Symbol, model_size
from polyfed.models.generators import averaged_state, generated_samples, input_generator
from polyfed.ops.aggregate import mean_state


@dataclass(frozen=True)
class Generating(Method):
    """A generator beside another method: `models["generator"]` of the server, and of clients that are given one.

    It stands before the method that it is added to, `class FedGen(Generating, FedAvg)`, and has no options of its own.
    """

    symbols: ClassVar[Mapping[str, Symbol]] = {"G": model_size("generator", "numbers of the generator")}

    def requirements(self) -> frozenset[str]:
        """Need classes, and networks that the server can build: G learns from what they say."""
        return super().requirements() | {"builds", "classes"}

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

    def average_generators(self, server: Party, replies: Mapping[int, Message], weights: Sequence[float]) -> None:
        """Give the server the mean of the clients' G."""
        states = (reply.params["generator"] for reply in replies.values())
        load_state(server.models["generator"], mean_state(states, weights))

    def setup_server(self, server: Party, infos: Mapping[int, ClientInfo], ctx: Context) -> None:
        """Give the server G."""
        super().setup_server(server, infos, ctx)
        self.add_generator(server, ctx)


@dataclass(frozen=True)
class InputGenerating(Generating):
    """A generator of inputs, from noise.

    Parameters
    ----------
    noise_dim, width
        Sizes of G: numbers of noise, and channels of its last hidden layer.
    generator_lr
        Learning rate of G (Adam).
    """

    noise_dim: AtLeastOne = 100
    width: AtLeastOne = 32
    generator_lr: Positive = 1e-3

    def build_generator(self, ctx: Context) -> nn.Module:
        """Build G, a generator of inputs."""
        return input_generator(self.noise_dim, ctx.input_shape, self.width)

    def generated(self, party: Party, seed: int, count: int) -> Samples:
        """Return samples that a party's G makes, the same wherever it and the seed of its noise are known."""
        return generated_samples(party.models["generator"], seed, count, self.noise_dim)

    def generator_training(self, ctx: Context, **more: Any) -> Training:
        """Return how G is trained."""
        return training_of(self, "generator", ctx.training, optimizer="adam", **more)
