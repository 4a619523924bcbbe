"""HeteroFL's dynamic mode: drawn levels, slices in whole networks, what travels."""

from collections import Counter

import pytest
import torch
from public_problem import EVALUATE, exchange, federation, party, problem, same, sizes_of_checked_replies, states

import polyfed as pf
from polyfed.core.message import Message
from polyfed.core.method import Step
from polyfed.core.settings import Training
from polyfed.core.statistics import collect_statistics
from polyfed.core.width import inside
from polyfed.methods.heterofl import STATISTICS, HeteroFL
from polyfed.methods.heterofl_dynamic import HeteroFLDynamic
from polyfed.models import build

MAIN = Step()
NORMED, PLAIN = "cnn:4-8,bn@1", "mlp:2x8@1"
THREE = HeteroFLDynamic(mix="a1-b1-c1")


@pytest.fixture
def fixed(monkeypatch):
    """Let client 0 hold level a, client 1 level b, ... in every round."""
    monkeypatch.setattr(HeteroFLDynamic, "level", lambda self, client, ctx: 0.5**client)


def drawn(method, rounds, clients, seed=0):
    run = federation(method, problem((9,) * clients), ("mlp:1x8",), seed=seed)
    found = []
    for number in range(1, rounds + 1):
        run.ctx.round = number
        found.append([method.level(client, run.ctx) for client in range(clients)])
    return found


def test_levels_are_drawn_for_every_round_and_client_by_their_proportions():
    found = drawn(HeteroFLDynamic(mix="a2-b1-d1"), 100, 4)
    assert found == drawn(HeteroFLDynamic(mix="a2-b1-d1"), 100, 4) != drawn(HeteroFLDynamic(mix="a2-b1-d1"), 100, 4, 1)
    counts = Counter(level for row in found for level in row)
    assert set(counts) == {1.0, 0.5, 0.125}
    assert abs(counts[1.0] - 200) < 30 and abs(counts[0.5] - 100) < 30
    assert len({tuple(row) for row in found}) > 40  # not the same for all clients, nor for all rounds
    assert {level for row in drawn(HeteroFLDynamic(mix="a-d", decay="fedfd"), 9, 2) for level in row} == {1.0, 0.7}


def test_level_a_only_is_heterofl_exactly():
    runs = [
        federation(m, problem(lacking=1), (NORMED,), rounds=2) for m in (HeteroFLDynamic(mix="a"), HeteroFL(), THREE)
    ]
    for run in runs:
        run.run()
    assert same(states(runs[0]), states(runs[1])) and not same(states(runs[2]), states(runs[1]))
    assert all(torch.equal(runs[0].server.state[name], tensor) for name, tensor in runs[1].server.state.items())
    assert runs[0].history[-1]["accuracy"] == runs[1].history[-1]["accuracy"]


@pytest.mark.parametrize("scaler", [True, False])
@pytest.mark.parametrize("model", ["cnn:4-8,bn", "mlp:2x8", "cnn:4-8"])
def test_a_slice_in_the_whole_network_trains_as_the_narrow_network(model, scaler, fixed):
    ours = federation(HeteroFLDynamic(mix="a-b-c", scaler=scaler), problem(), (f"{model}@1",), rounds=2)
    theirs = federation(
        HeteroFL(scaler=scaler), problem(), tuple(f"{model}@{rate}" for rate in (1, 0.5, 0.25)), rounds=2
    )
    ours.run(), theirs.run()
    for name in (n for n in theirs.server.state if "::" not in n):
        torch.testing.assert_close(ours.server.state[name], theirs.server.state[name], rtol=1e-3, atol=1e-4)
    if "bn" in model:
        for name, mean in theirs.server.state.items():
            if f"{model}@0.5::" in name:
                own = ours.server.state[name.replace(f"{model}@0.5::", f"{model}@1*0.5::")]
                torch.testing.assert_close(own, mean, rtol=1e-3, atol=1e-4)
    assert ours.history[-1]["bytes_up"] == theirs.history[-1]["bytes_up"]


@pytest.mark.parametrize("model", [NORMED, PLAIN])
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_nothing_moves_outside_the_slice(model, optimizer, fixed):
    training = Training(epochs=2, batch_size=8, lr=0.05, optimizer=optimizer, weight_decay=0.1, momentum=0.9)
    run = federation(HeteroFLDynamic(mix="a-b"), problem((18, 24)), (model,), training=training)
    exchange(run, MAIN)
    narrow = build(model.replace("@1", "@0.5"), (1, 8, 8), 3)
    for name, parameter in party(run, 1).main.named_parameters():
        inside = tuple(slice(0, size) for size in narrow.state_dict()[name].shape)
        rest = parameter.detach().clone()
        rest[inside] = 0
        assert not rest.any() and parameter[inside].any()


def test_layers_behind_frozen_ones_do_not_move_outside_the_slice(fixed):
    def frozen(input_shape, num_classes):
        model = build("mlp:2x8", input_shape, num_classes)
        model.stem.requires_grad_(False)
        return model

    run = federation(HeteroFLDynamic(mix="a-b", clip=None), problem((18, 24)), (frozen,))
    exchange(run, MAIN)
    own = party(run, 1).main
    assert own.stem.linear.weight.all()
    weight = own.layers[0].linear.weight
    assert weight[:4, :4].all() and not weight[4:].any() and not weight[:, 4:].any()


def test_the_server_takes_the_mean_of_the_holders_and_the_rest_stays(fixed):
    run = federation(HeteroFLDynamic(mix="a-b-c", mask=False), problem(), ("mlp:1x8",))
    run.ctx.round = 1
    before = run.server.state["stem.linear.bias"].clone()
    for clients, expected in (((0, 1, 2), [5, 5, 4, 4, 3, 3, 3, 3]), ((1, 2), [6, 6, 5, 5, None, None, None, None])):
        run.server.state["stem.linear.bias"].copy_(before)
        replies = {}
        for client in clients:
            sent = run.method.send(run.server, run.backend.infos[client], MAIN, run.ctx).params["slice"]
            value = {0: 3.0, 1: 5.0, 2: 7.0}[client]
            replies[client] = Message(
                {"slice": {n: torch.full_like(t, value) for n, t in sent.items()}}, {}, {"samples": 1}
            )
        run.method.fuse(run.server, replies, MAIN, run.ctx)
        found = run.server.state["stem.linear.bias"].tolist()
        old = before.tolist()
        assert found == pytest.approx([e if e is not None else b for e, b in zip(expected, old, strict=True)])


def test_statistics_are_those_of_the_level(fixed):
    run = federation(HeteroFLDynamic(mix="a-b"), problem((18, 24)), (NORMED,))
    exchange(run, MAIN)
    exchange(run, STATISTICS)
    narrow = build("cnn:4-8,bn@0.5", (1, 8, 8), 3)
    message = run.method.send(run.server, run.backend.infos[1], EVALUATE, run.ctx)
    narrow.load_state_dict(message.params["slice"], strict=False)
    collect_statistics(narrow, run.backend.store.data[1].train, 8)
    for name in ("stem.norm.running_mean", "stages.0.norm.running_var"):
        own, expected = message.params["slice"][name], narrow.state_dict()[name]
        torch.testing.assert_close(own, expected)
        assert not torch.allclose(run.server.main.state_dict()[name][: len(own)], expected)
    kept = party(run, 1).main.stem.norm
    assert kept.running_var[2:].tolist() == [1, 1] and kept.running_mean[2:].tolist() == [0, 0]
    client = party(run, 1)
    client.inbox = message
    run.method.receive(client, EVALUATE, run.ctx)
    x = torch.randn((5, 1, 8, 8), generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(client.main.eval()(x), narrow.eval()(x))


def test_bytes_are_those_of_the_slices():
    run = federation(THREE, problem((9,) * 6), (NORMED,))
    run.run()
    levels = [THREE.level(client, run.ctx) for client in range(6)]
    assert len(set(levels)) == 3
    sizes = [sum(p.numel() for p in build(f"cnn:4-8,bn@{level}", (1, 8, 8), 3).parameters()) for level in levels]
    channels = [int(12 * level) for level in levels]
    assert run.history[0]["bytes_down"] == sum(4 * 2 * size for size in sizes) + sum(8 * c for c in channels)
    assert run.history[0]["bytes_up"] == sum(4 * size + 8 for size in sizes) + sum(8 * c + 8 for c in channels)


@pytest.mark.parametrize("model", [PLAIN, "mlp:1x8@1"])
def test_clients_of_unlike_levels_are_stacked_with_their_own_scalers(model):
    method = HeteroFLDynamic(mix="a1-b1-c1", clip=None, mask=False)
    runs = [pf.run(method, problem((18,) * 6), [model], rounds=2, engine=e) for e in ("sequential", "batched")]
    assert len({method.level(client, federation(method, problem((9,) * 6), (model,)).ctx) for client in range(6)}) > 1
    for client in runs[0].models:
        one, other = (run.models[client].state_dict() for run in runs)
        assert all(torch.allclose(one[name], other[name], atol=1e-6) for name in one)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"mix": "b1-c1"}, "needs level a"),
        ({"mix": "a-z"}, "'z' in the mix"),
        ({"mix": "a-f"}, "a to e"),
        ({"statistics": "public"}, "statistics must stay 'clients'"),
        ({"view": "full"}, "view must stay 'prefix'"),
    ],
)
def test_values_that_make_no_sense_are_refused(options, words):
    with pytest.raises(pf.InputError, match=words):
        HeteroFLDynamic(**options)


def test_clients_of_several_widths_are_refused():
    with pytest.raises(pf.InputError, match="same architecture"):
        federation(HeteroFLDynamic(), problem((18, 24)), (NORMED, "cnn:4-8,bn@0.5"))
    with pytest.raises(pf.InputError, match=r"of one family .*: give all clients one model"):
        federation(HeteroFLDynamic(), problem((18, 24)), (NORMED, "mlp:1x8"))


def test_a_server_that_checks_replies_takes_those_of_every_level(monkeypatch):
    run = federation(HeteroFLDynamic(mix="a1-b1-c1"), problem((9,) * 6), ("cnn:4-8,bn",), rounds=2)
    assert len(set(sizes_of_checked_replies(run, monkeypatch))) >= 3


def test_gradients_of_entries_outside_the_level_are_none():
    grads = {"main": {"w": torch.tensor([[2.0, 3.0], [5.0, 7.0]])}}
    held = {"w": torch.tensor([[1.0, 0.0], [0.0, 0.0]])}
    assert inside((grads,), {"held": held})["main"]["w"].tolist() == [[2, 0], [0, 0]]
