"""Layer-wise averaging, and averaging by architecture: of FedAvg, and of the methods that are built on it."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from tests.contract.table import synthetic

import polyfed as pf
from polyfed.api import prepare
from polyfed.core.message import Message
from polyfed.core.settings import Settings
from polyfed.methods.fedavg import FedAvg
from polyfed.methods.fednova import FedNova
from polyfed.methods.fedprox import FedProx
from polyfed.methods.moon import Moon
from polyfed.methods.scaffold import Scaffold

BASES = [FedAvg(), FedProx(mu=0.5), Scaffold(), FedNova(), Moon(mu=5.0)]
SHALLOW, DEEP = "resnet:1-1,w4,stem=pool", "resnet:2-1,w4,stem=pool"  # with BatchNorm; one block more
bases = pytest.mark.parametrize("method", BASES, ids=lambda method: method.name)


def made(method, models, clients=3, rounds=1, data=None):
    settings = Settings(rounds, training=pf.Training(epochs=1, batch_size=8, lr=0.05))
    return prepare(method, data or synthetic(clients), list(models), settings)


def finished(*given, **more):
    run = made(*given, **more)
    run.run()
    return run


def fuse(run, values, samples):
    """Let the server fuse replies of clients whose tensors all hold one number, after the same number of steps."""
    replies = {}
    for client, value in values.items():
        sent = run.method.send(run.server, run.backend.infos[client], pf.Step(), run.ctx).params["main"]
        state = {name: torch.full_like(tensor, value) for name, tensor in sent.items()}
        replies[client] = Message({"main": state}, meta={"samples": samples[client], "effective": 6.0})
    run.method.fuse(run.server, replies, pf.Step(), run.ctx)


@bases
def test_with_one_architecture_it_is_the_method_itself(method):
    whole, layers = (finished(replace(method, view=view), ["cnn:4,bn"], rounds=2) for view in ("full", "owned"))
    assert whole.server.state.keys() == layers.server.state.keys()
    for name, tensor in whole.server.state.items():
        assert torch.equal(layers.server.state[name], tensor), name
    assert layers.meter.bytes == whole.meter.bytes


@bases
def test_every_tensor_has_the_mean_of_its_owners_and_without_any_stays(method):
    """Samples 10 and 30, numbers 1 and 5: 4 by samples, 3 with SCAFFOLD's equal weights; also of statistics."""
    run = made(method, [SHALLOW, DEEP, DEEP])
    shallow = set(run.method.slots_of(run.ctx.blueprints[SHALLOW], run.ctx))
    alone = set(run.server.state) - shallow
    assert any("running_var" in name for name in alone) and all(name.startswith("stages.0.1.") for name in alone)
    fuse(run, {0: 1.0, 1: 5.0}, {0: 10, 1: 30})  # client 2 is away
    mean = 3.0 if isinstance(method, Scaffold) else 4.0
    for name, tensor in run.server.state.items():
        assert torch.equal(tensor, torch.full_like(tensor, 5.0 if name in alone else mean)), name
    before = {name: run.server.state[name].clone() for name in alone}
    fuse(run, {0: 2.0}, {0: 10})  # nobody has the deep block
    for name, tensor in run.server.state.items():
        assert torch.equal(tensor, before[name] if name in alone else torch.full_like(tensor, 2.0)), name


@bases
def test_a_block_with_one_owner_is_the_owners_after_training(method):
    run = finished(method, ["mlp:1x8", "mlp:1x8", "mlp:2x8"])
    own = run.backend.store.records[2].states["main"]
    deep = [name for name in run.server.state if name.startswith("layers.0.")]
    assert deep
    for name in deep:
        assert torch.equal(run.server.state[name], own[name]), name
        assert not torch.equal(own[name], run.ctx.blueprints["mlp:2x8"].initial[name]), name


def test_a_client_exchanges_its_own_network():
    run = finished(FedAvg(), [SHALLOW, DEEP])
    for client, info in run.backend.infos.items():
        initial = run.ctx.blueprints[info.architecture].initial.values()
        size = 4 * sum(tensor.numel() for tensor in initial if tensor.is_floating_point())
        assert run.meter.bytes["down"][client] == size
        assert run.meter.bytes["up"][client] == size + 8
    assert run.meter.bytes["down"][1] > run.meter.bytes["down"][0]


def drawn(others):
    """Four clients with samples by number; those of clients 1 and 3 depend on `others`."""
    seeds = [client if client % 2 == 0 else client + others for client in range(4)]
    rngs = [np.random.default_rng(seed) for seed in seeds]
    parts = [
        (rng.normal(size=(12 + 5 * c, 6)).astype(np.float32), rng.integers(0, 3, 12 + 5 * c))
        for c, rng in enumerate(rngs)
    ]
    return pf.Clients.from_parts(parts, test=parts[0], num_classes=3, normalize=False)


@bases
def test_architectures_apart_do_not_notice_each_other(method):
    """The clients of the other architecture get other samples: nothing of the first one's changes, in two rounds."""
    apart = replace(method, view="same_arch")
    one, two = (finished(apart, ["mlp:1x8", "mlp:2x8"], rounds=2, data=drawn(others)) for others in (0, 10))
    for key, tensor in one.server.state.items():
        assert torch.equal(two.server.state[key], tensor) == key.startswith("mlp:1x8::"), key


@pytest.mark.parametrize("view", ["owned", "shared:head"])
def test_fedprox_penalises_the_parameters_that_were_received(view):
    run = made(FedProx(view=view), [SHALLOW, DEEP])
    for client, info in enumerate(run.backend.infos.values()):
        party = run.backend.store.open(client, run.ctx, scratch=True)
        party.inbox = run.method.send(run.server, info, pf.Step(), run.ctx)
        own = {name for name, _ in party.main.named_parameters()}
        assert any("running_mean" in name for name in party.inbox.params["main"]) == (view == "owned")
        penalised = run.method.stage(party, run.ctx).aux["anchor"]
        assert set(penalised) == (own if view == "owned" else {"head.weight", "head.bias"})
        assert all(torch.equal(tensor, run.server.state[name]) for name, tensor in penalised.items())
