"""What the round loop asks of a backend: it holds the clients and answers messages."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor

from polyfed.core.message import Message
from polyfed.core.method import Replies, Step
from polyfed.core.party import Blueprint, ClientInfo, Context


@dataclass(frozen=True)
class Measure:
    """How one model did on a data set.

    `accuracy` is the score of the task (None: these samples do not define it), `private` the accuracy of one that is
    told that the answer is no public class (None: it has none), `metrics` what else was asked for.
    """

    accuracy: float | None
    loss: float
    samples: int
    private: float | None = None
    metrics: dict[str, float | None] = field(default_factory=dict)


class Backend(Protocol):
    """Holds the clients. The in-process engines and Flower have this interface and no other.

    Attributes
    ----------
    infos
        Every client, by id.
    blueprints
        Every architecture in use, by name.
    """

    infos: dict[int, ClientInfo]
    blueprints: dict[str, Blueprint]

    def exchange(self, step: Step, messages: Mapping[int, Message], ctx: Context) -> Replies:
        """Deliver the messages, let the clients work, and return what came back."""
        ...

    def evaluate(self, messages: Mapping[int, Message], ctx: Context, on: str = "test") -> dict[int, Measure]:
        """Measure each client's model as it would be after receiving the message; nothing at the clients changes.

        `on` is `test`, `sample` (fewer test samples, where the backend has them), or a client's own `validation` or
        `personal` test data; those who have none are left out. Personal figures are those of clients, also where data
        is pooled.
        """
        ...

    def ask(self, client: int, x: Tensor, ctx: Context) -> Tensor:
        """Return what a client's model says of inputs: of one that cannot be uploaded (only where clients are near)."""
        ...

    def changed(self) -> dict[int, Any]:
        """Return the states (trees) of clients that changed since the last call: what a checkpoint must add."""
        ...

    def restore(self, states: Mapping[int, Any]) -> None:
        """Put clients back into saved states."""
        ...
