"""All clients in this process: parked as rows of numbers, active only while they work.

How the active ones work is the engine's business: one after the other (`sequential`), whole clients on several threads
(`threads`), stacked clients (`batched`), or whatever turns out fastest (`auto`).
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import nn

from polyfed.core.backend import Measure
from polyfed.core.errors import InputError
from polyfed.core.evaluate import Tally, chunk_count, measure_chunks, prepared, total
from polyfed.core.message import Message, State
from polyfed.core.method import EVALUATE, Method, Replies, Step
from polyfed.core.party import Blueprint, ClientInfo, Context, Party, PartyData, fill
from polyfed.core.rng import seeded
from polyfed.core.samples import Samples
from polyfed.engines.pool import WorkerPool
from polyfed.engines.store import Layout, Memory, ModuleSlot, Record, StateTable
from polyfed.engines.work import drive, receive

__all__ = ["ENGINES", "InProcess", "chosen_device", "drive", "make_engine", "receive"]

ENGINES = ("auto", "sequential", "threads", "batched")
MEMORY_BUDGET = 4 << 30  # bytes of parked states that stay in plain memory; the rest is in files


class Engine(Protocol):
    """Lets clients work."""

    def exchange(self, home: InProcess, step: Step, messages: Mapping[int, Message], ctx: Context) -> Replies:
        """Deliver the messages and return the replies."""
        ...


def make_engine(name: str) -> Engine:
    """Return an engine by its name."""
    if name in ("sequential", "threads"):
        from polyfed.engines.threads import Threads

        return Threads()
    if name == "batched":
        from polyfed.engines.batched import Batched

        return Batched()
    if name == "auto":
        from polyfed.engines.auto import Auto

        return Auto()
    raise InputError(f"engine is one of {', '.join(ENGINES)} or flower, not '{name}'.")


def chosen_device(name: str) -> str:
    """Turn `auto` into a GPU if there is one; refuse a device that is not there."""
    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        torch.empty(0, device=name)
    except (RuntimeError, AssertionError) as error:
        raise InputError(
            f"The device '{name}' cannot be used here: choose cpu, or auto, which takes a GPU if there is one."
        ) from error
    return name


class ActiveClient(Party):
    """A client at work. `states` are its tensors by model; `parked`: they are its rows themselves, not copies."""

    states: dict[str, State]
    parked: bool

    def tensors(self, model: str = "main") -> State:
        """Return a model's tensors: those of a parked client are known without asking the module."""
        return self.states[model] if model in self.states else super().tensors(model)


class WorkerModules:
    """The modules of one worker, and whose tensors they hold now."""

    def __init__(self) -> None:
        self.module_slots: dict[tuple[str, str], ModuleSlot] = {}  # (architecture, model name)


class InProcess:
    """Clients as parked records; a client is active only while it works."""

    def __init__(
        self,
        method: Method,
        infos: Sequence[ClientInfo],
        data: Sequence[PartyData],
        blueprints: Mapping[str, Blueprint],
        test: Samples,
        engine: str = "sequential",
        workers: int | None = None,
        memory_budget: int = MEMORY_BUDGET,
        sample: Samples | None = None,
    ) -> None:
        self.method = method
        self.infos = {info.id: info for info in infos}
        self.data = {info.id: item for info, item in zip(infos, data, strict=True)}
        self.blueprints = dict(blueprints)
        self.shared = {"test": test, "sample": sample if sample is not None else test}
        self.records: dict[int, Record] = {}
        self.state_tables: dict[tuple[str, str], StateTable] = {}
        self.memory = Memory(memory_budget)
        self.parked = torch.device("cpu")  # where inactive clients' states are
        self.spent: dict[tuple[str, int], float] = {}  # seconds of a client's last work in a step
        self.dirty: set[int] = set()
        self.measured: dict[tuple[int, str], tuple[int, Measure]] = {}
        self.initial: dict[Any, Measure] = {}  # of clients that were never active and have nothing of their own
        if workers is not None and workers < 1:
            raise InputError(f"workers must be at least 1, got {workers}.")
        self.pool = WorkerPool(1 if engine == "sequential" else workers or torch.get_num_threads())
        self.worker_modules = [WorkerModules() for _ in range(self.pool.workers)]
        self.engine = make_engine(engine)
        self.plain = type(method).receive is Method.receive  # a client that receives nothing stays as it is
        self._counts: dict[str, int] = {}
        for info in infos:
            self._counts[info.architecture] = self._counts.get(info.architecture, 0) + 1

    # --- the interface of core/backend.py ---

    def exchange(self, step: Step, messages: Mapping[int, Message], ctx: Context) -> Replies:
        """Let the clients work; replies come in ascending id whatever the order of work."""
        self.prepare(messages, ctx)
        return self.engine.exchange(self, step, messages, ctx)

    def evaluate(self, messages: Mapping[int, Message], ctx: Context, on: str = "test") -> dict[int, Measure]:
        """Measure every client's model; equal models are measured once, and models that did not change not again."""
        if on == "sample" and self.shared["sample"] is self.shared["test"]:
            on = "test"
        results: dict[int, Measure] = {}
        same: dict[Any, list[int]] = {}  # identity -> clients whose predictions are equal
        for client in sorted(messages):
            data = self.shared.get(on, self.data[client].validation)
            if data is None or not len(data):
                continue
            key = self.identity(client, messages[client]) if on in self.shared else None
            if key is None and self._silent(messages[client]):
                known = self._known(client, on)
                if known is not None:
                    results[client] = known
                    continue
                if on in self.shared and self._untouched(client):
                    key = "initial", on, self.infos[client].architecture
            same.setdefault(key if key is not None else client, []).append(client)
        firsts = [group[0] for group in same.values()]
        for group, found in zip(same.values(), self._measure(firsts, messages, ctx, on), strict=True):
            for client in group:
                results[client] = found
            if self._silent(messages[group[0]]):
                self.measured[group[0], on] = (self.version(group[0]), found)
        for key, group in same.items():
            if isinstance(key, tuple) and key[0] == "initial":
                self.initial[key] = results[group[0]]
        return {client: results[client] for client in sorted(results)}

    def changed(self) -> dict[int, Any]:
        """Return the trees of clients that were active since the last call."""
        trees = {client: self.records[client].tree() for client in sorted(self.dirty)}
        self.dirty.clear()
        return trees

    def restore(self, states: Mapping[int, Any]) -> None:
        """Put clients back into saved states."""
        self.dirty.clear()
        for client, tree in sorted(states.items()):
            self.records[client] = self._park(self.infos[client], tree["models"], tree["memory"])
            self.records[client].version = 1

    # --- activation ---

    def prepare(self, clients: Mapping[int, Any], ctx: Context) -> None:
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

    def _activated(self, client: int, record: Record, ctx: Context, scratch: bool, worker: int) -> ActiveClient:
        party = ActiveClient(client, self.infos[client], self.data[client])
        # A method that takes in messages by itself may write into its memory there: a copy is then a real one.
        copied = copy.copy if self.plain else copy.deepcopy
        party.memory = copied(record.memory) if scratch else record.memory
        if scratch:
            record = record.copy()
        if ctx.device != self.parked:
            record = record.to(ctx.device)
        party.parked = not scratch and ctx.device == self.parked
        party.states = record.states
        self.attach(party, party.states, worker)
        return party

    def attach(self, party: Party, states: Mapping[str, State], worker: int) -> None:
        """Point a worker's modules at a client's tensors and give them to the party."""
        assert party.info is not None
        for model, state in states.items():
            slot = self.worker_modules[worker].module_slots[party.info.architecture, model]
            slot.attach(state)
            party.models[model] = slot.module

    def close(self, party: Party, ctx: Context) -> None:
        """Note that a client was active; on the CPU its tensors are in its record already."""
        record = self.records[party.id]
        if ctx.device != self.parked:
            for model, state in record.states.items():
                fill(state, party.models[model].state_dict())
        record.memory = party.memory
        record.version += 1
        self.dirty.add(party.id)

    def expected_work(self, step: Step, client: int) -> float:
        """Return what a client's work will probably cost: what it cost last time, otherwise a guess."""
        info = self.infos[client]
        return self.spent.get((step.name, client), float(info.samples * info.parameters))

    def version(self, client: int) -> int:
        """Return how often a client was active."""
        record = self.records.get(client)
        return record.version if record else 0

    def model(self, client: int, ctx: Context, message: Message | None = None) -> nn.Module:
        """Return a copy of a client's main model, as it is now or after receiving a message."""
        party = self.open(client, ctx, scratch=True)
        if message is not None:
            receive(self.method, party, message, EVALUATE, ctx)
        return copy.deepcopy(party.main)

    def identity(self, client: int, message: Message) -> Any:
        """Return a key that is equal for clients whose predictions must be equal, or None if there is none.

        A client whose whole main model comes with the message, and which keeps nothing else, predicts from the message
        alone; two such messages that point at the same memory are the same model.
        """
        record = self.records.get(client)
        blueprint = self.blueprints[self.infos[client].architecture]
        if not self.plain or (record is not None and (record.memory or len(record.states) > 1)):
            return None
        received = message.params.get("main", {})
        known = {*received, *blueprint.frozen}  # nobody moves what is frozen
        if any(t.is_floating_point() and name not in known for name, t in blueprint.initial.items()):
            return None
        own = self._initial(self.infos[client])
        if any(name not in received and not torch.equal(t, own[name]) for name, t in blueprint.initial.items()):
            return None
        tensors = tuple((name, t.data_ptr(), tuple(t.shape)) for name, t in message.tensors())
        return blueprint.name, tensors, tuple(sorted(message.meta.items()))

    # --- measuring ---

    def _measure(self, clients: Sequence[int], messages: Mapping[int, Message], ctx: Context, on: str) -> list[Measure]:
        """Measure clients on all workers; where there are fewer clients than workers, their samples are divided."""
        records = {
            client: self.records.get(client) or self._first(self.infos[client], ctx, keep=False) for client in clients
        }
        for client, record in records.items():
            self._have_modules(client, record, ctx)
        shared = self.shared.get(on)
        shared = prepared(shared) if shared is not None and len(clients) > 1 else shared
        items: list[tuple[int, Samples, range]] = []
        for client in clients:
            data = shared if shared is not None else self.data[client].validation
            assert data is not None
            chunks = chunk_count(data)
            parts = min(chunks, -(-self.pool.workers // len(clients)))
            items.extend((client, data, range(p * chunks // parts, (p + 1) * chunks // parts)) for p in range(parts))

        def work(worker: int, item: tuple[int, Samples, range]) -> list[Tally]:
            client, data, chunks = item
            party = self._activated(client, records[client], ctx, True, worker)
            receive(self.method, party, messages[client], EVALUATE, ctx)
            return measure_chunks(self.method, party, data, chunks, ctx)

        tallies = self.pool.run(work, items, lambda item: self.infos[item[0]].parameters * len(item[2]))
        found: dict[int, list[Tally]] = {}
        for (client, _, _), some in zip(items, tallies, strict=True):
            found.setdefault(client, []).extend(some)
        return [total(found[client]) for client in clients]

    def _silent(self, message: Message) -> bool:
        """Tell whether a message leaves a client, and so its predictions, as they are."""
        return self.plain and not message.meta and not any(True for _ in message.tensors())

    def _known(self, client: int, on: str) -> Measure | None:
        """Return the measure of a client that did not change since, if there is one."""
        version, known = self.measured.get((client, on), (-1, None))
        if known is not None and version == self.version(client):
            return known
        if on in self.shared and self._untouched(client):
            return self.initial.get(("initial", on, self.infos[client].architecture))
        return None

    def _untouched(self, client: int) -> bool:
        """Tell whether a client still has the common initial model and nothing of its own."""
        common = type(self.method).setup_client is Method.setup_client and self.data[client].initial is None
        return common and client not in self.records

    # --- records and modules ---

    def _first(self, info: ClientInfo, ctx: Context, keep: bool = True) -> Record:
        """Build the record of a client that was never active: its initial state, then the method's set-up."""
        key = info.architecture, "main"
        if type(self.method).setup_client is Method.setup_client and key in self.worker_modules[0].module_slots:
            return self._park(info, {"main": self._initial(info)}, {}, keep)
        party = self._set_up(info, ctx)
        self._add_modules(info, party)
        states = {model: dict(module.state_dict()) for model, module in party.models.items()}
        return self._park(info, states, party.memory, keep)

    def _initial(self, info: ClientInfo) -> State:
        """Return what a client starts from: the weights that it was given, or the common ones of its architecture."""
        own = self.data[info.id].initial
        return self.blueprints[info.architecture].initial if own is None else own

    def _park(
        self, info: ClientInfo, states: Mapping[str, Mapping[str, Any]], memory: dict[str, Any], keep: bool = True
    ) -> Record:
        """Put states into the tables; without `keep`, only into copies that are soon forgotten."""
        record = Record(memory=memory)
        for model, state in states.items():
            key = (info.architecture, model)
            if key not in self.state_tables:
                self.state_tables[key] = StateTable(Layout(state), self._counts[info.architecture], self.memory)
            state_table = self.state_tables[key]
            if not keep:
                record.states[model] = {name: tensor.clone() for name, tensor in state.items()}
                continue
            record.numbers[model] = state_table.take()
            record.states[model] = state_table.state(record.numbers[model])
            fill(record.states[model], state)
        return record

    def _have_modules(self, client: int, record: Record, ctx: Context) -> None:
        """Build the modules of a restored client again: side models are built by the method's set-up."""
        info = self.infos[client]
        if any((info.architecture, model) not in self.worker_modules[0].module_slots for model in record.states):
            self._add_modules(info, self._set_up(info, ctx))

    def _add_modules(self, info: ClientInfo, party: Party) -> None:
        """Give every worker its own copy of modules that are new."""
        for model, module in party.models.items():
            key = (info.architecture, model)
            for number, modules in enumerate(self.worker_modules):
                if key not in modules.module_slots:
                    modules.module_slots[key] = ModuleSlot(module if number == 0 else copy.deepcopy(module))

    def _set_up(self, info: ClientInfo, ctx: Context) -> Party:
        blueprint = self.blueprints[info.architecture]
        party = Party(info.id, info, self.data[info.id])
        slot = self.worker_modules[0].module_slots.get((info.architecture, "main"))
        if slot is None:
            assert blueprint.build is not None
            slot = ModuleSlot(blueprint.build().to(ctx.device))
        slot.attach({name: tensor.to(ctx.device, copy=True) for name, tensor in self._initial(info).items()})
        party.models["main"] = slot.module
        with torch.no_grad(), seeded(ctx.seed, "own/setup"):
            self.method.setup_client(party, ctx)
        return party
