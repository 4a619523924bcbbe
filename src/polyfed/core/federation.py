"""The round loop. Read `Federation.run` from top to bottom: this is all that happens in a federation.

What it has to work with is in `runstate.py`, how it measures in `measuring.py`.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from statistics import fmean

from polyfed.core.apart import check_unwritten, tensors_of, writes
from polyfed.core.attack import falsified
from polyfed.core.clientnoise import with_noise, within_budget
from polyfed.core.cost import DOWN, UP, peak_memory, reset_peak_memory
from polyfed.core.errors import TrainingError
from polyfed.core.measuring import Measuring
from polyfed.core.message import Message
from polyfed.core.method import Step
from polyfed.core.rng import generator
from polyfed.core.robust import combined, finite_only
from polyfed.core.runstate import Line
from polyfed.core.threads import one_thread


class Federation(Measuring):
    """A server, a method, and a backend that holds the clients."""

    def run(self, resume: bool = False) -> list[Line]:
        """Run to the end and return the history."""
        with one_thread():
            return self._run(resume)

    def _run(self, resume: bool) -> list[Line]:
        reset_peak_memory()
        done, phase = self.restore() if resume else (0, "new")
        self._catch_up(phase)

        if phase == "new" and self.plan.before:
            self._phase("before", 0, self.plan.before, evaluate=True)
            phase = "before"
        for number in range(done + 1, self.rounds + 1):
            if self._over():
                break
            every = self.settings.evaluation.every
            last = number == self.rounds
            due = last or (every > 0 and number % every == 0)
            self._phase("round", number, self.plan.round, evaluate=due)
            phase = "round"
        if phase != "after" and self.plan.after:
            self._phase("after", self.ctx.round, self.plan.after, evaluate=True)
        return self.history

    def _over(self) -> bool:
        """Tell whether the last line was the end: nothing gets better, or nobody has a privacy budget left."""
        return self.spent >= self.backend.infos.keys() or bool(self.history and "stopped" in self.history[-1])

    def _catch_up(self, phase: str) -> None:
        """Let clients that joined a run later do what each does for itself before the rounds."""
        alone = [step for step in self.plan.before if not step.up]
        for step in alone if self.newcomers and phase != "new" else ():
            self._exchange(step, sorted(self.newcomers), {})

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
        if self.spent:
            line["spent"] = sorted(self.spent)
        if self.spent >= self.backend.infos.keys():  # nobody learns any more: what is there is measured in full
            evaluate, self.final = True, self.final or not self.plan.after
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
            self.spent |= {*clients} - {*self.ctx.participants}
        messages: dict[int, Message] = {}
        with self.meter.time("send"), self._at_server(f"send/{step.name}"):
            for client in self.ctx.participants:
                infos = self.backend.infos
                messages[client] = (
                    self.method.send(self.server, infos[client], step, self.ctx) if step.down else Message()
                )
                if step.down:
                    self.meter.count(DOWN, client, step.name, messages[client])
        sent = tensors_of(messages)
        before = writes(sent)
        with self.meter.time("local"):
            replies = self.backend.exchange(step, messages, self.ctx)
        check_unwritten(sent, before, messages, f"{self.method.name}: a client", "the message to client {}")
        if replies.saved:  # the time of a run is what it takes by itself
            for name in ("local", "saved"):
                self.meter.seconds[name] = self.meter.seconds.get(name, 0.0) + replies.saved
        if replies.broken and len(replies.broken) == len(messages):
            # Nobody is left: the settings are at fault, not a client.
            raise TrainingError(replies.failed[min(replies.broken)])
        missing.update(replies.failed)
        self.spent |= replies.spent
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
                finite = finite_only(ordered, self.backend.infos, missing)
                if ordered and not finite and not self.malicious:  # the settings or the method are at fault
                    raise TrainingError(missing[min(ordered)])
                ordered = self._guarded(step, messages, finite, missing)
                came = tensors_of(ordered)
                before = writes(came)
                if ordered and replies.fuse is not None:
                    replies.fuse(self.server, ordered)
                elif ordered:
                    self._fuse(step, ordered, missing)
                check_unwritten(came, before, ordered, f"{self.method.name}: `fuse`", "client {}'s reply")
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
