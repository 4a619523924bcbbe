"""The numbers of a run do not depend on how many threads torch may use, and the server takes one of them."""

import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from torch import nn

import polyfed as pf
from polyfed.core.message import Message
from polyfed.core.method import Method, Plan, Step
from polyfed.core.stage import Stage
from polyfed.flower.site import Site
from polyfed.flower.sitedata import SiteData

sys.path.insert(0, str(Path(__file__).parents[1] / "contract"))
from table import CASES, everyday, run_case, synthetic

AT_SERVER = [case for case in CASES if case.method in ("fedfd", "fedmd_global", "heterofl", "pfnm") or case.public]


@pytest.fixture
def threads():
    """Set the number of torch's threads, and put it back."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


def without_time(lines):
    return [{key: value for key, value in line.items() if key != "seconds"} for line in lines]


def assert_same(one, other):
    assert without_time(one.history) == without_time(other.history)
    for client in one.models:
        ours, theirs = one.models[client].state_dict(), other.models[client].state_dict()
        assert all(torch.equal(ours[name], theirs[name]) for name in ours), client


@everyday(AT_SERVER, few=True)
def test_the_bits_of_a_run_do_not_depend_on_the_number_of_threads(case, threads):
    runs = []
    for number in (1, 3):
        threads(number)
        runs.append(run_case(case, engine="sequential"))
        assert torch.get_num_threads() == number
    assert_same(*runs)


@pytest.mark.parametrize("model", ["mlp:2x200", "cnn:4-8,bn"])
def test_stacks_do_not_depend_on_the_number_of_threads(model, threads):
    runs = []
    for number in (1, 2, 3):
        threads(number)
        runs.append(pf.run("fedavg", synthetic(6), [model], 2, engine="batched", workers=2))
    assert_same(runs[0], runs[1])
    assert_same(runs[0], runs[2])


@dataclass(frozen=True)
class Counting(Method):
    """Notes how many threads torch may use in every hook."""

    name = "counting"
    seen: dict = field(default_factory=dict, compare=False)

    def note(self, hook):
        self.seen.setdefault(hook, set()).add(torch.get_num_threads())

    def plan(self):
        return Plan(before=(Step("first"),))

    def setup_server(self, server, infos, ctx):
        self.note("setup_server")
        server.models["main"] = nn.Sequential(nn.Flatten(), nn.Linear(64, 3))

    def setup_client(self, client, ctx):
        self.note("setup_client")

    def send(self, server, info, step, ctx):
        self.note("send")
        return Message()

    def loss(self, nets, batch, aux):
        self.note("loss")
        return super().loss(nets, batch, aux)

    def local(self, client, step, ctx):
        self.note("local")
        yield Stage(self.loss)
        return Message()

    def fuse(self, server, replies, step, ctx):
        self.note("fuse")

    def predict(self, party, x, ctx):
        self.note("predict")
        return super().predict(party, x, ctx)


HOOKS = {"setup_server", "setup_client", "send", "loss", "local", "fuse", "predict"}


@pytest.mark.parametrize("engine", ["sequential", "threads", "batched", "auto"])
def test_every_hook_has_one_thread(engine, threads):
    threads(3)
    method = Counting()
    pf.run(method, synthetic(3), ["mlp:1x8"], 1, engine=engine, workers=2)
    assert method.seen == {hook: {1} for hook in HOOKS}
    assert torch.get_num_threads() == 3


class CountingNet(nn.Module):
    """Notes how many threads torch may use when it is made and tried."""

    seen: ClassVar[set] = set()

    def __init__(self, input_shape, num_classes):
        super().__init__()
        self.seen.add(torch.get_num_threads())
        self.layer = nn.Linear(64, num_classes)

    def forward(self, x):
        self.seen.add(torch.get_num_threads())
        return self.layer(x.flatten(1))


def test_networks_are_made_and_tried_on_one_thread(threads):
    threads(3)
    CountingNet.seen.clear()
    pf.run("local", synthetic(2), [CountingNet], 1, engine="sequential")
    assert CountingNet.seen == {1}
    assert torch.get_num_threads() == 3


def test_a_site_works_on_one_thread(threads, tmp_path):
    threads(3)
    method = Counting()
    train, _ = synthetic(1).client(0)
    site = Site("here", "mlp:1x8", SiteData(train, train, 3), tmp_path, say=lambda text: None)
    site.method = lambda head: method
    training = {**vars(pf.Training())}
    run = {"federation": "0" * 16, "seed": 0, "feature_dim": None, "feature_adapter": "linear", "rounds": 1}
    run |= {"method": "local", "options": {}}
    head = {"run": {**run, "training": training, "public_classes": None}, "id": 0, "architecture": "mlp:1x8"}
    head |= {"round": 1, "phase": "round", "position": 0, "clients": 1, "participants": [0]}
    head |= {"step": {"name": "main", "who": "selected", "down": True, "up": True}}
    for kind in ("work", "measure"):
        answer, _ = site.answer({**head, "kind": kind}, b"")
        assert "error" not in answer, answer
    assert {"setup_client", "loss", "local", "predict"} <= set(method.seen)
    assert set.union(*method.seen.values()) == {1}  # also the server's hooks, in the rehearsal that says what leaves
