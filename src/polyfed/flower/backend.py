"""The backend that the round loop drives: the clients are sites somewhere else, and Flower carries the messages."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from polyfed.core.backend import Measure
from polyfed.core.blob import all_finite
from polyfed.core.checkpoint import read_json, write_json
from polyfed.core.clientnoise import KEPT
from polyfed.core.errors import InputError, MessageError
from polyfed.core.federation import Federation
from polyfed.core.message import Message
from polyfed.core.method import Replies, Step
from polyfed.core.party import Blueprint, ClientInfo, Context
from polyfed.core.runstate import Line
from polyfed.core.task import Regression
from polyfed.flower import plain
from polyfed.flower.codec import Head
from polyfed.flower.describe import LARGEST
from polyfed.flower.expect import Expectations
from polyfed.flower.mailbox import Mailbox, Question
from polyfed.flower.weights import bound

MOST = 1 << 40  # samples that a site can say it measured on
HUGE = 1e100  # of figures in the units of targets, which may be large; means of them must exist


class FlowerBackend:
    """Clients behind a network. Their states stay with them: a checkpoint here holds the server's part only."""

    def __init__(
        self,
        mailbox: Mailbox,
        infos: Mapping[int, ClientInfo],
        blueprints: Mapping[str, Blueprint],
        run: Head,
        expectations: Expectations,
        max_bytes: int,
        max_share: float = 1.0,
    ) -> None:
        self.mailbox = mailbox
        self.claimed = dict(infos)  # as the sites described themselves
        self.infos = bound(infos, max_share)  # as they count
        self.blueprints = dict(blueprints)
        self.run = run
        self.expectations = expectations
        self.max_bytes = max_bytes
        self.moment: tuple[str, int, int] = ("", -1, 0)  # phase, round, exchanges so far in it
        self.measured: tuple[Any, dict[int, Head]] = (None, {})  # when, and what the sites answered then
        self.told: dict[int, float] = {}  # client -> the epsilon that it has told last

    # --- the interface of core/backend.py ---

    def exchange(self, step: Step, messages: Mapping[int, Message], ctx: Context) -> Replies:
        """Let the sites work, side by side, and accept what passes every check."""
        phase, number, position = self.moment
        position = position + 1 if (phase, number) == (ctx.phase, ctx.round) else 0
        self.moment = (ctx.phase, ctx.round, position)
        words = {"name": step.name, "who": step.who, "down": step.down, "up": step.up}
        replies = Replies()

        def accept(client: int, head: Head, blob: bytes) -> Message:
            info = self.infos[client]
            message = self._checked(info, blob, messages[client], step, ctx)
            replies.losses[client] = _number(head, "loss", info, _largest_loss(ctx))
            replies.seconds[client] = _number(head, "seconds", info)
            if "epsilon" in head:
                replies.epsilon[client] = self.told[client] = self._epsilon(head, info)
            return message

        questions = {
            client: self._question({**self._head("work", client, ctx, position), "step": words}, message)
            for client, message in messages.items()
        }
        answers = self.mailbox.ask("train.work", questions, accept, when=f"{ctx.phase} {ctx.round}, {step.name}")
        replies.messages, replies.failed, replies.spent = answers.given, answers.failed, answers.spent
        return replies

    def evaluate(self, messages: Mapping[int, Message], ctx: Context, on: str = "test") -> dict[int, Measure]:
        """Let each site measure on all data that it has for that, in one go; those away are left out."""
        now = (ctx.phase, ctx.round, self.moment[2], tuple(sorted(messages)))
        if self.measured[0] != now:  # otherwise it came with the answer to an earlier question about the same models
            questions = {
                client: self._question(self._head("measure", client, ctx, self.moment[2]), message)
                for client, message in messages.items()
            }
            when = f"{ctx.phase} {ctx.round}"
            answers = self.mailbox.ask(
                "query.measure", questions, lambda client, head, blob: head, quorum=False, when=when
            )
            self.measured = (now, dict(sorted(answers.given.items())))
        part = "test" if on == "sample" else on
        found = {client: read_measure(head, part, ctx) for client, head in self.measured[1].items()}
        return {client: measure for client, measure in found.items() if measure is not None}

    def ask(self, client: int, x: Tensor, ctx: Context) -> Tensor:
        """Refuse: nobody answers questions of a server here, outside of what the method sends."""
        raise InputError(f"{self.infos[client]} cannot be asked over the network: its model stays there.")

    def changed(self) -> dict[int, Any]:
        """Return nothing: every site keeps its own state on its own disk."""
        return {}

    def restore(self, states: Mapping[int, Any]) -> None:
        """Do nothing: a site finds the state that belongs to a message by itself."""

    # --- messages ---

    def _epsilon(self, head: Head, info: ClientInfo) -> float:
        """Return what a site has spent; that never falls, unless the site has lost the folder in which it counts."""
        epsilon, before = _number(head, "epsilon", info), self.told.get(info.id, 0.0)
        if epsilon < before:
            raise MessageError(
                f"Message from {info} refused: it tells of epsilon {epsilon:.4g} after {before:.4g}, so it does not "
                "know any more what it has spent: bring back the folder of its --state."
            )
        return epsilon

    def _head(self, kind: str, client: int, ctx: Context, position: int) -> Head:
        return {
            "kind": kind,
            "run": self.run,
            "id": client,
            "architecture": self.infos[client].architecture,
            "clients": ctx.clients,
            "participants": list(ctx.participants),
            "round": ctx.round,
            "phase": ctx.phase,
            "position": position,
        }

    @staticmethod
    def _question(head: Head, message: Message) -> Question:
        empty = not (message.params or message.data or message.meta)
        return lambda: (head, b"" if empty else message.to_bytes())

    def _checked(self, info: ClientInfo, blob: bytes, sent: Message, step: Step, ctx: Context) -> Message:
        if not step.up:
            return Message()
        message = Message.from_bytes(blob, self.max_bytes, str(info))
        claimed = self.claimed[info.id]
        self.expectations.check(message, sent, step, claimed)
        self.expectations.plan(message, claimed, ctx)
        self.expectations.weigh(message, step, claimed, info, ctx)
        return message


class LiveFederation(Federation):
    """A federation whose replies come from outside: one that cannot be fused is left out, and the others count."""

    backend: FlowerBackend
    sites = 0  # how many there could be: a federation may begin without some

    def _summary(self, measures: Mapping[int, Measure]) -> dict[str, Any]:
        summary = super()._summary(measures)
        return {**summary, "clients": sorted(measures)} if 0 < len(measures) < self.sites else summary

    def _catch_up(self, phase: str) -> None:
        """Do nothing: a site that joins later begins with the round at hand, and its state says which that is."""

    def restore(self) -> tuple[int, str]:  # noqa: D102
        found = super().restore()
        if (path := self._ledger()) is not None and path.is_file():
            self.server.memory[KEPT] = read_json(path, sealed=True)
        self.backend.told = told_before(self.history)
        return found

    def _ledger(self) -> Path | None:
        """Return the file with what sites have spent, where the server adds the noise.

        It is no part of a checkpoint: a round that is done again has new noise, and is spent again.
        """
        return None if self.directory is None else self.directory.path / "privacy.json"

    def _guarded(
        self, step: Step, sent: Mapping[int, Message], replies: dict[int, Message], missing: dict[int, str]
    ) -> dict[int, Message]:
        with suppress(Exception):  # what a reply does to the rule is a reason to refuse that reply
            return super()._guarded(step, sent, replies, missing)
        good: dict[int, Message] = {}
        for client in _majority_first(replies):
            trial = {other: replies[other] for other in sorted([*good, client])}
            try:
                super()._guarded(step, sent, trial, {})
                good = trial
            except Exception as error:
                why = plain(f"{type(error).__name__}: {error!s:.300}")
                missing[client] = f"Message from {self.backend.infos[client]} refused: it cannot be compared ({why})."
        return super()._guarded(step, sent, good, missing)

    def _fuse(self, step: Step, replies: Mapping[int, Message], missing: dict[int, str]) -> None:
        if KEPT in self.server.memory and (path := self._ledger()) is not None:
            write_json(path, self.server.memory[KEPT])  # before anything of it leaves
        saved = self._snapshot()
        if self._try(step, replies) is None:
            return
        good: dict[int, Message] = {}
        for client in _majority_first(replies):
            self._put_back(saved)
            # Together: two may each be fine but not fit each other.
            trial = {other: replies[other] for other in sorted([*good, client])}
            why = self._try(step, trial)
            if why is None:
                good = trial
            else:
                missing[client] = f"Message from {self.backend.infos[client]} refused: it cannot be used ({why})."
        self._put_back(saved)
        if good and (why := self._try(step, good)) is not None:
            self._put_back(saved)
            for client in good:
                missing[client] = f"The replies of this round cannot be used together ({why})."

    def _try(self, step: Step, replies: Mapping[int, Message]) -> str | None:
        """Fuse and return what went wrong, in words. The copies of replies keep a failed trial from spoiling them."""
        try:
            self.method.fuse(self.server, replies, step, self.ctx)
        except Exception as error:  # what replies do to the fusion can refuse replies, and never end the server
            return plain(f"{type(error).__name__}: {error!s:.300}")
        tensors = [*self.server.state.values(), *_tensors(self.server.memory)]
        tensors += [t for module in self.server.models.values() for t in module.state_dict().values()]
        return None if all_finite(*tensors) else "the result is not finite"

    def _snapshot(self) -> Any:
        models = {name: dict(module.state_dict()) for name, module in self.server.models.items()}
        # In one go: what the three share is copied once.
        return copy.deepcopy((self.server.state, self.server.memory, models))

    def _put_back(self, saved: Any) -> None:
        state, memory, models = copy.deepcopy(saved)
        self.server.state, self.server.memory = state, memory
        for name, values in models.items():
            self.server.models[name].load_state_dict(values)


def told_before(history: Sequence[Line]) -> dict[int, float]:
    """Return what each site has told last of the epsilon that it has spent."""
    lines = [line["privacy"] for line in history if line.get("privacy", {}).get("unit") == "sample"]
    return {int(client): float(epsilon) for line in lines for client, epsilon in line["epsilon"].items()}


def _majority_first(replies: Mapping[int, Message]) -> list[int]:
    """Return the clients, those whose replies have the most common form first: where two do not fit, many decide."""
    forms = {
        client: tuple(sorted((name, tuple(tensor.shape)) for name, tensor in reply.tensors()))
        for client, reply in replies.items()
    }
    common = Counter(forms.values())
    return sorted(replies, key=lambda client: (-common[forms[client]], client))


def _tensors(tree: Any) -> list[torch.Tensor]:
    if isinstance(tree, torch.Tensor):
        return [tree]
    if isinstance(tree, dict):
        return [t for value in tree.values() for t in _tensors(value)]
    return [t for value in tree for t in _tensors(value)] if isinstance(tree, list | tuple) else []


def _number(head: Head, key: str, info: ClientInfo, largest: float = LARGEST) -> float:
    value = head.get(key)
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < largest:  # NaN is not, either
        raise MessageError(f"Message from {info} refused: its {key} is not a number below {largest:g}.")
    return float(value)


def _largest_loss(ctx: Context) -> float:
    """Return what no loss exceeds: that of a regression may be the square of large targets."""
    return HUGE if isinstance(ctx.task, Regression) else LARGEST


def read_measure(head: Head, part: str, ctx: Context) -> Measure | None:
    """Return a site's measure, or None where it has none or tells nonsense."""
    try:
        score, loss, samples, private, told = head["measures"][part]
        metrics = {metric.name: _figure(told[metric.name]) for metric in ctx.metrics}
        measure = Measure(_figure(score), float(loss), int(samples), _figure(private), metrics)
    except Exception:  # a number that does not exist, a list that is none
        return None
    if not abs(measure.loss) < _largest_loss(ctx) or not 0 < measure.samples < MOST:
        return None
    if part == "test" and measure.accuracy is None:
        return None
    lowest = 0.0 if ctx.task.score == "accuracy" else -HUGE  # R² of a model that knows nothing is far below zero
    scores = [share for share in (measure.accuracy, measure.private) if share is not None]
    return measure if all(lowest <= share <= 1 for share in scores) else None


def _figure(value: Any) -> float | None:
    """Return a number that a site told; None stays None."""
    if value is None:
        return None
    if not abs(number := float(value)) < HUGE:  # NaN is not, either
        raise ValueError(f"{number} is no figure")
    return number
