"""The same apps in Flower's simulation runtime give the same numbers, and a run is resumed from its directory."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from types import SimpleNamespace
from typing import ClassVar

import flwr.simulation
import numpy as np
import problem
import pytest
import torch
from flwr.supercore.task_identity import TaskIdentity
from test_same_result import TRAINING, tree, trees_equal

import polyfed as pf
from polyfed.build import make_blueprint
from polyfed.config import Config
from polyfed.core.errors import InputError, PolyfedError
from polyfed.core.settings import Evaluation
from polyfed.flower.agree import agree
from polyfed.flower.describe import introduce
from polyfed.flower.running import Given, make_federation
from polyfed.flower.serve import start_directory
from polyfed.flower.site import Site
from polyfed.flower.sitedata import as_site_data, check_data

needs_ray = pytest.mark.skipif(
    importlib.util.find_spec("ray") is None, reason="needs Ray: pip install 'polyfed[simulation]'"
)
MODELS = ["mlp:1x16", "mlp:2x16", "cnn:4-8"]


def run(engine, out=None, **more):
    settings = {"rounds": 2, "training": TRAINING, "feature_dim": 8, "engine": engine, "out": out}
    return pf.run("fedproto", problem.clients(), MODELS, **(settings | more))


def states(result):
    return {client: dict(result.models[client].state_dict()) for client in result.models}


class GridHere:
    """Flower's grid without its runtime: a message is answered when it is posted."""

    def __init__(self, app, nodes):
        self.app, self.nodes, self.replies = app, nodes, {}

    def get_node_ids(self):
        return list(range(self.nodes))

    def push_messages(self, messages):
        for message in messages:
            name = f"message-{len(self.replies)}"
            message.metadata.__dict__["_message_id"] = name
            node = SimpleNamespace(node_config={"partition-id": message.metadata.dst_node_id})
            self.replies[name] = self.app(message, node)
            yield name

    def pull_messages(self, names):
        return [self.replies[name] for name in names]

    def send_and_receive(self, messages):
        return self.pull_messages(list(self.push_messages(messages)))


@pytest.fixture
def no_runtime(monkeypatch):
    """The apps of the simulation in this process, without Ray."""

    def run_simulation(server_app, client_app, num_supernodes, backend_config):
        server_app(GridHere(client_app, num_supernodes), None)

    for name in ("_run_id", "_task_id", "_node_id"):
        monkeypatch.setattr(TaskIdentity, name, 1)
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: name == "ray" or find(name, *rest))
    monkeypatch.setattr(flwr.simulation, "run_simulation", run_simulation)


@dataclass(frozen=True)
class Scaled(pf.FedAvg):
    """What a client receives depends on the round, the phase and who took part, and `receive` unpacks it."""

    name: ClassVar[str] = "scaled"

    def send(self, server, info, step, ctx):
        message = super().send(server, info, step, ctx)
        share = 0.5 if info.id in ctx.participants else 1.0
        message.data["scale"] = torch.tensor(share * ctx.round * len(ctx.phase))
        return message

    def receive(self, client, step, ctx):
        super().receive(client, step, ctx)
        if step.name == "evaluate":
            for tensor in client.main.state_dict().values():
                tensor.mul_(client.inbox.data["scale"])


def test_what_clients_end_up_with_is_the_same_as_in_process(no_runtime):
    def run(engine):
        return pf.run(Scaled(), problem.clients(), "mlp:1x8", 3, TRAINING, participation=0.4, engine=engine)

    alone, together = run("sequential"), run("flower")
    assert [line["accuracy"] for line in alone.history] == [line["accuracy"] for line in together.history]
    assert trees_equal(states(alone), states(together))


@pytest.mark.parametrize(("method", "unit"), [("fedproto", "sample"), ("fedavg", "client")])
def test_privacy_is_the_same_as_in_process(method, unit, no_runtime):
    pytest.importorskip("dp_accounting")
    privacy = pf.Privacy(epsilon=6.0, unit=unit)

    def run(engine):
        return pf.run(method, problem.clients(), "mlp:1x8", 2, TRAINING, engine=engine, privacy=privacy, feature_dim=8)

    alone, together = run("sequential"), run("flower")
    assert [line["privacy"] for line in alone.history] == [line["privacy"] for line in together.history]
    assert not any("missing" in line for line in together.history)
    assert trees_equal(states(alone), states(together))


def test_sites_that_have_nothing_in_common_are_not_averaged(tmp_path):
    config = Config(pf.FedAvg(), "fedavg", 1)
    directory, run = start_directory(config, tmp_path / "run", problem.SITES, False)
    introductions = {}
    for number, model in enumerate((problem.own, "mlp:1x8", "mlp:1x9")):
        name = problem.SITES[number]
        site = Site(name, model, problem.part(number), tmp_path / name, say=lambda text: None)
        introductions[name] = site.answer({"kind": "describe", "run": run}, b"")
    given = Given(config.method, config.settings(), run, problem.SITES, directory)
    with pytest.raises(InputError, match=r"its own \(own, mlp:1x8, mlp:1x9\), so nothing would be averaged"):
        make_federation(None, given, introductions, ())


@pytest.mark.parametrize(
    ("method", "more", "words"),
    [
        ("centralized", {}, "all data in one place"),
        ("local", {"evaluate_samples": 5}, "evaluate_samples is not for the engine 'flower'"),
    ],
)
def test_what_sites_cannot_do_is_refused_and_nothing_is_written(method, more, words, tmp_path, no_runtime):
    with pytest.raises(InputError, match=words):
        pf.run(method, problem.clients(), MODELS, engine="flower", out=tmp_path / "run", **more)
    assert not (tmp_path / "run").exists()


def test_without_ray_it_says_how_to_get_it(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(InputError, match=r"polyfed\[simulation\]"):
        run("flower")


@needs_ray
@pytest.mark.slow  # Ray takes about half a minute to start on two cores
def test_flowers_simulation_gives_the_numbers_of_our_own(tmp_path):
    alone = run("sequential")
    together = run("flower", tmp_path / "run")
    assert [line["accuracy"] for line in alone.history] == [line["accuracy"] for line in together.history]
    assert alone.cost.bytes == together.cost.bytes
    assert trees_equal(tree(alone.server), tree(together.server))
    assert trees_equal(states(alone), states(together))
    assert (tmp_path / "run" / "result.json").is_file()


class Enough(PolyfedError):
    """Somebody stops the run."""


@needs_ray
@pytest.mark.slow
def test_a_stopped_simulation_is_resumed(tmp_path):
    def stop(line):
        raise Enough("after one round")

    whole = run("sequential")
    with pytest.raises(Enough):
        run("flower", tmp_path / "run", observers=[stop])
    resumed = run("flower", tmp_path / "run", resume=True)
    assert [line["accuracy"] for line in whole.history] == [line["accuracy"] for line in resumed.history]
    assert trees_equal(states(whole), states(resumed))


def of_values():
    """Three sites that learn values, each with test data of its own."""
    rng = np.random.default_rng(5)

    def draw(n):
        x = rng.normal(size=(n, 4)).astype(np.float32)
        return x, 100 + 20 * x[:, 0]

    parts = [draw(20) for _ in range(3)]
    return pf.Clients.from_parts(parts, test=draw(30), own_test=0.25, validation=0.2, task="regression")


def worst_error(predictions, targets):
    return abs(predictions - targets).max()


def test_sites_measure_on_their_own_data_as_clients_do(no_runtime):
    def run(engine):
        options = {"engine": engine, "metrics": ["rmse", worst_error], "patience": 1, "progress": False}
        return pf.run("fedavg", of_values(), "mlp:1x8", 3, pf.Training(lr=1e-12), **options)

    alone, together = run("sequential"), run("flower")
    assert [line["accuracy"] for line in alone.history] == [line["accuracy"] for line in together.history]
    assert alone.accuracy()["personal"]["clients"] == [0, 1, 2]
    assert together.history[-1]["stopped"] == alone.history[-1]["stopped"]
    assert together.rounds == 2


def test_sites_of_different_tasks_or_units_are_refused():
    x, y = np.random.default_rng(0).normal(size=(12, 4)).astype(np.float32), np.arange(12) / 2

    def head(task, labels=y):
        data = as_site_data({"train": (x, labels), "test": (x, labels), "validation": (x, labels), "task": task})
        check_data(data)
        assert data.own_test is data.test  # its test samples are its own
        blueprint = make_blueprint("mlp:1x8", "mlp:1x8", (4,), data.num_classes, 0, None, "linear")
        return introduce(pf.FedAvg(), "mlp:1x8", data, blueprint)[0]

    plain, scaled = head("regression"), head(pf.Regression((3.0,), (2.0,)))
    agree({"north": plain, "south": head("regression")}, None, False)
    with pytest.raises(
        InputError, match=r"south learns regression with center \[3.0\] and spread \[2.0\], but site north"
    ):
        agree({"north": plain, "south": scaled}, None, False)
    with pytest.raises(InputError, match="south learns classification, but site north regression"):
        agree({"north": plain, "south": head(None, np.arange(12) % 2)}, None, False)
    assert plain["validation"] == 12


def test_patience_needs_a_site_with_validation_data(tmp_path):
    config = Config(pf.FedAvg(), "fedavg", 3, evaluation=Evaluation(patience=1))
    directory, run = start_directory(config, tmp_path / "run", problem.SITES[:1], False)
    site = Site("north", "mlp:1x8", problem.part(0), tmp_path / "north", say=lambda text: None)
    introductions = {"north": site.answer({"kind": "describe", "run": run}, b"")}
    given = Given(config.method, config.settings(), run, problem.SITES[:1], directory)
    with pytest.raises(InputError, match="patience needs validation data, but no site has any"):
        make_federation(None, given, introductions, ())
