"""FedNova: the acceptance properties of its spec."""

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from tests.contract.table import unequal

import polyfed as pf
from polyfed.api import prepare
from polyfed.core.errors import InputError, MessageError
from polyfed.core.message import Message
from polyfed.core.settings import Settings
from polyfed.methods.fedavg import FedAvg
from polyfed.methods.fednova import FedNova
from polyfed.methods.fedprox import FedProx
from polyfed.ops.steps import effective_by_epoch, effective_steps

RATE = 0.1
SGD = pf.Training(epochs=2, batch_size=4, lr=RATE)
SIZES = (4, 8, 20)  # 2, 4 and 10 steps
PUSHES = (1.0, -2.0, 3.0)


def federation(method, clients, rounds=1, training=SGD, models=("mlp:1x8",)):
    made = prepare(method, clients, list(models), Settings(rounds, training=training))
    made.run()
    return made


@dataclass(frozen=True)
class Pushed(FedNova):
    """The gradient of every parameter is the value of the client's inputs, in every step."""

    name = "pushed"

    def loss(self, nets, batch, aux):
        push = batch.x.mean() * sum(p.sum() for p in nets["main"].parameters().values())
        return push if not self.mu else push + super().loss(nets, batch, aux) - self.cross_entropy(nets, batch, aux)

    def cross_entropy(self, nets, batch, aux):
        return super(FedProx, self).loss(nets, batch, aux)


def constant_clients(sizes=SIZES, pushes=PUSHES):
    parts = [(np.full((n, 4), push, np.float32), np.zeros(n, np.int64)) for n, push in zip(sizes, pushes, strict=True)]
    return pf.Clients.from_parts(parts, test=parts[0], num_classes=3, normalize=False)


def shares(sizes=SIZES):
    return [n / sum(sizes) for n in sizes]


def changes(run, architecture="mlp:1x8"):
    """How far every shared tensor lies from the start; all its entries moved alike."""
    initial = run.ctx.blueprints[architecture].initial
    found = {}
    for name, tensor in run.server.state.items():
        change = (tensor - initial[name]).flatten()
        torch.testing.assert_close(change, change[:1].expand_as(change), rtol=1e-3, atol=1e-5)
        found[name] = float(change.double().mean())
    return found


def assert_all_moved(run, by):
    for name, change in changes(run).items():
        assert change == pytest.approx(by, rel=1e-4), name


def listen(monkeypatch, *numbers):
    """Note what clients tell beside their weights."""
    told, fuse = {}, FedNova.fuse

    def look(self, server, replies, step, ctx):
        told.update({client: [reply.meta[number] for number in numbers] for client, reply in replies.items()})
        fuse(self, server, replies, step, ctx)

    monkeypatch.setattr(FedNova, "fuse", look)
    return told


def closed_form(tau, momentum=0.0, mu=0.0):
    if mu:
        return (1 - (1 - RATE * mu) ** tau) / (RATE * mu)
    return (tau - momentum * (1 - momentum**tau) / (1 - momentum)) / (1 - momentum)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_constant_gradients_give_the_step_of_the_text(momentum):
    run = federation(Pushed(), constant_clients(), training=pf.Training(2, 4, lr=RATE, momentum=momentum))
    a = [closed_form(tau, momentum) for tau in (2, 4, 10)]
    if not momentum:
        assert a == [2, 4, 10]
    tau_eff = sum(p * a_k for p, a_k in zip(shares(), a, strict=True))
    push = sum(p * g for p, g in zip(shares(), PUSHES, strict=True))
    assert_all_moved(run, -RATE * tau_eff * push)


def test_equal_steps_are_their_own_common_number():
    """Four steps each: tau_eff is 4, and the mean of the pushes (1 - 2 + 3)/3."""
    assert_all_moved(federation(Pushed(), constant_clients((8, 8, 8))), -RATE * 4 * (1 - 2 + 3) / 3)


def test_with_a_proximal_term_the_common_number_of_steps_is_the_plain_one():
    run = federation(Pushed(mu=2.0), constant_clients())
    tau_eff = sum(p * tau for p, tau in zip(shares(), (2, 4, 10), strict=True))
    push = sum(p * g for p, g in zip(shares(), PUSHES, strict=True))
    assert_all_moved(run, -RATE * tau_eff * push)


def test_a_rate_that_decays_within_the_round_counts(monkeypatch):
    assert effective_steps([0.1, 0.1, 0.05, 0.05], 0.0, 0.0) == 3.0
    told = listen(monkeypatch, "effective")
    federation(FedNova(), constant_clients(), training=pf.Training(2, 4, lr=RATE, decay=0.5))
    assert told == {0: [1.5], 1: [3.0], 2: [7.5]}  # half of the steps have half of the rate


def test_a_stragglers_rate_decays_by_the_epochs_that_it_did(monkeypatch):
    monkeypatch.setattr(FedNova, "epochs", lambda self, client, ctx: client.id + 1)
    told = listen(monkeypatch, "effective")
    federation(FedNova(), constant_clients(), training=pf.Training(4, 4, lr=RATE, decay=0.5))
    assert told == {0: [1.0], 1: [2 * (1 + 0.5)], 2: [5 * (1 + 0.5 + 0.25)]}  # 1, 2 and 5 steps in an epoch


def test_uniform_weights_leave_sample_counts_out():
    run = federation(Pushed(weighting="uniform"), constant_clients())
    expected = -RATE * (2 + 4 + 10) / 3 * (1 - 2 + 3) / 3
    assert_all_moved(run, expected)


@pytest.mark.parametrize("tau", [1, 2, 7])
def test_the_recurrence_is_the_closed_form(tau):
    assert effective_steps([RATE] * tau, 0.0, 0.0) == tau
    assert effective_steps([RATE] * tau, 0.9, 0.0) == pytest.approx(closed_form(tau, 0.9))
    assert effective_steps([RATE] * tau, 0.0, 2.0) == pytest.approx(closed_form(tau, mu=2.0))


def test_whole_epochs_at_once_are_the_recurrence():
    """Three epochs of two steps, whose rate falls: by hand without momentum and term 2, 2 + 2/2, 2 + 2/2 + 2/4."""
    rates = [RATE, RATE / 2, RATE / 4]
    assert effective_by_epoch(rates, 2, 0.0, 0.0) == pytest.approx([2.0, 3.0, 3.5])
    for momentum, mu in ((0.9, 0.0), (0.0, 2.0), (0.5, 2.0)):
        steps = [rate for rate in rates for _ in range(2)]
        each = [effective_steps(steps[:done], momentum, mu) for done in (2, 4, 6)]
        assert effective_by_epoch(rates, 2, momentum, mu) == pytest.approx(each)


def test_momentum_and_proximal_term_together_are_what_the_optimizer_does():
    w = torch.zeros(1, requires_grad=True)
    optimizer = torch.optim.SGD([w], lr=RATE, momentum=0.9)
    for _ in range(6):
        optimizer.zero_grad()
        (w + 2.0 / 2 * w.square()).sum().backward()
        optimizer.step()
    assert effective_steps([RATE] * 6, 0.9, 2.0) == pytest.approx(-float(w.detach()) / RATE, rel=1e-5)


@pytest.mark.parametrize("training", [SGD, pf.Training(2, 4, lr=RATE, momentum=0.9)])
def test_equal_numbers_of_steps_are_fedavg_to_the_bit(training):
    clients = unequal((14, 16, 15), None, False)  # four batches each
    ours, plain = (federation(m, clients, 2, training, ("cnn:4,bn",)) for m in (FedNova(), FedAvg()))
    for name, tensor in plain.server.state.items():
        assert torch.equal(ours.server.state[name], tensor)
    assert torch.equal(ours.server.main.state_dict()["head.weight"], plain.server.state["head.weight"])


def test_unequal_ones_are_not_and_the_proximal_term_acts_in_training():
    clients = unequal(SIZES, None, False)
    methods = (FedAvg(), FedNova(), FedNova(mu=1.0), FedNova(straggler_share=1.0), FedNova(gmf=0.5))
    found = [federation(m, clients, 2, pf.Training(4, 4, lr=RATE)).server.state["head.weight"] for m in methods]
    for place, one in enumerate(found):
        assert not any(torch.allclose(one, other, rtol=1e-3) for other in found[place + 1 :])


def test_server_momentum_by_hand():
    """The same push in both rounds: 1, then gmf + 1 of it."""
    one, two = (federation(Pushed(gmf=0.25), constant_clients(), rounds) for rounds in (1, 2))
    (first,) = {round(change, 4) for change in changes(one).values()}
    assert first == pytest.approx(changes(federation(Pushed(), constant_clients()))["head.bias"], abs=1e-4)
    for change in changes(two).values():
        assert change == pytest.approx(2.25 * first, rel=1e-3)


def test_layer_by_layer_every_layer_has_the_steps_of_its_owners():
    run = federation(Pushed(), constant_clients(), models=("mlp:2x8", "mlp:1x8"))  # clients 0 and 2 own layers.0
    found = changes(run, "mlp:2x8")
    (p0, p2), pushes = (4 / 24, 20 / 24), (1.0, 3.0)
    deep = -RATE * (p0 * 2 + p2 * 10) * (p0 * pushes[0] + p2 * pushes[1])
    tau_eff = sum(p * tau for p, tau in zip(shares(), (2, 4, 10), strict=True))
    common = -RATE * tau_eff * sum(p * g for p, g in zip(shares(), PUSHES, strict=True))
    for name, change in found.items():
        assert change == pytest.approx(deep if name.startswith("layers") else common, rel=1e-4), name


def test_statistics_have_the_mean_of_fedavg():
    clients = unequal(SIZES, None, False)
    ours, plain = (federation(m, clients, models=("cnn:4,bn",)) for m in (FedNova(), FedAvg()))
    for name, tensor in plain.server.state.items():
        assert torch.equal(ours.server.state[name], tensor) == ("running" in name), name


def test_pre_training_is_fedavgs():
    runs = []
    for method in (FedAvg(pretrain_epochs=1), FedNova(pretrain_epochs=1)):
        runs.append(prepare(method, unequal(SIZES, None, False), ["mlp:1x8"], Settings(1, training=SGD)))
        runs[-1]._phase("before", 0, runs[-1].plan.before, evaluate=False)
    plain, ours = runs
    for name, tensor in plain.server.state.items():
        assert torch.equal(ours.server.state[name], tensor)


@pytest.mark.parametrize(("mu", "numbers"), [(0.0, 2), (0.1, 3)])
def test_two_numbers_travel_beside_the_weights(mu, numbers):
    run = federation(FedNova(mu=mu), unequal(SIZES, None, False))
    size = 4 * sum(tensor.numel() for tensor in run.server.state.values())
    assert run.meter.bytes["down"] == dict.fromkeys(range(3), size)
    assert run.meter.bytes["up"] == dict.fromkeys(range(3), size + 8 * numbers)


def test_adam_counts_plain_steps(monkeypatch):
    told = listen(monkeypatch, "effective", "steps")
    federation(FedNova(mu=0.1), unequal(SIZES, None, False), training=pf.Training(2, 4, "adam", lr=0.01, momentum=0.9))
    assert told == {0: [2.0, 2], 1: [4.0, 4], 2: [10.0, 10]}


def test_what_cannot_be_is_refused():
    with pytest.raises(InputError, match="gmf must be below 1"):
        FedNova(gmf=1.0)
    with pytest.raises(InputError, match="mu must not be negative"):
        FedNova(mu=-1.0)
    with pytest.raises(InputError, match="view 'prefix' is not offered"):
        FedNova(view="prefix")
    with pytest.raises(InputError, match="lr times mu must be below 1"):
        federation(FedNova(mu=10.0), unequal(SIZES, None, False))
    run = federation(FedNova(), unequal(SIZES, None, False))
    reply = Message({"main": dict(run.server.state)}, meta={"samples": 4, "effective": 0.0})
    with pytest.raises(MessageError, match="0 effective steps"):
        run.method.fuse(run.server, {0: reply}, pf.Step(), run.ctx)


@dataclass(frozen=True)
class Listening(FedNova):
    """Keeps what every client told, beside what it could have told."""

    name = "listening"

    def fuse(self, server, replies, step, ctx):
        for client, reply in replies.items():
            ctx.log(f"told {client}", [dict(reply.meta), self.numbers(ctx.infos[client], ctx)])
        super().fuse(server, replies, step, ctx)


@pytest.mark.parametrize("share", [0.0, 1.0])
@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
@pytest.mark.parametrize("momentum, mu", [(0.0, 0.0), (0.9, 0.0), (0.0, 0.3), (0.8, 0.3)])
def test_what_a_server_of_strangers_takes_for_possible_is_what_clients_tell(momentum, mu, optimizer, share):
    """The server finds a_k by itself, whole epochs at once; clients step by step: also where the rate decays."""
    training = pf.Training(3, 4, optimizer, RATE, momentum if optimizer == "sgd" else 0.0, decay=0.5)
    run = federation(Listening(mu=mu, straggler_share=share), constant_clients((5, 8, 20)), 2, training)
    told = [(client, *line[f"told {client}"]) for line in run.history for client in range(3)]
    for client, meta, numbers in told:
        least, most = numbers["effective"]
        assert least * (1 - 1e-9) <= meta["effective"] <= most * (1 + 1e-9)
        assert share or meta["effective"] == pytest.approx(most, rel=1e-12)
        assert not mu or numbers["steps"][0] <= meta["steps"] <= numbers["steps"][1]
        # Five samples: two batches, or with BatchNorm one.
        fewest, most = ([1, 2, 5], [2, 2, 5])
        assert numbers["steps"] == ((1 if share else 3) * fewest[client], 3 * most[client])
