"""FjORD: the acceptance properties of its spec."""

import logging
from collections import Counter
from types import SimpleNamespace

import pytest
import torch
from public_problem import exchange, federation, party, problem, same, states
from torch.nn import functional as F

import polyfed as pf
from polyfed.core.method import Step
from polyfed.core.nets import Net
from polyfed.core.party import Party, PartyData
from polyfed.core.stage import Batch
from polyfed.methods.fedavg import FedAvg
from polyfed.methods.fjord import FjORD
from polyfed.methods.heterofl import HeteroFL
from polyfed.models import build

THIRDS = FjORD(widths=(0.25, 0.5, 1.0))
MAIN = Step()
ENGINES = ("sequential", "batched")


def staged(method, model, client=0):
    """A client's network and stage, in a federation of widths of one network."""
    run = federation(method, problem((18, 24)), (model,))
    run.ctx.round = 1
    own = party(run, client)
    return own.main, method.stage(own, run.ctx)


def batch(width=None, size=6):
    rng = torch.Generator().manual_seed(5)
    columns = {} if width is None else {"width": torch.tensor(width)}
    return Batch(torch.randn((size, 1, 8, 8), generator=rng), torch.arange(size) % 3, columns)


def gradients(loss, module):
    names = [name for name, _ in module.named_parameters()]
    return dict(zip(names, torch.autograd.grad(loss, list(module.parameters()), materialize_grads=True), strict=True))


def corner(shape):
    return tuple(slice(0, size) for size in shape)


@pytest.mark.parametrize("models", [("mlp:1x8",), ("cnn:4-8,bn",)])
def test_the_whole_width_only_is_fedavg_weighted_by_samples(models):
    runs = [
        federation(method, problem(lacking=1), models, rounds=2)
        for method in (FjORD(widths=(1.0,), static_bn=False), FjORD(widths=(1.0,), static_bn=False, kd=True), FedAvg())
    ]
    for run in runs:
        run.run()
    assert same(states(runs[0]), states(runs[2])) and same(states(runs[1]), states(runs[2]))
    assert not same(states(runs[0]), states(federation(FedAvg(), problem(), models)))


def test_widths_of_several_rates_without_draws_are_heterofl_without_companions():
    models = ("cnn:4-8,bn@1", "cnn:4-8,bn@0.5")
    plain = HeteroFL(weighting="samples", scaler=False, mask=False, clip=None)
    runs = [federation(method, problem(), models, rounds=2) for method in (FjORD(widths=(1.0,)), plain)]
    for run in runs:
        run.run()
    assert same(states(runs[0]), states(runs[1]))
    assert all(torch.equal(runs[0].server.state[name], tensor) for name, tensor in runs[1].server.state.items())


@pytest.mark.parametrize(
    ("rate", "narrower"),
    [(1, [0.2, 0.4, 0.6, 0.8]), (0.8, [0.25, 0.5, 0.75]), (0.6, [1 / 3, 2 / 3]), (0.5, [0.4, 0.8]), (0.1, [])],
)
def test_no_width_above_the_clients_own_is_drawn(rate, narrower):
    model, stage = staged(FjORD(), f"mlp:2x20@{rate}")
    client = Party(0, None, PartyData())
    client.models["main"] = model
    assert FjORD().narrower(client) == pytest.approx(narrower)
    assert FjORD(widths=(1.0, 0.4, 0.4)).narrower(client) == pytest.approx([0.4 / rate] if rate > 0.4 else [])
    assert len(stage.aux.get("prefixes", [])) == len(narrower) and bool(stage.draws) == bool(narrower)


@pytest.mark.parametrize(("spec", "tolerance"), [("mlp:2x12", 1e-6), ("cnn:6-10,bn", 1e-5), ("resnet50:w4", 1e-3)])
def test_a_drawn_width_is_the_narrow_network_and_moves_its_prefix_only(spec, tolerance):
    model, stage = staged(FjORD(widths=(0.3, 0.7, 1.0)), spec)
    for drawn, rate in ((0.1, 0.3), (0.34, 0.7)):
        narrow = build(f"{spec}@{rate}", (1, 8, 8), 3)
        narrow.load_state_dict({n: model.state_dict()[n][corner(t.shape)] for n, t in narrow.state_dict().items()})
        found = stage.loss({"main": Net(model)}, batch(drawn), stage.aux)
        expected = F.cross_entropy(Net(narrow).still()(batch().x), batch().y)
        torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)
        ours, theirs = gradients(found, model), gradients(expected, narrow)
        for name, gradient in ours.items():
            inside = corner(theirs[name].shape)
            torch.testing.assert_close(gradient[inside], theirs[name], rtol=tolerance, atol=tolerance)
            rest = gradient.clone()
            rest[inside] = 0
            assert not rest.any()
    whole = stage.loss({"main": Net(model)}, batch(0.67), stage.aux)
    assert torch.equal(whole, F.cross_entropy(Net(model).still()(batch().x), batch().y))


def test_every_width_is_drawn_equally_often_and_anew_for_every_batch(monkeypatch):
    drawn = Counter()
    replaced = Net.replaced

    def noted(self, state):
        drawn[len(state["stem.linear.bias"])] += 1
        return replaced(self, state)

    monkeypatch.setattr(Net, "replaced", noted)
    run = federation(THIRDS, problem((300, 300)), ("mlp:1x8",), rounds=2)
    run.run()
    steps = 2 * 2 * 2 * 38  # rounds, clients, epochs, batches of 8
    assert set(drawn) == {2, 4}
    assert all(abs(count - steps / 3) < 25 for count in drawn.values())


def test_self_distillation_by_hand():
    model, stage = staged(FjORD(widths=(0.5, 1.0), kd=True), "mlp:1x4")
    x, y = batch().x, batch().y
    weight, bias = model.stem.linear.weight, model.stem.linear.bias
    hidden = (x.flatten(1) @ weight.T + bias).relu()
    teacher = hidden @ model.head.weight.T + model.head.bias
    student = hidden[:, :2] @ model.head.weight[:, :2].T + model.head.bias
    hard = F.cross_entropy(teacher, y)
    soft = -(teacher.detach().softmax(1) * student.log_softmax(1)).sum(1).mean()
    found = stage.loss({"main": Net(model)}, batch(0.49), stage.aux)
    torch.testing.assert_close(found, hard + soft)
    ours, theirs = gradients(found, model), gradients(hard + soft, model)
    assert all(torch.allclose(ours[name], gradient) for name, gradient in theirs.items())
    # The whole network drawn: the student is the teacher, the soft term has no gradient.
    whole, plain = stage.loss({"main": Net(model)}, batch(0.5), stage.aux), F.cross_entropy(model(x), y)
    assert torch.equal(whole, plain)
    ours, theirs = gradients(whole, model), gradients(plain, model)
    assert all(torch.equal(ours[name], gradient) for name, gradient in theirs.items())


def test_masked_classes_have_no_gradient_at_any_width():
    model, _ = staged(THIRDS, "mlp:1x8")
    method = FjORD(widths=(0.5, 1.0), mask=True, kd=True)
    _, stage = staged(method, "mlp:1x8")
    aux = {**stage.aux, "present": torch.tensor([1.0, 1.0, 0.0])}
    for drawn in (0.1, 0.9):
        found = gradients(method.loss({"main": Net(model)}, batch(drawn), aux), model)
        assert not found["head.bias"][2].any() and found["head.bias"][:2].all()


def test_entries_beyond_the_widest_participant_stay():
    run = federation(THIRDS, problem((18, 24)), ("cnn:4-8,bn@1", "cnn:4-8,bn@0.5"))
    before = {name: tensor.clone() for name, tensor in run.server.state.items()}
    exchange(run, MAIN, clients=(1,))
    weight, old = run.server.state["stages.0.conv.weight"], before["stages.0.conv.weight"]
    assert torch.equal(weight[4:], old[4:]) and torch.equal(weight[:, 2:], old[:, 2:])
    assert (weight[:4, :2] != old[:4, :2]).all()
    assert torch.equal(weight[:4, :2], party(run, 1).main.state_dict()["stages.0.conv.weight"])


def test_entries_have_the_mean_of_their_holders_by_samples():
    run = federation(THIRDS, problem((10, 30)), ("mlp:1x4@1", "mlp:1x4@0.5"))
    exchange(run, MAIN)
    one, two = (party(run, client).main.state_dict()["stem.linear.weight"] for client in (0, 1))
    fused = run.server.state["stem.linear.weight"]
    torch.testing.assert_close(fused[:2], 0.25 * one[:2] + 0.75 * two)
    assert torch.equal(fused[2:], one[2:])


@pytest.mark.parametrize("static", [True, False])
def test_statistics_are_not_disturbed_by_narrow_widths(static):
    run = federation(FjORD(widths=(0.25, 1.0), static_bn=static), problem((18, 24)), ("cnn:4-8,bn",))
    exchange(run, MAIN)
    mean = party(run, 0).main.state_dict()["stem.norm.running_mean"]
    assert mean.any() != static


def test_bytes_are_those_of_the_slices():
    models = ("mlp:1x8@1", "mlp:1x8@0.5")
    run = federation(THIRDS, problem((18, 24)), models)
    run.run()
    sizes = [sum(p.numel() for p in build(model, (1, 8, 8), 3).parameters()) for model in models]
    assert run.history[0]["bytes_down"] == sum(4 * size for size in sizes)
    assert run.history[0]["bytes_up"] == sum(4 * size + 8 for size in sizes)


@pytest.mark.parametrize("seed", [0, 1, 2])  # the first draw: whole or narrow
def test_clients_run_one_by_one_and_the_log_says_why(seed, caplog):
    with caplog.at_level(logging.INFO, logger="polyfed.engine"):
        runs = [pf.run(THIRDS, problem(), ["mlp:1x8"], rounds=1, seed=seed, engine=e) for e in ENGINES]
    alone, stacked = (run.models[0].state_dict() for run in runs)
    assert all(torch.equal(alone[name], stacked[name]) for name in alone)
    assert "mlp:1x8 run one by one" in caplog.text and ".item()" in caplog.text


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"widths": ()}, "widths is empty"),
        ({"widths": (0.5, 1.5)}, "at most 1"),
        ({"widths": (0.0, 1.0)}, "above 0"),
        ({"scaler": True}, "scaler must stay False"),
        ({"global_rate": 0.5}, "global_rate must stay 1.0"),
    ],
)
def test_values_that_make_no_sense_are_refused(options, words):
    with pytest.raises(pf.InputError, match=words):
        FjORD(**options)


def test_a_width_that_is_ones_own_up_to_rounding_is_not_narrower(monkeypatch):
    monkeypatch.setattr("polyfed.methods.fjord.rate_of", lambda network: 0.1 + 0.2)  # 0.30000000000000004
    assert FjORD(widths=(0.1, 0.3)).narrower(SimpleNamespace(main=None)) == [pytest.approx(1 / 3)]
