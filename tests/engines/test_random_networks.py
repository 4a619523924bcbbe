"""Networks that draw random numbers by themselves: the same seed gives the same bits, whoever runs them and when."""

import logging
import random
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import polyfed as pf
from polyfed.build import make_blueprint
from polyfed.core.alone import train_alone
from polyfed.core.method import Method
from polyfed.core.samples import Samples
from polyfed.core.settings import Training
from polyfed.core.stage import Stage
from polyfed.engines.inprocess import InProcess

sys.path.insert(0, str(Path(__file__).parents[1] / "contract"))
from table import synthetic


class FunctionalDropout(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(64, 16), nn.Linear(16, 3)

    def forward(self, x):
        return self.last(F.dropout(self.first(x.flatten(1)).relu(), 0.5, self.training))


class AlwaysDropout(FunctionalDropout):
    """Drops in prediction, too: the flag was forgotten."""

    def forward(self, x):
        return self.last(F.dropout(self.first(x.flatten(1)).relu(), 0.5))


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.LSTM(8, 8, num_layers=2, dropout=0.5, batch_first=True), nn.Linear(8, 3)

    def forward(self, x):
        return self.last(self.first(x.flatten(1, 2))[0][:, -1])


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.3, batch_first=True)
        self.last = nn.Linear(8, 3)

    def forward(self, x):
        return self.last(self.first(x.flatten(1, 2)).mean(1))


class Noise(FunctionalDropout):
    """Draws in every way, in training and in prediction."""

    def forward(self, x):
        x = x.flatten(1) + 0.3 * torch.randn(len(x), 64) + 0.1 * torch.rand_like(x.flatten(1))
        return self.last(self.first(x).relu() * torch.bernoulli(torch.full((16,), 0.8)))


class OtherGenerators(FunctionalDropout):
    """Draws from Python's and NumPy's generators (stochastic depth, mixing of samples)."""

    def forward(self, x):
        factor = (random.random() + 0.5) * float(np.random.uniform(0.5, 1.5))
        return self.last(self.first(x.flatten(1)).relu() * factor)


class ModuleDropout(FunctionalDropout):
    def __init__(self):
        super().__init__()
        self.drop = nn.Dropout(0.5)

    def forward(self, x):
        return self.last(self.drop(self.first(x.flatten(1)).relu()))


RANDOM = [FunctionalDropout, AlwaysDropout, Recurrent, Attention, Noise, OtherGenerators]
EVERYDAY = (FunctionalDropout, Recurrent, ModuleDropout)  # one of each kind; make test-long has the others
networks = pytest.mark.parametrize(
    "network",
    [
        pytest.param(kind, id=kind.__name__, marks=() if kind in EVERYDAY else pytest.mark.long)
        for kind in (*RANDOM, ModuleDropout)
    ],
)


def run(network, disturb=0, method="fedavg", **more):
    """Run after some draws from the global generator, which must not matter."""
    torch.manual_seed(disturb)
    return pf.run(
        method, synthetic(3), [network], more.pop("rounds", 2), pf.Training(epochs=2, batch_size=8), seed=3, **more
    )


def without_time(lines):
    return [{key: value for key, value in line.items() if key not in ("seconds", "engine")} for line in lines]


def assert_same(one, other):
    assert without_time(one.history) == without_time(other.history)
    for client in one.models:
        ours, theirs = one.models[client].state_dict(), other.models[client].state_dict()
        assert all(torch.equal(ours[name], theirs[name]) for name in ours), client


@networks
def test_workers_order_and_what_was_drawn_before_do_not_matter(network, monkeypatch):
    alone = run(network, engine="sequential")
    assert_same(alone, run(network, disturb=1, engine="sequential"))
    for workers in (1, 2, 4):
        assert_same(alone, run(network, disturb=workers, engine="threads", workers=workers))
    exchange = InProcess.exchange

    def backwards(self, step, messages, ctx):
        return exchange(self, step, dict(reversed(messages.items())), ctx)

    monkeypatch.setattr(InProcess, "exchange", backwards)
    assert_same(alone, run(network, disturb=7, engine="threads", workers=2))


@networks
@pytest.mark.parametrize("engine", ["batched", "auto"])
def test_stacking_engines_run_them_one_by_one_and_the_log_says_why(network, engine, caplog):
    alone = run(network, engine="sequential")
    with caplog.at_level(logging.INFO, logger="polyfed.engine"):
        other = run(network, disturb=1, engine=engine, workers=2)
    if network in RANDOM:
        assert_same(alone, other)
        assert f"Clients of {network.__name__} run one by one: their network draws random numbers" in caplog.text
        assert caplog.text.count("run one by one") == 1
        return
    for client in alone.models:
        ours, theirs = alone.models[client].state_dict(), other.models[client].state_dict()
        assert all(torch.allclose(ours[name], theirs[name], atol=1e-5) for name in ours)


@networks
def test_other_seeds_rounds_and_clients_draw_other_numbers(network):
    blueprint = make_blueprint(network, network.__name__, (1, 8, 8), 3, 0, None, "linear")
    assert blueprint.random == (network in RANDOM)

    def after(client, seed, rounds=1):
        same = pf.Clients.from_parts([(parts.inputs().numpy(), parts.labels().numpy())] * 2, test=(x, y), num_classes=3)
        torch.manual_seed(0)
        return pf.run("local", same, [network], rounds, seed=seed).models[client].state_dict()

    parts = synthetic(1).client(0)[0]
    x, y = parts.inputs().numpy()[:4], parts.labels().numpy()[:4]
    first = after(0, 0)
    assert any(not torch.equal(first[n], t) for n, t in after(1, 0).items())
    assert any(not torch.equal(first[n], t) for n, t in after(0, 1).items())


@networks
def test_a_resumed_run_is_the_same(network, tmp_path):
    class Stopped(Exception):
        pass

    def stop(line):
        if line["round"] == 1:
            raise Stopped

    whole = run(network, rounds=3, out=tmp_path / "whole", checkpoint_seconds=0.0)
    with pytest.raises(Stopped):
        run(network, rounds=3, out=tmp_path / "stopped", checkpoint_seconds=0.0, observers=[stop])
    again = run(network, disturb=5, rounds=3, out=tmp_path / "stopped", checkpoint_seconds=0.0, resume=True)
    assert_same(whole, again)


@networks
def test_what_a_client_computes_between_stages_and_what_the_server_computes(network):
    options = {"public_epochs": 0, "private_epochs": 1, "subset": 10, "digest_epochs": 1}
    runs = [run(network, disturb, pf.FedMDGlobal(**options), engine="threads", workers=2) for disturb in (0, 1)]
    assert_same(*runs)
    runs = [run(network, disturb, pf.Ensemble(), engine="threads", workers=2) for disturb in (0, 1)]
    assert_same(*runs)


class Unseeded(Method):
    """A method that builds its side model, and the server's, as anybody would."""

    name = "unseeded"

    def setup_server(self, server, infos, ctx):
        server.models["main"] = nn.Sequential(nn.Flatten(), nn.Linear(64, 3))

    def setup_client(self, client, ctx):
        client.models["side"] = nn.Sequential(nn.Flatten(), nn.Linear(64, 3))

    def both(self, nets, batch, aux):
        return F.cross_entropy(nets["main"](batch.x) + nets["side"](batch.x), batch.y)

    def local(self, client, step, ctx):
        yield Stage(self.both, trainable={"main": None})


def test_models_that_a_method_builds_itself_come_from_the_seed():
    runs = [run("mlp:1x8", disturb, Unseeded(), engine="threads", workers=2) for disturb in (0, 1)]
    assert_same(*runs)


@networks
def test_training_one_network_outside_of_a_federation(network):
    found = []
    for disturb in (0, 1):
        torch.manual_seed(0)
        model = network()
        torch.manual_seed(disturb)
        data = Samples(torch.arange(4 * 64.0).view(4, 1, 8, 8) / 256, torch.arange(4) % 3)
        stage = Stage(lambda nets, batch, aux: F.cross_entropy(nets["main"](batch.x), batch.y), data=data)
        train_alone(model, stage, Training(epochs=2))
        found.append(model.last.weight.detach())
    assert torch.equal(*found)
