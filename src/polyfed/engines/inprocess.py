"""All clients in this process: they rest as rows of numbers and are active only while they work.

How the active ones work is the engine's business: one after the other (`sequential`), whole clients on several threads
(`threads`), stacked clients (`batched`), or by a rule for each architecture (`auto`).
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from polyfed.core.backend import Measure
from polyfed.core.errors import InputError
from polyfed.core.evaluate import Tally, chunk_count, measure_chunks, prepared, total
from polyfed.core.launch import local_rank, world_size
from polyfed.core.message import Message
from polyfed.core.method import EVALUATE, Method, Replies, Step
from polyfed.core.nets import EVAL, mode
from polyfed.core.party import Blueprint, ClientInfo, Context, PartyData
from polyfed.core.samples import Samples
from polyfed.engines.clients import MEMORY_BUDGET, ClientStore
from polyfed.engines.known import KnownStages
from polyfed.engines.pool import WorkerPool
from polyfed.engines.work import drive, receive

__all__ = ["ENGINES", "InProcess", "chosen_device", "drive", "make_engine", "receive"]

ENGINES = ("auto", "sequential", "threads", "batched")


class Engine(Protocol):
    """Lets clients work."""

    def exchange(self, backend: InProcess, step: Step, messages: Mapping[int, Message], ctx: Context) -> Replies:
        """Deliver the messages and return the replies."""
        ...


def make_engine(
    name: str,
    blueprints: Mapping[str, Blueprint],
    infos: Mapping[int, ClientInfo],
    batch_size: int,
    share: float,
    input_shape: tuple[int, ...],
) -> Engine:
    """Return an engine by its name; `auto` looks at the clients, and how many of them take part in a round."""
    if name in ("sequential", "threads"):
        from polyfed.engines.threads import Threads

        return Threads()
    if name == "batched":
        from polyfed.engines.batched import Batched

        return Batched()
    if name == "auto":
        from polyfed.engines.auto import Auto

        auto = Auto()
        auto.choose(blueprints, infos, batch_size, share, input_shape)
        return auto
    raise InputError(f"engine is one of {', '.join(ENGINES)} or flower, not '{name}'.")


def chosen_device(name: str) -> str:
    """Turn `auto` into a GPU if there is one (each process its own); refuse a device that is not there."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda" and world_size() > 1:
        name = f"cuda:{local_rank() % max(1, torch.cuda.device_count())}"
    try:
        torch.empty(0, device=name)
    except (RuntimeError, AssertionError) as error:
        raise InputError(
            f"The device '{name}' cannot be used here: choose cpu, or auto, which takes a GPU if there is one."
        ) from error
    return name


class InProcess:
    """Clients in a store, and an engine that lets them work."""

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
        known: KnownStages | None = None,
        *,
        batch_size: int,
        share: float,
    ) -> None:
        if workers is not None and workers < 1:
            raise InputError(f"workers must be at least 1, got {workers}.")
        self.pool = WorkerPool(1 if engine == "sequential" else workers or torch.get_num_threads())
        self.store = ClientStore(method, infos, data, blueprints, self.pool.workers, memory_budget)
        self.method = method
        self.infos = self.store.infos
        self.blueprints = self.store.blueprints
        self.engine = make_engine(engine, self.blueprints, self.infos, batch_size, share, tuple(test.x.shape[1:]))
        self.known = known  # stages of earlier runs on the same data
        self.shared = {"test": test, "sample": sample if sample is not None else test}
        self.spent: dict[tuple[str, int], float] = {}  # seconds of a client's last work in a step
        self.measured: dict[tuple[int, str], tuple[int, Measure]] = {}
        self.initial: dict[Any, Measure] = {}  # of clients that were never active and have nothing of their own

    def groups(self) -> dict[str, str]:
        """Return how clients of each architecture work where the engine chooses: `stack`, `plain` or `whole`."""
        from polyfed.engines.auto import Auto

        return self.engine.groups() if isinstance(self.engine, Auto) else {}

    # --- the interface of core/backend.py ---

    def exchange(self, step: Step, messages: Mapping[int, Message], ctx: Context) -> Replies:
        """Let the clients work; replies come in ascending id whatever the order of work."""
        self.store.prepare(messages, ctx)
        return self.engine.exchange(self, step, messages, ctx)

    def evaluate(self, messages: Mapping[int, Message], ctx: Context, on: str = "test") -> dict[int, Measure]:
        """Measure every client's model; equal models are measured once, and models that did not change not again."""
        if on == "sample" and self.shared["sample"] is self.shared["test"]:
            on = "test"
        if on == "personal":
            return self._personal(messages, ctx)
        results: dict[int, Measure] = {}
        same: dict[Any, list[int]] = {}  # identity -> clients whose predictions are equal
        for client in sorted(messages):
            data = self.shared.get(on, self.store.data[client].validation)
            if data is None or not len(data):
                continue
            key = self.identity(client, messages[client]) if on in self.shared else None
            if key is None and self._silent(messages[client]):
                known = self._known(client, on)
                if known is not None:
                    results[client] = known
                    continue
                if on in self.shared and self.store.untouched(client):
                    key = "initial", on, self.infos[client].architecture
            same.setdefault(key if key is not None else client, []).append(client)
        firsts = [group[0] for group in same.values()]
        shared = self.shared.get(on)
        shared = prepared(shared) if shared is not None and len(firsts) > 1 else shared
        jobs = [(c, data) for c in firsts if (data := shared if shared is not None else self.store.data[c].validation)]
        for group, found in zip(same.values(), self._measure(jobs, messages, ctx), strict=True):
            for client in group:
                results[client] = found
            if self._silent(messages[group[0]]):
                self.measured[group[0], on] = (self.store.version(group[0]), found)
        for key, group in same.items():
            if isinstance(key, tuple) and key[0] == "initial":
                self.initial[key] = results[group[0]]
        return {client: results[client] for client in sorted(results)}

    @torch.no_grad()
    def ask(self, client: int, x: Tensor, ctx: Context) -> Tensor:
        """Return what a client's model says of inputs."""
        party = self.store.open(client, ctx, scratch=True)
        with mode(party.main, EVAL):
            outputs: Tensor = party.main(x)
        return outputs

    def changed(self) -> dict[int, Any]:
        """Return the trees of clients that were active since the last call."""
        return self.store.changed()

    def restore(self, states: Mapping[int, Any]) -> None:
        """Put clients back into saved states."""
        self.store.restore(states)

    # --- what engines and results ask ---

    def expected_work(self, step: Step, client: int) -> float:
        """Return what a client's work will probably cost: what it cost last time, otherwise a guess."""
        info = self.infos[client]
        return self.spent.get((step.name, client), float(info.samples * info.parameters))

    def model(self, client: int, ctx: Context, message: Message | None = None) -> nn.Module:
        """Return a copy of a client's main model, as it is now or after receiving a message."""
        party = self.store.open(client, ctx, scratch=True)
        if message is not None:
            receive(self.method, party, message, EVALUATE, ctx)
        return copy.deepcopy(party.main)

    def identity(self, client: int, message: Message) -> Any:
        """Return a key that is equal for clients whose predictions must be equal, or None if there is none.

        A client whose whole main model comes with the message, and which keeps nothing else, predicts from the message
        alone; two such messages that point at the same memory are the same model.
        """
        blueprint = self.blueprints[self.infos[client].architecture]
        if not (self.store.plain and self.store.only_main(client)):
            return None
        received = message.params.get("main", {})
        known = {*received, *blueprint.frozen}  # nobody moves what is frozen
        if any(t.is_floating_point() and name not in known for name, t in blueprint.initial.items()):
            return None
        own = self.store.initial(self.infos[client])
        if any(name not in received and not torch.equal(t, own[name]) for name, t in blueprint.initial.items()):
            return None
        tensors = tuple((name, t.data_ptr(), tuple(t.shape)) for name, t in message.tensors())
        return blueprint.name, tensors, tuple(sorted(message.meta.items()))

    # --- measuring ---

    def _personal(self, messages: Mapping[int, Message], ctx: Context) -> dict[int, Measure]:
        """Measure on every client's own test data; a party that trains for several is measured for each of them."""
        results: dict[int, Measure] = {}
        jobs: list[tuple[int, int, Samples]] = []  # client, the party that trains for it, data
        for party in sorted(messages):
            silent = self._silent(messages[party])
            for client, data in sorted(self.store.data[party].tests.items()):
                known = self._known(party, f"personal/{client}") if silent else None
                if known is not None:
                    results[client] = known
                else:
                    jobs.append((client, party, data))
        found = self._measure([(party, data) for _, party, data in jobs], messages, ctx)
        for (client, party, _), one in zip(jobs, found, strict=True):
            results[client] = one
            if self._silent(messages[party]):
                self.measured[party, f"personal/{client}"] = (self.store.version(party), one)
        return {client: results[client] for client in sorted(results)}

    def _measure(
        self, jobs: Sequence[tuple[int, Samples]], messages: Mapping[int, Message], ctx: Context
    ) -> list[Measure]:
        """Measure clients, each on its data, on all workers; where there are more workers, samples are divided."""
        opened = self.store.copies(list(dict.fromkeys(client for client, _ in jobs)), ctx)
        items: list[tuple[int, int, Samples, range]] = []
        for place, (client, data) in enumerate(jobs):
            chunks = chunk_count(data)
            parts = min(chunks, -(-self.pool.workers // len(jobs)))
            pieces = [range(p * chunks // parts, (p + 1) * chunks // parts) for p in range(parts)]
            items.extend((place, client, data, piece) for piece in pieces)

        def work(worker: int, item: tuple[int, int, Samples, range]) -> list[Tally]:
            _, client, data, chunks = item
            party = opened(client, worker)
            receive(self.method, party, messages[client], EVALUATE, ctx)
            return measure_chunks(self.method, party, data, chunks, ctx)

        tallies = self.pool.run(work, items, lambda item: self.infos[item[1]].parameters * len(item[3]))
        found: list[list[Tally]] = [[] for _ in jobs]
        for (place, _, _, _), some in zip(items, tallies, strict=True):
            found[place].extend(some)
        return [total(some, ctx) for some in found]

    def _silent(self, message: Message) -> bool:
        """Tell whether a message leaves a client, and so its predictions, as they are."""
        return self.store.plain and not message.meta and not any(True for _ in message.tensors())

    def _known(self, client: int, on: str) -> Measure | None:
        """Return the measure of a client that did not change since, if there is one."""
        version, known = self.measured.get((client, on), (-1, None))
        if known is not None and version == self.store.version(client):
            return known
        if on in self.shared and self.store.untouched(client):
            return self.initial.get(("initial", on, self.infos[client].architecture))
        return None
