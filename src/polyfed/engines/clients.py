"""The clients of this process at rest and at work: records in tables, and modules that they take in turn.

Engines ask here for a client (`open`, `close`), for a worker's modules (`attach`, `module`) and for the states of
neighbours as one stack (`rows`); where the numbers lie is this file's and `store.py`'s business.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from polyfed.core.errors import MethodError
from polyfed.core.learner import Learner
from polyfed.core.message import State
from polyfed.core.method import Method
from polyfed.core.party import Blueprint, ClientInfo, Context, Party, PartyData, fill
from polyfed.core.privacy import LEDGER
from polyfed.core.rng import seeded
from polyfed.engines.store import Layout, Memory, ModuleSlot, Record, StateTable

MEMORY_BUDGET = 4 << 30  # bytes of states at rest that stay in plain memory; the rest is in files


class ActiveClient(Party):
    """A client at work. `states` are its tensors by model; `in_place`: they are its rows themselves, not copies."""

    KEPT = Party.KEPT | {"states", "in_place"}
    states: dict[str, State]
    in_place: bool

    def tensors(self, model: str = "main") -> State:
        """Return a model's tensors: a client's own are known without asking the module."""
        return self.states[model] if model in self.states else super().tensors(model)


class ClientStore:
    """All clients as records; a client is active only while it works, on the modules of one worker."""

    def __init__(
        self,
        method: Method,
        infos: Sequence[ClientInfo],
        data: Sequence[PartyData],
        blueprints: Mapping[str, Blueprint],
        workers: int = 1,
        memory_budget: int = MEMORY_BUDGET,
    ) -> None:
        self.method = method
        self.infos = {info.id: info for info in infos}
        self.data = {info.id: item for info, item in zip(infos, data, strict=True)}
        self.blueprints = dict(blueprints)
        self.records: dict[int, Record] = {}
        self.dirty: set[int] = set()  # clients that were active since the last checkpoint
        self.plain = type(method).receive is Method.receive  # a client that receives nothing stays as it is
        self.device = torch.device("cpu")  # where states at rest are
        self._tables: dict[tuple[str, str], StateTable] = {}  # (architecture, model name)
        self._memory = Memory(memory_budget)
        self._slots: list[dict[tuple[str, str], ModuleSlot]] = [{} for _ in range(workers)]  # each worker's modules
        self._counts: dict[str, int] = {}
        for info in infos:
            self._counts[info.architecture] = self._counts.get(info.architecture, 0) + 1

    # --- checkpoints ---

    def changed(self) -> dict[int, Any]:
        """Return the trees of clients that were active since the last call."""
        trees = {client: self.records[client].tree() for client in sorted(self.dirty)}
        self.dirty.clear()
        return trees

    def trees(self) -> dict[int, Any]:
        """Return the trees of all clients that were ever active."""
        return {client: record.tree() for client, record in sorted(self.records.items())}

    def restore(self, states: Mapping[int, Any]) -> None:
        """Put clients back into saved states."""
        self.dirty.clear()
        for client, tree in sorted(states.items()):
            self.records[client] = self._keep(self.infos[client], tree["models"], tree["memory"])
            self.records[client].version = 1

    def version(self, client: int) -> int:
        """Return how often a client was active."""
        record = self.records.get(client)
        return record.version if record else 0

    def untouched(self, client: int) -> bool:
        """Tell whether a client still has the common initial model and nothing of its own."""
        common = type(self.method).setup_client is Method.setup_client and self.data[client].initial is None
        return common and client not in self.records

    def only_main(self, client: int) -> bool:
        """Tell whether a client keeps nothing but its main model."""
        record = self.records.get(client)
        return record is None or not (record.memory or len(record.states) > 1)

    def states(self, client: int) -> dict[str, State]:
        """Return the tensors of a client that was active, by model: views into its rows."""
        return self.records[client].states

    def initial(self, info: ClientInfo) -> State:
        """Return what a client starts from: the weights that it was given, or the common ones of its architecture."""
        own = self.data[info.id].initial
        return self.blueprints[info.architecture].initial if own is None else own

    # --- clients at work ---

    def prepare(self, clients: Iterable[int], ctx: Context) -> None:
        """Make the records of clients that are active for the first time, and all modules that they need.

        Everything that builds or copies modules happens here, in the calling thread.
        """
        for client in sorted(clients):
            if client not in self.records:
                self.records[client] = self._first(self.infos[client], ctx)
            self._have_modules(client, self.records[client], ctx)

    def open(self, client: int, ctx: Context, scratch: bool = False, worker: int = 0) -> ActiveClient:
        """Return the client as an active party on a worker's modules.

        `scratch`: with a throw-away copy of its tensors, for evaluation.
        """
        record = self.records.get(client)
        if record is None:
            record = self._first(self.infos[client], ctx, keep=not scratch)  # an evaluation must leave no trace
            if not scratch:
                self.records[client] = record
        self._have_modules(client, record, ctx)
        return self._activated(client, record, ctx, scratch, worker)

    def copies(self, clients: Iterable[int], ctx: Context) -> Callable[[int, int], ActiveClient]:
        """Return a function that opens a throw-away copy of one of these clients on a worker; it builds nothing."""
        records = {
            client: self.records.get(client) or self._first(self.infos[client], ctx, keep=False) for client in clients
        }
        for client, record in records.items():
            self._have_modules(client, record, ctx)
        return lambda client, worker: self._activated(client, records[client], ctx, True, worker)

    def _activated(self, client: int, record: Record, ctx: Context, scratch: bool, worker: int) -> ActiveClient:
        party = ActiveClient(client, self.infos[client], self.data[client])
        # A method that takes in messages by itself may write into its memory there: a copy is then a real one.
        copied = copy.copy if self.plain else copy.deepcopy
        party.memory = copied(record.memory) if scratch else record.memory
        if scratch:
            record = record.copy()
        if ctx.device != self.device:
            record = record.to(ctx.device)
        party.in_place = not scratch and ctx.device == self.device
        party.states = record.states
        self.attach(party, party.states, worker)
        return party

    def attach(self, party: Party, states: Mapping[str, State], worker: int) -> None:
        """Point a worker's modules at a client's tensors and give them to the party."""
        assert party.info is not None
        for model, state in states.items():
            slot = self._slots[worker][party.info.architecture, model]
            slot.attach(state)
            party.models[model] = slot.module
            if isinstance(slot.module, Learner):
                slot.module.attach(party)

    def module(self, worker: int, architecture: str, model: str) -> nn.Module:
        """Return a worker's module of an architecture, with whichever client's tensors it holds now."""
        return self._slots[worker][architecture, model].module

    def rows(self, clients: Sequence[int], model: str) -> State:
        """Return the tensors of several clients of one architecture as stacks: views, or none if they lie apart."""
        table = self._tables[self.infos[clients[0]].architecture, model]
        rows = table.together([self.records[client].numbers[model] for client in clients])
        return {} if rows is None else table.layout.stacked(rows)

    def check_own(self, party: ActiveClient, worker: int) -> None:
        """Refuse a method that has put other tensors in the place of a client's own: they would be lost.

        Raises
        ------
        MethodError
            With the tensor, and how to write it.
        """
        assert party.info is not None
        for model, state in party.states.items():
            name = self._slots[worker][party.info.architecture, model].replaced(state)
            if name is not None:
                raise MethodError(
                    f"{self.method.name}: client {party.id} put another tensor in the place of '{name}' of its network "
                    f"'{model}' (`.data = ...`, `assign=True` or a new module): write into the one that is there, for "
                    "instance with `copy_`, `mul_` or `load_state_dict`."
                )

    def close(self, party: Party, ctx: Context) -> None:
        """Note that a client was active; on the CPU its tensors are in its record already."""
        record = self.records[party.id]
        if ctx.device != self.device:
            for model, state in record.states.items():
                fill(state, party.models[model].state_dict())
        record.memory = party.memory
        record.version += 1
        self.dirty.add(party.id)

    def start_over(self, client: int, ctx: Context) -> None:
        """Put a client whose training broke down back to its beginning: not a number would stay so for good.

        What it has spent of a privacy budget stays spent. Nobody may be at work meanwhile.
        """
        record, fresh = self.records[client], self._set_up(self.infos[client], ctx)
        for model, module in fresh.models.items():
            fill(record.states[model], module.state_dict())
        record.memory = fresh.memory | {key: record.memory[key] for key in (LEDGER,) if key in record.memory}

    # --- records and modules ---

    def _first(self, info: ClientInfo, ctx: Context, keep: bool = True) -> Record:
        """Build the record of a client that was never active: its initial state, then the method's set-up."""
        key = info.architecture, "main"
        if type(self.method).setup_client is Method.setup_client and key in self._slots[0]:
            return self._keep(info, {"main": self.initial(info)}, {}, keep)
        party = self._set_up(info, ctx)
        self._add_modules(info, party)
        states = {model: dict(module.state_dict()) for model, module in party.models.items()}
        return self._keep(info, states, party.memory, keep)

    def _keep(
        self, info: ClientInfo, states: Mapping[str, Mapping[str, Any]], memory: dict[str, Any], keep: bool = True
    ) -> Record:
        """Put states into the tables; without `keep`, only into copies that are soon forgotten."""
        record = Record(memory=memory)
        for model, state in states.items():
            key = (info.architecture, model)
            if key not in self._tables:
                self._tables[key] = StateTable(Layout(state), self._counts[info.architecture], self._memory)
            table = self._tables[key]
            if not keep:
                record.states[model] = {name: tensor.clone() for name, tensor in state.items()}
                continue
            record.numbers[model] = table.take()
            record.states[model] = table.state(record.numbers[model])
            fill(record.states[model], state)
        return record

    def _have_modules(self, client: int, record: Record, ctx: Context) -> None:
        """Build the modules of a restored client again: side models are built by the method's set-up."""
        info = self.infos[client]
        if any((info.architecture, model) not in self._slots[0] for model in record.states):
            self._add_modules(info, self._set_up(info, ctx))

    def _add_modules(self, info: ClientInfo, party: Party) -> None:
        """Give every worker its own copy of modules that are new."""
        for model, module in party.models.items():
            key = (info.architecture, model)
            for number, slots in enumerate(self._slots):
                if key not in slots:
                    slots[key] = ModuleSlot(module if number == 0 else copy.deepcopy(module))

    def _set_up(self, info: ClientInfo, ctx: Context) -> Party:
        blueprint = self.blueprints[info.architecture]
        party = Party(info.id, info, self.data[info.id])
        slot = self._slots[0].get((info.architecture, "main"))
        if slot is None:
            assert blueprint.build is not None
            slot = ModuleSlot(blueprint.build().to(ctx.device))
        slot.attach({name: tensor.to(ctx.device, copy=True) for name, tensor in self.initial(info).items()})
        party.models["main"] = slot.module
        with torch.no_grad(), seeded(ctx.seed, "own/setup"):
            self.method.setup_client(party, ctx)
        return party
