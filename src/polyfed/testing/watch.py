"""Comparing finished runs, and looking at what happens in one."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from polyfed.core.message import Message, State
from polyfed.core.method import Step
from polyfed.core.party import Context
from polyfed.core.samples import Samples, Scaling
from polyfed.engines import batched
from polyfed.engines.inprocess import InProcess
from polyfed.result import Result

States = dict[Any, State]


def states(result: Result) -> States:
    """Return all networks that a run ends with: the clients', and the server's where it has one."""
    found: States = {client: dict(result.models[client].state_dict()) for client in result.models}
    return found if result.server_model is None else {**found, "server": dict(result.server_model.state_dict())}


def same_states(a: States, b: States) -> None:
    """Assert that networks are equal, bit for bit."""
    assert a and a.keys() == b.keys(), "other parties"
    for party in a:
        assert a[party] and a[party].keys() == b[party].keys(), f"other tensors at {party}"
        for name in a[party]:
            one, other = a[party][name], b[party][name]
            assert torch.equal(one, other), f"{name} of {party} differs{_how_far(one, other)}"


def _how_far(one: Tensor, other: Tensor) -> str:
    """Return how unlike two tensors are, in words: rounding looks otherwise than a mistake."""
    if one.shape != other.shape:
        return f" in shape: {list(one.shape)} and {list(other.shape)}"
    return f", by {float((one.double() - other.double()).abs().max()):.2g} at most"


def are_equal(a: States, b: States) -> bool:
    """Tell whether networks are equal, bit for bit."""
    return all(torch.equal(a[party][name], b[party][name]) for party in a for name in a[party])


def same_lines(a: Result, b: Result) -> None:
    """Assert that two histories are equal but for the time that things took."""
    assert timeless(a.history) == timeless(b.history), "the histories differ"


def timeless(tree: Any) -> Any:
    """Return a tree without what differs from run to run: seconds and memory."""
    if isinstance(tree, Mapping):
        return {k: timeless(v) for k, v in tree.items() if k not in ("seconds", "peak_memory", "checksum")}
    return [timeless(item) for item in tree] if isinstance(tree, list) else tree


@dataclass
class Said:
    """One exchange: what went down and up as it was written, and what each client has."""

    step: Step
    down: dict[int, bytes]
    up: dict[int, bytes]
    models: dict[int, dict[str, State]]  # those of a client
    train: dict[int, Samples]
    public: Samples | None
    ctx: Context  # as it was then


@dataclass
class Observed:
    """A run, and what was seen in it."""

    said: list[Said] = field(default_factory=list)
    starts: dict[str, State] = field(default_factory=dict)  # architecture -> its initial weights
    result: Result = field(init=False)


@contextmanager
def observing() -> Iterator[Observed]:
    """Note all that server and clients say to each other in the runs of the block."""
    exchange, observed = InProcess.exchange, Observed()

    def noted(self: InProcess, step: Step, messages: Any, ctx: Any) -> Any:
        observed.starts |= {name: blueprint.initial for name, blueprint in ctx.blueprints.items()}
        down = {client: _written(message) for client, message in messages.items()}
        replies = exchange(self, step, messages, ctx)
        up = {client: _written(message) for client, message in replies.messages.items()}
        models = {client: self.store.states(client) for client in messages}
        train = {client: own for client in messages if (own := self.store.data[client].train) is not None}
        public = next((data.public for data in self.store.data.values() if data.public is not None), None)
        observed.said.append(Said(step, down, up, models, train, public, copy.copy(ctx)))
        return replies

    with patch.object(InProcess, "exchange", noted):
        yield observed


def _written(message: Message) -> bytes:
    blob = message.to_bytes()
    assert dict(Message.from_bytes(blob).tensors()).keys() == dict(message.tensors()).keys(), "a tensor was lost"
    return blob


@contextmanager
def watching() -> Iterator[list[tuple[int, bool]]]:
    """List `(client, whether its tensors moved)` for every exchange in which somebody trained.

    A client that takes part starts from what it has and what it is sent; a loss says that there was training.
    """
    exchange, found = InProcess.exchange, []

    def watched(self: InProcess, step: Any, messages: Any, ctx: Any) -> Any:
        self.store.prepare(messages, ctx)
        starts = {}
        for client, message in messages.items():
            own = copy.deepcopy(self.store.states(client))
            starts[client] = {model: {**state, **message.params.get(model, {})} for model, state in own.items()}
        replies = exchange(self, step, messages, ctx)
        if any(replies.losses.values()):
            assert replies.losses.keys() == messages.keys()
            for client, start in starts.items():
                found.append((client, not are_equal(start, self.store.states(client))))
        return replies

    with patch.object(InProcess, "exchange", watched):
        yield found


def everybody_moved(moved: Sequence[tuple[int, bool]], result: Result) -> None:
    """Assert that every client trained, and moved each time."""
    assert {client for client, _ in moved} == set(result.models), "somebody never trained"
    assert all(did for _, did in moved), f"nothing moved at {[client for client, did in moved if not did]}"


@contextmanager
def stacking() -> Iterator[list[bool]]:
    """List for every piece of training of the engine `batched` whether it was that of a stack."""
    found: list[bool] = []

    def noted(run: Callable[..., None], stacked: bool) -> Callable[..., None]:
        def counted(*given: Any) -> None:
            found.append(stacked)
            run(*given)

        return counted

    with (
        patch.object(batched, "run_stack", noted(batched.run_stack, True)),
        patch.object(batched, "run_alone", noted(batched.run_alone, False)),
    ):
        yield found


@contextmanager
def engine_log() -> Iterator[list[str]]:
    """List what the engines say in the log, such as why clients run one by one, whatever level is set."""
    log, said = logging.getLogger("polyfed.engine"), list[str]()
    level, handler = log.level, logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    try:
        yield said
    finally:
        log.setLevel(level)
        log.removeHandler(handler)


@contextmanager
def double_precision() -> Iterator[None]:
    """Compute in float64, where stacked and single differ by rounding that no step makes visible."""
    apply = Scaling.apply
    torch.set_default_dtype(torch.float64)
    try:
        with patch.object(Scaling, "apply", lambda self, x: apply(self, x).to(torch.get_default_dtype())):
            yield
    finally:
        torch.set_default_dtype(torch.float32)
