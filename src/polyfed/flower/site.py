"""A site's work: rebuild the party from disk, receive, work, write the state, reply.

Nothing is kept in memory between two messages that a kill could lose; what is on disk is in `sitefolder.py`.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from torch import nn

from polyfed import methods
from polyfed.core.checkpoint import read_json, read_tree, write_atomic
from polyfed.core.errors import InputError, MessageError, PolyfedError
from polyfed.core.evaluate import measure
from polyfed.core.learner import Learner
from polyfed.core.message import Message
from polyfed.core.method import EVALUATE, Method, Step
from polyfed.core.metrics import Metric, make_metrics
from polyfed.core.own_code import kept_traceback
from polyfed.core.party import Blueprint, ClientInfo, Context, Party, PartyData, load_state
from polyfed.core.privacy import LEDGER, BudgetSpent
from polyfed.core.rng import seeded
from polyfed.core.runner import run_stage
from polyfed.core.settings import Training
from polyfed.core.threads import one_thread
from polyfed.engines.inprocess import drive, receive
from polyfed.flower.alone import train_alone
from polyfed.flower.codec import Body, Head
from polyfed.flower.describe import introduce, make_own_blueprint
from polyfed.flower.sitedata import SiteData, described
from polyfed.flower.sitefolder import SERVER, SiteFolder, Tag, tag_of
from polyfed.flower.whatleaves import privacy_of, what_leaves
from polyfed.methods.local import Local
from polyfed.specs import ModelSpec, fetches, label_of
from polyfed.trained import model_file, name_of

LAST = 1 << 30


class Site(SiteFolder):
    """One site: its model, its data, its state on disk."""

    def __init__(
        self,
        name: str,
        model: ModelSpec,
        data: SiteData,
        folder: Path,
        allow: Sequence[str] = (),
        max_bytes: int = 1 << 30,
        say: Callable[[str], None] = print,
    ) -> None:
        super().__init__(name, folder)
        self.model = model
        self.data = data
        self.allow = tuple(allow)
        self.max_bytes = max_bytes
        self.say = say
        self.told: set[str] = set()
        self.built: tuple[Any, Blueprint, nn.Module] | None = None
        self.ended: str | None = None  # why the federation ended
        self.refused: str | None = None  # why this site cannot take part
        self.unwritten = ""  # why its model has no file
        self.reached: dict[str, dict[str, list[Any]]] = {}  # what its model reaches: together, and alone

    def answer(self, head: Head, body: bytes | Body) -> tuple[Head, bytes]:
        """Do what a message asks, and count every byte that leaves."""
        answer, blob = self._answer(head, body)
        with suppress(PolyfedError, KeyError, TypeError):  # a message that names no federation
            self.read_along(head)
            self.count(head, len(json.dumps(answer)) + len(blob))
        return answer, blob

    @one_thread()
    def _answer(self, head: Head, body: bytes | Body) -> tuple[Head, bytes]:
        """Do what a message asks; whatever goes wrong is told to the server in one sentence, and the site lives on."""
        try:
            body = Body(body) if isinstance(body, bytes) else body
            kind = head.get("kind")
            if kind == "describe":
                return self.describe(head)
            if kind in ("work", "measure", "alone"):
                self.check_classes(head["run"])
                self.agree(head)
            if kind == "work":
                return self.work(head, body)
            if kind == "measure":
                return self.measure(head, body)
            if kind == "alone":
                answer = train_alone(self, head)
                self.reached |= {"alone": answer["measures"]} if "measures" in answer else {}
                return answer, b""
            if kind == "end":
                self.ended = str(head.get("reason", ""))[:2000]
                if head.get("refused"):
                    self.refused = self.refused or f"The server refused this site. {self.ended}"
                return {"ok": True}, b""
            raise MessageError(f"Message from {SERVER} refused: it asks for '{kind}', which does not exist.")
        except PolyfedError as error:
            self.say(f"Refused: {error}")
            if isinstance(error, InputError):  # what this site was started with does not fit: people must look at it
                self.refused = str(error)
            return {"error": str(error), "spent": isinstance(error, BudgetSpent)}, b""
        except (RuntimeError, ValueError, KeyError, TypeError, IndexError, AttributeError, OSError) as error:
            self.say(f"Failed: {type(error).__name__}: {error}.{kept_traceback(error)}")
            if head.get("kind") == "describe":
                self.refused = f"This site cannot introduce itself ({type(error).__name__}: {error})."
            return {"error": f"the work failed ({type(error).__name__})", "spent": False}, b""

    # --- what a message can ask for ---

    def describe(self, head: Head) -> tuple[Head, bytes]:
        """Introduce this site; first tell the people here what will leave it."""
        method, run = self.method(head), head["run"]
        blueprint, _ = self.network(method, run)
        self.agree(head)
        self.tell(method, blueprint, run)
        about, initial = introduce(method, self.model, self.data, blueprint)
        return {"name": self.name, **about, "audit": self.audit}, initial

    def agree(self, head: Head) -> None:
        """Refuse less privacy than is wanted here; hold the server to what was told, and tell what is new."""
        method, run = self.method(head), head["run"]
        privacy = privacy_of(run)
        enough = privacy.on and privacy.epsilon is not None and privacy.delta * len(self.data.train) <= 1
        if self.max_epsilon is not None and enough:
            before = self.spent_elsewhere(head, privacy.delta)
            if before and before + (privacy.epsilon or 0) > self.max_epsilon:  # epsilons add up
                raise InputError(
                    f"Site {self.name} has spent epsilon {before:.4g} in earlier federations, and takes part with "
                    f"{self.max_epsilon:g} in all (--max-epsilon), but the server asks for {privacy.epsilon:g} more: "
                    "ask for less, or, with other samples, use another --state."
                )
        if self.max_epsilon is not None and not (enough and (privacy.epsilon or 0) <= self.max_epsilon):
            raise InputError(
                f"Site {self.name} takes part with epsilon {self.max_epsilon:g} for each sample at most, and a delta "
                "below one over the number of its samples (--max-epsilon), but the server asks for "
                + (f"epsilon {privacy.epsilon}, delta {privacy.delta:g}." if privacy.on else "training without noise.")
            )
        new, blueprint = self.hold(head), self.network(method, run)[0]
        self.stay(head, len(self.data.train), {name: list(shape) for name, shape in blueprint.shapes.items()})
        if new:
            self.tell(method, blueprint, run)

    def check_classes(self, run: Mapping[str, Any]) -> None:
        """Refuse to work on other classes than those that the sites agreed on, as after a start with other data."""
        agreed = run.get("class_names")
        if agreed is not None and list(agreed) != list(self.data.classes):
            raise InputError(
                f"Site {self.name} has the classes [{', '.join(self.data.classes)}], but this federation agreed on "
                f"[{', '.join(map(str, agreed))}]: join with the same data as before."
            )

    def work(self, head: Head, body: Body) -> tuple[Head, bytes]:
        """Take part in one exchange."""
        start = time.perf_counter()
        tag = tag_of(head)
        method = self.method(head)
        step = self.step(method, head)
        party, ctx = self.open(method, head, before=tag)
        with ctx.own_draws(f"own/{step.name}", party):
            self.take(method, party, self.read(body), step, ctx)
            reply, loss = drive(method, party, step, ctx)
        party.inbox = Message()  # it may be as large as the reply, which is written now
        if step.up and reply.wire_bytes() > self.max_bytes:
            raise MessageError(f"Its reply has {reply.wire_bytes()} bytes, the limit is {self.max_bytes}.")
        self.keep_ledger(head, party)  # before anything leaves
        self.keep(head, tag, party)
        answer = reply.to_bytes() if step.up else b""
        told = {"loss": loss, "seconds": time.perf_counter() - start}
        if ctx.privacy.on:  # the loss is one of samples, without noise
            told |= {"loss": 0.0, "epsilon": party.memory.get(LEDGER, {}).get("epsilon", 0.0)}
        return told, answer

    def step(self, method: Method, head: Head) -> Step:
        """Return the step that a message asks for: one of the method's own, whose replies were announced."""
        plan, asked = method.plan(), head["step"]
        for step in (*plan.before, *plan.round, *plan.after):
            if all(asked[key] == getattr(step, key) for key in ("name", "who", "down", "up")):
                return step
        raise MessageError(f"Message from {SERVER} refused: {method.name} has no such step as {str(asked)[:200]}.")

    def measure(self, head: Head, body: Body) -> tuple[Head, bytes]:
        """Measure this site's model as it would be after receiving the message, and write that model for the people.

        Nothing else here changes.
        """
        results, party = self.figures(head, body)
        if party is not None:
            try:
                self.keep_model(head, party)
            except InputError as error:  # a learner that no file holds here: no reason to leave the federation
                if not isinstance(party.models["main"], Learner):
                    raise
                if not self.unwritten:
                    self.say(f"Your model has no file: {error}")
                self.unwritten = str(error)
        self.reached["together"] = results
        return {"measures": results}, b""

    def figures(self, head: Head, body: Body) -> tuple[dict[str, list[Any]], Party | None]:
        """Return what this site's model reaches after receiving the message, on all data for that; and the party."""
        method = self.method(head)
        message = self.read(body)
        results: dict[str, list[Any]] = {}
        data, party = self.data, None
        for on, samples in (("test", data.test), ("validation", data.validation), ("personal", data.own_test)):
            if on == "personal" and samples is data.test and "test" in results:
                results[on] = results["test"]
            elif samples is not None and len(samples):
                party, ctx = self.open(method, head, before=(*tag_of(head)[:2], LAST))
                self.take(method, party, message, EVALUATE, ctx)
                found = measure(method, party, samples, ctx)
                results[on] = [found.accuracy, found.loss, found.samples, found.private, found.metrics]
        return results, party

    def metrics(self, run: Mapping[str, Any]) -> tuple[Metric, ...]:
        """Return what else is measured here, by the names that the server gave."""
        return make_metrics([str(name) for name in run.get("metrics", ())], self.data.task)

    # --- the party ---

    def method(self, head: Head) -> Method:
        """Return the method that the server names: one of this package's, and allowed here."""
        name, options = head["run"]["method"], head["run"]["options"]
        if not isinstance(name, str) or not isinstance(options, dict):
            raise MessageError(f"Message from {SERVER} refused: it names no method.")
        if self.allow and name not in (*self.allow, Local.name):  # which sends nothing
            raise InputError(f"Site {self.name} does not allow {name[:100]} (it allows {', '.join(self.allow)}).")
        if name not in methods.registry() and name not in self.allow:
            # A name with a colon would import code here: only the site itself may ask for that.
            how = f": it is in a file that this site must have, too, and allow (--allow {name[:100]})" * (":" in name)
            raise InputError(f"Site {self.name} does not know the method '{name[:100]}'{how}.")
        fetched = next((value for value in options.values() if isinstance(value, str) and fetches(value)), None)
        if fetched is not None:
            raise InputError(
                f"Site {self.name} would fetch '{fetched[:100]}' for {name}: the server may name no such network."
            )
        return methods.make(name, options)

    def network(self, method: Method, run: Mapping[str, Any]) -> tuple[Blueprint, nn.Module]:
        """Return this site's blueprint and network, built once for a federation."""
        key = (run["federation"], run["seed"], run["feature_dim"], run["feature_adapter"])
        if self.built is None or self.built[0] != key:
            blueprint = make_own_blueprint(method, self.model, self.data, run)
            assert blueprint.build is not None
            self.built = (key, blueprint, blueprint.build())
        return self.built[1], self.built[2]

    def open(self, method: Method, head: Head, before: Tag) -> tuple[Party, Context]:
        """Rebuild the party as it was before the given moment."""
        run = head["run"]
        blueprint, module = self.network(method, run)
        info = ClientInfo(int(head["id"]), len(self.data.train), str(head["architecture"]), blueprint.parameters)
        ctx = Context(
            seed=run["seed"],
            round=int(head["round"]),
            rounds=int(run["rounds"]),
            training=Training(**{f.name: run["training"][f.name] for f in fields(Training)}),
            num_classes=self.data.num_classes,
            input_shape=self.data.input_shape,
            clients=int(head["clients"]),
            public_classes=run["public_classes"],
            privacy=privacy_of(run),
            own_epochs=method.own_epochs(int(run["training"]["epochs"]), int(run["rounds"])),
            releases=method.releases().planned(int(run["rounds"])),
            secure=self.secure,
            phase=head["phase"],
            participants=tuple(head["participants"]),
            blueprints={info.architecture: blueprint},
            task=self.data.task,
            metrics=self.metrics(run),
        )
        ctx.run_stage = lambda stage, party, name: run_stage(stage, party, ctx, name)
        party = Party(info.id, info, PartyData(self.data.train, self.data.validation, self.data.public))
        load_state(module, blueprint.initial)
        party.models["main"] = module
        with torch.no_grad(), seeded(ctx.seed, "own/setup"):
            method.setup_client(party, ctx)
        found = [tag for tag in self.tags(head) if tag < before]
        if found:
            tree = read_tree(self.path(head, max(found)))
            for model, state in tree["models"].items():
                load_state(party.models[model], state)
            party.memory = tree["memory"]
        if isinstance(module, Learner):
            module.attach(party)
        if ctx.privacy.on and self.secure and self.ledger(head).is_file():
            party.memory[LEDGER] = read_json(self.ledger(head), sealed=True)
        return party, ctx

    def read(self, body: Body) -> Message:
        """Read what came with a message."""
        blob = body.take()
        return Message.from_bytes(blob, self.max_bytes, SERVER) if blob else Message()

    def take(self, method: Method, party: Party, message: Message, step: Step, ctx: Context) -> None:
        """Receive a message from the server, once it is sure that it fits."""
        for model in message.params.keys() & party.models.keys():
            own = party.models[model].state_dict()
            for name, tensor in message.params[model].items():
                if name not in own or own[name].shape != tensor.shape or own[name].dtype != tensor.dtype:
                    raise MessageError(f"Message from {SERVER} refused: '{name[:100]}' does not fit our network.")
        receive(method, party, message, step, ctx)

    # --- the disk ---

    def keep_model(self, head: Head, party: Party) -> None:
        """Write the model with what is needed to use it on raw inputs."""
        data, run, blueprint = self.data, head["run"], self.network(self.method(head), head["run"])[0]
        about = {
            **described(data),
            "outputs": blueprint.num_classes,
            "model": name_of(self.model) or f"{self.model.__module__}:{label_of(self.model)}",
            "name": self.name,
            "seed": run["seed"],
            "feature_dim": run["feature_dim"],
            "feature_adapter": run["feature_adapter"],
            "method": run["method"],
            "round": int(head["round"]),
        }
        write_atomic(self.outcome, model_file(party.models["main"], about), private=True)

    # --- people ---

    def tell(self, method: Method, blueprint: Blueprint, run: Mapping[str, Any]) -> None:
        """Say once what a federation will carry out of this site, before anything is."""
        if run["federation"] not in self.told:
            self.told.add(run["federation"])
            for line in what_leaves(self.model, self.data, method, blueprint, run):
                self.say(line)
            if (privacy := privacy_of(run)).on:
                self.tell_spent(run, privacy.delta)

    def tell_spent(self, run: Mapping[str, Any], delta: float) -> None:
        """Say what earlier federations cost."""
        try:
            before = self.spent_elsewhere({"run": run}, delta)
        except PolyfedError as error:
            self.say(f"What was spent in earlier federations is not known: {error}")
            return
        if before:
            self.say(f"This site has spent epsilon {before:.4g} in earlier federations: epsilons add up.")

    def last_words(self) -> list[str]:
        """Return what the people here have from it: what was gained, and their model."""
        words = []
        alone, together = ((self.reached.get(key) or {}).get("personal") for key in ("alone", "together"))
        if alone and together and None not in (alone[0], together[0]):
            score = "accuracy" if self.data.task.score == "accuracy" else self.data.task.title
            gain = 100 * (together[0] - alone[0])
            words.append(
                f"On your own test data: alone {score} {alone[0]:.1%}, together {together[0]:.1%}, gained {gain:+.1f} "
                "points."
            )
        if self.unwritten:
            words.append(f"Your model has no file: {self.unwritten}")
        elif self.outcome.is_file():
            how = "" if isinstance(self.model, str) else f", model={label_of(self.model)}"
            words.append(f"Your model: {self.outcome}, load it with polyfed.load_model('{self.outcome}'{how})")
        return words
