"""What a run consists of: server, method, backend and context, the history so far; and what is saved of it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from polyfed.core.attack import malicious
from polyfed.core.augment import check_images
from polyfed.core.backend import Backend
from polyfed.core.clientnoise import check_statistics, planned
from polyfed.core.cost import CostMeter
from polyfed.core.errors import InputError
from polyfed.core.evaluate import few
from polyfed.core.method import Method
from polyfed.core.metrics import Metric
from polyfed.core.newcomers import check_room, together
from polyfed.core.party import Context, Party, PartyData, load_state
from polyfed.core.rng import SERVER, seeded
from polyfed.core.rundir import RunDirectory
from polyfed.core.runner import run_stage
from polyfed.core.samples import Samples
from polyfed.core.selection import Patience
from polyfed.core.settings import Settings
from polyfed.core.task import CLASSIFICATION, Task, check_score
from polyfed.core.threads import one_thread

Line = dict[str, Any]
Observer = Callable[[Line], None]


class RunState:
    """All that stands before the first round, and can be restored after any."""

    def __init__(
        self,
        method: Method,
        backend: Backend,
        settings: Settings,
        *,
        num_classes: int,
        input_shape: tuple[int, ...],
        test: Samples | None,  # None: each client measures on test data of its own, and nobody measures the server
        public: Samples | None = None,
        public_classes: int | None = None,
        directory: RunDirectory | None = None,
        observers: Sequence[Observer] = (),
        task: Task = CLASSIFICATION,
        metrics: Sequence[Metric] = (),
    ) -> None:
        check_images(settings.training, input_shape)
        self.method = method
        self.backend = backend
        self.settings = settings
        self.test = test
        self.sample = few(test, settings) if test is not None else None
        if self.sample is not None:
            check_score(task, self.sample.labels(), "the test samples that models are measured on")
        self.directory = directory
        self.observers = list(observers)
        self.plan = method.plan()
        self.rounds = self.plan.rounds if self.plan.rounds is not None else settings.rounds
        self.attack, self.rule = settings.trust.attackers(), settings.trust.rule()
        self.malicious = malicious(self.attack, list(backend.infos), settings.seed)
        self.meter = CostMeter()
        self.history: list[Line] = []
        self.spent: set[int] = set()  # clients whose privacy budget is used up
        self.server = Party(SERVER, None, PartyData(None, test if method.selects_on_test() else None, public))
        self.ctx = Context(
            seed=settings.seed,
            round=0,
            rounds=self.rounds,
            training=settings.training,
            num_classes=num_classes,
            input_shape=input_shape,
            public_classes=public_classes,
            privacy=settings.privacy,
            own_epochs=method.own_epochs(settings.training.epochs, self.rounds),
            releases=method.releases().planned(self.rounds),
            clients=len(backend.infos),
            device=torch.device(settings.execution.device),
            blueprints=dict(backend.blueprints),
            infos=dict(backend.infos),
            task=task,
            metrics=tuple(metrics),
        )
        self.replies_planned = planned(method, self.rounds)  # of each client
        check_statistics(settings.privacy, self.ctx.blueprints)
        if settings.evaluation.patience is not None and not settings.evaluation.every:
            raise InputError("patience needs measurements before the end: leave out evaluate=end.")
        self.patience = Patience(settings.evaluation.patience, task)
        self.ctx.run_stage = lambda stage, party, name: run_stage(stage, party, self.ctx, name)
        self.ctx.ask = lambda client, x: self.backend.ask(client, x, self.ctx)
        self.saved_at = time.monotonic()
        self.final = False  # the phase at hand is the last one, measured in full
        self.newcomers: frozenset[int] = frozenset()  # who was not there when the checkpoint was written
        with self._at_server("setup"):
            method.setup_server(self.server, backend.infos, self.ctx)

    @contextmanager
    def _at_server(self, work: str) -> Iterator[None]:
        """Let the server compute, on one thread; what its networks draw by themselves comes from a seed of its own."""
        with one_thread(), seeded(self.settings.seed, f"own/{self.ctx.phase}/{work}", self.ctx.round):
            yield

    # --- saving ---

    def _save(self, phase: str, number: int, line: Line) -> None:
        if self.directory is None:
            return
        self.directory.append(line)
        if self.final or time.monotonic() - self.saved_at >= self.settings.execution.checkpoint_seconds:
            self._checkpoint(phase, number)

    def _checkpoint(self, phase: str, number: int) -> None:
        if self.directory is None:
            return
        participants = list(self.ctx.participants)
        progress = {"round": number, "phase": phase, "participants": participants, "cost": self.meter.dump()}
        progress["clients"] = sorted(self.backend.infos)
        server = {
            "state": self.server.state,
            "memory": self.server.memory,
            "models": {name: dict(module.state_dict()) for name, module in self.server.models.items()},
        }
        self.directory.save(progress, server, self.backend.changed())
        self.saved_at = time.monotonic()

    def restore(self) -> tuple[int, str]:
        """Continue from the checkpoint, in the moment after it; return the last finished round and phase."""
        assert self.directory is not None
        found = self.directory.load()
        self.history = self.directory.history()
        self.spent = set(self.history[-1].get("spent", ())) if self.history else set()
        if found is None:
            return 0, "new"
        progress, server, clients = found
        self.newcomers = frozenset(self.backend.infos) - frozenset(progress.get("clients", self.backend.infos))
        if self.newcomers:
            check_room(self.server, server, [str(self.backend.infos[client]) for client in sorted(self.newcomers)])
            server["state"] = {**self.server.state, **server["state"]}
            server["memory"] = together(self.server.memory, server["memory"])
        self.server.state = server["state"]
        self.server.memory = server["memory"]
        for name, state in server["models"].items():
            load_state(self.server.models[name], state)
        self.backend.restore(clients)
        self.meter = CostMeter.load(progress["cost"])
        self.ctx.round, self.ctx.phase = progress["round"], progress["phase"]
        self.ctx.participants = tuple(progress.get("participants", ()))
        return self.ctx.round, self.ctx.phase
