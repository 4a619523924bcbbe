"""ScaleFL: the acceptance properties of its spec."""

import math

import pytest
import torch
from tests.contract.table import synthetic

import polyfed as pf
from polyfed.api import prepare
from polyfed.core.errors import InputError
from polyfed.core.message import Message
from polyfed.core.method import EVALUATE, Step
from polyfed.core.nets import Net
from polyfed.core.settings import Settings
from polyfed.core.stage import Batch
from polyfed.core.statistics import collect_statistics
from polyfed.methods.fedavg import FedAvg
from polyfed.methods.scalefl import ScaleFL
from polyfed.models import activate_scalers, build

TRAINING = pf.Training(epochs=2, batch_size=8, lr=0.05)
LEVELS = ["cnn:4-6-8,exits", "cnn:4-6-8,exits=2@0.75", "cnn:4-6-8,exits=1@0.5"]
A, B, C = [[0.5, 0.5], [0.5, 0.5]], [[0.8, 0.2], [0.8, 0.2]], [[0.9, 0.1], [0.1, 0.9]]


def federation(method, models=LEVELS, rounds=1, run=True):
    made = prepare(method, synthetic(3), list(models), Settings(rounds, training=TRAINING))
    if run:
        made.run()
    return made


class Given(torch.nn.Module):
    """A network whose exits give what it was told, as probabilities."""

    def __init__(self, *probabilities):
        super().__init__()
        self.logits = torch.nn.ParameterList([torch.tensor(p).log() for p in probabilities])

    def exits(self, x):
        return list(self.logits)


def loss_of(method, net, labels=(0, 1), **aux):
    aux = {name: torch.tensor(value) for name, value in aux.items()}
    return method.loss({"main": Net(net)}, Batch(torch.zeros(2, 1), torch.tensor(labels)), aux)


def divergence(p, q):
    """Return KL(p || q), mean over the rows."""
    rows = zip(p, q, strict=True)
    return sum(x * math.log(x / y) for row, other in rows for x, y in zip(row, other, strict=True)) / len(p)


# --- the loss ---


def test_exits_weigh_more_the_deeper_they_are():
    ce = [math.log(2), -(math.log(0.8) + math.log(0.2)) / 2, -math.log(0.9)]
    assert loss_of(ScaleFL(), Given(A, B, C)).item() == pytest.approx((ce[0] + 2 * ce[1] + 3 * ce[2]) / 6)
    assert loss_of(ScaleFL(), Given(A, B)).item() == pytest.approx((ce[0] + 2 * ce[1]) / 3)
    assert loss_of(ScaleFL(), Given(B)).item() == pytest.approx(ce[1])
    assert loss_of(ScaleFL(), Given(A, A, A, A)).item() == pytest.approx(ce[0])  # the weights sum to 1


@pytest.mark.parametrize("official", [False, True])
@pytest.mark.parametrize("temperature", [1.0, 2.0])
def test_the_last_exit_teaches_the_others(official, temperature):
    method = ScaleFL(gamma=0.3, temperature=temperature, official=official)
    soft = [[[x ** (1 / temperature) for x in row] for row in p] for p in (A, B, C)]
    soft = [[[x / sum(row) for x in row] for row in p] for p in soft]
    one, two = (divergence(soft[2], p) for p in soft[:2])
    assert one != divergence(soft[0], soft[2])
    plain, taught = loss_of(method, Given(A, B, C)), loss_of(method, Given(A, B, C), gamma=0.3)
    expected = 0.3 * temperature**2 / 2 * (one + 2 * two) / 6  # two classes
    assert (taught - plain).item() == pytest.approx(expected, rel=1e-4)
    assert loss_of(method, Given(C, C), gamma=0.3).item() == pytest.approx(loss_of(method, Given(C, C)).item())
    assert loss_of(method, Given(C), gamma=0.3).item() == loss_of(method, Given(C)).item()


def test_the_teacher_is_held_fixed_unless_official():
    """The part of the gradient of the last exit that comes from teaching."""
    grads = {}
    for official in (False, True):
        for gamma in ({}, {"gamma": 0.3}):
            net = Given(A, C)
            loss_of(ScaleFL(official=official), net, **gamma).backward()
            grads[official, bool(gamma)] = [z.grad for z in net.logits]
    assert torch.equal(grads[False, True][1], grads[False, False][1])
    assert not torch.allclose(grads[True, True][1], grads[True, False][1])
    assert torch.equal(grads[True, True][0], grads[False, True][0])
    assert not torch.allclose(grads[False, True][0], grads[False, False][0])


def test_absent_classes_get_no_gradient_with_a_mask():
    net = Given(A, C)
    loss_of(ScaleFL(mask=True), net, labels=(0, 0), present=[1.0, 0.0]).backward()
    assert all(not z.grad[:, 1].any() and z.grad[:, 0].all() for z in net.logits)


def test_a_mask_leaves_out_the_rows_of_absent_classes_in_every_exit():
    run = federation(ScaleFL(mask=True), run=False)
    run.ctx.round = 1
    assert run.backend.infos[0].label_counts[2] == 0
    party = run.backend.store.open(0, run.ctx, scratch=True)
    aux = run.method.stage(party, run.ctx).aux
    assert aux.keys() == {"present", "gamma"} and aux["present"].tolist() == [1.0, 1.0, 0.0]
    before = {name: tensor.clone() for name, tensor in run.server.state.items()}
    run.method.fuse(run.server, replies(run, {0: 1.0}), Step(), run.ctx)
    for number in range(3):
        rows = run.server.state[f"head.{number}.weight"]
        assert bool((rows[:2] == 1.0).all()) and torch.equal(rows[2], before[f"head.{number}.weight"][2])


def test_training_leaves_the_statistics_of_batchnorm_alone_if_they_are_static():
    batch = Batch(torch.rand(4, 1, 8, 8), torch.tensor([0, 1, 2, 0]))
    for static in (True, False):
        net = build("cnn:4-6,bn,exits", (1, 8, 8), 3)
        ScaleFL(static_bn=static).loss({"main": Net(net)}, batch, {})
        assert bool(net.stem.norm.running_mean.any()) != static


@pytest.mark.parametrize(
    "options, first",
    [({}, 3), ({"start": 0.0}, 1), ({"start": 0.5}, 5), ({"start": 1.0}, None), ({"gamma": 0.0}, None)],
)
def test_the_first_quarter_of_the_rounds_is_without_distillation(options, first):
    run = federation(ScaleFL(**options), rounds=8, run=False)
    party = run.backend.store.open(0, run.ctx, scratch=True)
    teaching = []
    for number in range(9):
        run.ctx.round = number
        aux = run.method.stage(party, run.ctx).aux
        teaching += [number] if "gamma" in aux else []
        assert float(aux.get("gamma", run.method.gamma)) == pytest.approx(run.method.gamma)
    assert teaching == (list(range(first, 9)) if first else [])


def test_one_exit_at_one_width_is_uniform_fedavg():
    one = ["cnn:4-6,bn,exits=1"]
    ours, plain = (federation(m, one, 2) for m in (ScaleFL(static_bn=False), FedAvg(weighting="uniform")))
    for name, tensor in plain.server.state.items():
        assert torch.equal(ours.server.state[name], tensor)


# --- levels ---


def replies(run, values):
    """What clients would return whose tensors are all equal to one number."""
    sent = {c: run.method.send(run.server, run.backend.infos[c], Step(), run.ctx) for c in values}
    states = {c: {n: torch.full_like(t, values[c]) for n, t in m.params["main"].items()} for c, m in sent.items()}
    return {c: Message({"main": state}, {}, {"samples": 1 + c}) for c, state in states.items()}


def test_every_entry_is_the_mean_over_the_levels_that_hold_it():
    run = federation(ScaleFL(), run=False)
    run.method.fuse(run.server, replies(run, {0: 1.0, 1: 4.0, 2: 10.0}), Step(), run.ctx)
    state = run.server.state
    assert state["stem.conv.bias"].tolist() == [5.0, 5.0, 2.5, 1.0]  # widths 4, 3 and 2
    assert state["stages.0.conv.bias"].tolist() == [2.5] * 5 + [1.0]  # 6 and 5
    assert state["stages.1.conv.bias"].tolist() == [1.0] * 8
    assert state["head.0.weight"].tolist() == [[5.0, 5.0, 2.5, 1.0]] * 3
    assert state["head.0.bias"].tolist() == [5.0] * 3 and state["head.1.bias"].tolist() == [2.5] * 3


def test_running_statistics_have_the_plain_mean_if_they_are_tracked():
    models = ["cnn:4-6-8,bn,exits", "cnn:4-6-8,bn,exits=2@0.75", "cnn:4-6-8,bn,exits=1@0.5"]
    run = federation(ScaleFL(static_bn=False), models, run=False)
    run.method.fuse(run.server, replies(run, {0: 1.0, 1: 4.0, 2: 10.0}), Step(), run.ctx)
    assert run.server.state["stem.norm.running_mean"].tolist() == [5.0, 5.0, 2.5, 1.0]
    assert run.server.state["stages.0.norm.running_var"].tolist() == [2.5] * 5 + [1.0]


def test_what_is_deeper_or_wider_than_everybody_who_takes_part_stays():
    run = federation(ScaleFL(), run=False)
    before = {name: tensor.clone() for name, tensor in run.server.state.items()}
    run.method.fuse(run.server, replies(run, {2: 10.0}), Step(), run.ctx)
    for name, tensor in run.server.state.items():
        if name.startswith(("stem", "head.0")):
            inside = before[name].clone()
            inside[(slice(0, 2),) if name.startswith("stem") else (..., slice(0, 2 if "weight" in name else 3))] = 10.0
            assert torch.equal(tensor, inside), name
        else:
            assert torch.equal(tensor, before[name]), name


def test_every_tensor_of_every_level_is_trained():
    fresh, run = federation(ScaleFL(gamma=0.0), run=False), federation(ScaleFL(gamma=0.0))
    for client, model in enumerate(LEVELS):
        start = run.method.send(fresh.server, run.backend.infos[client], Step(), run.ctx).params["main"]
        own = run.backend.store.records[client].states["main"]
        assert start.keys() == own.keys() == run.ctx.blueprints[model].shapes.keys()
        assert all(not torch.equal(own[name], tensor) for name, tensor in start.items()), model


def test_a_client_exchanges_what_its_level_uses():
    run = federation(ScaleFL())
    widths = [(4, 6, 8), (3, 5), (2,)]
    sizes = {}
    for client, level in enumerate(widths):
        stages = sum(9 * a * b + b for a, b in zip((1, *level), level, strict=False))
        sizes[client] = 4 * (stages + sum(3 * w + 3 for w in level))
    assert run.meter.bytes["down"] == sizes
    assert run.meter.bytes["up"] == {client: size + 8 for client, size in sizes.items()}


# --- prediction ---


def test_a_level_predicts_with_its_last_exit_at_its_scale():
    run = federation(ScaleFL())
    x = torch.rand(5, 1, 8, 8)
    for client, model in enumerate(LEVELS):
        party = run.backend.store.open(client, run.ctx, scratch=True)
        party.inbox = run.method.send(run.server, run.backend.infos[client], EVALUATE, run.ctx)
        run.method.receive(party, EVALUATE, run.ctx)
        party.main.eval()
        found = run.method.predict(party, x, run.ctx)
        assert torch.equal(found, party.main.exits(x)[-1])
        net = build(model, (1, 8, 8), 3).eval()
        net.load_state_dict(party.inbox.params["main"])
        assert torch.allclose(net(x), found) == (client == 0)  # activations of narrow levels are divided by their rate
        activate_scalers(net, predicting=True)
        torch.testing.assert_close(net(x), found)
    whole = run.server.main.eval()
    assert torch.equal(run.method.predict(run.server, x, run.ctx), whole.exits(x)[-1])


@pytest.mark.parametrize("scaler", [True, False])
def test_clients_scale_against_the_global_rate(scaler):
    run = federation(ScaleFL(scaler=scaler, global_rate=0.75), LEVELS[1:], run=False)
    for client, factor in ((0, 1.0), (1, 0.75 / 0.5)):
        party = run.backend.store.open(client, run.ctx, scratch=True)
        run.method.setup_client(party, run.ctx)
        scale = party.main.stem.scaler
        assert float(scale.eval()(torch.ones(()))) == pytest.approx(factor if scaler else 1.0)


def test_a_scaler_works_in_prediction_only_where_it_is_asked_to():
    net, x = build("cnn:4,exits@0.5", (1, 8, 8), 3).eval(), torch.rand(2, 1, 8, 8)
    plain = net.stem(x)
    activate_scalers(net)
    assert torch.equal(net.stem(x), plain)
    activate_scalers(net, predicting=True)
    torch.testing.assert_close(net.stem(x), 2 * plain)
    activate_scalers(net, False, predicting=True)
    assert torch.equal(net.stem(x), plain)


@pytest.mark.parametrize("statistics", ["clients", "public"])
def test_statistics_are_those_of_the_scaled_network(statistics):
    models = ["cnn:4-6,bn,exits", "cnn:4-6,bn,exits=1@0.5"]
    run = federation(ScaleFL(statistics=statistics), models)
    sent = run.method.send(run.server, run.backend.infos[1], EVALUATE, run.ctx).params["main"]
    net = build(models[1], (1, 8, 8), 3)
    activate_scalers(net, predicting=True)
    net.load_state_dict(sent, strict=False)
    data = run.server.public if statistics == "public" else run.backend.store.data[1].train
    collect_statistics(net, data, TRAINING.batch_size)
    torch.testing.assert_close(net.stem.norm.running_var, sent["stem.norm.running_var"])


# --- what is refused ---


@pytest.mark.parametrize(
    "options, words",
    [
        ({"gamma": -0.1}, "gamma must not be negative"),
        ({"temperature": 0.0}, "temperature must be above 0"),
        ({"start": 1.5}, "start must be at most 1"),
    ],
)
def test_what_cannot_be_is_refused(options, words):
    with pytest.raises(InputError, match=words):
        ScaleFL(**options)


def test_networks_without_exits_are_refused_with_a_remedy():
    with pytest.raises(InputError, match=r"network with several exits, but client 0 has cnn:4-8.*option exits"):
        federation(ScaleFL(), ["cnn:4-8@1"])
