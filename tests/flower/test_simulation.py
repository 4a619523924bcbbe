"""The same apps in Flower's simulation runtime give the same numbers, and a run is resumed from its directory."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from types import SimpleNamespace
from typing import ClassVar

import flwr.simulation
import problem
import pytest
import torch
from flwr.supercore.task_identity import TaskIdentity
from test_same_result import TRAINING, tree, trees_equal

import polyfed as pf
from polyfed.config import Config
from polyfed.core.errors import InputError, PolyfedError
from polyfed.flower.serve import Given, convene, start_directory
from polyfed.flower.site import Site

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
    """Flower's grid without its runtime: a letter is answered when it is posted."""

    def __init__(self, app, nodes):
        self.app, self.nodes, self.replies = app, nodes, {}

    def get_node_ids(self):
        return list(range(self.nodes))

    def push_messages(self, letters):
        for letter in letters:
            name = f"letter-{len(self.replies)}"
            letter.metadata.__dict__["_message_id"] = name
            node = SimpleNamespace(node_config={"partition-id": letter.metadata.dst_node_id})
            self.replies[name] = self.app(letter, node)
            yield name

    def pull_messages(self, names):
        return [self.replies[name] for name in names]

    def send_and_receive(self, letters):
        return self.pull_messages(list(self.push_messages(letters)))


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


def test_sites_that_have_nothing_in_common_are_not_averaged(tmp_path):
    config = Config(pf.FedAvg(), "fedavg", 1)
    directory, run = start_directory(config, tmp_path / "run", problem.SITES, False)
    met = {}
    for number, model in enumerate((problem.own, "mlp:1x8", "mlp:1x9")):
        name = problem.SITES[number]
        site = Site(name, model, problem.part(number), tmp_path / name, say=lambda text: None)
        met[name] = site.answer({"kind": "describe", "run": run}, b"")
    given = Given(config.method, config.settings(), run, problem.SITES, directory)
    with pytest.raises(InputError, match=r"its own \(own, mlp:1x8, mlp:1x9\), so nothing would be averaged"):
        convene(None, given, met, ())


def test_pooled_data_is_refused():
    pytest.importorskip("ray")
    with pytest.raises(InputError, match="all data in one place"):
        pf.run("centralized", problem.clients(), MODELS, engine="flower")


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
