"""The round loop. Read `Federation.run` from top to bottom: this is all that happens in a federation."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from statistics import fmean
from typing import Any

import torch

from polyfed.core.attack import falsified, honest_infos, malicious
from polyfed.core.augment import check_images
from polyfed.core.backend import Backend, Measure
from polyfed.core.clientnoise import check_statistics, planned, with_noise, within_budget
from polyfed.core.cost import DOWN, UP, CostMeter, peak_memory, reset_peak_memory
from polyfed.core.errors import InputError, TrainingError
from polyfed.core.evaluate import measure
from polyfed.core.message import Message
from polyfed.core.method import EVALUATE, Method, Step
from polyfed.core.metrics import Metric
from polyfed.core.party import Context, Party, PartyData, load_state
from polyfed.core.rng import SERVER, generator, seeded
from polyfed.core.robust import combined, finite_only
from polyfed.core.rundir import RunDirectory
from polyfed.core.runner import run_stage
from polyfed.core.samples import Samples
from polyfed.core.selection import Patience
from polyfed.core.settings import Settings
from polyfed.core.summary import over_clients, summarize
from polyfed.core.task import CLASSIFICATION, Task, check_score
from polyfed.core.threads import one_thread

Line = dict[str, Any]
Observer = Callable[[Line], None]


def few(test: Samples, settings: Settings) -> Samples:
    """Return the test samples that models are measured on before the end: a fixed draw, or all."""
    wanted = settings.evaluation.samples
    if wanted is None or wanted >= len(test):
        return test
    order = torch.randperm(len(test), generator=generator(settings.seed, "evaluate-samples"))
    return test.select(order[:wanted].sort().values)


class Federation:
    """A server, a method, and a backend that holds the clients."""

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
        with self._at_server("setup"):
            method.setup_server(self.server, backend.infos, self.ctx)

    def run(self, resume: bool = False) -> list[Line]:
        """Run to the end and return the history."""
        with one_thread():
            return self._run(resume)

    def _run(self, resume: bool) -> list[Line]:
        reset_peak_memory()
        done, phase = self.restore() if resume else (0, "new")

        if phase == "new" and self.plan.before:
            self._phase("before", 0, self.plan.before, evaluate=True)
            phase = "before"
        for number in range(done + 1, self.rounds + 1):
            if self.history and "stopped" in self.history[-1]:
                break
            every = self.settings.evaluation.every
            last = number == self.rounds
            due = last or (every > 0 and number % every == 0)
            self._phase("round", number, self.plan.round, evaluate=due)
            phase = "round"
        if phase != "after" and self.plan.after:
            self._phase("after", self.ctx.round, self.plan.after, evaluate=True)
        return self.history

    def _phase(self, phase: str, number: int, steps: Sequence[Step], evaluate: bool) -> None:
        """Run the exchanges of one phase, measure, write the line, perhaps save."""
        start = time.perf_counter()
        before = dict(self.meter.seconds)
        self.ctx.round = number
        self.ctx.phase = phase
        self.ctx.records = {}
        self.final = (number == self.rounds and not self.plan.after) or phase == "after"
        self.meter.new_round()
        rng = generator(self.settings.seed, f"select/{phase}", number)
        selected = self.settings.participation.select(self.backend.infos, rng)
        line: Line = {"round": number, "phase": phase, "participants": list(selected)}
        if self.malicious:
            line["malicious"] = sorted(self.malicious)
        losses: list[float] = []
        missing: dict[int, str] = {}
        for step in steps:
            if step.when == "evaluation" and not evaluate:
                continue
            everybody = step.who == "all"
            replied = self._exchange(step, sorted(self.backend.infos) if everybody else selected, missing)
            losses = replied if any(replied) else losses  # of the last step that trained: the others report zeros
            if step.evaluate and evaluate:
                line.setdefault("stages", {})[step.evaluate] = self._summary(self._evaluate_clients())
        if losses:
            line["loss"] = fmean(losses)
        if missing:
            line["missing"] = {str(client): why for client, why in sorted(missing.items())}
        if evaluate and "mean" in (found := self._evaluate(line)):  # in a real federation everybody may be away
            line["accuracy"] = found
        line.update(bytes_up=self.meter.round_bytes[UP], bytes_down=self.meter.round_bytes[DOWN], **self.ctx.records)
        spent = {name: total - before.get(name, 0.0) for name, total in self.meter.seconds.items()}
        line["seconds"] = {**spent, "total": time.perf_counter() - start + spent.get("saved", 0.0)}
        self.meter.seconds["total"] = self.meter.seconds.get("total", 0.0) + line["seconds"]["total"]
        self.meter.peak_memory = max(self.meter.peak_memory, peak_memory())
        self.history.append(line)
        self._save(phase, number, line)
        try:
            for observer in self.observers:
                observer(line)
        except BaseException:  # somebody stops the run here (Ctrl-C): what is done stays done
            self._checkpoint(phase, number)
            raise

    def _exchange(self, step: Step, clients: Sequence[int], missing: dict[int, str]) -> list[float]:
        """One exchange: send, work at the clients, fuse. Returns the clients' losses."""
        self.ctx.participants = tuple(sorted(clients))
        if self.settings.privacy.of_clients and step.up:
            able = self.settings.privacy, self.ctx.participants, self.server, self.ctx
            self.ctx.participants = within_budget(*able, self.replies_planned, missing)
        messages: dict[int, Message] = {}
        with self.meter.time("send"), self._at_server(f"send/{step.name}"):
            for client in self.ctx.participants:
                infos = self.backend.infos
                messages[client] = (
                    self.method.send(self.server, infos[client], step, self.ctx) if step.down else Message()
                )
                if step.down:
                    self.meter.count(DOWN, client, step.name, messages[client])
        with self.meter.time("local"):
            replies = self.backend.exchange(step, messages, self.ctx)
        if replies.saved:  # the time of a run is what it takes by itself
            for name in ("local", "saved"):
                self.meter.seconds[name] = self.meter.seconds.get(name, 0.0) + replies.saved
        if replies.broken and len(replies.broken) == len(messages):
            # Nobody is left: the settings are at fault, not a client.
            raise TrainingError(replies.failed[min(replies.broken)])
        missing.update(replies.failed)
        if replies.epsilon:
            known = self.ctx.records.get("privacy", {}).get("epsilon", {})
            told = {str(client): epsilon for client, epsilon in sorted(replies.epsilon.items())}
            self.ctx.log("privacy", {"unit": "sample", "delta": self.settings.privacy.delta, "epsilon": known | told})
        ordered = {client: replies.messages[client] for client in sorted(replies.messages)}
        if step.up and self.attack is not None:
            with self._at_server(f"attack/{step.name}"):
                bad = self.malicious
                ordered = falsified(self.attack, bad, self.method, self.server, messages, ordered, step, self.ctx)
        if step.up:
            for client, message in ordered.items():
                self.meter.count(UP, client, step.name, message)
            with self.meter.time("fuse"), self._at_server(f"fuse/{step.name}"):
                ordered = self._guarded(step, messages, finite_only(ordered, self.backend.infos, missing), missing)
                if ordered:
                    self._fuse(step, ordered, missing)
        return [replies.losses[client] for client in ordered if client in replies.losses]

    def _guarded(
        self, step: Step, sent: Mapping[int, Message], replies: dict[int, Message], missing: dict[int, str]
    ) -> dict[int, Message]:
        """Return the replies as a rule against bad senders and the noise of client-level privacy let the method see."""
        seen = self.method, self.server, sent
        if self.rule is not None and replies:
            replies = combined(self.rule, *seen, replies, self.ctx, missing)
        if self.settings.privacy.of_clients and replies:
            replies = with_noise(*seen, replies, step.name, self.replies_planned, self.ctx, missing)
        return replies

    def _fuse(self, step: Step, replies: Mapping[int, Message], missing: dict[int, str]) -> None:
        """Let the method take in the replies. A federation of strangers overrides this to catch harmful ones."""
        self.method.fuse(self.server, replies, step, self.ctx)

    @contextmanager
    def _at_server(self, work: str) -> Iterator[None]:
        """Let the server compute, on one thread; what its networks draw by themselves comes from a seed of its own."""
        with one_thread(), seeded(self.settings.seed, f"own/{self.ctx.phase}/{work}", self.ctx.round):
            yield

    # --- measuring ---

    def _evaluate(self, line: Line) -> dict[str, Any]:
        """Measure on validation data first: it may say that this round is the last one, which is measured in full."""
        validation = self._on_own("validation")
        if line["phase"] == "round" and validation and line["round"] < self.rounds:
            stopped = self.patience.over(self.history, line["round"], validation)
            if stopped is not None:
                line["stopped"] = stopped
                self.final = not self.plan.after
        summary = self._summary(self._evaluate_clients())
        with self.meter.time("evaluate"):
            summary.update(self._evaluate_server())
        own = {"validation": validation, "personal": self._on_own("personal")}
        if summary and self.ctx.task.score != "accuracy":
            summary["score"] = self.ctx.task.title  # what stands where accuracy is said
        return self._of_outcome(summary | {kind: found for kind, found in own.items() if found})

    def _on_own(self, kind: str) -> dict[str, Any]:
        """Measure every client on data of its own and say whose it was: not everybody has some."""
        with self.meter.time("evaluate"):
            found = self.backend.evaluate(self._evaluation_messages(), self.ctx, kind)
        return {**summarize(found), "clients": sorted(found)} if found else {}

    def _of_outcome(self, summary: dict[str, Any]) -> dict[str, Any]:
        """Judge everybody by the server's model where that is what the method is for; what clients keep is `own`."""
        fused = summary.get("global")
        if self.method.outcome != "server" or fused is None or not summary.get("per_client"):
            return summary
        kept = ("mean", "std", "worst", "per_client", "metrics", "personal")
        own = {key: summary.pop(key) for key in kept if key in summary}
        everybody = [fused] * len(own["per_client"])
        judged = {"mean": fused, "std": 0.0, "worst": fused, "per_client": everybody, "own": own}
        if "global_metrics" in summary:
            metrics = summary["global_metrics"]
            judged["metrics"] = {name: over_clients([value] * len(everybody)) for name, value in metrics.items()}
        return {**summary, **judged}

    def _evaluate_clients(self) -> dict[int, Measure]:
        with self.meter.time("evaluate"):
            return self.backend.evaluate(self._evaluation_messages(), self.ctx, "test" if self.final else "sample")

    def _evaluation_messages(self) -> dict[int, Message]:
        """Return what each measured client would receive now. Not counted: nothing is learned from it."""
        infos, wanted = self.backend.infos, self.settings.evaluation.clients
        clients = honest_infos(infos, self.malicious)
        if wanted is not None and wanted < len(clients) and not self.final:
            order = torch.randperm(len(clients), generator=generator(self.settings.seed, "evaluate-clients"))
            clients = sorted(clients[place] for place in order[:wanted].tolist())
        with self._at_server("send/evaluate"):
            return {client: self.method.send(self.server, infos[client], EVALUATE, self.ctx) for client in clients}

    def _evaluate_server(self) -> Mapping[str, Any]:
        if self.test is None or self.sample is None or not self.method.serves(self.server):
            return {"global": None}
        with self._at_server("evaluate"):
            found = measure(self.method, self.server, self.test if self.final else self.sample, self.ctx)
        private = {} if found.private is None else {"global_private": found.private}
        return {"global": found.accuracy, **private, **({"global_metrics": found.metrics} if found.metrics else {})}

    def _summary(self, measures: Mapping[int, Measure]) -> dict[str, Any]:
        """Summarize measures on the common test set."""
        if not measures:
            return {}
        return {
            **summarize(measures),
            **({} if self.final or self.sample is self.test or self.sample is None else {"samples": len(self.sample)}),
            **({} if len(measures) == len(self.backend.infos) else {"clients": sorted(measures)}),  # some were away
        }

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
        if found is None:
            return 0, "new"
        progress, server, clients = found
        self.server.state = server["state"]
        self.server.memory = server["memory"]
        for name, state in server["models"].items():
            load_state(self.server.models[name], state)
        self.backend.restore(clients)
        self.meter = CostMeter.load(progress["cost"])
        self.ctx.round, self.ctx.phase = progress["round"], progress["phase"]
        self.ctx.participants = tuple(progress.get("participants", ()))
        return self.ctx.round, self.ctx.phase
