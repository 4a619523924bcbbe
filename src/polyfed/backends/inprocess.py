"""All clients in this process, one after the other: the reference engine of simulations."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from polyfed.backends.store import Layout, Record, Seat
from polyfed.core.backend import Measure
from polyfed.core.evaluate import measure
from polyfed.core.message import Message
from polyfed.core.method import Method, Replies, Step
from polyfed.core.party import Blueprint, ClientInfo, Context, Party, PartyData, load_state
from polyfed.core.runner import run_stage
from polyfed.core.samples import Samples

Run = Callable[[Any, Party, Context, str], float]


def receive(party: Party, message: Message) -> None:
    """Put a message into the inbox and load the states of models that the party has."""
    party.inbox = message
    for name, state in message.params.items():
        if name in party.models:
            load_state(party.models[name], state)


def drive(method: Method, party: Party, step: Step, ctx: Context, run: Run = run_stage) -> tuple[Message, float]:
    """Run a client's work of one step: every stage it yields, in order. Returns its reply and the last mean loss."""
    work = method.local(party, step, ctx)
    if work is None or isinstance(work, Message):  # a step without training need not be a generator
        return work or Message(), 0.0
    loss = 0.0
    number = 0
    try:
        stage = next(work)
        while True:
            loss = run(stage, party, ctx, f"{step.name}/{number}")
            number += 1
            stage = work.send(loss)
    except StopIteration as finished:
        return finished.value or Message(), loss


class InProcess:
    """Clients as parked records; a client is active only while it works."""

    def __init__(
        self,
        method: Method,
        infos: Sequence[ClientInfo],
        data: Sequence[PartyData],
        blueprints: Mapping[str, Blueprint],
        test: Samples,
    ) -> None:
        self.method = method
        self.infos = {info.id: info for info in infos}
        self.data = {info.id: item for info, item in zip(infos, data, strict=True)}
        self.blueprints = dict(blueprints)
        self.test = test
        self.records: dict[int, Record] = {}
        self.seats: dict[tuple[str, str], Seat] = {}  # (architecture, model name) -> the module clients take in turn
        self.layouts: dict[tuple[str, str], Layout] = {}
        self.dirty: set[int] = set()
        self.measured: dict[tuple[int, str], tuple[int, Measure]] = {}

    # --- the interface of core/backend.py ---

    def exchange(self, step: Step, messages: Mapping[int, Message], ctx: Context) -> Replies:
        """Let the clients work in ascending id."""
        replies = Replies()
        for client in sorted(messages):
            start = time.perf_counter()
            party = self.open(client, ctx)
            receive(party, messages[client])
            reply, loss = drive(self.method, party, step, ctx)
            self.close(party)
            replies.messages[client] = reply
            replies.losses[client] = loss
            replies.seconds[client] = time.perf_counter() - start
        return replies

    def evaluate(self, messages: Mapping[int, Message], ctx: Context, on: str = "test") -> dict[int, Measure]:
        """Measure every client's model; equal models are measured once."""
        results: dict[int, Measure] = {}
        distinct: dict[Any, Measure] = {}
        for client in sorted(messages):
            data = self.test if on == "test" else self.data[client].validation
            if data is None or not len(data):
                continue
            key = self.identity(client, messages[client]) if on == "test" else None
            if key is None and not any(True for _ in messages[client].tensors()):
                version, known = self.measured.get((client, on), (-1, None))
                if known is not None and version == self.version(client):
                    results[client] = known
                    continue
            if key is not None and key in distinct:
                results[client] = distinct[key]
                continue
            party = self.open(client, ctx, scratch=True)
            receive(party, messages[client])
            results[client] = measure(self.method, party, data, ctx)
            if key is not None:
                distinct[key] = results[client]
            self.measured[client, on] = (self.version(client), results[client])
        return results

    def changed(self) -> dict[int, Any]:
        """Return the trees of clients that were active since the last call."""
        trees = {client: self.records[client].tree() for client in sorted(self.dirty)}
        self.dirty.clear()
        return trees

    def restore(self, states: Mapping[int, Any]) -> None:
        """Put clients back into saved states."""
        self.dirty.clear()
        for client, tree in states.items():
            record = Record(memory=tree["memory"], version=1)
            for model, state in tree["models"].items():
                layout = self.layouts.setdefault((self.infos[client].architecture, model), Layout(state))
                record.layouts[model] = layout
                record.rows[model] = layout.pack(state)
            self.records[client] = record

    # --- activation ---

    def open(self, client: int, ctx: Context, scratch: bool = False) -> Party:
        """Return the client as an active party. `scratch`: with a throw-away copy of its tensors, for evaluation."""
        info = self.infos[client]
        record = self.records.get(client)
        if record is None:
            record = self._first(info, ctx)
            if not scratch:  # an evaluation must leave no trace
                self.records[client] = record
        if scratch:
            record = record.copy()
        party = Party(client, info, self.data[client])
        for model in record.rows:
            seat = self.seats.get((info.architecture, model)) or self._seat_by_setup(info, model, ctx)
            seat.attach(record.state(model))
            party.models[model] = seat.module
        party.memory = record.memory if not scratch else copy.copy(record.memory)
        return party

    def close(self, party: Party) -> None:
        """Note that a client was active; its tensors are in its record already."""
        record = self.records[party.id]
        record.memory = party.memory
        record.version += 1
        self.dirty.add(party.id)

    def version(self, client: int) -> int:
        """Return how often a client was active."""
        record = self.records.get(client)
        return record.version if record else 0

    def model(self, client: int, ctx: Context) -> nn.Module:
        """Return a copy of a client's main model, for people."""
        party = self.open(client, ctx, scratch=True)
        return copy.deepcopy(party.main)

    def identity(self, client: int, message: Message) -> Any:
        """Return a key that is equal for clients whose predictions must be equal, or None if there is none.

        A client whose whole main model comes with the message, and which keeps nothing else, predicts from the message
        alone; two such messages that point at the same memory are the same model.
        """
        record = self.records.get(client)
        blueprint = self.blueprints[self.infos[client].architecture]
        if record is not None and (record.memory or len(record.rows) > 1):
            return None
        received = message.params.get("main", {})
        if any(t.is_floating_point() and name not in received for name, t in blueprint.initial.items()):
            return None
        tensors = tuple((name, t.data_ptr(), tuple(t.shape)) for name, t in message.tensors())
        return blueprint.name, tensors

    def _first(self, info: ClientInfo, ctx: Context) -> Record:
        """Build the record of a client that was never active: the common initial state, then the method's set-up."""
        party = self._set_up(info, ctx)
        record = Record(memory=party.memory)
        for model, module in party.models.items():
            key = (info.architecture, model)
            state = dict(module.state_dict())
            layout = self.layouts.setdefault(key, Layout(state))
            record.layouts[model] = layout
            record.rows[model] = layout.pack(state)
            if key not in self.seats:
                self.seats[key] = Seat(module)
        return record

    def _seat_by_setup(self, info: ClientInfo, model: str, ctx: Context) -> Seat:
        """Build the module of a restored client again: side models are built by the method's set-up."""
        party = self._set_up(info, ctx)
        for name, module in party.models.items():
            self.seats.setdefault((info.architecture, name), Seat(module))
        return self.seats[info.architecture, model]

    def _set_up(self, info: ClientInfo, ctx: Context) -> Party:
        blueprint = self.blueprints[info.architecture]
        party = Party(info.id, info, self.data[info.id])
        seat = self.seats.get((info.architecture, "main"))
        if seat is None:
            assert blueprint.build is not None
            seat = Seat(blueprint.build().to(ctx.device))
        seat.attach({name: tensor.clone() for name, tensor in blueprint.initial.items()})
        party.models["main"] = seat.module
        with torch.no_grad():
            self.method.setup_client(party, ctx)
        return party
