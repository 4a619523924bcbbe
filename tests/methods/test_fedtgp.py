"""FedTGP: the acceptance properties of its spec (F2)."""

import copy
import math

import pytest
import torch
from tests.contract.table import synthetic
from torch import nn

import polyfed as pf
from polyfed.api import prepare
from polyfed.config import Networks
from polyfed.core.errors import InputError
from polyfed.core.message import Message
from polyfed.core.nets import Net
from polyfed.core.settings import Settings
from polyfed.core.stage import Batch
from polyfed.methods.fedproto import FedProto
from polyfed.methods.fedtgp import FedTGP, contrastive_loss, gaps

SGD = pf.Training(epochs=1, batch_size=8, lr=0.05)


def federation(method, rounds=1, models=("mlp:1x8",), clients=3, feature_dim=2, training=SGD):
    settings = Settings(rounds, training=training)
    made = prepare(method, synthetic(clients), list(models), settings, Networks(feature_dim=feature_dim))
    made.run()
    return made


def told(prototypes, classes, counts=None):
    data = {"prototypes": torch.tensor(prototypes), "classes": torch.tensor(classes, dtype=torch.uint8)}
    return Message(data={**data, "counts": torch.tensor(counts or [1] * len(classes), dtype=torch.int32)})


def fused(method, run, replies):
    method.fuse(run.server, replies, run.plan.round[0], run.ctx)
    return run.server.memory["prototypes"]["prototypes"]


def test_the_gap_of_two_classes_is_their_distance_for_both_and_of_three_the_nearest():
    assert gaps(torch.tensor([[0.0, 0.0], [3.0, 4.0]])).tolist() == [5.0, 5.0]
    assert gaps(torch.tensor([[0.0], [1.0], [4.0]])).tolist() == [1.0, 1.0, 3.0]
    assert gaps(torch.tensor([[7.0]])).tolist() == [0.0]  # one class has no gap


@pytest.mark.parametrize(("weighting", "gap"), [("uniform", 4.0), ("samples", 3.0)])
@pytest.mark.parametrize("threshold", [100.0, 3.5, 0.0])
def test_the_margin_is_the_largest_gap_of_the_mean_prototypes_but_never_above_the_threshold(weighting, gap, threshold):
    replies = {0: told([[0.0], [2.0]], [0, 1], [1, 3]), 1: told([[6.0]], [1], [1])}  # class 1: 4, or 3 by samples
    method = FedTGP(weighting=weighting, margin_threshold=threshold)
    run = federation(FedTGP(server_epochs=0))
    assert float(method.margin(replies, run.ctx)) == min(gap, threshold)


class Fixed(nn.Module):
    """A map of two classes to given numbers."""

    def __init__(self, *values):
        super().__init__()
        self.values = nn.Parameter(torch.tensor([[value] for value in values]))

    def forward(self, classes):
        return self.values[classes]


@pytest.mark.parametrize(("margin", "loss"), [(2.0, math.log(2)), (0.0, math.log(1 + math.exp(-2)))])
def test_the_loss_by_hand(margin, loss):
    """T = (0, 4) and p = 1 of class 0: distances 1 and 3, the first of them plus the margin."""
    aux = {"classes": torch.arange(2), "margin": torch.tensor(margin)}
    found = contrastive_loss({"main": Net(Fixed(0.0, 4.0))}, Batch(torch.tensor([[1.0]]), torch.tensor([0])), aux)
    assert float(found.detach()) == pytest.approx(loss)


def test_at_its_prototype_the_gradient_is_finite():
    network = Fixed(1.0, 4.0)
    aux = {"classes": torch.arange(2), "margin": torch.tensor(0.5)}
    contrastive_loss({"main": Net(network)}, Batch(torch.tensor([[1.0]]), torch.tensor([0])), aux).backward()
    assert network.values.grad.isfinite().all() and network.values.grad[1].abs() > 0


def test_the_server_fits_the_map_to_all_prototypes_by_plain_sgd():
    method = FedTGP(server_epochs=2, server_lr=0.2, server_batch=50)
    more = pf.Training(momentum=0.9, weight_decay=0.1, batch_size=1, lr=0.01)
    run = federation(FedTGP(server_epochs=0), training=more)
    by_hand = copy.deepcopy(run.server.models["prototypes"])
    replies = {0: told([[1.0, 0.0], [0.0, 3.0]], [0, 2]), 1: told([[1.0, 1.0]], [1])}
    batch = Batch(torch.tensor([[1.0, 0.0], [0.0, 3.0], [1.0, 1.0]]), torch.tensor([0, 2, 1]))
    aux = {"classes": torch.arange(3), "margin": torch.tensor(5**0.5)}  # the gap of (0, 3), to (1, 1); the others 1
    optimizer = torch.optim.SGD(by_hand.parameters(), lr=0.2)
    for _ in range(2):
        optimizer.zero_grad()
        contrastive_loss({"main": Net(by_hand)}, batch, aux).backward()
        optimizer.step()
    torch.testing.assert_close(fused(method, run, replies), by_hand(torch.arange(3)).detach())
    assert run.ctx.records["margin"] == pytest.approx(5**0.5)


def test_without_epochs_the_prototypes_are_the_untrained_map():
    run = federation(FedTGP(server_epochs=0), rounds=2)
    again = federation(FedTGP(server_epochs=0, lam=0.0), rounds=1)
    sent = run.method.send(run.server, run.backend.infos[0], run.plan.round[0], run.ctx)
    assert torch.equal(sent.data["prototypes"], again.server.memory["prototypes"]["prototypes"])
    assert sent.data["classes"].tolist() == [0, 1, 2]
    assert torch.equal(sent.data["prototypes"], run.server.models["prototypes"](torch.arange(3)))


def test_the_loss_falls_to_near_zero_on_prototypes_that_are_apart_and_training_goes_on_next_round():
    run = federation(FedTGP(server_epochs=0), feature_dim=4)
    rows = [[10.0, 0.0, 0.0, 0.0], [0.0, 10.0, 0.0, 0.0], [0.0, 0.0, 10.0, 0.0]]
    method = FedTGP(server_epochs=100, server_lr=0.05, margin_threshold=1.0)
    losses = []
    for _ in range(4):
        fused(method, run, {0: told(rows, [0, 1, 2])})
        aux = {"classes": torch.arange(3), "margin": torch.tensor(1.0)}
        batch = Batch(torch.tensor(rows), torch.arange(3))
        losses.append(float(contrastive_loss({"main": Net(run.server.models["prototypes"])}, batch, aux).detach()))
    assert losses == sorted(losses, reverse=True) and losses[-1] < 0.01


@pytest.mark.parametrize("collect", ["after", "before", "training"])
def test_the_wire_is_that_of_fedproto(collect):
    ours = federation(FedTGP(server_epochs=1, collect=collect), rounds=2)
    plain = federation(FedProto(), rounds=2)
    assert ours.meter.bytes == plain.meter.bytes and ours.meter.kinds == plain.meter.kinds
    assert ours.meter.bytes["up"][1] == 2 * (4 * (3 * 2 + 3) + 3)
    assert ours.meter.bytes["down"][1] == 4 * 3 * 2 + 3  # nothing in the first round


def test_clients_pull_towards_the_trained_prototypes_and_predict_by_the_nearest():
    run = federation(FedTGP(server_epochs=3), rounds=1)
    client = run.backend.store.open(0, run.ctx)
    client.inbox = run.method.send(run.server, run.backend.infos[0], run.plan.round[0], run.ctx)
    stage = next(run.method.local(client, run.plan.round[0], run.ctx))
    trained = run.server.models["prototypes"](torch.arange(3)).detach()
    assert torch.equal(stage.aux["prototypes"], trained) and stage.aux["known"].tolist() == [1, 1, 1]
    z = client.main.features(client.train.inputs())
    pull = stage.loss({"main": Net(client.main)}, Batch(client.train.inputs(), client.train.labels()), stage.aux)
    plain = torch.nn.functional.cross_entropy(client.main.head(z), client.train.labels())
    torch.testing.assert_close(pull - plain, 10 * (z - trained[client.train.labels()]).pow(2).mean())
    scores = run.method.predict(client, client.train.inputs(), run.ctx)
    torch.testing.assert_close(scores, -torch.cdist(z, trained))


def test_the_released_way_tells_the_prototypes_of_the_network_before_its_training():
    before, after = (federation(FedTGP(server_epochs=0, collect=way)) for way in ("before", "after"))
    for run, trained in ((before, False), (after, True)):
        client = run.backend.store.open(1, run.ctx, scratch=True)
        start = run.ctx.blueprints[client.architecture].initial
        work = run.method.local(client, run.plan.round[0], run.ctx)
        next(work)
        client.main.load_state_dict({name: 2 * tensor for name, tensor in start.items()})  # in place of the training
        with pytest.raises(StopIteration) as finished:
            work.send(None)
        with torch.no_grad():
            z = client.main.features(client.train.inputs())
        mean = z[client.train.labels() == 0].mean(0)
        assert torch.allclose(finished.value.value.data["prototypes"][0], mean, atol=1e-5) == trained


@pytest.mark.parametrize(
    "options",
    [{"server_epochs": -1}, {"margin_threshold": -1.0}, {"server_lr": 0.0}, {"server_batch": 0}, {"collect": "now"}],
)
def test_values_that_make_no_sense_are_refused(options):
    with pytest.raises(InputError, match=next(iter(options))):
        FedTGP(**options)
