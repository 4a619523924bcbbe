"""DepthFL: the acceptance properties of its spec."""

import math
from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
from tests.contract.table import synthetic
from torch.nn import functional as F

import polyfed as pf
from polyfed.api import prepare
from polyfed.core.errors import InputError
from polyfed.core.message import Message
from polyfed.core.method import Step
from polyfed.core.nets import Net
from polyfed.core.settings import Participation, Settings
from polyfed.core.stage import Batch
from polyfed.methods.depthfl import DepthFL
from polyfed.methods.fedavg import PRETRAIN, FedAvg

TRAINING = pf.Training(epochs=2, batch_size=8, lr=0.05)
WHOLE, MIDDLE, SHORT = "cnn:3-4-6,exits", "cnn:3-4-6,exits=2", "cnn:3-4-6,exits=1"
DEPTHS = [WHOLE, MIDDLE, SHORT]


def federation(method, models=DEPTHS, rounds=1, clients=3, share=1.0, run=True):
    settings = Settings(rounds, training=TRAINING, participation=Participation(share))
    made = prepare(method, synthetic(clients), list(models), settings)
    if run:
        made.run()
    return made


class Given(torch.nn.Module):
    """A network whose exits give what it was told."""

    def __init__(self, *logits):
        super().__init__()
        self.logits = torch.nn.ParameterList([torch.tensor(z) for z in logits])

    def exits(self, x):
        return list(self.logits)


def loss_of(method, net, strength, labels=(0, 1)):
    aux = {"strength": torch.tensor(strength)}
    return method.loss({"main": Net(net)}, Batch(torch.zeros(2, 1), torch.tensor(labels)), aux)


# --- the loss ---


def test_lambda_grows_to_one():
    run = federation(DepthFL(), run=False)
    found = {}
    for t in (0, 150, 299, 300, 1000):
        run.ctx.round = t + 1
        found[t] = run.method.strength(run.ctx)
    assert found[0] == pytest.approx(math.exp(-5)) and found[150] == pytest.approx(math.exp(-1.25))
    assert found[299] < 1 == found[300] == found[1000]
    run.ctx.round = 0  # before the rounds, as in the first
    assert run.method.strength(run.ctx) == found[0]
    assert DepthFL(ramp=0).strength(run.ctx) == 1
    run.ctx.round = 6
    assert DepthFL(ramp=10).strength(run.ctx) == found[150]


def test_the_loss_by_hand():
    """Three exits whose probabilities for two samples are known."""
    a, b, c = ([[0.5, 0.5], [0.5, 0.5]], [[0.8, 0.2], [0.8, 0.2]], [[0.9, 0.1], [0.1, 0.9]])
    net = Given(*(torch.tensor(p).log().tolist() for p in (a, b, c)))
    ce = [math.log(2), -(math.log(0.8) + math.log(0.2)) / 2, -math.log(0.9)]

    def kl(p, q):
        rows = zip(p, q, strict=True)
        return sum(x * math.log(x / y) for row, other in rows for x, y in zip(row, other, strict=True)) / 2

    taught = sum(kl(p, q) for p in (a, b, c) for q in (a, b, c))
    for strength in (0.0, 0.3, 1.0):
        found = loss_of(DepthFL(feddyn=False), net, strength)
        assert found.item() == pytest.approx(sum(ce) + strength / 2 * taught, rel=1e-5)
    assert loss_of(DepthFL(feddyn=False, kd=False), net, 1.0).item() == pytest.approx(sum(ce), rel=1e-5)
    # temperature 2: probabilities p^(1/2), normed, and four times as much
    soft = [[[math.sqrt(x) / sum(map(math.sqrt, row)) for x in row] for row in p] for p in (a, b, c)]
    taught = 4 * sum(kl(p, q) for p in soft for q in soft)
    found = loss_of(DepthFL(feddyn=False, temperature=2.0), net, 1.0)
    assert found.item() == pytest.approx(sum(ce) + taught / 2, rel=1e-5)


def test_equal_exits_and_a_single_one_learn_nothing_from_each_other():
    z = [[1.0, -2.0], [0.5, 3.0]]
    for exits in ([z], [z, z], [z, z, z]):
        net = Given(*exits)
        plain = len(exits) * F.cross_entropy(torch.tensor(z), torch.tensor([0, 1]))
        torch.testing.assert_close(loss_of(DepthFL(), net, 1.0), plain)


def test_a_teacher_is_held_fixed():
    """The gradient of an exit is that of its own terms: softmax - teacher, for each teacher."""
    net = Given([[2.0, 0.0]], [[0.0, 1.0]])
    loss_of(DepthFL(), net, 1.0, labels=(0,)).backward()
    one, other = (torch.softmax(z.detach(), 1) for z in net.logits)
    label = torch.tensor([[1.0, 0.0]])
    torch.testing.assert_close(net.logits[0].grad, (one - label) + (one - other))
    torch.testing.assert_close(net.logits[1].grad, (other - label) + (other - one))


@dataclass(frozen=True)
class MultiExitAverage(FedAvg):
    """Uniform FedAvg of the multi-exit loss."""

    name: ClassVar[str] = "multi_exit_average"
    weighting: str = "uniform"

    def loss(self, nets, batch, aux):
        return sum(F.cross_entropy(z, batch.y) for z in nets["main"].call("exits", batch.x))


def test_without_its_ideas_it_is_uniform_fedavg_of_the_multi_exit_loss():
    ours, plain = (federation(m, [WHOLE], rounds=2) for m in (DepthFL(kd=False, feddyn=False), MultiExitAverage()))
    for name, tensor in plain.server.state.items():
        torch.testing.assert_close(ours.server.state[name], tensor)
    taught = federation(DepthFL(feddyn=False, ramp=0), [WHOLE], rounds=2)
    assert not any(torch.allclose(taught.server.state[n], t) for n, t in plain.server.state.items())


def test_unextended_only_the_last_exit_is_trained():
    run = federation(DepthFL(extended=False, feddyn=False), [WHOLE])
    initial = run.ctx.blueprints[WHOLE].initial
    still = {name for name, tensor in run.server.state.items() if torch.equal(tensor, initial[name])}
    assert still == {f"head.{number}.{kind}" for number in (0, 1) for kind in ("weight", "bias")}


# --- FedDyn ---


def replies(run, values):
    """What clients would return whose tensors are all equal to one number."""
    sent = {c: run.method.send(run.server, run.backend.infos[c], Step(), run.ctx) for c in values}
    states = {c: {n: torch.full_like(t, values[c]) for n, t in m.params["main"].items()} for c, m in sent.items()}
    return {c: Message({"main": state}, {}, {"samples": 1}) for c, state in states.items()}


def test_the_servers_step_by_hand():
    """w = 0, clients of three depths return 1, 3 and 5; one more client is absent."""
    run = federation(DepthFL(alpha=0.5), clients=4, run=False)
    run.ctx.phase, run.ctx.round = "round", 1
    for tensor in run.server.state.values():
        tensor.zero_()
    run.method.fuse(run.server, replies(run, {0: 1.0, 1: 3.0, 2: 5.0}), Step(), run.ctx)
    # holders: the first stage all three, the second two, the third one; h = -alpha · holders/4 · mean
    for name, mean, holders in (("head.0.bias", 3.0, 3), ("head.1.bias", 2.0, 2), ("head.2.bias", 1.0, 1)):
        h = -0.5 * holders / 4 * mean
        torch.testing.assert_close(run.server.memory["h"][name], torch.full((3,), h))
        torch.testing.assert_close(run.server.state[name], torch.full((3,), mean - h / 0.5))
        assert torch.equal(run.server.main.state_dict()[name], run.server.state[name])
    # the next round adds to h; a stage that nobody holds stays as it is
    before = {name: tensor.clone() for name, tensor in run.server.state.items()}
    run.method.fuse(run.server, replies(run, {2: 7.0}), Step(), run.ctx)
    w, h = float(before["head.0.bias"][0]), -0.5 * 3 / 4 * 3.0
    h -= 0.5 * 1 / 4 * (7.0 - w)
    torch.testing.assert_close(run.server.state["head.0.bias"], torch.full((3,), 7.0 - h / 0.5))
    for name in ("head.1.bias", "stages.0.conv.weight", "stages.1.conv.weight"):
        assert torch.equal(run.server.state[name], before[name])


def gradients(run):
    found = {client: record.memory.get("gradient", {}) for client, record in run.backend.store.records.items()}
    return {client: found.get(client, {}) for client in run.backend.infos}


@pytest.mark.parametrize("share", [1.0, 0.5])
def test_h_is_the_sum_of_what_clients_remember_over_their_number(share):
    run = federation(DepthFL(), rounds=3, clients=4, share=share)
    assert run.server.memory["h"].keys() == run.ctx.blueprints[WHOLE].shapes.keys()
    for key, h in run.server.memory["h"].items():
        total = sum((q[key] for q in gradients(run).values() if key in q), torch.zeros_like(h))
        torch.testing.assert_close(h, total / 4, rtol=1e-4, atol=1e-6)
        assert h.abs().max() > 0


def test_a_client_remembers_how_far_it_went_and_starts_from_there():
    run = federation(DepthFL(alpha=0.2), [SHORT], clients=1)
    start = run.ctx.blueprints[SHORT].initial
    own = run.backend.store.records[0].states["main"]
    q = gradients(run)[0]
    for name, tensor in q.items():
        torch.testing.assert_close(tensor, -0.2 * (own[name] - start[name]))
    party = run.backend.store.open(0, run.ctx, scratch=True)
    run.ctx.phase, run.ctx.round = "round", 2
    party.inbox = run.method.send(run.server, run.backend.infos[0], Step(), run.ctx)
    anchor = run.method.stage(party, run.ctx).aux["anchor"]
    for name, w in party.inbox.params["main"].items():
        torch.testing.assert_close(anchor[name], w + q[name] / 0.2)


def test_the_penalty_is_that_of_the_paper_up_to_a_constant():
    """(3): the gradient of -<q, w_k> + alpha/2 ||w_k - w||^2 is alpha (w_k - w) - q."""
    net = Given([[0.3, 0.1]])
    w, q = torch.tensor([[0.5, -1.0]]), torch.tensor([[0.25, 2.0]])
    method = DepthFL(alpha=0.4)
    batch = Batch(torch.zeros(1, 1), torch.tensor([0]))
    plain = method.exit_loss({"main": Net(net)}, batch, {})
    (expected,) = torch.autograd.grad(plain, [net.logits[0]])
    whole = method.loss({"main": Net(net)}, batch, {"anchor": {"logits.0": w + q / 0.4}})
    (found,) = torch.autograd.grad(whole, [net.logits[0]])
    torch.testing.assert_close(found, expected + 0.4 * (net.logits[0].detach() - w) - q)


def test_buffers_are_averaged_without_feddyn():
    run = federation(DepthFL(), ["cnn:3-4,bn,exits", "cnn:3-4,bn,exits=1"])
    statistics = [name for name in run.server.state if "running" in name]
    assert statistics and not set(statistics) & set(run.server.memory["h"])
    means = {c: r.states["main"]["stem.norm.running_mean"] for c, r in run.backend.store.records.items()}
    torch.testing.assert_close(run.server.state["stem.norm.running_mean"], sum(means.values()) / 3)


def test_pre_training_is_without_feddyn():
    run = federation(DepthFL(pretrain_epochs=1), [WHOLE], run=False)
    party = run.backend.store.open(0, run.ctx, scratch=True)
    party.inbox = run.method.send(run.server, run.backend.infos[0], PRETRAIN, run.ctx)
    for phase in ("before", "round"):
        run.ctx.phase = phase
        assert ("anchor" in run.method.stage(party, run.ctx).aux) == (phase == "round")
    run.method.fuse(run.server, replies(run, {0: 1.0, 1: 3.0}), PRETRAIN, run.ctx)
    assert all(bool((tensor == 2.0).all()) for tensor in run.server.state.values())
    assert not any(h.any() for h in run.server.memory["h"].values())
    trained = federation(DepthFL(pretrain_epochs=1), [WHOLE], rounds=1)
    for key, h in trained.server.memory["h"].items():  # what clients remember is of the round alone
        torch.testing.assert_close(h, sum(q[key] for q in gradients(trained).values()) / 3, rtol=1e-4, atol=1e-6)


# --- depths ---


@pytest.mark.parametrize("feddyn", [True, False])
def test_a_stage_depends_only_on_clients_that_hold_it(feddyn):
    states = []
    for value in (5.0, 6.0):
        run = federation(DepthFL(feddyn=feddyn), run=False)
        run.method.fuse(run.server, replies(run, {0: 1.0, 1: 3.0, 2: value}), Step(), run.ctx)
        states.append(run.server.state)
    for name, tensor in states[0].items():
        held = name.startswith(("stem", "head.0"))  # all that the shortest client has
        assert torch.equal(tensor, states[1][name]) != held, name


def test_a_party_predicts_with_the_mean_of_its_exits():
    run = federation(DepthFL())
    x = torch.rand(5, 1, 8, 8)
    model = run.server.main.eval()
    logits = model.exits(x)
    assert len(logits) == 3
    torch.testing.assert_close(run.method.predict(run.server, x, run.ctx), (logits[0] + logits[1] + logits[2]) / 3)
    assert torch.equal(DepthFL(extended=False).predict(run.server, x, run.ctx), model(x))
    assert not torch.equal(model(x), run.method.predict(run.server, x, run.ctx))


def test_a_client_exchanges_its_stages_and_exits():
    run = federation(DepthFL())
    stages = [3 * 9 + 3, 4 * 3 * 9 + 4, 6 * 4 * 9 + 6]
    exits = [3 * (width + 1) for width in (3, 4, 6)]
    sizes = {client: 4 * sum(stages[:m] + exits[:m]) for client, m in enumerate((3, 2, 1))}
    assert run.meter.bytes["down"] == sizes
    assert run.meter.bytes["up"] == {client: size + 8 for client, size in sizes.items()}


# --- what is refused ---


@pytest.mark.parametrize(
    "options, words",
    [
        ({"alpha": 0.0}, "alpha must be above 0"),
        ({"temperature": 0.0}, "temperature must be above 0"),
        ({"ramp": -1}, "ramp must not be negative"),
        ({"view": "prefix"}, "use scalefl"),
    ],
)
def test_what_cannot_be_is_refused(options, words):
    with pytest.raises(InputError, match=words):
        DepthFL(**options)


def test_networks_without_exits_are_refused_with_a_remedy():
    with pytest.raises(InputError, match=r"network with several exits, but client 0 has cnn:4-8.*option exits"):
        federation(DepthFL(), ["cnn:4-8"])
