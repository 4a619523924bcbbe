"""FedGH: the acceptance properties of its spec (F3)."""

import numpy as np
import pytest
import torch
from tests.contract.table import synthetic
from torch import nn
from torch.nn import functional as F

import polyfed as pf
from polyfed.api import prepare
from polyfed.build import make_blueprint
from polyfed.config import Networks
from polyfed.core.errors import InputError
from polyfed.core.heads import linear_head
from polyfed.core.message import Message
from polyfed.core.party import load_state
from polyfed.core.prototypes import class_means
from polyfed.core.settings import Settings
from polyfed.methods.fedgh import FedGH

SGD = pf.Training(epochs=1, batch_size=8, lr=0.05)
MIXED = ("mlp:1x8", "cnn:4-8", "mlp:2x4")


def federation(method, rounds=1, models=MIXED, clients=3, feature_dim=8, training=SGD):
    made = prepare(
        method, synthetic(clients), list(models), Settings(rounds, training=training), Networks(feature_dim=feature_dim)
    )
    made.run()
    return made


def told(prototypes, classes):
    return Message(data={"prototypes": torch.tensor(prototypes), "classes": torch.tensor(classes, dtype=torch.uint8)})


def with_head(run, value):
    """Set all of the server's head to a value and return it."""
    head = run.server.models["head"]
    load_state(head, {name: torch.full_like(tensor, value) for name, tensor in head.state_dict().items()})
    return head


def test_one_step_by_hand():
    """Zero head, one prototype (1, 0) of class 0: the gradient of CE is (softmax - one-hot) x."""
    run = federation(FedGH(server_lr=1.0), models=["mlp:1x8"], feature_dim=2)
    head = with_head(run, 0.0)
    run.method.fuse(run.server, {0: told([[1.0, 0.0]], [0])}, run.plan.round[0], run.ctx)
    third = 1 / 3
    torch.testing.assert_close(head.weight.detach(), torch.tensor([[2 * third, 0.0], [-third, 0.0], [-third, 0.0]]))
    torch.testing.assert_close(head.bias.detach(), torch.tensor([2 * third, -third, -third]))


def test_the_prototypes_of_all_clients_count_alike_and_epochs_and_batches_are_the_methods_own():
    run = federation(FedGH(server_lr=0.5, server_batch=100, server_epochs=2), models=["mlp:1x8"], feature_dim=2)
    head = with_head(run, 0.1)
    by_hand = nn.Linear(2, 3)
    load_state(by_hand, head.state_dict())
    x, y = torch.tensor([[1.0, 0.0], [0.0, 2.0], [3.0, 1.0]]), torch.tensor([0, 2, 1])
    optimizer = torch.optim.SGD(by_hand.parameters(), lr=0.5)
    for _ in range(2):
        optimizer.zero_grad()
        F.cross_entropy(by_hand(x), y).backward()
        optimizer.step()
    replies = {0: told([[1.0, 0.0], [0.0, 2.0]], [0, 2]), 1: told([[3.0, 1.0]], [1])}
    run.method.fuse(run.server, replies, run.plan.round[0], run.ctx)
    for name, tensor in by_hand.state_dict().items():
        torch.testing.assert_close(head.state_dict()[name], tensor)


def test_the_server_steps_with_the_runs_rate_by_plain_sgd_unless_told_otherwise():
    ours, plain = (
        federation(FedGH(), models=["mlp:1x8"], feature_dim=2, training=pf.Training(lr=0.1, **more))
        for more in ({"momentum": 0.9, "weight_decay": 0.5, "clip": 0.001}, {})
    )
    for run in (ours, plain):
        with_head(run, 0.1)
        run.method.fuse(run.server, {0: told([[1.0, 0.0]] * 90, [0] * 90)}, run.plan.round[0], run.ctx)
    one, other = (run.server.models["head"].state_dict() for run in (ours, plain))
    assert all(torch.equal(one[name], other[name]) for name in one)
    assert not torch.equal(one["bias"], torch.full((3,), 0.1))


def test_a_head_without_prototypes_stays_as_it_is():
    run = federation(FedGH(server_epochs=3), models=["mlp:1x8"], feature_dim=2)
    head = with_head(run, 0.5)
    empty = Message(data={"prototypes": torch.zeros(0, 2), "classes": torch.zeros(0, dtype=torch.uint8)})
    run.method.fuse(run.server, {0: empty, 1: empty}, run.plan.round[0], run.ctx)
    assert head.weight.tolist() == [[0.5, 0.5]] * 3 and head.bias.tolist() == [0.5] * 3
    exchange = run.backend.exchange

    def nobody_answers(step, messages, ctx):
        replies = exchange(step, messages, ctx)
        replies.messages.clear()
        return replies

    run.backend.exchange = nobody_answers
    run._exchange(run.plan.round[0], (0, 1, 2), {})
    assert head.weight.tolist() == [[0.5, 0.5]] * 3


def test_the_loss_of_the_head_falls():
    run = federation(FedGH(server_epochs=0), rounds=2)
    clients = [run.backend.store.open(client, run.ctx, scratch=True) for client in range(3)]
    told_all = {c.id: Message(data=class_means(c, run.ctx)) for c in clients}
    head = run.server.models["head"]

    def loss():
        pairs = [(m.data["prototypes"], m.data["classes"].long()) for m in told_all.values()]
        with torch.no_grad():
            return float(F.cross_entropy(head(torch.cat([p for p, _ in pairs])), torch.cat([c for _, c in pairs])))

    losses = [loss()]
    for _ in range(5):
        FedGH(server_epochs=30).fuse(run.server, told_all, run.plan.round[0], run.ctx)
        losses.append(loss())
    assert losses == sorted(losses, reverse=True) and losses[-1] < 0.9 * losses[0]


@pytest.mark.parametrize("epochs", [0, 3])
def test_every_client_begins_with_the_servers_head_bit_for_bit_and_its_own_extractor(epochs):
    run = federation(FedGH(server_epochs=epochs), rounds=2)
    head = run.server.models["head"].state_dict()
    step = run.plan.round[0]
    for client, info in run.backend.infos.items():
        own = {name: tensor.clone() for name, tensor in run.backend.store.records[client].states["main"].items()}
        party = run.backend.store.open(client, run.ctx)
        party.inbox = run.method.send(run.server, info, step, run.ctx)
        run.method.receive(party, step, run.ctx)
        for name, tensor in party.tensors().items():
            kind = name.removeprefix("head.")
            assert torch.equal(tensor, head[kind] if name.startswith("head.") else own[name])
        assert not torch.equal(own["head.weight"], head["weight"])


def test_without_epochs_the_first_head_stays_that_of_the_largest_architecture():
    run = federation(FedGH(server_epochs=0), rounds=2)
    largest = max(run.ctx.blueprints.values(), key=lambda blueprint: blueprint.parameters)
    assert torch.equal(run.server.models["head"].weight, largest.initial["head.weight"])
    assert torch.equal(run.server.models["head"].bias, largest.initial["head.bias"])


def test_extractors_never_travel_and_bytes_are_those_of_the_formula():
    rounds, run = 2, federation(FedGH(), rounds=2)
    assert set(run.meter.kinds) == {"main/down/params/main", "main/up/data/prototypes", "main/up/data/classes"}
    for client, samples in enumerate(synthetic(3).train):
        held = int((np.array(samples.label_counts(3)) > 0).sum())
        assert run.meter.bytes["down"][client] == rounds * 4 * 3 * (8 + 1)
        assert run.meter.bytes["up"][client] == rounds * held * (4 * 8 + 1)
    assert run.meter.bytes["up"][0] < run.meter.bytes["up"][1]  # the first client lacks a class


def test_prototypes_are_those_of_the_trained_network_as_it_predicts():
    run = federation(FedGH(), models=["cnn:4-8,bn"], feature_dim=None)
    client = run.backend.store.open(1, run.ctx, scratch=True)
    again = run.method.local(client, run.plan.round[0], run.ctx)
    next(again)
    with torch.no_grad():  # in place of the training
        client.main.stem.conv.weight.mul_(1.5)
    with pytest.raises(StopIteration) as finished:
        again.send(None)
    with torch.no_grad():
        z = client.main.eval().features(client.train.inputs())
    y = client.train.labels()
    for label, prototype in zip(*(finished.value.value.data[k] for k in ("classes", "prototypes")), strict=True):
        torch.testing.assert_close(prototype, z[y == int(label)].mean(0))


class Net(nn.Module):
    """A network of one's own, with a head under another name."""

    def __init__(self, bias=True, frozen=False):
        super().__init__()
        self.body = nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.ReLU(), nn.Linear(8, 8, bias=False), nn.ReLU())
        self.out = nn.Linear(8, 3, bias=bias)
        self.out.requires_grad_(not frozen)

    def forward(self, x):
        return self.out(self.body(x))


def own():
    return pf.adapt(Net(), head="out")


def without_bias():
    return pf.adapt(Net(bias=False), head="out")


def frozen_head():
    return pf.adapt(Net(frozen=True), head="out")


def test_the_head_is_found_under_any_name():
    blueprint = make_blueprint(own, "own", (1, 8, 8), 3, 0, None, "linear")
    (weight, bias) = linear_head(blueprint)
    assert weight.endswith("out.weight") and bias.endswith("out.bias")
    run = federation(FedGH(), models=[own, "mlp:1x8"], feature_dim=None)
    assert len(run.history[-1]["accuracy"]["per_client"]) == 3


@pytest.mark.parametrize("model", [without_bias, frozen_head])
def test_a_network_whose_head_cannot_be_replaced_is_refused(model):
    with pytest.raises(InputError, match=f"linear layer with a bias, free to be trained, but {model.__name__} does"):
        federation(FedGH(), models=[model], feature_dim=None)


@pytest.mark.parametrize("options", [{"server_epochs": -1}, {"server_lr": 0.0}, {"server_batch": 0}])
def test_values_that_make_no_sense_are_refused(options):
    with pytest.raises(InputError, match=next(iter(options))):
        FedGH(**options)
