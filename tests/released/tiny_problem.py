"""A problem small enough to be put through the authors' programs: fixed weights, clients with one sample many times.

Batches of such a client are the same in any order, so that only the formulas decide. Reference numbers in the tests
beside this file come from code outside of this repository, in double precision, written after the program that each
test names.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping

import torch
from torch import Tensor, nn

from polyfed.api import prepare
from polyfed.core.federation import Federation
from polyfed.core.method import Method
from polyfed.core.settings import Settings, Training
from polyfed.data import Clients

SIZES = (4, 8, 12)  # with batches of 4 and two epochs: 2, 4 and 6 steps


def wave(shape: torch.Size | tuple[int, ...], start: float, scale: float = 0.5) -> Tensor:
    """Return the sines of start, start + 1, ... in this shape."""
    return scale * torch.sin(torch.arange(math.prod(shape)) + start).view(*shape)


class Tiny(nn.Module):
    """Two inputs, four hidden units, three classes."""

    def __init__(self, apart: float = 1.0) -> None:
        super().__init__()
        self.feature_dim, self.num_classes = 4, 3
        self.body, self.head = nn.Linear(2, 4), nn.Linear(4, 3)
        for place, parameter in enumerate(self.parameters()):
            parameter.data = wave(parameter.shape, 1.0 + apart * place)

    def features(self, x: Tensor) -> Tensor:
        return torch.tanh(self.body(x))

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.features(x))
        return logits


def clients() -> Clients:
    """Client k has the sample (sin(1 + k), cos(2 + 3k)) of class k."""
    parts = []
    for k, n in enumerate(SIZES):
        x = torch.tensor([[math.sin(1.0 + k), math.cos(2.0 + 3 * k)]]).expand(n, 2)
        parts.append((x, torch.full((n,), k)))
    return Clients.from_parts(parts, test=parts[0], num_classes=3, normalize=False)


def finished(method: Method, rounds: int, momentum: float = 0.0, model: Callable[[], nn.Module] = Tiny) -> Federation:
    """Run a method on it."""
    training = Training(epochs=2, batch_size=4, lr=0.1, momentum=momentum)
    federation = prepare(method, clients(), [model], Settings(rounds, training=training))
    federation.run()
    return federation


def in_one(tensors: Iterable[Tensor]) -> float:
    """Return one number that all entries enter with different weights."""
    everything = torch.cat([tensor.double().flatten() for tensor in tensors])
    return float((everything * torch.cos(torch.arange(len(everything)))).sum())


def in_few(state: Mapping[str, Tensor]) -> tuple[list[float], float]:
    """Return the classifier's bias of `Tiny`, and all parameters in one number."""
    return state["head.bias"].tolist(), in_one(state[name] for name, _ in Tiny().named_parameters())
