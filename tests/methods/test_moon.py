"""MOON: the acceptance properties of its spec."""

import math

import pytest
import torch
from tests.contract.table import synthetic
from torch.nn import functional as F

import polyfed as pf
from polyfed.api import prepare
from polyfed.config import Networks
from polyfed.core.errors import InputError
from polyfed.core.nets import Net
from polyfed.core.settings import Participation, Settings
from polyfed.core.stage import Batch
from polyfed.methods.fedavg import FedAvg
from polyfed.methods.heterofl import HeteroFL
from polyfed.methods.moon import Moon, contrast
from polyfed.methods.moon_hetero import MoonHetero
from polyfed.models import build

SGD = pf.Training(epochs=2, batch_size=8, lr=0.05)
WIDTHS = ("cnn:4-8,bn@1", "cnn:4-8,bn@0.5")


def federation(method, rounds=2, models=("mlp:1x8",), share=1.0, clients=3, **more):
    settings = Settings(rounds, training=SGD, participation=Participation(share))
    made = prepare(method, synthetic(clients), list(models), settings, **more)
    made.run()
    return made


def test_the_term_by_hand():
    """cos(z, near) = 1 and 0, cos(z, far) = 0 and 0.6."""
    z, near = torch.tensor([[2.0, 0.0], [0.0, 1.0]]), torch.tensor([[1.0, 0.0], [3.0, 0.0]])
    far = torch.tensor([[0.0, 5.0], [0.8, 0.6]])
    first = -math.log(math.exp(1 / 0.5) / (math.exp(1 / 0.5) + math.exp(0)))
    second = -math.log(math.exp(0) / (math.exp(0) + math.exp(0.6 / 0.5)))
    assert float(contrast(z, near, [far], 0.5)) == pytest.approx((first + second) / 2, rel=1e-6)
    twice = -math.log(math.exp(1) / (math.exp(1) + 2 * math.exp(0)))
    assert float(contrast(z[:1], near[:1], [far[:1], far[:1]], 1.0)) == pytest.approx(twice, rel=1e-6)


def test_where_both_networks_are_the_same_it_is_log_two_and_moves_nothing():
    z = torch.randn(5, 4, generator=torch.Generator().manual_seed(0)).requires_grad_()
    near = torch.randn(5, 4, generator=torch.Generator().manual_seed(1))
    term = contrast(z, near, [near], 0.5)
    assert float(term.detach()) == pytest.approx(math.log(2), rel=1e-6)
    assert torch.equal(torch.autograd.grad(term, z)[0], torch.zeros(5, 4))


@pytest.mark.parametrize("temperature", [0.5, 2.0])
def test_its_bounds(temperature):
    z = torch.tensor([[1.0, 2.0]])
    low, high = (math.log(1 + math.exp(sign * 2 / temperature)) for sign in (-1, 1))
    assert float(contrast(z, z, [-z], temperature)) == pytest.approx(low, rel=1e-5)
    assert float(contrast(z, -z, [z], temperature)) == pytest.approx(high, rel=1e-5)


def test_the_loss_is_cross_entropy_and_mu_times_the_term_of_frozen_networks_in_prediction_mode():
    nets = [build("cnn:4,bn", (1, 8, 8), 3) for _ in range(3)]
    x = torch.randn(6, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    y = torch.tensor([0, 1, 2, 0, 1, 2])
    for net in nets:  # statistics of their own, so that prediction is not what training computes
        net.train()
        net(3 * x + 1)
    near, far = ({n: t.clone() for n, t in net.state_dict().items() if t.is_floating_point()} for net in nets[1:])
    for net in nets[1:]:
        net.eval()
    with torch.no_grad():
        expected_near, expected_far = nets[1].features(x), nets[2].features(x)
    before = {n: t.clone() for n, t in nets[0].state_dict().items()}
    aux = {"global": near, "previous": {"0": far}}
    loss = Moon(mu=3.0, temperature=0.7).loss({"main": Net(nets[0])}, Batch(x, y), aux)
    moved = {n: t.clone() for n, t in nets[0].state_dict().items()}
    nets[0].load_state_dict(before)
    nets[0].train()
    z = nets[0].features(x)
    term = contrast(z, expected_near, [expected_far], 0.7)
    torch.testing.assert_close(loss, F.cross_entropy(nets[0].head(z), y) + 3.0 * term)
    assert all(torch.equal(moved[n], t) for n, t in nets[0].state_dict().items())  # statistics moved by one pass only
    assert not any(t.requires_grad for t in (*near.values(), *far.values()))


@pytest.mark.parametrize("models", [["mlp:1x8"], ["mlp:1x8", "mlp:2x8"], ["cnn:4,bn"]])
def test_the_first_round_is_fedavgs_and_the_second_is_not(models):
    ours, plain = (federation(m, 1, models) for m in (Moon(mu=5.0), FedAvg()))
    for name, tensor in plain.server.state.items():
        assert torch.equal(ours.server.state[name], tensor), name
    ours, plain = (federation(m, 2, models) for m in (Moon(mu=5.0), FedAvg()))
    assert not torch.allclose(ours.server.state["head.weight"], plain.server.state["head.weight"], rtol=1e-3)


def test_a_projection_is_trained_and_shared_like_the_rest():
    """Eight features become five numbers, which the term compares and the classifier sees."""
    five = Networks(feature_dim=5)
    off, plain = (federation(m, 2, networks=five) for m in (Moon(mu=0.0), FedAvg()))
    first, once = (federation(m, 1, networks=five) for m in (Moon(mu=5.0), FedAvg()))
    assert plain.server.state["projection.weight"].shape == (5, 8)
    assert plain.server.main.features(torch.zeros(2, 1, 8, 8)).shape == (2, 5)
    for name, tensor in plain.server.state.items():
        assert torch.equal(off.server.state[name], tensor), name
        assert torch.equal(first.server.state[name], once.server.state[name]), name
    pulled = federation(Moon(mu=5.0), 2, networks=five).server.state["projection.weight"]
    assert not torch.allclose(pulled, plain.server.state["projection.weight"], rtol=1e-3)


@pytest.mark.parametrize("option", [{"temperature": 5.0}, {"mu": 1.0}, {"previous": 2}])
def test_every_option_acts(option):
    one, other = (federation(Moon(**{"mu": 5.0, **more}), 3) for more in ({}, option))
    assert not torch.allclose(one.server.state["head.weight"], other.server.state["head.weight"], rtol=1e-4)


@pytest.mark.parametrize("previous", [1, 2])
def test_a_client_keeps_the_networks_that_it_returned_last(previous, monkeypatch):
    returned = {}
    fuse = Moon.fuse

    def look(self, server, replies, step, ctx):
        for client, reply in replies.items():
            returned.setdefault(client, []).append({n: t.clone() for n, t in reply.params["main"].items()})
        fuse(self, server, replies, step, ctx)

    monkeypatch.setattr(Moon, "fuse", look)
    run = federation(Moon(previous=previous), 4, share=0.5, clients=4)
    assert {len(states) for states in returned.values()} & {1, 2, 3}
    for client, record in run.backend.store.records.items():
        kept = record.memory.get("previous", [])
        assert len(kept) == min(previous, len(returned.get(client, [])))
        for state, expected in zip(kept, reversed(returned.get(client, [])), strict=False):
            assert all(torch.equal(state[name], tensor) for name, tensor in expected.items())


def test_the_received_network_is_the_clients_own_architecture_filled_from_the_server():
    run = federation(Moon(), 2, ["mlp:1x8", "mlp:2x8"], clients=4)
    for client in (0, 1):
        party = run.backend.store.open(client, run.ctx, scratch=True)
        party.inbox = run.method.send(run.server, run.backend.infos[client], pf.Step(), run.ctx)
        run.method.receive(party, pf.Step(), run.ctx)
        aux = run.method.stage(party, run.ctx).aux
        assert aux["global"].keys() == run.ctx.blueprints[run.backend.infos[client].architecture].shapes.keys()
        for name, tensor in aux["global"].items():
            assert torch.equal(tensor, run.server.state[name])
            assert not torch.equal(tensor, aux["previous"]["0"][name])


def test_bytes_are_fedavgs():
    run = federation(Moon(), rounds=2)
    size = 4 * sum(tensor.numel() for tensor in run.server.state.values())
    assert run.meter.bytes["down"] == dict.fromkeys(range(3), 2 * size)
    assert run.meter.bytes["up"] == dict.fromkeys(range(3), 2 * (size + 8))


def test_without_the_term_nothing_is_kept():
    run = federation(Moon(mu=0.0))
    assert not any(record.memory for record in run.backend.store.records.values())


@pytest.mark.parametrize(
    ("option", "words"),
    [
        ({"mu": -1.0}, "mu must not be negative"),
        ({"temperature": 0.0}, "temperature must be above 0"),
        ({"previous": 0}, "previous must be at least 1"),
    ],
)
def test_what_cannot_be_is_refused(option, words):
    with pytest.raises(InputError, match=words):
        Moon(**option)


# --- on width slices ---


def test_of_slices_the_first_round_is_heterofls_and_the_second_is_not():
    ours, plain = (federation(m, 1, WIDTHS) for m in (MoonHetero(mu=5.0), HeteroFL()))
    assert ours.server.state.keys() == plain.server.state.keys()
    for name, tensor in plain.server.state.items():  # static statistics among them
        assert torch.equal(ours.server.state[name], tensor), name
    ours, plain = (federation(m, 2, WIDTHS) for m in (MoonHetero(mu=5.0), HeteroFL()))
    assert not torch.allclose(ours.server.state["head.weight"], plain.server.state["head.weight"], rtol=1e-3)
    assert ours.meter.bytes == plain.meter.bytes


@pytest.mark.parametrize("static", [True, False])
def test_the_loss_of_a_slice_by_hand(static):
    """With static BatchNorm all three networks use the batch's statistics; class 2 is absent, its logit 0."""
    nets = [build("cnn:4-8,bn@0.5", (1, 8, 8), 3) for _ in range(3)]
    x = torch.randn(4, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    y, present = torch.tensor([0, 1, 1, 0]), torch.tensor([1.0, 1.0, 0.0])
    for net in nets:
        net.train()
        net(3 * x + 1)
    near, far = ({n: t.clone() for n, t in net.state_dict().items() if t.is_floating_point()} for net in nets[1:])
    before = {n: t.clone() for n, t in nets[0].state_dict().items()}
    aux = {"global": near, "previous": {"0": far}, "present": present}
    loss = MoonHetero(mu=3.0, temperature=0.7, static_bn=static).loss({"main": Net(nets[0])}, Batch(x, y), aux)
    assert static == all(torch.equal(before[n], t) for n, t in nets[0].state_dict().items())  # no statistics moved
    for net in nets[1:]:
        net.train(static)
    nets[0].load_state_dict(before)
    with torch.no_grad():
        beside = [net.features(x) for net in nets[1:]]
    z = nets[0].features(x)
    term = contrast(z, beside[0], beside[1:], 0.7)
    torch.testing.assert_close(loss, F.cross_entropy(nets[0].head(z) * present, y) + 3.0 * term)


def test_a_slice_that_was_only_measured_is_no_previous_network():
    run = federation(MoonHetero(previous=2), 1, WIDTHS)
    assert run.plan.round[-1].name == "statistics"
    for record in run.backend.store.records.values():
        (kept,) = record.memory["previous"]
        assert any(
            not torch.equal(kept[name], tensor) for name, tensor in record.states["main"].items() if name in kept
        )


def test_slices_need_widths_of_one_network():
    with pytest.raises(InputError, match=r"moon_hetero needs architectures of one family .*: use width rates of one"):
        federation(MoonHetero(), 1, ["mlp:1x8", "cnn:4-8"])
