"""FedL2G: the acceptance properties of its spec."""

import copy
from dataclasses import replace

import pytest
import torch
from tests.contract.table import synthetic
from torch import nn
from torch.nn import functional as F

import polyfed as pf
from polyfed.api import prepare
from polyfed.config import Networks
from polyfed.core.errors import InputError
from polyfed.core.message import Message
from polyfed.core.nets import Net
from polyfed.core.party import Context, Party, PartyData
from polyfed.core.rng import SERVER
from polyfed.core.samples import Samples
from polyfed.core.settings import Settings
from polyfed.core.stage import Batch
from polyfed.methods.fedl2g import FedL2G
from polyfed.methods.fedproto import FedProto
from polyfed.models import build

SGD = pf.Training(epochs=2, batch_size=4, lr=0.05)


def federation(method, rounds=1, models=("mlp:1x8",), clients=3, feature_dim=None, training=SGD):
    settings = Settings(rounds, training=training)
    made = prepare(method, synthetic(clients), list(models), settings, Networks(feature_dim=feature_dim))
    made.run()
    return made


def context(classes, training):
    return Context(0, 1, 1, training, classes, (1,), 1)


class Bare(nn.Module):
    """A linear model of two classes, without a bias, at zero."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(2, 1))

    def forward(self, x):
        return x @ self.weight.T


def test_a_step_by_hand():
    """W = 0, input 1, V = 0, study = quiz = one sample of class 0, eta = 1: w' = (0.5, -0.5)."""
    client = Party(0, None, PartyData())
    client.models["main"] = Bare()
    one = Samples(torch.ones(1, 1), torch.tensor([0]))
    ctx = context(2, pf.Training(lr=1.0))
    gradient, present = FedL2G().gradient(client, one, one, torch.zeros(2, 2), ctx)
    assert present.tolist() == [0]
    torch.testing.assert_close(gradient, torch.tensor([[-0.2689414, 0.2689414], [0.0, 0.0]]))
    server = Party(SERVER, None, PartyData())
    server.memory["guides"] = torch.zeros(2, 2)
    told = Message(data={"gradients": gradient[:1], "classes": torch.tensor([0], dtype=torch.uint8)})
    FedL2G(server_lr=0.1).fuse(server, {0: told}, pf.Step(), ctx)
    torch.testing.assert_close(server.memory["guides"], torch.tensor([[0.02689414, -0.02689414], [0.0, 0.0]]))


@pytest.fixture
def doubles():
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def problem(form, model="mlp:2x6", weight=1.0):
    """A client with study and quiz samples, guides and the method."""
    rng = torch.Generator().manual_seed(0)
    client = Party(0, None, PartyData())
    with torch.random.fork_rng():
        torch.manual_seed(1)
        client.models["main"] = build(model, (1, 8, 8), 3)
    x = torch.randn(12, 1, 8, 8, generator=rng)
    y = torch.tensor([0, 2, 2, 0, 2, 0, 2, 1, 2, 0, 1, 1])
    guides = torch.randn(3, 3 if form == "logit" else client.main.feature_dim, generator=rng)
    return FedL2G(form=form, guide_weight=weight), client, Samples(x[:7], y[:7]), Samples(x[7:], y[7:]), guides


@pytest.mark.parametrize("form", ["logit", "feature"])
@pytest.mark.parametrize("model", ["mlp:2x6", "cnn:4-6,bn"])
def test_the_gradient_is_the_sum_of_the_outputs_derivatives_along_the_quiz_gradient(form, model, doubles):
    method, client, study, quiz, guides = problem(form, model, weight=1.5)
    found, present = method.gradient(client, study, quiz, guides, context(3, pf.Training(lr=0.3)))
    module = copy.deepcopy(client.main)
    for layer in module.modules():
        if hasattr(layer, "track_running_stats"):
            layer.track_running_stats = False  # the statistics of the batch
    weights = {name: p.detach() for name, p in module.named_parameters()}

    class Parts(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = module

        def forward(self, x):
            z = self.net.features(x)
            return z, self.net.head(z)

    def parts(w, x):
        return torch.func.functional_call(Parts(), {f"net.{n}": t for n, t in w.items()}, (x,))

    def guided(w):
        z, logits = parts(w, study.x)
        mse = F.mse_loss(logits if form == "logit" else z, guides[study.y])
        return F.cross_entropy(logits, study.y) + 1.5 * mse

    step = torch.func.grad(guided)(weights)
    ahead = {name: w - 0.3 * step[name] for name, w in weights.items()}
    u = torch.func.grad(lambda w: F.cross_entropy(parts(w, quiz.x)[1], quiz.y))(ahead)
    place = 1 if form == "logit" else 0
    o, pushed = torch.func.jvp(lambda w: parts(w, study.x)[place], (weights,), (u,))
    expected = torch.stack([pushed[study.y == c].sum(0) for c in range(3)]) * 2 * 0.3 * 1.5 / o.numel()
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-14)
    assert present.tolist() == [0, 2] and expected.abs().max() > 1e-5


def test_the_gradient_is_the_change_of_the_quiz_loss(doubles):
    method, client, study, quiz, guides = problem("logit")
    ctx = context(3, pf.Training(lr=0.3))
    found, _ = method.gradient(client, study, quiz, guides, ctx)

    def quiz_loss(v):
        module = copy.deepcopy(client.main)
        method.guided_loss(Net(module), study.x, study.y, v).backward()
        with torch.no_grad():
            for parameter in module.parameters():
                parameter -= 0.3 * parameter.grad
            return float(F.cross_entropy(module(quiz.x), quiz.y))

    for row, column in ((0, 0), (2, 1), (1, 2)):
        nudge = torch.zeros_like(guides)
        nudge[row, column] = 1e-4
        change = (quiz_loss(guides + nudge) - quiz_loss(guides - nudge)) / 2e-4
        assert float(found[row, column]) == pytest.approx(change, abs=1e-8)
    assert found[1].tolist() == [0.0, 0.0, 0.0]  # no such sample in the study batch


def test_the_step_ahead_has_the_learning_rate_of_the_round(doubles):
    """0.4, halved after each of two rounds."""
    method, client, study, quiz, guides = problem("logit")
    third = replace(context(3, pf.Training(lr=0.4, round_decay=0.5)), round=3, rounds=9)
    found, _ = method.gradient(client, study, quiz, guides, third)
    expected, _ = method.gradient(client, study, quiz, guides, context(3, pf.Training(lr=0.1)))
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("model", ["mlp:1x8", "cnn:4-8,bn"])
def test_telling_the_gradient_leaves_the_network_and_its_statistics_alone(model):
    run = federation(FedL2G(warm_up=3), models=[model])
    start = run.ctx.blueprints[model].initial
    client = run.backend.store.open(0, run.ctx)
    before = {name: tensor.clone() for name, tensor in client.tensors().items()}
    client.inbox = run.method.send(run.server, run.backend.infos[0], run.plan.before[0], run.ctx)
    with pytest.raises(StopIteration) as finished:
        next(run.method.local(client, run.plan.before[0], run.ctx))
    assert finished.value.value.data["gradients"].abs().max() > 0
    assert all(torch.equal(before[name], tensor) for name, tensor in client.tensors().items())
    assert any(not torch.equal(before[name], start[name]) for name in start)  # it did train in the round


def test_a_lone_sample_in_a_network_with_batchnorm_uses_the_running_statistics():
    method, client, study, _, guides = problem("logit", "cnn:4-6,bn")
    one = study.select(torch.tensor([0]))
    found, present = method.gradient(client, one, one, guides, context(3, pf.Training(lr=0.3)))
    assert found.isfinite().all() and found[0].abs().max() > 0 and present.tolist() == [0]
    client.main.stem.norm.running_mean.add_(1.0)
    other, _ = method.gradient(client, one, one, guides, context(3, pf.Training(lr=0.3)))
    assert not torch.allclose(other, found, rtol=1e-3)


def test_frozen_parameters_take_no_step(doubles):
    method, client, study, quiz, guides = problem("logit")
    ctx = context(3, pf.Training(lr=0.3))
    free, _ = method.gradient(client, study, quiz, guides, ctx)
    client.main.stem.requires_grad_(False)
    frozen, _ = method.gradient(client, study, quiz, guides, ctx)
    assert not torch.allclose(free, frozen, rtol=1e-3)


def test_the_mean_is_over_those_who_had_the_class_and_is_clipped():
    server, ctx = Party(SERVER, None, PartyData()), context(3, SGD)

    def told(rows, classes):
        return Message(data={"gradients": torch.tensor(rows), "classes": torch.tensor(classes, dtype=torch.uint8)})

    replies = {0: told([[2.0], [1.0]], [0, 2]), 1: told([[4.0]], [0])}
    for clip, scale in ((100.0, 1.0), (1.0, 1 / 10**0.5)):  # the mean is (3, 0, 1)
        server.memory["guides"] = torch.ones(3, 1)
        FedL2G(server_lr=0.5, server_clip=clip).fuse(server, replies, pf.Step(), ctx)
        expected = [1 - 1.5 * scale, 1.0, 1 - 0.5 * scale]
        assert server.memory["guides"].flatten().tolist() == pytest.approx(expected)


@pytest.mark.parametrize(("options", "rate"), [({}, 0.1), ({"form": "feature"}, 100.0), ({"server_lr": 3.0}, 3.0)])
def test_the_servers_rate_where_nobody_says_it(options, rate):
    server = Party(SERVER, None, PartyData())
    server.memory["guides"] = torch.zeros(3, 1)
    reply = Message(data={"gradients": torch.tensor([[0.01]]), "classes": torch.tensor([1], dtype=torch.uint8)})
    FedL2G(**options).fuse(server, {0: reply}, pf.Step(), context(3, SGD))
    assert server.memory["guides"].flatten().tolist() == pytest.approx([0.0, -0.01 * rate, 0.0])


def test_without_a_rate_the_guides_stay_as_drawn_from_a_normal():
    run = federation(FedL2G(warm_up=2, server_lr=0.0))
    drawn = torch.randn(3, 3, generator=replace(run.ctx, round=0).rng("guides"))
    assert torch.equal(run.server.memory["guides"], drawn)
    moved = federation(FedL2G(warm_up=2)).server.memory["guides"]
    assert not torch.equal(moved, drawn)


def test_with_a_weight_of_zero_it_is_local_training_on_the_study_set():
    method = FedL2G(guide_weight=0.0, warm_up=1)
    ours = federation(method, rounds=2)
    data = synthetic(3)
    studies = [method.divided(samples, client, ours.ctx)[0] for client, samples in enumerate(data.train)]
    less = replace(
        data, train=tuple(replace(s, index=study.index) for s, study in zip(data.train, studies, strict=True))
    )
    plain = prepare(pf.Local(), less, ["mlp:1x8"], Settings(2, training=SGD))
    plain.run()
    assert all(len(study) < len(samples) for study, samples in zip(studies, data.train, strict=True))
    for client in range(3):
        mine, theirs = (run.backend.store.records[client].states["main"] for run in (ours, plain))
        assert all(torch.equal(mine[name], tensor) for name, tensor in theirs.items())


@pytest.mark.parametrize(("form", "weight"), [("logit", 1.0), ("feature", 1.0), ("feature", 0.5)])
def test_the_loss_by_hand(form, weight):
    method, client, study, _, guides = problem(form, weight=weight)
    z = client.main.features(study.x)
    logits = client.main.head(z)
    target = logits if form == "logit" else z
    expected = F.cross_entropy(logits, study.y) + weight * (target - guides[study.y]).pow(2).mean()
    found = method.loss({"main": Net(client.main)}, Batch(study.x, study.y), {"guides": guides})
    torch.testing.assert_close(found, expected)
    if form == "feature":
        aux = {"prototypes": guides, "known": torch.ones(3)}
        proto = FedProto(lam=weight).loss({"main": Net(client.main)}, Batch(study.x, study.y), aux)
        torch.testing.assert_close(found, proto)


@pytest.mark.parametrize(
    ("samples", "batches", "quiz"),
    [(1, 1, 1), (2, 1, 1), (19, 1, 3), (20, 1, 4), (50, 2, 8), (20, 5, 4)],
)
def test_the_quiz_set_is_fixed_and_apart_from_the_study_set(samples, batches, quiz):
    """Batches of 4: a client with fewer than 20 samples keeps a fifth of them for the quiz."""
    data = Samples(torch.arange(float(samples)).unsqueeze(1), torch.zeros(samples, dtype=torch.long))
    method = FedL2G(quiz_batches=batches)
    study, asked = method.divided(data, 0, context(3, SGD))
    assert len(asked) == quiz
    values = study.inputs().flatten().tolist() + asked.inputs().flatten().tolist()
    assert sorted(values) == ([0.0, 0.0] if samples == 1 else list(range(samples)))
    again, _ = method.divided(data, 0, replace(context(3, SGD), round=9))
    assert torch.equal(study.inputs(), again.inputs())
    if samples == 50:
        assert not torch.equal(study.inputs(), method.divided(data, 1, context(3, SGD))[0].inputs())
        assert asked.inputs().max() > 8  # not the first ones


def test_every_exchange_draws_another_study_batch(monkeypatch):
    seen = []
    gradient = FedL2G.gradient

    def noted(self, client, study, quiz, guides, ctx):
        seen.append((client.id, ctx.round, tuple(study.inputs().sum(dim=(1, 2, 3)).tolist()), len(study)))
        return gradient(self, client, study, quiz, guides, ctx)

    monkeypatch.setattr(FedL2G, "gradient", noted)
    federation(FedL2G(warm_up=3, study_batches=2), rounds=2)
    batches = [(client, sums) for client, _, sums, _ in seen]
    assert len(batches) == 3 * 5 == len(set(batches))
    assert [number for client, number, *_ in seen if client == 0] == [0, 0, 0, 1, 2]
    assert {size for *_, size in seen} == {8}


def test_everybody_takes_part_in_the_warm_up():
    assert [(step.name, step.who) for step in FedL2G(warm_up=3).plan().before] == [("guide", "all")] * 3


def test_only_the_study_set_is_trained_on():
    run = federation(FedL2G(warm_up=0))
    client = run.backend.store.open(1, run.ctx)
    client.inbox = run.method.send(run.server, run.backend.infos[1], run.plan.round[0], run.ctx)
    stage = next(run.method.local(client, run.plan.round[0], run.ctx))
    study, _ = run.method.divided(client.train, 1, run.ctx)
    assert torch.equal(stage.data.inputs(), study.inputs()) and len(study) < len(client.train)
    assert torch.equal(stage.aux["guides"], run.server.memory["guides"])


@pytest.mark.parametrize(("form", "size"), [("logit", 3), ("feature", 8)])
def test_bytes_are_those_of_the_formula(form, size, monkeypatch):
    held, warm_up, rounds = [], 2, 2
    gradient = FedL2G.gradient

    def noted(self, client, study, *rest):
        held.append((client.id, len(study.labels().unique())))
        return gradient(self, client, study, *rest)

    monkeypatch.setattr(FedL2G, "gradient", noted)
    run = federation(FedL2G(form=form, warm_up=warm_up), rounds=rounds)
    for client in range(3):
        assert run.meter.bytes["down"][client] == (warm_up + rounds) * 4 * 3 * size
        assert run.meter.bytes["up"][client] == sum(n * (4 * size + 1) for k, n in held if k == client)


def test_a_class_number_takes_two_bytes_past_256_classes():
    """One class of 257 in a batch of one sample: a row of 257 numbers and its number."""
    made = prepare(
        FedL2G(warm_up=1), synthetic(2, classes=257), ["mlp:1x4"], Settings(1, training=replace(SGD, batch_size=1))
    )
    made.run()
    assert made.meter.bytes["up"] == dict.fromkeys(range(2), 2 * (4 * 257 + 2))


def with_dropout():
    return pf.adapt(
        nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, 3)), head="4"
    )


def test_dropout_draws_come_from_the_clients_own_stream():
    runs = [federation(FedL2G(warm_up=2), models=[with_dropout], rounds=1) for _ in range(2)]
    assert torch.equal(*(run.server.memory["guides"] for run in runs))


def test_networks_of_any_kind_are_guided_by_logits_and_features_need_one_size():
    run = federation(FedL2G(warm_up=1), models=["mlp:1x8", "cnn:4-8,bn", "mlp:2x5"])
    assert run.server.memory["guides"].shape == (3, 3)
    with pytest.raises(InputError, match="client 0 has 8 features and client 1 has 5"):
        federation(FedL2G(form="feature"), models=["mlp:1x8", "mlp:2x5"])


@pytest.mark.parametrize(
    "options",
    [
        {"form": "head"},
        {"guide_weight": -1.0},
        {"server_lr": -1.0},
        {"server_clip": 0.0},
        {"warm_up": -1},
        {"quiz_batches": 0},
        {"study_batches": 0},
    ],
)
def test_values_that_make_no_sense_are_refused(options):
    with pytest.raises(InputError, match=next(iter(options))):
        FedL2G(**options)
