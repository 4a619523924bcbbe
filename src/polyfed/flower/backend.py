"""The backend that the round loop drives: the clients are sites somewhere else, and Flower carries the messages."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from typing import Any

import torch

from polyfed.core.backend import Measure
from polyfed.core.blob import all_finite
from polyfed.core.errors import MessageError
from polyfed.core.federation import Federation
from polyfed.core.message import Message
from polyfed.core.method import Replies, Step
from polyfed.core.party import Blueprint, ClientInfo, Context
from polyfed.flower.codec import Head
from polyfed.flower.expect import Expectations
from polyfed.flower.mailbox import Mailbox, Question


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
    ) -> None:
        self.mailbox = mailbox
        self.infos = dict(infos)
        self.blueprints = dict(blueprints)
        self.run = run
        self.expectations = expectations
        self.max_bytes = max_bytes
        self.moment: tuple[str, int, int] = ("", -1, 0)  # phase, round, exchanges so far in it
        self.validation: dict[int, Measure] = {}

    # --- the interface of core/backend.py ---

    def exchange(self, step: Step, messages: Mapping[int, Message], ctx: Context) -> Replies:
        """Let the sites work, side by side, and believe what passes every check."""
        phase, number, position = self.moment
        position = position + 1 if (phase, number) == (ctx.phase, ctx.round) else 0
        self.moment = (ctx.phase, ctx.round, position)
        words = {"name": step.name, "who": step.who, "down": step.down, "up": step.up}
        replies = Replies()

        def accept(client: int, head: Head, blob: bytes) -> Message:
            info = self.infos[client]
            message = self._believe(info, blob, messages[client], step)
            replies.losses[client] = _number(head, "loss", info)
            replies.seconds[client] = _number(head, "seconds", info)
            return message

        questions = {
            client: self._question({**self._head("work", client, ctx, position), "step": words}, message)
            for client, message in messages.items()
        }
        answers = self.mailbox.ask("train.work", questions, accept)
        replies.messages, replies.failed = answers.given, answers.failed
        return replies

    def evaluate(self, messages: Mapping[int, Message], ctx: Context, on: str = "test") -> dict[int, Measure]:
        """Let each site measure on its own test and validation data, in one go; those away are left out."""
        if on == "validation":  # asked right after the test, for the same models: it came with that answer
            return self.validation
        questions = {
            client: self._question(self._head("measure", client, ctx, self.moment[2]), message)
            for client, message in messages.items()
        }
        answers = self.mailbox.ask("query.measure", questions, lambda client, head, blob: head, quorum=False)
        found: dict[int, Measure] = {}
        self.validation = {}
        for client, head in sorted(answers.given.items()):
            for part, results in (("test", found), ("validation", self.validation)):
                measure = _measure(head, part)
                if measure is not None:
                    results[client] = measure
        return found

    def changed(self) -> dict[int, Any]:
        """Return nothing: every site keeps its own state on its own disk."""
        return {}

    def restore(self, states: Mapping[int, Any]) -> None:
        """Do nothing: a site finds the state that belongs to a message by itself."""

    # --- messages ---

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

    def _believe(self, info: ClientInfo, blob: bytes, sent: Message, step: Step) -> Message:
        if not step.up:
            return Message()
        message = Message.from_bytes(blob, self.max_bytes, str(info))
        self.expectations.check(message, sent, step, info)
        return message


class LiveFederation(Federation):
    """A federation whose replies come from outside: one that cannot be fused is left out, and the others count."""

    sites = 0  # how many there could be: a federation may begin without some

    def _summary(self, measures: Mapping[int, Measure]) -> dict[str, Any]:
        summary = super()._summary(measures)
        return {**summary, "clients": sorted(measures)} if 0 < len(measures) < self.sites else summary

    def _fuse(self, step: Step, replies: Mapping[int, Message], missing: dict[int, str]) -> None:
        saved = self._snapshot()
        if self._try(step, replies) is None:
            return
        good: dict[int, Message] = {}
        for client, message in replies.items():
            self._put_back(saved)
            why = self._try(step, {**good, client: message})  # together: two may each be fine but not fit each other
            if why is None:
                good[client] = message
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
        except (RuntimeError, ValueError, KeyError, IndexError, TypeError, AttributeError, MessageError) as error:
            return f"{type(error).__name__}: {error}"
        tensors = [*self.server.state.values(), *_tensors(self.server.memory)]
        tensors += [t for module in self.server.models.values() for t in module.state_dict().values()]
        return None if all(map(all_finite, tensors)) else "the result is not finite"

    def _snapshot(self) -> Any:
        models = {name: dict(module.state_dict()) for name, module in self.server.models.items()}
        # In one go: what the three share is copied once.
        return copy.deepcopy((self.server.state, self.server.memory, models))

    def _put_back(self, saved: Any) -> None:
        state, memory, models = copy.deepcopy(saved)
        self.server.state, self.server.memory = state, memory
        for name, values in models.items():
            self.server.models[name].load_state_dict(values)


def _tensors(tree: Any) -> list[torch.Tensor]:
    if isinstance(tree, torch.Tensor):
        return [tree]
    if isinstance(tree, dict):
        return [t for value in tree.values() for t in _tensors(value)]
    return [t for value in tree for t in _tensors(value)] if isinstance(tree, list | tuple) else []


def _number(head: Head, key: str, info: ClientInfo) -> float:
    value = head.get(key)
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise MessageError(f"Message from {info} refused: its {key} is not a number.")
    return float(value)


def _measure(head: Head, part: str) -> Measure | None:
    """Return a site's measure, or None where it has none or tells nonsense."""
    try:
        accuracy, loss, samples, private = head["measures"][part]
        measure = Measure(float(accuracy), float(loss), int(samples), None if private is None else float(private))
    except (KeyError, TypeError, ValueError):
        return None
    sensible = 0 <= measure.accuracy <= 1 and math.isfinite(measure.loss) and measure.samples > 0
    return measure if sensible else None
