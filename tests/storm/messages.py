"""Mutated messages of sites: introductions, replies and measurements go through the server's own code, as on arrival.

Every one of them is either used or refuses its sender with a sentence; an exception that comes out is an escape.
"""

from __future__ import annotations

import json
import random
import time
import traceback
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict
from mutations import mutate_blob, mutate_tree

from polyfed.config import Config, Networks
from polyfed.core.method import EVALUATE
from polyfed.core.privacy import Privacy
from polyfed.core.robust import finite_only, fits
from polyfed.core.settings import Evaluation, Training
from polyfed.core.summary import summarize
from polyfed.core.trust import RULES, Rule, Trust
from polyfed.data import Clients
from polyfed.flower.codec import _FORM
from polyfed.flower.mailbox import Asked, Exchange, Mailbox
from polyfed.flower.registration import Registration
from polyfed.flower.running import Given, make_federation
from polyfed.flower.serve import run_head
from polyfed.flower.site import Site
from polyfed.flower.sitedata import SiteData
from polyfed.methods import make

SITES = ["north", "south", "west"]
METHODS = ("fedavg", "fedproto", "heterofl", "fedmd", "fedin")
OPTIONS = {"fedmd": {"public_epochs": 0}}  # the public samples here have no labels
MAX_BYTES = 1 << 20
TRAINING = Training(1, 8, lr=0.05)
PUBLIC = Privacy()
SLOW = 5.0  # seconds of processor time for one message that count as a hang; a busy machine is nobody's hang


@dataclass
class Outcome:
    """What became of the messages."""

    tried: int = 0
    used: int = 0
    refused: int = 0
    escapes: list[str] = field(default_factory=list)
    slow: list[str] = field(default_factory=list)
    unclean: list[str] = field(default_factory=list)  # sentences with control characters
    longest: float = 0.0  # seconds of processor time for one message
    kinds: Counter[str] = field(default_factory=Counter)


def problem() -> Clients:
    """Three sites with images of 8 x 8 and three classes."""
    rng = np.random.default_rng(3)
    parts = [(rng.normal(size=(12, 1, 8, 8)).astype(np.float32), np.arange(12) % 3) for _ in range(4)]
    return Clients.from_parts(parts[:3], test=parts[3], num_classes=3, name="storm", public=parts[0][0])


class Hostile:
    """A server with three sites in this process; one of them sends what it is told to."""

    def __init__(self, method: str, folder: Path, private: Privacy = PUBLIC) -> None:
        data = problem()
        config = Config(
            make(method, OPTIONS.get(method, {})),
            method,
            2,
            training=Training(1, 8, lr=0.05),
            models=Networks(feature_dim=8),
            evaluation=Evaluation(metrics=("macro_f1", "auroc")),
            privacy=private,
        )
        run = run_head(config.method, config.settings(), config.models, "0123456789abcdef")
        self.given = Given(config.method, config.settings(), run, SITES, None, data.public, None, None, MAX_BYTES)
        parts = [
            SiteData(data.train[k], data.test, 3, None, data.public, None, data.class_names) for k in range(len(SITES))
        ]
        model = "mlp:1x16" if method != "fedin" else "mlp:2x16"
        self.sites = [
            Site(name, model, part, folder / f"{method}-{name}", max_bytes=MAX_BYTES, say=lambda text: None)
            for name, part in zip(SITES, parts, strict=True)
        ]
        self.introductions = {site.name: site.answer({"kind": "describe", "run": run}, b"") for site in self.sites}
        own = json.loads(json.dumps(self.introductions["south"][0]))
        self.introductions["south"][0]["model"] = None  # a network of its own, which only the site can build
        self.zoo = own
        if config.method.shares:
            from polyfed.core.message import Message

            blueprint, _ = self.sites[1].network(config.method, run)
            about, _ = self.introductions["south"]
            self.introductions["south"] = about, Message(params={"main": blueprint.initial}).to_bytes()
        honest = {site.name: site.answer({"kind": "describe", "run": run}, b"") for site in self.sites}
        self.federation, _ = make_federation(None, self.given, honest, ())  # type: ignore[arg-type]
        self.backend: Any = self.federation.backend
        self.mailbox = Mailbox(
            None,
            dict,
            {},
            dict(enumerate(SITES)),
            1.0,
            1,
            1.0,
            lambda text: None,  # type: ignore[arg-type]
        )
        self.rules = [None, *(name for name in RULES if fits(Rule(name), config.method))]
        self._rehearse()

    def _rehearse(self) -> None:
        """Let the sites work once, to have honest replies to change."""
        ctx = self.federation.ctx
        ctx.round, ctx.participants = 1, (0, 1, 2)
        plan = self.federation.plan
        self.step = next(step for step in (*plan.before, *plan.round) if step.up)
        ctx.phase = "before" if self.step in plan.before else "round"
        ctx.round = 0 if ctx.phase == "before" else 1
        with self.federation._at_server("send"):
            self.sent = {
                client: self.federation.method.send(self.federation.server, info, self.step, ctx)
                for client, info in self.backend.infos.items()
            }
        step = {"name": self.step.name, "who": self.step.who, "down": self.step.down, "up": self.step.up}
        self.replies = {}
        for client, site in enumerate(self.sites):
            head = {**self.backend._head("work", client, ctx, 0), "step": step}
            blob = self.sent[client].to_bytes() if self.step.down else b""
            self.replies[client] = site.answer(json.loads(json.dumps(head)), blob)
            assert "error" not in self.replies[client][0], self.replies[client][0]
        head = self.backend._head("measure", 1, ctx, 0)
        message = self.federation.method.send(self.federation.server, self.backend.infos[1], EVALUATE, ctx)
        self.measure = self.sites[1].answer(json.loads(json.dumps(head)), message.to_bytes())[0]

    def take(self, accept: Any, head: Any, blob: bytes) -> tuple[Any, str | None]:
        """Let a message of `south` arrive; return what was read, or why it was refused."""
        text = head if isinstance(head, str) else json.dumps(head)
        content = RecordDict({"head": ConfigRecord({"json": text})})
        if blob:
            content["body"] = ArrayRecord({"blob": Array("uint8", (len(blob),), _FORM, blob)})
        exchange = Exchange(self.mailbox, "storm", {1: lambda: ({}, b"")}, accept)
        exchange._take(Asked(1, 1, ""), SimpleNamespace(has_error=lambda: False, content=content))
        return exchange.answers.given.get(1), exchange.answers.failed.get(1)

    def introduce(self, rng: random.Random) -> str | None:
        """Send a changed introduction."""
        head, blob = self.introductions["south"] if rng.random() < 0.6 else (self.zoo, b"")
        head, blob = _changed(head, blob, rng)
        registration = Registration(self.mailbox, self.given.run, SITES, lambda text: None, read=self.given.read)
        heads = {"north": self.introductions["north"][0]}

        def accept(client: int, found: Any, initial: bytes) -> Any:
            registration._check(heads, "south", found)
            return registration.read("south", found, initial)

        return self.take(accept, head, blob)[1]

    def reply(self, rng: random.Random) -> str | None:
        """Send a changed reply; if it is accepted, fuse it with the others."""
        head, blob = _changed(*self.replies[1], rng)
        replies: dict[int, Any] = {}

        def accept(client: int, found: Any, body: bytes) -> Any:
            from polyfed.flower.backend import _number

            message = self.backend._checked(
                self.backend.infos[client], body, self.sent[client], self.step, self.federation.ctx
            )
            _number(found, "loss", self.backend.infos[client])
            return message

        found, why = self.take(accept, head, blob)
        if found is None:
            return why
        for client in (0, 2):
            replies[client] = self.backend._checked(
                self.backend.infos[client], self.replies[client][1], self.sent[client], self.step, self.federation.ctx
            )
        missing: dict[int, str] = {}
        saved = self.federation._snapshot()
        everybody = {0: replies[0], 1: found, 2: replies[2]}
        self.federation.rule = Trust(robust=rng.choice(self.rules)).rule()
        with self.federation._at_server("fuse"):
            everybody = self.federation._guarded(
                self.step, self.sent, finite_only(everybody, self.backend.infos, missing), missing
            )
            self.federation._fuse(self.step, everybody, missing)
        tensors = [t for t in self.federation.server.state.values() if t.is_floating_point()]
        assert all(bool(torch.isfinite(t).all()) for t in tensors), "the server's state is not finite"
        assert not {0, 2} & missing.keys(), f"an honest site was refused: {missing}"
        self.federation._put_back(saved)
        return missing.get(1)

    def told(self, rng: random.Random) -> str | None:
        """Send a changed measurement."""
        from polyfed.flower.backend import read_measure

        found, why = self.take(lambda client, head, blob: head, _changed(self.measure, b"", rng)[0], b"")
        if found is None:
            return why
        ctx = self.federation.ctx
        measures = [read_measure(found, part, ctx) for part in ("test", "validation", "personal")]
        for measure in measures:
            if measure is not None:
                assert 0 <= (measure.accuracy or 0) <= 1 and abs(measure.loss) < 1e10, measure
                summarize({0: measure, 1: measure})
        return None if any(measures) else "left out"


def _changed(head: Any, blob: bytes, rng: random.Random) -> tuple[Any, bytes]:
    """Change head or blob, or both; rarely the head's text itself."""
    where = rng.random()
    if blob and where < 0.55:
        return head, mutate_blob(blob, rng)
    head = mutate_tree(head, rng)
    if where > 0.95:
        text = json.dumps(head)
        place = rng.randrange(len(text)) if text else 0
        return text[:place] + rng.choice(("[" * 5000, '"', "\\ud800", "1" * 5000, "")) + text[place:], blob
    return head, mutate_blob(blob, rng) if blob and where > 0.85 else blob


def campaign(count: int, seed: int, folder: Path, methods: tuple[str, ...] = METHODS) -> Outcome:
    """Send `count` changed messages, dealt to the methods in turn."""
    rng = random.Random(seed)
    outcome = Outcome()
    servers = [Hostile(method, folder) for method in methods]
    for number in range(count):
        server = servers[number % len(servers)]
        kind = rng.choices(("introduce", "reply", "told"), (3, 6, 1))[0]
        start = time.process_time()
        outcome.tried += 1
        outcome.kinds[kind] += 1
        where = f"{server.given.method.name} {kind} message {number} of seed {seed}"
        try:
            why = getattr(server, kind)(rng)
            outcome.refused += why is not None
            outcome.used += why is None
            if why is not None and not why.isprintable():
                outcome.unclean.append(f"{where}: {why!r:.200}")
        except Exception:
            outcome.escapes.append(f"{where}:\n{traceback.format_exc(limit=-4)}")
        spent = time.process_time() - start
        outcome.longest = max(outcome.longest, spent)
        if spent > SLOW:
            outcome.slow.append(f"{where}: {spent:.0f} s")
    return outcome
