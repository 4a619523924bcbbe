"""What the tests of methods with a small common model share: a tiny federation, stand-ins for networks, and FedAvg."""

import copy

import torch
from tests.contract.table import synthetic

import polyfed as pf
from polyfed.api import prepare
from polyfed.core.rng import seeded
from polyfed.core.settings import Participation, Settings
from polyfed.models import build

SGD = pf.Training(epochs=1, batch_size=8, lr=0.05)
FULL = pf.Training(epochs=1, batch_size=1000, lr=0.1)  # one step with all samples
MODELS = ("mlp:1x8", "mlp:2x12")


def federation(method, rounds=1, training=SGD, models=MODELS, clients=3, share=1.0, run=True):
    settings = Settings(rounds, training=training, participation=Participation(share))
    made = prepare(method, synthetic(clients), list(models), settings)
    if run:
        made.run()
    return made


def held(run, client, model="main"):
    """A client's tensors as they are."""
    return run.backend.store.records[client].states[model]


def start_of(spec, purpose="proxy"):
    """The common model as every party starts with it."""
    with seeded(0, f"init/{purpose}"):
        return build(spec, (1, 8, 8), 3)


def averaged(module, rounds, training, weighting, clients=3):
    """The state that FedAvg reaches with a given network."""
    method = pf.FedAvg(weighting=weighting, view="full")
    return federation(method, rounds, training, [copy.deepcopy(module)], clients).server.main.state_dict()


def assert_equal(found, expected):
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


def assert_close(found, expected, **tolerance):
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, **tolerance)


def size_of(module):
    return 4 * sum(tensor.numel() for tensor in module.state_dict().values() if tensor.is_floating_point())


class Stub:
    """A network that gives the same answers to everything."""

    def __init__(self, logits=None, features=None):
        self.logits, self.seen = logits, []
        self._features = features

    def __call__(self, x):
        return self.logits

    def features(self, x):
        return self._features

    def head(self, z):
        self.seen.append(z)
        return z if self.logits is None else self.logits

    def still(self):
        return self

    def eval(self):
        return self
