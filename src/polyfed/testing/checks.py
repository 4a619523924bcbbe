"""The checks of the contract: each takes a `Setting` and raises an `AssertionError` that says what does not hold."""

from __future__ import annotations

import json
import math
import shutil
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from polyfed import methods
from polyfed.api import resume
from polyfed.core.checkpoint import pack_tree, unpack_tree
from polyfed.core.federation import Federation
from polyfed.core.message import Message, State
from polyfed.core.party import cloned, fill
from polyfed.core.places import kind_of
from polyfed.core.robust import fits
from polyfed.core.traffic import Told, Traffic, expected_bytes, letters, shown
from polyfed.core.trust import Rule
from polyfed.engines.inprocess import InProcess
from polyfed.engines.shares import divided, keys_of, part_of, sizes_of
from polyfed.result import Result
from polyfed.testing.setting import Limit, Setting, digits, unequal
from polyfed.testing.watch import (
    States,
    are_equal,
    double_precision,
    engine_log,
    everybody_moved,
    observing,
    same_lines,
    same_states,
    stacking,
    states,
    timeless,
    watching,
)

TOLERANCE = 1e-7  # of a stacked run in float64: BatchNorm over few values turns 1e-16 into 1e-9


class NotApplicable(Exception):
    """A check says nothing about this method; the text says why."""


def same_seed_same_run(setting: Setting) -> None:
    """The same seed gives the same run, bit for bit."""
    _same_run(setting.plain, setting.run(engine="sequential"))


def another_seed_another_run(setting: Setting) -> None:
    """Another seed gives another start and another run."""
    one = setting.observed
    with observing() as other:
        other.result = setting.run(seed=1)
    assert timeless(one.result.history) != timeless(other.result.history), "two seeds gave the same history"
    assert one.starts, "there are no networks"
    for name, initial in one.starts.items():
        assert not are_equal({0: initial}, {0: other.starts[name]}), f"{name} starts from the same weights"


def losses_are_finite_and_training_moves(setting: Setting) -> None:
    """Every loss is finite, and training moves every client."""
    with watching() as moved:
        # A small rate: BatchNorm over two samples of one pixel can throw a loss far off.
        result = setting.run(lr=0.01)
    losses = [line["loss"] for line in result.history if "loss" in line]
    assert losses and all(0 < loss < 100 for loss in losses), f"the losses are {losses}"
    everybody_moved(moved, result)


def client_order_does_not_matter(setting: Setting) -> None:
    """Clients may answer in any order."""
    expected = setting.plain
    exchange, turned = InProcess.exchange, []

    def backwards(self: InProcess, step: Any, messages: Any, ctx: Any) -> Any:
        replies = exchange(self, step, dict(reversed(messages.items())), ctx)
        replies.messages = dict(reversed(replies.messages.items()))
        turned.append(len(replies.messages) > 1)
        return replies

    with patch.object(InProcess, "exchange", backwards):
        found = setting.run()
    assert turned and all(turned), "there was nothing to turn round"
    same_lines(found, expected)
    same_states(states(found), states(expected))


def copied_messages_give_the_same_run(setting: Setting) -> None:
    """Messages may be copies, as between sites: no party relies on sharing memory with another."""
    exchange = InProcess.exchange

    def through_bytes(self: InProcess, step: Any, messages: Any, ctx: Any) -> Any:
        replies = exchange(self, step, {client: _copy(message) for client, message in messages.items()}, ctx)
        replies.messages = {client: _copy(reply) for client, reply in replies.messages.items()}
        return replies

    with patch.object(InProcess, "exchange", through_bytes):
        found = setting.run(engine="sequential")
    _same_run(setting.plain, found)


def _copy(message: Message) -> Message:
    return Message.from_bytes(message.to_bytes())


def unselected_clients_are_untouched(setting: Setting) -> None:
    """Clients that do not take part in a round stay as they are."""
    if setting.method.pools_data:
        raise NotApplicable("all data is in one place")
    if "all" in {step.who for step in setting.method.plan().round}:
        raise NotApplicable("every client takes part in one of its steps")
    phase, untouched = Federation._phase, []

    def held(federation: Federation, client: int) -> bytes:
        """Return what a client has: in its record, or the common start if it was never active."""
        backend: Any = federation.backend
        party = backend.store.open(client, federation.ctx, scratch=True)
        assert party.states["main"]
        return pack_tree({"models": party.states, "memory": party.memory})

    def watched(self: Federation, name: str, number: int, steps: Any, evaluate: bool) -> None:
        before = {client: held(self, client) for client in self.backend.infos}
        phase(self, name, number, steps, evaluate)
        if name == "round":
            for client in before.keys() - set(self.history[-1]["participants"]):
                assert held(self, client) == before[client], f"client {client} changed in round {number}"
                untouched.append((number, client))

    with patch.object(Federation, "_phase", watched):
        result = setting.run(rounds=3, participation=0.5)
    rounds = [line for line in result.history if line["phase"] == "round"]
    assert all(len(line["participants"]) == 2 for line in rounds)
    assert len(untouched) == 2 * len(rounds)  # the other two of four, also where there is one round only


def bytes_are_those_of_the_messages(setting: Setting) -> None:
    """Counted bytes are those of the messages as they are written, in both directions."""
    sent: dict[str, dict[int, int]] = {"up": {}, "down": {}}
    wire = {"up": 0, "down": 0}
    for said in setting.observed.said:
        for direction, group in (("down", said.down), ("up", said.up)):
            if getattr(said.step, direction):
                for client, blob in group.items():
                    sent[direction][client] = sent[direction].get(client, 0) + Message.from_bytes(blob).nbytes()
                    wire[direction] += len(blob)
    cost, history = setting.plain.cost, setting.plain.history
    assert any(sent["up"].values()) == setting.talks, f"`sends` says: {setting.method.sends}"
    assert cost.bytes == sent and cost.wire == wire, "the meter has other figures"
    for direction in ("up", "down"):
        total = sum(sent[direction].values())
        assert cost.total(direction) == sum(line[f"bytes_{direction}"] for line in history) == total
        assert sum(size for name, size in cost.kinds.items() if f"/{direction}/" in name) == total


def bytes_are_those_of_the_formulas(setting: Setting) -> None:
    """Every message is as large as the formulas in `traffic` say."""
    method = setting.method
    if method.traffic is None:
        raise NotApplicable("it has no formulas of its cost")
    letters(method)
    for said in setting.observed.said:
        exchange = method.traffic.get(said.step.name, Traffic())
        for direction, group in (("down", said.down), ("up", said.up)):
            for client, blob in group.items():
                message, formula = Message.from_bytes(blob), getattr(exchange, direction)
                who = client, message, said.models[client], said.train[client], said.public
                expected = expected_bytes(formula, Told(method, said.ctx, *who))
                counted = message.nbytes() if getattr(said.step, direction) else 0
                assert expected == counted, (
                    f"client {client}, round {said.ctx.round}, step '{said.step.name}': {counted} bytes go "
                    f"{direction}, and `traffic` says {shown(formula)} = {expected}"
                )


def only_declared_models_travel_and_no_inputs(setting: Setting) -> None:
    """Only models that `shares` names travel, and no client tells an input as it is."""
    shares, looked = type(setting.method).shares, []
    for said in setting.observed.said:
        for client, blob in said.up.items():
            reply = Message.from_bytes(blob)
            assert set(reply.params) <= shares, f"{set(reply.params)} travel, `shares` has {set(shares)}"
            assert Message.from_bytes(said.down[client]).params.keys() & said.models[client].keys() <= shares
            own = said.train[client]
            private = torch.cat([own.inputs(), own.x[own.rows()]]).flatten(1)  # as networks see them, and as they are
            for name, tensor in reply.tensors():
                looked.append(name)
                if tensor.numel() % private.shape[1] == 0:
                    rows = tensor.reshape(-1, 1, private.shape[1])
                    assert not (rows == private).all(dim=2).any(), f"{name} holds inputs of client {client}"
                known = not setting.method.combines or kind_of(name) in setting.method.combines
                assert known or not tensor.is_floating_point(), f"`combines` does not say how {name} is combined"
    assert bool(looked) == setting.talks, f"`sends` says: {setting.method.sends}"


def rules_against_bad_senders_slot_in(setting: Setting) -> None:
    """A rule that the method can be used with (`combines`) runs to the end, and others are refused."""
    rule = next((name for name in ("median", "norm") if fits(Rule(name), setting.method)), None)
    if rule is None:
        raise NotApplicable("its replies are not combined")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", f"robust={rule}: ")  # so few clients: it may have nobody to compare
        result = setting.run(rounds=1, robust=rule)
    assert "missing" not in result.history[-1], f"under {rule}: {result.history[-1]['missing']}"
    assert all(math.isfinite(value) for value in result.accuracy()["per_client"])


def fusing_can_be_divided(setting: Setting) -> None:
    """Processes that fuse some keys each (`fused_into`) give the same bits as one that fuses all."""
    ours = 3

    def in_parts(self: Federation, step: Any, replies: Any, missing: Any) -> None:
        method, server, ctx = self.method, self.server, self.ctx
        if any(method.fused_into(server, ctx.infos[client], step, ctx) is None for client in replies):
            raise NotApplicable("fusing is more than averaging")
        owner = divided(sizes_of(method, server, replies, step, ctx), ours)
        before, after = cloned(server.state), {}
        for rank in range(ours):
            part = {c: part_of(r, keys_of(method, server, c, step, ctx), owner, rank) for c, r in replies.items()}
            method.fuse(server, part, step, ctx)
            after.update({key: server.state[key].clone() for key in owner if owner[key] == rank})
            fill(server.state, before)  # a process does not know what the others have found
        fill(server.state, after)
        method.fuse(server, {client: Message(meta=reply.meta) for client, reply in replies.items()}, step, ctx)

    with patch.object(Federation, "_fuse", in_parts):
        found = setting.run(engine="sequential")
    _same_run(setting.plain, found)


def resume_gives_the_same_run(setting: Setting) -> None:
    """A run that is stopped after any round and resumed is the uninterrupted one."""
    with tempfile.TemporaryDirectory() as folder:
        _stop_and_resume(setting, Path(folder))


def _stop_and_resume(setting: Setting, folder: Path) -> None:
    data = digits(setting.public)
    named = methods.is_importable(type(setting.method)) and all(isinstance(model, str) for model in setting.models)
    copied: list[tuple[int, str]] = []

    def copy(line: Any) -> None:  # what a run leaves that is cut off here: its checkpoint is written by now
        shutil.copytree(folder / "whole", folder / f"stopped-{len(copied)}")
        copied.append((line["round"], line["phase"]))

    whole = setting.run(rounds=3, data=data, out=folder / "whole", observers=[copy])
    moments = [(line["round"], line["phase"]) for line in whole.history]
    assert moments and copied == moments
    for place, moment in enumerate(moments[:3]):
        out = folder / f"stopped-{place}"
        later: list[Any] = []
        again = (
            resume(out, observers=[later.append])
            if named
            else setting.run(rounds=3, data=data, out=out, resume=True, observers=[later.append])
        )
        assert [(line["round"], line["phase"]) for line in later] == moments[place + 1 :]
        for file in ("history.jsonl", "result.json"):
            assert _file(out / file) == _file(folder / "whole" / file), f"{file} differs, stopped at {moment}"
        networks = sorted(file.name for file in (folder / "whole" / "models").iterdir())
        assert networks and networks == sorted(file.name for file in (out / "models").iterdir())
        for name in networks:
            same = (out / "models" / name).read_bytes() == (folder / "whole" / "models" / name).read_bytes()
            assert same, f"{name} differs, stopped at {moment}"
        for kept in ("state", "memory"):
            assert _stored(getattr(again.server, kept)) == _stored(getattr(whole.server, kept)), (moment, kept)


def one_sample_and_one_class_take_part(setting: Setting) -> None:
    """A client with one sample and a client with one class take part."""
    with watching() as moved:
        result = setting.run(data=unequal((1, 6, 20), 1, setting.public))
    accuracy = result.accuracy()
    assert len(accuracy["per_client"]) == 3 and all(0 <= value <= 1 for value in accuracy["per_client"])
    everybody_moved(moved, result)


def switched_off_it_is_its_base_method(setting: Setting) -> None:
    """Switched off it is its base method exactly, and switched on it is not."""
    if setting.limit is None:
        raise NotApplicable("no limit case is given")
    limit = setting.limit if isinstance(setting.limit, Limit) else Limit(*setting.limit)
    result = setting.run(method=limit.off, **limit.where(setting.public))
    off, (base, score) = states(result), _baseline(setting, limit, limit.where(setting.public))
    clients = off.keys() & base.keys()  # not every method has a network at the server
    assert len(clients) >= 4
    same_states(*({party: _kept(found[party], limit) for party in clients} for found in (off, base)))
    if None not in (found := (result.accuracy()["global"], score)):
        assert found[0] == found[1], f"what the server predicts is right for {found[0]} and not {found[1]}"
    on, (usual, _) = states(setting.plain), _baseline(setting, limit, {})
    assert not any(are_equal({c: on[c]}, {c: usual[c]}) for c in range(4)), "switched on it changes nothing"


def workers_do_not_matter(setting: Setting) -> None:
    """Any number of workers gives the same bits."""
    _same_run(setting.plain, setting.run(engine="threads", workers=3))


def stacks_give_the_same_numbers(setting: Setting) -> None:
    """The engine `batched` gives the same numbers up to rounding, in stacks unless `stacked=False` says otherwise."""
    with double_precision():
        alone = states(setting.run(rounds=1, engine="sequential"))
        with stacking() as trained, engine_log() as reasons:
            together = states(setting.run(rounds=1, engine="batched", workers=2))
    if len(setting.models) == 1 and not setting.method.pools_data:
        stacked = bool(trained) and all(trained)
        why = f" ({' '.join(reasons)})" if reasons else ""
        how = "in stacks" if stacked else f"one by one{why}"
        assert stacked == setting.stacked, f"clients trained {how}, but stacked={setting.stacked}"
    for party, state in alone.items():
        for name, tensor in state.items():
            if tensor.is_floating_point():
                apart = float((tensor - together[party][name]).abs().max()) if tensor.numel() else 0.0
                assert apart < TOLERANCE, f"{name} of {party} differs by {apart:.1e}"


CHECKS: tuple[Callable[[Setting], None], ...] = (
    same_seed_same_run,
    another_seed_another_run,
    losses_are_finite_and_training_moves,
    client_order_does_not_matter,
    copied_messages_give_the_same_run,
    unselected_clients_are_untouched,
    bytes_are_those_of_the_messages,
    only_declared_models_travel_and_no_inputs,
    bytes_are_those_of_the_formulas,
    rules_against_bad_senders_slot_in,
    fusing_can_be_divided,
    resume_gives_the_same_run,
    one_sample_and_one_class_take_part,
    switched_off_it_is_its_base_method,
    workers_do_not_matter,
    stacks_give_the_same_numbers,
)


_BASELINES: dict[str, tuple[States, float | None]] = {}  # what plain runs end with that several are compared with


def _baseline(setting: Setting, limit: Limit, where: dict[str, Any]) -> tuple[States, float | None]:
    """Return the networks that the base method ends with, and how often the server is right.

    Where names say it all, it runs once.
    """
    networks = where.get("models", setting.models)
    named = all(isinstance(model, str) for model in networks)
    told = {name: value for name, value in where.items() if name != "data"}, limit.sizes if "data" in where else None
    key = repr((limit.base, networks, setting.public, setting.feature_dim, told))
    if not named or key not in _BASELINES:
        result = setting.run(method=limit.base, **where)
        _BASELINES[key] = states(result), result.accuracy()["global"]
    return _BASELINES[key]


def _kept(state: State, limit: Limit) -> State:
    """Return the tensors of a network that must be equal."""
    return {name: tensor for name, tensor in state.items() if not name.startswith(limit.besides)}


def _same_run(one: Result, other: Result) -> None:
    """Assert that two runs are equal bit for bit: their histories, networks, and what the server remembers."""
    same_lines(one, other)
    same_states(states(one), states(other))
    assert one.server is not None and other.server is not None
    assert _stored(one.server.memory) == _stored(other.server.memory), "the server remembers something else"


def _stored(tree: Any) -> bytes:
    """Return a tree as a checkpoint keeps it: with sorted keys."""
    return pack_tree(unpack_tree(pack_tree(tree), "tree"))


def _file(path: Path) -> Any:
    lines = path.read_text().splitlines() if path.suffix == ".jsonl" else [path.read_text()]
    return [timeless(json.loads(line)) for line in lines]
