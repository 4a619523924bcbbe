"""A method in a file of one's own, between real processes: who has the file and allows it takes part."""

from __future__ import annotations

import problem
import pytest

import polyfed as pf
from polyfed.config import Config
from polyfed.core.errors import InputError
from polyfed.flower.serve import Hosting, serve
from polyfed.methods.fedproto import FedProto

FILE = '''
from dataclasses import dataclass
from typing import ClassVar

import torch

import polyfed as pf


@dataclass(frozen=True)
class Heads(pf.Method):
    """Averages the last layers, which travel as data."""

    name: ClassVar[str] = "own_heads"
    sends: ClassVar[str] = "the last layer"
    needs: ClassVar[frozenset[str]] = frozenset({"feature_dim"})

    def send(self, server, info, step, ctx):
        return pf.Message(data=dict(server.memory.get("head", {})))

    def receive(self, client, step, ctx):
        if client.inbox.data:
            client.main.head.load_state_dict(client.inbox.data)

    def local(self, client, step, ctx):
        yield pf.Stage(self.loss)
        return pf.Message(data={n: t.clone() for n, t in client.main.head.state_dict().items()})

    def fuse(self, server, replies, step, ctx):
        names = next(iter(replies.values())).data
        server.memory["head"] = {n: torch.stack([r.data[n] for r in replies.values()]).mean(0) for n in names}
'''
MODELS = {"north": "mlp:1x16", "south": "mlp:2x16", "west": "problem:own"}
OWN = "own_method_file:Heads"


@pytest.mark.timeout(600)
def test_a_method_of_ones_own_file_gives_the_numbers_of_a_simulation(processes, monkeypatch):
    (processes.folder / "own_method_file.py").write_text(FILE)
    settings = ["--method", OWN, "--feature-dim", "8", "--rounds", "2", "--batch-size", "8"]
    server = processes.serve(*settings, "--insecure", "--sites", ",".join(problem.SITES), "--wait", "240")
    how = ["--insecure", "--allow", OWN]
    sites = {n: processes.join(n, *how, "--name", n, model=MODELS[n]) for n in problem.SITES}
    assert processes.finish(server) == 0, processes.logs()
    assert all(processes.finish(process) == 0 for process in sites.values()), processes.logs()
    monkeypatch.chdir(processes.folder)
    training = pf.Training(epochs=1, batch_size=8, lr=0.05)
    models = ["mlp:1x16", "mlp:2x16", problem.own]
    alone = pf.run(OWN, problem.clients(), models, rounds=2, feature_dim=8, training=training, engine="threads")
    assert [line["accuracy"]["per_client"] for line in processes.history()] == [
        line["accuracy"]["per_client"] for line in alone.history
    ]
    assert "Model weights are among it" in processes.log("north")


@pytest.mark.timeout(300)
def test_a_site_that_does_not_allow_the_file_says_what_to_do(processes):
    (processes.folder / "own_method_file.py").write_text(FILE)
    settings = ["--method", OWN, "--feature-dim", "8", "--rounds", "1", "--insecure", "--sites", "north"]
    server = processes.serve(*settings, "--wait", "20")
    site = processes.join("north", "--insecure", "--name", "north", model="mlp:1x16")
    assert processes.finish(site) == 2, processes.logs()
    assert f"does not know the method '{OWN}'" in processes.log("north")
    assert f"--allow {OWN}" in processes.log("north")
    processes.finish(server)


def test_a_class_of_a_script_cannot_be_served(tmp_path):
    class Mine(FedProto):
        name = "mine"

    with pytest.raises(InputError, match="mine is a class of a script"):
        serve(Config(Mine(), "mine"), tmp_path / "run", Hosting())
