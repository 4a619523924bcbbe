"""The invariants that every method keeps (one table, one line for each method; see table.py)."""

import json
from dataclasses import replace

import pytest
import torch
from table import CASES, Case, run_case

from polyfed import methods
from polyfed.api import resume
from polyfed.core.checkpoint import pack_tree, unpack_tree
from polyfed.core.federation import Federation
from polyfed.core.message import Message
from polyfed.engines.inprocess import InProcess

cases = pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)


def without_time(lines):
    return [{key: value for key, value in line.items() if key != "seconds"} for line in lines]


def states(result):
    """All networks that a run ends with: the clients', and the server's where it has one."""
    found = {client: result.models[client].state_dict() for client in result.models}
    return found if result.server_model is None else {**found, "server": result.server_model.state_dict()}


def assert_same(a, b):
    assert a and a.keys() == b.keys()
    for party in a:
        assert a[party] and a[party].keys() == b[party].keys()
        for name in a[party]:
            assert torch.equal(a[party][name], b[party][name]), (party, name)


def are_same(a, b):
    return all(torch.equal(a[party][name], b[party][name]) for party in a for name in a[party])


@pytest.fixture
def trained(monkeypatch):
    """List `(client, whether its tensors moved)` for every exchange in which somebody trained.

    A client that takes part starts from what it has and what it is sent; a loss says that there was training.
    """
    exchange, found = InProcess.exchange, []

    def watched(self, step, messages, ctx):
        self.prepare(messages, ctx)
        starts = {}
        for client, message in messages.items():
            own = {model: {n: t.clone() for n, t in s.items()} for model, s in self.records[client].states.items()}
            starts[client] = {model: {**state, **message.params.get(model, {})} for model, state in own.items()}
        replies = exchange(self, step, messages, ctx)
        if any(replies.losses.values()):
            assert replies.losses.keys() == messages.keys()
            for client, start in starts.items():
                found.append((client, not are_same(start, self.records[client].states)))
        return replies

    monkeypatch.setattr(InProcess, "exchange", watched)
    return found


def test_every_registered_method_is_in_the_table():
    assert set(methods.registry()) == {case.method for case in CASES}
    assert len({case.id for case in CASES}) == len(CASES)  # each has its own line in the stored results


@cases
def test_the_same_seed_gives_the_same_run(case):
    first, second = run_case(case), run_case(case)
    assert without_time(first.history) == without_time(second.history)
    assert_same(states(first), states(second))
    assert pack_tree(first.server.memory) == pack_tree(second.server.memory)


@cases
def test_another_seed_gives_another_start_and_another_run(case, monkeypatch):
    run, starts = Federation.run, []

    def noted(self, resume=False):
        starts.append({name: blueprint.initial for name, blueprint in self.ctx.blueprints.items()})
        return run(self, resume)

    monkeypatch.setattr(Federation, "run", noted)
    assert without_time(run_case(case).history) != without_time(run_case(case, seed=1).history)
    one, other = starts
    assert one and not any(are_same({name: one[name]}, {name: other[name]}) for name in one)


@cases
def test_every_loss_is_finite_and_training_moves_every_client(case, trained):
    result = run_case(case, lr=0.01)  # a small rate: BatchNorm over two samples of one pixel can throw a loss far off
    losses = [line["loss"] for line in result.history if "loss" in line]
    assert losses and all(0 < loss < 100 for loss in losses)
    assert {client for client, _ in trained} == set(result.models)
    assert all(moved for _, moved in trained), trained


@cases
def test_client_order_does_not_matter(case, monkeypatch):
    expected = run_case(case)
    exchange, turned = InProcess.exchange, []

    def backwards(self, step, messages, ctx):
        replies = exchange(self, step, dict(reversed(messages.items())), ctx)
        replies.messages = dict(reversed(replies.messages.items()))
        turned.append(len(replies.messages) > 1)
        return replies

    monkeypatch.setattr(InProcess, "exchange", backwards)
    found = run_case(case)
    assert turned and all(turned)
    assert without_time(found.history) == without_time(expected.history)
    assert_same(states(found), states(expected))


@cases
def test_unselected_clients_are_untouched(case, monkeypatch):
    if methods.find(case.method).pools_data:
        pytest.skip("all data is in one place")
    if "all" in {step.who for step in methods.make(case.method, case.options).plan().round}:
        pytest.skip("every client takes part in one of its steps")
    phase, untouched = Federation._phase, []

    def held(federation, client):
        """What a client has: in its record, or the common start if it was never active."""
        party = federation.backend.open(client, federation.ctx, scratch=True)
        assert party.states["main"]
        return pack_tree({"models": party.states, "memory": party.memory})

    def watched(self, name, number, steps, evaluate):
        before = {client: held(self, client) for client in self.backend.infos}
        phase(self, name, number, steps, evaluate)
        if name == "round":
            for client in before.keys() - set(self.history[-1]["participants"]):
                assert held(self, client) == before[client], (number, client)
                untouched.append((number, client))

    monkeypatch.setattr(Federation, "_phase", watched)
    result = run_case(case, rounds=3, participation=0.5)
    rounds = [line for line in result.history if line["phase"] == "round"]
    assert all(len(line["participants"]) == 2 for line in rounds)
    assert len(untouched) == 2 * len(rounds)  # the other two of four, also where there is one round only


@cases
def test_bytes_are_those_of_the_serialised_messages(case, monkeypatch):
    sent = {"up": {}, "down": {}}
    wire = {"up": 0, "down": 0}
    exchange = InProcess.exchange

    def count(self, step, messages, ctx):
        replies = exchange(self, step, messages, ctx)
        for direction, group in (("down", messages), ("up", replies.messages)):
            if getattr(step, direction):
                for client, message in group.items():
                    blob = message.to_bytes()
                    again = Message.from_bytes(blob)
                    assert dict(again.tensors()).keys() == dict(message.tensors()).keys()
                    sent[direction][client] = sent[direction].get(client, 0) + again.nbytes()
                    wire[direction] += len(blob)
        return replies

    monkeypatch.setattr(InProcess, "exchange", count)
    result = run_case(case)
    kind = methods.find(case.method)
    assert any(sent["up"].values()) == (kind.sends != "nothing" and not kind.pools_data)
    assert result.cost.bytes == sent
    assert result.cost.wire == wire
    for direction in ("up", "down"):
        total = sum(sent[direction].values())
        assert result.cost.total(direction) == sum(line[f"bytes_{direction}"] for line in result.history) == total
        assert sum(size for name, size in result.cost.kinds.items() if f"/{direction}/" in name) == total


@cases
def test_only_declared_models_travel_and_no_inputs(case, monkeypatch):
    kind = methods.find(case.method)
    exchange, looked = InProcess.exchange, []

    def look(self, step, messages, ctx):
        replies = exchange(self, step, messages, ctx)
        for client, reply in replies.messages.items():
            assert set(reply.params) <= kind.shares
            assert messages[client].params.keys() & self.records[client].states.keys() <= kind.shares
            own = self.data[client].train
            private = torch.cat([own.inputs(), own.x[own.rows()]]).flatten(1)  # as networks see them, and as they are
            for name, tensor in reply.tensors():
                looked.append(name)
                if tensor.numel() % private.shape[1] == 0:
                    rows = tensor.reshape(-1, 1, private.shape[1])
                    assert not (rows == private).all(dim=2).any(), f"{name} holds images"
        return replies

    monkeypatch.setattr(InProcess, "exchange", look)
    run_case(case)
    assert bool(looked) == (kind.sends != "nothing" and not kind.pools_data)


@cases
def test_resume_after_any_round_gives_the_same_run(case, tmp_path):
    whole = run_case(case, rounds=3, out=tmp_path / "whole", digits=True)
    moments = [(line["round"], line["phase"]) for line in whole.history]
    assert moments
    for place, moment in enumerate(moments[:3]):
        out = tmp_path / f"stopped-{place}"

        class Stopped(Exception):
            pass

        def stop_here(line, moment=moment, error=Stopped):
            if (line["round"], line["phase"]) == moment:
                raise error

        with pytest.raises(Stopped):
            run_case(case, rounds=3, out=out, digits=True, observers=[stop_here])
        later = []
        again = resume(out, observers=[later.append])
        assert [(line["round"], line["phase"]) for line in later] == moments[place + 1 :]
        for file in ("history.jsonl", "result.json"):
            assert timeless(out / file) == timeless(tmp_path / "whole" / file), (moment, file)
        networks = sorted(file.name for file in (tmp_path / "whole" / "models").iterdir())
        assert networks and networks == sorted(file.name for file in (out / "models").iterdir())
        for name in networks:
            assert (out / "models" / name).read_bytes() == (tmp_path / "whole" / "models" / name).read_bytes(), name
        for kept in ("state", "memory"):
            assert stored(getattr(again.server, kept)) == stored(getattr(whole.server, kept)), (moment, kept)


@cases
def test_a_client_with_one_sample_and_a_client_with_one_class_take_part(case, trained):
    result = run_case(case, sizes=(1, 6, 20), single_class=1)
    accuracy = result.accuracy()
    assert len(accuracy["per_client"]) == 3 and all(0 <= value <= 1 for value in accuracy["per_client"])
    assert {client for client, _ in trained} == set(result.models)
    assert all(moved for _, moved in trained), trained


@pytest.mark.parametrize("case", [case for case in CASES if case.off], ids=lambda case: case.id)
def test_switched_off_it_is_its_base_method_and_switched_on_it_is_not(case):
    off = states(run_case(replace(case, options={**case.options, **case.off})))
    base = states(run_case(Case(case.base, case.models, case.base_options, case.public, case.feature_dim)))
    clients = off.keys() & base.keys()  # not every method has a network at the server
    assert len(clients) >= 4
    assert_same({party: off[party] for party in clients}, {party: base[party] for party in clients})
    on = states(run_case(case))
    assert not any(are_same({client: on[client]}, {client: base[client]}) for client in range(4))


def stored(tree):
    """A tree as a checkpoint keeps it: with sorted keys."""
    return pack_tree(unpack_tree(pack_tree(tree), "tree"))


def timeless(path):
    def strip(value):
        if isinstance(value, dict):
            return {k: strip(v) for k, v in value.items() if k not in ("seconds", "peak_memory")}
        return [strip(v) for v in value] if isinstance(value, list) else value

    if path.suffix == ".jsonl":
        return [strip(json.loads(line)) for line in path.read_text().splitlines()]
    return strip(json.loads(path.read_text()))
