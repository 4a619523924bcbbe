"""A small problem with public data, and a federation on it that tests can take apart."""

from __future__ import annotations

import numpy as np
import torch

from polyfed.api import prepare
from polyfed.core.federation import Federation
from polyfed.core.method import EVALUATE, Method, Step
from polyfed.core.party import Party
from polyfed.core.settings import Participation, Settings, Training
from polyfed.data import Clients
from polyfed.engines.inprocess import InProcess
from polyfed.flower.expect import Expectations
from polyfed.flower.rehearse import Problem

PUBLIC, PRIVATE = 2, 3  # classes
MLP = ("mlp:1x12",)


def problem(
    sizes: tuple[int, ...] = (18, 24, 30), public: int = 40, labelled: bool = True, lacking: int | None = None
) -> Clients:
    """Noisy class patterns; the public set has two other classes. `lacking`: this client has no sample of class 2."""
    rng = np.random.default_rng(3)
    patterns = rng.normal(size=(PRIVATE + PUBLIC, 1, 8, 8)).astype(np.float32)

    def draw(n: int, classes: int = PRIVATE, first: int = 0) -> tuple[np.ndarray, np.ndarray]:
        y = rng.integers(0, classes, n)
        return (patterns[first + y] + 0.5 * rng.normal(size=(n, 1, 8, 8))).astype(np.float32), y

    parts = [draw(n, PRIVATE - (client == lacking)) for client, n in enumerate(sizes)]
    test = draw(60)
    shared = draw(public, PUBLIC, PRIVATE)
    return Clients.from_parts(parts, test=test, num_classes=PRIVATE, public=shared if labelled else shared[0])


def federation(
    method: Method,
    clients: Clients | None = None,
    models: tuple = MLP,
    rounds: int = 1,
    training: Training = Training(epochs=2, batch_size=8, lr=0.05),  # noqa: B008 (frozen)
    participation: float = 1.0,
    seed: int = 0,
) -> Federation:
    """A federation before its first step."""
    settings = Settings(rounds, seed, training, Participation(participation))
    return prepare(method, clients or problem(), list(models), settings)


def exchange(federation: Federation, step: Step, round: int = 1, clients: tuple[int, ...] | None = None) -> None:
    """Run one step of a round by hand."""
    federation.ctx.round = round
    federation._exchange(step, clients if clients is not None else sorted(federation.backend.infos), {})


def party(federation: Federation, client: int) -> Party:
    """A copy of a client as it is now."""
    return federation.backend.store.open(client, federation.ctx, scratch=True)


def states(federation: Federation) -> list[dict[str, torch.Tensor]]:
    """Copies of all clients' tensors."""
    return [
        {name: tensor.clone() for name, tensor in party(federation, client).main.state_dict().items()}
        for client in sorted(federation.backend.infos)
    ]


def same(a: list[dict[str, torch.Tensor]], b: list[dict[str, torch.Tensor]]) -> bool:
    """Whether all tensors are equal, bit for bit."""
    return all(torch.equal(one[name], other[name]) for one, other in zip(a, b, strict=True) for name in one)


__all__ = ["EVALUATE", "MLP", "PRIVATE", "PUBLIC", "exchange", "federation", "party", "problem", "same", "states"]


def sizes_of_checked_replies(run, monkeypatch):
    """Run a federation in which every reply passes the checks of a real server; return the bytes of each."""
    expected = Expectations(run.method, dict(run.backend.blueprints), Problem(3, (1, 8, 8), 3, False), 0)
    exchanged, checked = InProcess.exchange, []

    def watched(self, step, messages, ctx):
        replies = exchanged(self, step, messages, ctx)
        for client, reply in replies.messages.items():
            expected.check(reply, messages[client], step, self.infos[client])
            checked.append(reply.nbytes())
        return replies

    monkeypatch.setattr(InProcess, "exchange", watched)
    run.run()
    return checked
