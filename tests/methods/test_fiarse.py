"""FIARSE: the acceptance properties of its spec."""

from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
from public_problem import EVALUATE, exchange, federation, party, problem, same, sizes_of_checked_replies, states
from torch import nn

import polyfed as pf
from polyfed.core.fields import in_words, types_of
from polyfed.core.message import Message
from polyfed.core.method import Step
from polyfed.core.settings import Training
from polyfed.core.stage import Trained
from polyfed.data import Clients
from polyfed.methods.fedavg import FedAvg
from polyfed.methods.fiarse import FIARSE, effective
from polyfed.methods.single_weights import others
from polyfed.models import build

MAIN = Step()
W = [0.5, -0.3, 0.1, -0.8]


class Tiny(nn.Module):
    """Weights by hand: one matrix of four, and a norm, which is never masked."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(2)
        self.head = nn.Linear(2, 2, bias=False)
        self.head.weight.data = torch.tensor(W).view(2, 2)

    def forward(self, x):
        return self.head(self.norm(x.flatten(1)[:, :2]))


def two_classes(sizes=(8, 8)):
    rng = torch.Generator().manual_seed(0)
    parts = [(torch.randn((n, 2), generator=rng), torch.arange(n) % 2) for n in sizes]
    return Clients.from_parts(parts, test=parts[0], num_classes=2)


def tiny(method, sizes=(8, 8), **training):
    return federation(method, two_classes(sizes), (Tiny,), training=Training(epochs=1, batch_size=8, **training))


def clones(state):
    return {name: tensor.clone() for name, tensor in state.items()}


def test_the_numbers_of_the_spec():
    w, kept = torch.tensor(W, requires_grad=True), torch.tensor([True, False, False, True])
    out = effective(w, kept, torch.tensor(0.5))
    assert out.tolist() == pytest.approx([0.5, 0, 0, -0.8])
    (gradient,) = torch.autograd.grad(out.sum(), w)
    assert gradient.tolist() == pytest.approx([1.5, 0, 0, 1.47337], abs=1e-5)


def test_an_equal_weight_that_was_not_kept_is_off():
    w = torch.tensor([0.5, 0.5, 0.0], requires_grad=True)
    for theta in (0.5, 0.0):
        out = effective(w, torch.tensor([True, False, False]), torch.tensor(theta))
        (gradient,) = torch.autograd.grad(out.sum(), w)
        assert out.tolist() == [0.5, 0, 0] and gradient.tolist() == [1.5 if theta else 1.0, 0, 0]


def test_the_factor_is_between_one_and_one_and_a_half_and_one_without_a_threshold():
    w = torch.linspace(-3, 3, 61, requires_grad=True)
    everything = torch.ones(61, dtype=torch.bool)
    for theta in (0.1, 1.0):
        out = effective(w, everything, torch.tensor(theta))
        (c,) = torch.autograd.grad(out.sum(), w)
        on = w.abs() >= theta
        assert (c[on] > 1).all() and (c[on] <= 1.5).all() and not c[~on].any()
        assert torch.equal(out[on], w[on]) and not out[~on].any()  # what is below the threshold is off
    with torch.no_grad():
        w[30] = 0.0
    out = effective(w, everything, torch.tensor(0.0))
    (c,) = torch.autograd.grad(out.sum(), w)
    assert torch.equal(c, torch.ones(61)) and torch.equal(out, w)


@pytest.mark.parametrize("models", [("mlp:1x8",), ("cnn:4-8,bn",)])
def test_whole_networks_are_fedavg_with_uniform_weights(models):
    runs = [federation(m, problem(), models, rounds=2) for m in (FIARSE(sizes=(1.0,)), FedAvg(weighting="uniform"))]
    for run in runs:
        run.run()
    assert same(states(runs[0]), states(runs[1]))
    assert all(torch.equal(runs[0].server.state[name], tensor) for name, tensor in runs[1].server.state.items())


@pytest.mark.parametrize("scope", ["model", "layer"])
def test_masks_are_nested_in_the_size(scope):
    sizes = (0.02, 0.1, 0.5, 0.9, 1.0)
    run = federation(FIARSE(sizes=sizes, scope=scope), problem((9,) * 5), ("mlp:2x8",))
    found = [run.method.kept(run.server, run.backend.infos[client], run.ctx) for client in range(5)]
    found = [(choice.chosen, theta) for choice, theta in found]
    for (small, high), (large, low) in pairwise(found):
        assert not (small & ~large).any() and int(small.sum()) < int(large.sum()) and (high >= low).all()
    assert found[-1][0].all() and not found[-1][1].any()


def test_a_layer_keeps_its_own_share_and_norms_are_whole():
    run = federation(FIARSE(sizes=(0.25,), scope="layer"), problem((9,)), ("cnn:4-8,bn",))
    weights = run.method.weights("cnn:4-8,bn", run.ctx)
    assert weights.groups == [["stem.conv.weight"], ["stages.0.conv.weight"], ["head.weight", "head.bias"]]
    choice, theta = run.method.kept(run.server, run.backend.infos[0], run.ctx)
    assert theta.shape == (3,)
    masks = choice.masks()
    assert [int(masks[name].sum()) for name in ("stem.conv.weight", "stages.0.conv.weight")] == [9, 72]
    assert int(masks["head.weight"].sum() + masks["head.bias"].sum()) == 27 // 4
    for name, mask in masks.items():
        place = next(number for number, names in enumerate(weights.groups) if name in names)
        magnitude = run.server.state[name].abs()
        assert (magnitude[mask] >= theta[place]).all() and (magnitude[~mask] <= theta[place]).all()


def test_a_layer_trains_with_its_own_threshold():
    run = federation(FIARSE(sizes=(0.25,), scope="layer"), problem((9,)), ("mlp:1x8",))
    client = party(run, 0)
    client.inbox = run.method.send(run.server, run.backend.infos[0], MAIN, run.ctx)
    run.method.receive(client, MAIN, run.ctx)
    aux = run.method.stage(client, run.ctx).aux
    first, second = client.inbox.data["theta"].tolist()
    assert first != second
    assert {name: float(theta) for name, theta in aux["theta"].items()} == {
        "stem.linear.weight": first,
        "stem.linear.bias": first,
        "head.weight": second,
        "head.bias": second,
    }


def test_a_client_receives_its_largest_weights_and_zeros():
    run = tiny(FIARSE(sizes=(0.5,)))
    message = run.method.send(run.server, run.backend.infos[0], MAIN, run.ctx)
    assert message.params["kept"]["values"].tolist() == pytest.approx([0.5, -0.8])
    assert message.data["mask"].tolist() == [1 + 8] and message.data["theta"].tolist() == [0.5]
    assert set(message.params["main"]) == {"norm.weight", "norm.bias"}
    client = party(run, 0)
    client.inbox = message
    run.method.receive(client, EVALUATE, run.ctx)
    assert client.main.head.weight.flatten().tolist() == pytest.approx([0.5, 0, 0, -0.8])


def test_one_step_follows_the_masked_and_scaled_gradient():
    run = tiny(FIARSE(sizes=(0.5,)), lr=0.1)
    exchange(run, MAIN, clients=(0,))
    model = Tiny()
    x, y = run.backend.store.data[0].train.inputs(), run.backend.store.data[0].train.labels()
    model.head.weight.data *= torch.tensor([[1.0, 0.0], [0.0, 1.0]])
    nn.functional.cross_entropy(model(x), y).backward()
    c = torch.tensor([[1.5, 0.0], [0.0, 1.47337]])
    expected = model.head.weight.data - 0.1 * c * model.head.weight.grad
    trained = party(run, 0).main
    torch.testing.assert_close(trained.head.weight.data, expected)
    torch.testing.assert_close(trained.norm.weight.data, model.norm.weight.data - 0.1 * model.norm.weight.grad)
    assert run.server.state["head.weight"].flatten()[[1, 2]].tolist() == pytest.approx([-0.3, 0.1])  # kept by nobody
    assert torch.equal(run.server.state["head.weight"].diagonal(), trained.head.weight.data.diagonal())


def test_a_weight_that_falls_below_the_threshold_is_off_for_the_rest_of_the_round():
    """Moved below the threshold by hand, it has no gradient, and is returned as it is."""
    run = tiny(FIARSE(sizes=(0.5,)), lr=0.1)
    client = party(run, 0)
    client.inbox = run.method.send(run.server, run.backend.infos[0], MAIN, run.ctx)
    run.method.receive(client, MAIN, run.ctx)
    work = run.method.local(client, MAIN, run.ctx)
    stage = next(work)
    with torch.no_grad():
        client.main.head.weight[0, 0] = 0.4
    run.ctx.run(stage, client, "main/0")
    after = client.tensors()["head.weight"].tolist()
    assert after[0][0] == pytest.approx(0.4) and after[1][1] != pytest.approx(-0.8)
    with pytest.raises(StopIteration) as finished:
        work.send(Trained())
    assert finished.value.value.params["kept"]["values"][0] == pytest.approx(0.4)


@pytest.mark.parametrize(("server_lr", "weighting"), [(1.0, "uniform"), (0.25, "uniform"), (1.0, "samples")])
def test_entries_have_the_mean_over_those_who_kept_them(server_lr, weighting):
    run = tiny(FIARSE(sizes=(0.75, 0.5), server_lr=server_lr, weighting=weighting), (8, 24))
    before = clones(run.server.state)
    sent = {c: run.method.send(run.server, run.backend.infos[c], MAIN, run.ctx) for c in (0, 1)}
    replies = {
        client: Message({"main": sent[client].params["main"], "kept": {"values": values}}, {}, {"samples": samples})
        for client, values, samples in (
            (0, torch.tensor([1.0, 9.0, 3.0]), 8),  # entries 0, 1, 3
            (1, torch.tensor([5.0, 7.0]), 24),  # entries 0, 3
        )
    }
    run.method.fuse(run.server, replies, MAIN, run.ctx)
    share = 0.5 if weighting == "uniform" else 0.75
    mean = [1 + share * 4, 9.0, 0.1, 3 + share * 4]
    expected = [w + server_lr * (m - w) for w, m in zip(W, mean, strict=True)]
    assert run.server.state["head.weight"].flatten().tolist() == pytest.approx(expected)
    assert run.server.state["head.weight"][1, 0] == before["head.weight"][1, 0]
    assert torch.equal(run.server.main.head.weight.data, run.server.state["head.weight"])
    kept, _ = run.method.kept(run.server, run.backend.infos[1], run.ctx)  # by the new magnitudes
    order = run.server.state["head.weight"].flatten().abs().argsort(descending=True)[:2]
    assert set(kept.chosen.nonzero().flatten().tolist()) == set(order.tolist()) != {0, 3}


def test_running_statistics_have_the_plain_mean_whatever_the_servers_step():
    run = federation(FIARSE(sizes=(0.5,), server_lr=0.5), problem((18, 24)), ("cnn:4-8,bn",))
    exchange(run, MAIN)
    found = [party(run, client).main.state_dict()["stem.norm.running_mean"] for client in (0, 1)]
    torch.testing.assert_close(run.server.state["stem.norm.running_mean"], (found[0] + found[1]) / 2)


@pytest.mark.parametrize(("size", "count", "choice"), [(1.0, 547, 69), (0.25, 136, 69), (0.02, 10, 40)])
def test_bytes_are_the_closed_form(size, count, choice):
    run = federation(FIARSE(sizes=(size,)), problem((18, 24)), ("mlp:1x8",))
    run.run()  # n = 64 * 8 + 8 + 8 * 3 + 3 = 547 weights, 69 bytes of mask, one threshold
    assert run.history[0]["bytes_down"] == 2 * (4 * count + choice + 4)
    assert run.history[0]["bytes_up"] == 2 * (4 * count + 8)


def test_bytes_with_norms_and_a_threshold_for_every_layer():
    run = federation(FIARSE(sizes=(0.5, 0.25), scope="layer"), problem((18, 24)), ("cnn:4-8,bn",))
    run.run()
    n, q = [36, 288, 8 * 3 + 3], 4 * (4 + 8)  # weight, bias, mean and variance of every channel
    kept = [sum(int(size * part) for part in n) for size in (0.5, 0.25)]
    assert run.history[0]["bytes_down"] == sum(4 * k + -(-sum(n) // 8) + 4 * q + 4 * 3 for k in kept)
    assert run.history[0]["bytes_up"] == sum(4 * k + 4 * q + 8 for k in kept)


def test_sizes_are_dealt_in_turn_and_measured_with_their_own_mask():
    run = federation(FIARSE(sizes=(1.0, 0.1)), problem((9, 9, 9)), ("mlp:1x8",))
    run.run()
    for client, share in ((0, 547), (1, 54), (2, 547)):
        message = run.method.send(run.server, run.backend.infos[client], EVALUATE, run.ctx)
        own = party(run, client)
        own.inbox = message
        run.method.receive(own, EVALUATE, run.ctx)
        assert sum(int((p != 0).sum()) for p in own.main.parameters()) == share
    assert all((p != 0).all() for p in run.server.main.parameters())


def test_frozen_weights_neither_compete_nor_travel():
    def frozen(input_shape, num_classes):
        model = build("mlp:1x8", input_shape, num_classes)
        model.stem.requires_grad_(False)
        return model

    run = federation(FIARSE(sizes=(0.5,)), problem((18, 24)), (frozen,))
    run.run()
    assert run.history[0]["bytes_up"] == 2 * (4 * (27 // 2) + 8)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"sizes": ()}, "sizes is empty"),
        ({"sizes": (1.0, 0.0)}, "above 0"),
        ({"sizes": (1.1,)}, "at most 1"),
        ({"sizes": "1.0,0.25"}, r"sizes is a list in brackets, such as \[1, 2\], got '1.0,0.25'"),
        ({"view": "prefix"}, "view must stay 'auto'"),
        ({"server_lr": -1.0}, "negative"),
        ({"scope": "stage"}, "scope"),
    ],
)
def test_values_that_make_no_sense_are_refused(options, words):
    with pytest.raises(pf.InputError, match=words):
        FIARSE(**options)


def test_the_list_of_sizes_is_told_in_words():
    assert in_words(types_of(FIARSE)["sizes"]) == "list of numbers, each above 0, at most 1"


def test_clients_of_other_architectures_are_refused():
    with pytest.raises(pf.InputError, match="same architecture"):
        federation(FIARSE(), problem((18, 24)), ("mlp:1x8", "mlp:1x12"))


def test_a_server_that_checks_replies_takes_those_of_every_size(monkeypatch):
    run = federation(FIARSE(sizes=(1.0, 0.25, 0.01)), problem((9,) * 6), ("cnn:4-8,bn",), rounds=2)
    assert len(set(sizes_of_checked_replies(run, monkeypatch))) >= 3


@pytest.mark.parametrize(("buffers", "number"), [("average", 48), ("local", 24)])
def test_what_travels_whole_by_hand(buffers, number):
    """Norms of 4 and 8 channels: 12 weights and 12 biases, and 12 means and 12 variances where they are averaged."""
    run = federation(FIARSE(buffers=buffers), problem((8, 8)), ("cnn:4-8,bn",))
    (blueprint,) = run.ctx.blueprints.values()
    assert others(SimpleNamespace(method=run.method, ctx=run.ctx, blueprint=blueprint)) == number
