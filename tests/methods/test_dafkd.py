"""DaFKD: the acceptance properties of its spec."""

import pytest
import torch
from tests.contract.table import synthetic
from torch.nn import functional as F

import polyfed as pf
from polyfed.api import prepare
from polyfed.core.errors import InputError
from polyfed.core.method import Step
from polyfed.core.nets import Net
from polyfed.core.party import load_state, state_of
from polyfed.core.settings import Settings
from polyfed.core.stage import Batch
from polyfed.engines.inprocess import InProcess
from polyfed.methods.dafkd import DaFKD, noise_seed, weighted_teacher
from polyfed.methods.dafkd_hetero import DaFKDHetero
from polyfed.models.generators import averaged_state, generated

SMALL = {"noise_dim": 4, "width": 2, "samples": 12, "distill_epochs": 1, "distill_lr": 1e-3}
TRAINING = pf.Training(epochs=1, batch_size=8, lr=0.05)
WIDTHS = ("mlp:1x8@1", "mlp:1x8@0.5")


def federation(method, models=("mlp:1x8",), rounds=1, clients=3):
    return prepare(method, synthetic(clients), list(models), Settings(rounds, training=TRAINING))


def exchanged(run, monkeypatch):
    """Run, and return what went down and came up in every exchange."""
    seen = []
    exchange = InProcess.exchange

    def noted(self, step, messages, ctx):
        kept = {client: message.detached() for client, message in messages.items()}
        replies = exchange(self, step, messages, ctx)
        seen.append((ctx.round, kept, {client: reply.detached() for client, reply in replies.messages.items()}))
        return replies

    monkeypatch.setattr(InProcess, "exchange", noted)
    run.run()
    return seen


def test_a_teacher_is_weighted_by_scores_sample_by_sample():
    answers = torch.tensor([[[1.0, 0.0], [4.0, 0.0], [2.0, 6.0]], [[0.0, 1.0], [0.0, 8.0], [4.0, 2.0]]])
    scores = torch.tensor([[0.75, 0.1, 0.0], [0.25, 0.3, 0.0]])
    expected = torch.tensor([[0.75, 0.25], [1.0, 6.0], [3.0, 4.0]])  # the last: no score at all, equal weights
    torch.testing.assert_close(weighted_teacher(answers, scores), expected)
    constant = weighted_teacher(answers, torch.full((2, 3), 0.3))
    torch.testing.assert_close(constant, answers.mean(0))  # FedDF's teacher
    ones = weighted_teacher(torch.ones(5, 4, 3), torch.rand(5, 4))
    torch.testing.assert_close(ones, torch.ones(4, 3))  # weights sum to one
    tiny = weighted_teacher(torch.tensor([[[4.0]], [[8.0]]]), torch.tensor([[1e-35], [3e-35]]))
    torch.testing.assert_close(tiny, torch.tensor([[7.0]]))  # also where nobody knows the sample at all


def active(method, round=1, client=1, models=("mlp:1x8",)):
    run = federation(method, models)
    run.ctx.round = round
    party = run.backend.store.open(client, run.ctx)
    party.inbox = run.method.send(run.server, party.info, Step(), run.ctx)
    return run, party, run.method.stage(party, run.ctx)


@pytest.mark.parametrize("penalty", [0.0, 0.3])
def test_the_losses_by_hand(penalty):
    _, client, stage = active(DaFKD(**SMALL, penalty=penalty))
    first, second = stage.updates
    assert first.trainable == {"main": None, "discriminator": None} and second.trainable == {"generator": None}
    torch.manual_seed(0)
    noise, place = torch.randn(5, 4), torch.rand(5)
    batch = Batch(torch.randn(5, 1, 8, 8), torch.tensor([0, 1, 2, 0, 1]), {"noise": noise, "place": place})
    nets = {name: Net(module) for name, module in client.models.items()}
    found = first.losses[0](nets, batch, {})
    main, discriminator = client.main, client.models["discriminator"]
    fake = client.models["generator"](noise).detach()

    def score(x):
        return discriminator(main.features(x)).squeeze(1)

    def bce(x, value):
        return F.binary_cross_entropy(score(x).sigmoid(), torch.full((5,), value))

    expected = F.cross_entropy(main(batch.x), batch.y) + bce(batch.x, 1.0) + bce(fake, 0.0)
    at = place.view(5, 1, 1, 1)
    between = (at * batch.x + (1 - at) * fake).requires_grad_()
    (slope,) = torch.autograd.grad(score(between).sigmoid().sum(), between, create_graph=True)
    expected = expected + penalty * (slope.flatten(1).norm(dim=1) - 1).square().mean()
    torch.testing.assert_close(found, expected)
    for module in (main.stem.linear, discriminator):  # the penalty reaches the weights, too
        ours, by_hand = (torch.autograd.grad(v, module.weight, retain_graph=True) for v in (found, expected))
        torch.testing.assert_close(ours, by_hand)
    made = second.losses[0](nets, batch, {})
    torch.testing.assert_close(made, F.binary_cross_entropy(score(fake).sigmoid(), torch.ones(5)))
    (gradient,) = torch.autograd.grad(made, client.models["generator"].layers[-1].bias)
    assert gradient.abs().sum() > 0


def test_who_learns_in_which_round():
    method = DaFKD(**SMALL, discriminator_rounds=1, generator_rounds=2)
    moved = [[set(u.trainable) for u in active(method, round)[2].all_updates()] for round in (1, 2, 3)]
    assert moved == [[{"main", "discriminator"}, {"generator"}], [{"main"}, {"generator"}], [{"main"}]]
    only_judges = DaFKD(**SMALL, discriminator_rounds=1, generator_rounds=0)
    assert [set(u.trainable) for u in active(only_judges)[2].all_updates()] == [{"main", "discriminator"}]


def test_a_generated_batch_moves_no_statistics_of_the_network():
    _, client, stage = active(DaFKD(**SMALL), models=("cnn:4-8,bn",))
    nets = {name: Net(module) for name, module in client.models.items()}
    batch = Batch(
        torch.randn(5, 1, 8, 8), torch.tensor([0, 1, 2, 0, 1]), {"noise": torch.randn(5, 4), "place": torch.rand(5)}
    )
    stage.updates[0].losses[0](nets, batch, {})
    assert client.main.stem.norm.num_batches_tracked == 1  # that of the client's own samples
    assert client.models["generator"].layers[0].num_batches_tracked == 0
    stage.updates[1].losses[0](nets, batch, {})
    assert client.main.stem.norm.num_batches_tracked == client.models["generator"].layers[0].num_batches_tracked == 1


def test_scores_are_those_of_the_samples_of_the_generator_that_was_sent(monkeypatch):
    run = federation(DaFKD(**SMALL))
    started = {name: t.clone() for name, t in averaged_state(run.server.models["generator"]).items()}
    ((_, down, up),) = exchanged(run, monkeypatch)
    noise = torch.randn(12, 4, generator=torch.Generator().manual_seed(down[1].meta["noise"]))
    assert down[1].meta["noise"] == noise_seed(run.ctx)
    generator = run.method.new_generator(run.ctx)
    load_state(generator, started)
    x = generated(generator, noise)
    client = run.backend.store.open(1, run.ctx)
    with torch.no_grad():
        scores = client.models["discriminator"](client.main.eval().features(x)).sigmoid().squeeze(1)
    torch.testing.assert_close(up[1].data["scores"], scores)
    assert not torch.equal(up[1].params["generator"]["first.weight"], started["first.weight"])  # it was trained since


def test_generators_are_averaged_by_samples_and_discriminators_stay(monkeypatch):
    run = federation(DaFKD(**SMALL))
    ((_, _, up),) = exchanged(run, monkeypatch)
    weights = torch.tensor([float(reply.meta["samples"]) for reply in up.values()])
    for name, mean in averaged_state(run.server.models["generator"]).items():
        stacked = torch.stack([reply.params["generator"][name] for reply in up.values()])
        expected = (stacked * (weights / weights.sum()).view(-1, *(1,) * mean.dim())).sum(0)
        torch.testing.assert_close(mean, expected)
    kept = [record.states["discriminator"] for record in run.backend.store.records.values()]
    assert not torch.equal(kept[0]["weight"], kept[1]["weight"])
    assert all(set(reply.params) == {"main", "generator"} for reply in up.values())
    assert not any(torch.equal(t, kept[0]["weight"]) for reply in up.values() for _, t in reply.tensors())


def test_nothing_is_distilled_in_the_first_round_and_the_average_is_where_it_starts(monkeypatch):
    seen = []
    real = DaFKD.distill_into
    monkeypatch.setattr(
        DaFKD, "distill_into", lambda self, server, data, targets, ctx: seen.append((server, data, targets, ctx))
    )
    run = federation(DaFKD(**SMALL), rounds=2)
    (_, _, _), (_, _, up) = exchanged(run, monkeypatch)
    ((server, data, targets, ctx),) = seen
    names = ("head.weight", "head.bias", "stem.linear.weight", "stem.linear.bias")
    assert set(server.state) == set(names)

    def answer(state):
        return F.linear(
            F.linear(data.x.flatten(1), state[names[2]], state[names[3]]).relu(), state[names[0]], state[names[1]]
        )

    scores = torch.stack([reply.data["scores"] for reply in up.values()])
    weights = scores / scores.sum(0)
    expected = sum(w.unsqueeze(1) * answer(reply.params["main"]) for w, reply in zip(weights, up.values(), strict=True))
    torch.testing.assert_close(targets, expected)
    average = {name: tensor.clone() for name, tensor in server.state.items()}
    samples = torch.tensor([float(reply.meta["samples"]) for reply in up.values()])
    heads = torch.stack([reply.params["main"]["head.bias"] for reply in up.values()])
    torch.testing.assert_close(average["head.bias"], (heads * (samples / samples.sum()).unsqueeze(1)).sum(0))

    def distance(state, targets=targets):
        student, teacher = (answer(state) / 10).log_softmax(1), (targets / 10).softmax(1)
        return 100 * F.kl_div(student, teacher, reduction="batchmean").item()  # T = 10

    far = 100 * targets  # so that the divergence is no matter of rounding
    real(DaFKD(**SMALL | {"distill_lr": 1e-12}), server, data, far, ctx)
    assert ctx.records["distill_loss"] == pytest.approx(distance(average, far), rel=1e-3)
    real(DaFKD(**SMALL | {"distill_epochs": 40}), server, data, targets, ctx)
    assert distance(server.state) < distance(average)
    assert all(torch.equal(server.state[name], server.main.state_dict()[name]) for name in names)
    assert ctx.records["distill_loss"] < distance(average)


def test_without_distillation_the_server_has_the_mean_by_samples_of_what_was_uploaded(monkeypatch):
    run = federation(DaFKD(**SMALL | {"distill_epochs": 0}), rounds=2)  # discriminators and generator do learn
    _, (_, _, up) = exchanged(run, monkeypatch)
    samples = torch.tensor([float(reply.meta["samples"]) for reply in up.values()])
    for name, mean in run.server.state.items():
        stacked = torch.stack([reply.params["main"][name] for reply in up.values()])
        torch.testing.assert_close(mean, torch.tensordot(samples / samples.sum(), stacked, 1))


def test_a_slice_teaches_and_the_widest_network_learns(monkeypatch):
    taught = []
    monkeypatch.setattr(
        DaFKDHetero, "distill_into", lambda self, server, data, targets, ctx: taught.append(targets.shape)
    )
    federation(DaFKDHetero(**SMALL), WIDTHS, rounds=3).run()
    assert taught == [(12, 3), (12, 3)]
    monkeypatch.undo()
    run = federation(DaFKDHetero(**SMALL | {"distill_lr": 0.1}), WIDTHS, rounds=2)
    plain = federation(DaFKDHetero(**SMALL | {"distill_epochs": 0}), WIDTHS, rounds=2)
    run.run(), plain.run()
    for name, tensor in plain.server.state.items():
        assert tensor.shape[0] in (8, 3)  # that of the widest
        assert not torch.equal(run.server.state[name], tensor)
        assert torch.equal(run.server.state[name], state_of(run.server.main)[name])


@pytest.mark.parametrize("kind", [DaFKD, DaFKDHetero])
def test_bytes(kind):
    run = federation(kind(**SMALL), rounds=2)
    run.run()
    shared = sum(t.numel() for t in run.server.state.values())
    generator = sum(t.numel() for t in averaged_state(run.server.models["generator"]).values())
    assert run.meter.bytes["down"] == dict.fromkeys(range(3), 2 * (4 * (shared + generator) + 8))
    assert run.meter.bytes["up"] == dict.fromkeys(range(3), 2 * (4 * (shared + generator + 12) + 8))


def test_what_does_not_fit_is_refused():
    with pytest.raises(InputError, match="the same architecture"):
        federation(DaFKD(), ("mlp:1x8", "mlp:2x8"))
    with pytest.raises(InputError, match="temperature must be above 0"):
        DaFKD(temperature=0.0)
    with pytest.raises(InputError, match="samples must be at least 1"):
        DaFKDHetero(samples=0)
