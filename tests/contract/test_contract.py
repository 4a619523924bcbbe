"""The invariants that every method keeps (one table, one line for each method; see table.py)."""

import json
from dataclasses import replace

import pytest
import torch
from table import CASES, Case, run_case, synthetic

from polyfed import methods
from polyfed.api import resume
from polyfed.core.federation import Federation
from polyfed.core.message import Message

cases = pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)


def without_time(lines):
    return [{key: value for key, value in line.items() if key != "seconds"} for line in lines]


def states(result):
    return {client: result.models[client].state_dict() for client in result.models}


def assert_same(a, b):
    assert a.keys() == b.keys()
    for client in a:
        for name in a[client]:
            assert torch.equal(a[client][name], b[client][name]), (client, name)


def test_every_registered_method_is_in_the_table():
    assert set(methods.registry()) == {case.method for case in CASES}


@cases
def test_the_same_seed_gives_the_same_run(case):
    first, second = run_case(case), run_case(case)
    assert without_time(first.history) == without_time(second.history)
    assert_same(states(first), states(second))


@cases
def test_another_seed_gives_another_run(case):
    assert without_time(run_case(case).history) != without_time(run_case(case, seed=1).history)


@cases
def test_every_loss_is_finite_and_training_moves_the_models(case):
    result = run_case(case, lr=0.01)  # a small rate: BatchNorm over two samples of one pixel can throw a loss far off
    losses = [line["loss"] for line in result.history if "loss" in line]
    assert losses and all(0 <= loss < 100 for loss in losses)
    before = states(run_case(case, rounds=1, lr=1e-12))
    after = states(result)
    moved = [not torch.equal(after[c][n], before[c][n]) for c in after for n in after[c] if n.endswith("weight")]
    assert any(moved)


@cases
def test_client_order_does_not_matter(case, monkeypatch):
    expected = run_case(case)
    from polyfed.backends.inprocess import InProcess

    exchange = InProcess.exchange

    def backwards(self, step, messages, ctx):
        replies = exchange(self, step, dict(reversed(messages.items())), ctx)
        replies.messages = dict(reversed(replies.messages.items()))
        return replies

    monkeypatch.setattr(InProcess, "exchange", backwards)
    assert without_time(run_case(case).history) == without_time(expected.history)


@cases
def test_unselected_clients_are_untouched(case):
    if methods.find(case.method).pools_data:
        pytest.skip("all data is in one place")
    if "all" in {step.who for step in methods.make(case.method, case.options).plan().round}:
        pytest.skip("every client takes part in one of its steps")
    seen = {}

    def watch(federation, phase, number):
        backend = federation.backend
        if phase != "round":
            return
        parked = {c: backend.records[c].tree() for c in backend.records}
        if number > 1:
            for client, tree in seen.items():
                if client not in federation.history[-1]["participants"]:
                    for model, state in tree["models"].items():
                        for name, tensor in state.items():
                            assert torch.equal(tensor, parked[client]["models"][model][name]), (client, name)
        seen.clear()
        for client, tree in parked.items():
            copies = {m: {n: t.clone() for n, t in s.items()} for m, s in tree["models"].items()}
            seen[client] = {"models": copies}

    result = run_case(case, rounds=3, participation=0.5, watch=watch)
    assert all(len(line["participants"]) == 2 for line in result.history if line["phase"] == "round")


@cases
def test_bytes_are_those_of_the_serialised_messages(case, monkeypatch):
    sent = {"up": 0, "down": 0}
    wire = {"up": 0, "down": 0}
    exchange = Federation._exchange

    def count(self, step, clients, missing):
        method = self.method
        backend = self.backend

        class Tap:
            def __getattr__(self, name):
                return getattr(backend, name)

            def exchange(self, step, messages, ctx):
                replies = backend.exchange(step, messages, ctx)
                for direction, group in (("down", messages), ("up", replies.messages)):
                    if getattr(step, direction):
                        for message in group.values():
                            blob = message.to_bytes()
                            again = Message.from_bytes(blob)
                            assert dict(again.tensors()).keys() == dict(message.tensors()).keys()
                            sent[direction] += again.nbytes()
                            wire[direction] += len(blob)
                return replies

        self.backend = Tap()
        try:
            return exchange(self, step, clients, missing)
        finally:
            self.backend, self.method = backend, method

    monkeypatch.setattr(Federation, "_exchange", count)
    result = run_case(case)
    assert result.cost.total("up") == sent["up"]
    assert result.cost.total("down") == sent["down"]
    assert result.cost.wire == wire


@cases
def test_only_declared_models_travel_and_no_inputs(case, monkeypatch):
    kind = methods.find(case.method)
    count = Federation._exchange
    clients = synthetic()
    width = clients.input_shape[-1] * clients.input_shape[-2]

    def look(self, step, ids, missing):
        fuse = type(self.method).fuse

        def spy(method, server, replies, step, ctx):
            for reply in replies.values():
                assert set(reply.params) <= kind.shares
                for name, tensor in reply.data.items():
                    private = tensor.dim() == 4 and tensor.shape[-1] * tensor.shape[-2] == width
                    assert not private or tensor.shape[1] > 1, f"{name} looks like images"
            return fuse(method, server, replies, step, ctx)

        monkeypatch.setattr(type(self.method), "fuse", spy)
        try:
            return count(self, step, ids, missing)
        finally:
            monkeypatch.setattr(type(self.method), "fuse", fuse)

    monkeypatch.setattr(Federation, "_exchange", look)
    run_case(case)


@cases
def test_resume_after_any_round_gives_the_same_run(case, tmp_path):
    named = replace(case)
    run_case(named, rounds=3, out=tmp_path / "whole", digits=True)
    for stop in (0, 1, 2):
        out = tmp_path / f"stopped-{stop}"

        class Stopped(Exception):
            pass

        def stop_here(line, stop=stop, error=Stopped):
            if line["round"] == stop and (stop > 0 or line["phase"] == "before"):
                raise error

        try:
            run_case(named, rounds=3, out=out, digits=True, observers=[stop_here])
        except Stopped:
            resume(out)
        for file in ("history.jsonl", "result.json"):
            assert timeless(out / file) == timeless(tmp_path / "whole" / file), (stop, file)


@cases
def test_a_client_with_one_sample_and_a_client_with_one_class_take_part(case):
    result = run_case(case, sizes=(1, 6, 20), single_class=1)
    assert len(result.accuracy()["per_client"]) == 3


@pytest.mark.parametrize("case", [case for case in CASES if case.off], ids=lambda case: case.id)
def test_switched_off_it_is_its_base_method(case):
    off = run_case(replace(case, options={**case.options, **(case.off or {})}))
    base = run_case(Case(case.base, case.models, case.base_options, case.public, case.feature_dim))
    assert_same(states(off), states(base))


def timeless(path):
    def strip(value):
        if isinstance(value, dict):
            return {k: strip(v) for k, v in value.items() if k not in ("seconds", "peak_memory")}
        return [strip(v) for v in value] if isinstance(value, list) else value

    if path.suffix == ".jsonl":
        return [strip(json.loads(line)) for line in path.read_text().splitlines()]
    return strip(json.loads(path.read_text()))
