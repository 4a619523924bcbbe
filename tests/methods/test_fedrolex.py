"""FedRolex: the acceptance properties of its spec."""

from itertools import pairwise

import pytest
import torch
from tests.contract.table import synthetic

import polyfed as pf
from polyfed.api import prepare
from polyfed.core.errors import InputError
from polyfed.core.message import Message
from polyfed.core.method import Step
from polyfed.core.settings import Settings
from polyfed.methods.fedavg import FedAvg
from polyfed.methods.fedrolex import FedRolex
from polyfed.methods.heterofl import STATISTICS, HeteroFL

WIDTHS = ["cnn:8-16@1", "cnn:8-16@0.5", "cnn:8-16@0.25"]
TRAINING = pf.Training(epochs=1, batch_size=8, lr=0.05)


def federation(method, models=WIDTHS, rounds=1):
    return prepare(method, synthetic(3), models, Settings(rounds, training=TRAINING))


def windows(run, architecture, rounds):
    """Which of the 16 channels of the second layer an architecture holds in each round."""
    found = []
    for number in range(1, rounds + 1):
        run.ctx.round = number
        slots = run.method.slots_of(run.ctx.blueprints[architecture], run.ctx)
        name = next(n for n in slots if n.endswith("weight") and run.server.state[n].shape[:2] == (16, 8))
        part = slots[name].part
        found.append(set(range(16)) if part is None else set(part[0].flatten().tolist()))
    return found


def test_the_first_round_is_that_of_heterofl():
    ours, plain = federation(FedRolex()), federation(HeteroFL())
    ours.run(), plain.run()
    for name, tensor in plain.server.state.items():
        assert torch.equal(ours.server.state[name], tensor), name


@pytest.mark.parametrize("direction", [1, -1])
@pytest.mark.parametrize(("rate", "count"), [("0.5", 8), ("0.25", 4)])
def test_every_channel_is_held_equally_often(rate, count, direction):
    held = windows(federation(FedRolex(direction=direction)), f"cnn:8-16@{rate}", 17)
    assert all(len(window) == count for window in held)
    for channel in range(16):
        assert sum(channel in window for window in held[:16]) == count
    assert held[0] == held[16] == set(range(count))
    assert set().union(*held[: 16 - count + 1]) == set(range(16)) != set().union(*held[: 16 - count])
    for before, after in pairwise(held):
        assert len(after - before) == len(before - after) == 1
    assert windows(federation(FedRolex(stride=3)), f"cnn:8-16@{rate}", 2)[1] == {(3 + i) % 16 for i in range(count)}


def test_a_client_gets_a_window_of_the_global_network_and_returns_it_there():
    run = federation(FedRolex(mask=False), ["cnn:8-16@1", "cnn:8-16@0.5"], rounds=2)
    run.run()
    run.ctx.round = 2
    info = run.backend.infos[1]
    sent = run.method.send(run.server, info, Step(), run.ctx).params["main"]
    state = run.server.state
    first = next(n for n in sent if n.endswith("weight") and state[n].shape[:2] == (8, 1))
    second = next(n for n in sent if n.endswith("weight") and state[n].shape[:2] == (16, 8))
    one, two = [1, 2, 3, 4], list(range(1, 9))
    assert torch.equal(sent[first], state[first][one])
    assert torch.equal(sent[second], state[second][two][:, one])
    assert torch.equal(sent["head.weight"], state["head.weight"][:, two])


@pytest.mark.parametrize("options", [{}, {"direction": -1, "stride": 3}, {"extraction": "random"}])
def test_untouched_windows_put_back_are_the_network(options):
    run = federation(FedRolex(mask=False, **options))
    before = {name: tensor.clone() for name, tensor in run.server.state.items()}
    for number in (1, 4, 15):
        run.ctx.round = number
        told = {}
        for client, info in run.backend.infos.items():
            sent = run.method.send(run.server, info, Step(), run.ctx).params["main"]
            told[client] = Message({"main": {n: t.clone() for n, t in sent.items()}}, meta={"samples": 1 + client})
        run.method.fuse(run.server, told, Step(), run.ctx)
        assert all(torch.equal(run.server.state[name], tensor) for name, tensor in before.items())


def test_windows_of_all_layers_are_back_after_the_least_common_multiple_of_their_widths():
    run = federation(FedRolex(), ["cnn:4-6@1", "cnn:4-6@0.5"])
    held = []
    for number in range(1, 14):
        run.ctx.round = number
        slots = run.method.slots_of(run.ctx.blueprints["cnn:4-6@0.5"], run.ctx)
        held.append(tuple(tuple(axis.flatten().tolist()) for axis in slots["stages.0.conv.weight"].part[:2]))
    assert held[0] == held[12] == ((0, 1, 2), (0, 1)) and len(set(held)) == 12
    assert held[5] == ((5, 0, 1), (1, 2))  # of six channels from the sixth on, of four from the second on


def test_rows_of_absent_classes_are_left_out_in_the_columns_of_the_window():
    run = federation(FedRolex(), ["mlp:1x8@0.5", "mlp:1x8@1"])
    run.ctx.round = 3
    assert run.backend.infos[0].label_counts[2] == 0
    before = {name: tensor.clone() for name, tensor in run.server.state.items()}
    sent = run.method.send(run.server, run.backend.infos[0], Step(), run.ctx).params["main"]
    reply = Message({"main": {name: torch.full_like(t, 7.0) for name, t in sent.items()}}, meta={"samples": 1})
    run.method.fuse(run.server, {0: reply}, Step(), run.ctx)
    held = torch.zeros(3, 8, dtype=torch.bool)
    held[:2, 2:6] = True  # two classes, channels 2 to 5
    assert torch.equal(run.server.state["head.weight"], torch.where(held, 7.0, before["head.weight"]))


@pytest.mark.parametrize(("buffers", "held"), [("average", True), ("local", False)])
def test_windows_hold_running_statistics_where_these_are_averaged(buffers, held):
    run = federation(FedRolex(buffers=buffers, static_bn=False), ["cnn:8-16,bn@1", "cnn:8-16,bn@0.5"])
    slots = run.method.slots_of(run.ctx.blueprints["cnn:8-16,bn@0.5"], run.ctx)
    assert any("running_mean" in name for name in slots) == held


def test_a_view_by_name_is_refused():
    with pytest.raises(InputError, match="view must stay 'prefix'"):
        FedRolex(view="owned")


def test_whole_networks_roll_without_changing_the_function():
    one, two = ["cnn:8-16@1"], FedAvg(weighting="uniform")
    plain = {"mask": False, "clip": None, "static_bn": False}
    ours, average = federation(FedRolex(**plain), one, rounds=3), federation(two, one, rounds=3)
    ours.run(), average.run()
    for name, tensor in average.server.state.items():
        torch.testing.assert_close(ours.server.state[name], tensor, rtol=1e-4, atol=1e-5)


def test_a_whole_network_is_sent_rolled_and_computes_the_same():
    run = federation(FedRolex(), ["cnn:8-16@1"])
    run.ctx.round = 4
    state, sent = run.server.state, run.method.send(run.server, run.backend.infos[0], Step(), run.ctx).params["main"]
    assert torch.equal(sent["stem.conv.bias"], state["stem.conv.bias"].roll(-3))
    assert torch.equal(sent["stages.0.conv.weight"], state["stages.0.conv.weight"].roll((-3, -3), (0, 1)))
    assert torch.equal(sent["head.weight"], state["head.weight"].roll(-3, 1))
    assert torch.equal(sent["head.bias"], state["head.bias"])
    rolled, plain = (run.ctx.blueprints["cnn:8-16@1"].build() for _ in range(2))
    rolled.load_state_dict(sent), plain.load_state_dict(state)
    x = torch.randn((5, 1, 8, 8), generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(rolled(x), plain(x), rtol=1e-5, atol=1e-5)


def test_whole_networks_have_the_statistics_of_their_rolled_channels():
    one = ["cnn:8-16,bn@1"]
    ours, plain = (federation(method, one, rounds=3) for method in (FedRolex(), HeteroFL()))
    ours.run(), plain.run()
    rolled, straight = (run.server.main.stem.norm.running_mean for run in (ours, plain))
    assert len(set(straight.tolist())) == 8
    torch.testing.assert_close(rolled, straight.roll(-2), rtol=1e-3, atol=1e-4)  # the third window begins at channel 2
    x = ours.test.inputs()
    torch.testing.assert_close(ours.server.main.eval()(x), plain.server.main.eval()(x), rtol=1e-3, atol=1e-3)


def test_static_windows_are_heterofl():
    ours, plain = federation(FedRolex(extraction="static"), rounds=3), federation(HeteroFL(), rounds=3)
    ours.run(), plain.run()
    for name, tensor in plain.server.state.items():
        assert torch.equal(ours.server.state[name], tensor), name


# --- drawn channels ---


def drawn(run, client, number=1):
    """Which channels of each layer a client holds in a round, by its shape in the global network."""
    run.ctx.round = number
    slots = run.method.slots(run.server, run.backend.infos[client], run.ctx)
    layers = {name: slot.part for name, slot in slots.items() if name.endswith("bias") and "head" not in name}
    return [part[0].flatten().tolist() for _, part in sorted(layers.items()) if part is not None]


def test_every_client_draws_channels_of_its_own_for_each_layer_in_each_round():
    half = ["mlp:2x16@1", "mlp:2x16@0.5", "mlp:2x16@0.5"]
    run = federation(FedRolex(extraction="random"), half)
    found = [drawn(run, client, number) for client in (1, 2) for number in (1, 2, 3)]
    layers = [tuple(layer) for pair in found for layer in pair]
    assert len(layers) == len(set(layers)) == 12  # two clients, three rounds, two layers of 16
    assert all(len(layer) == len(set(layer)) == 8 and list(layer) == sorted(layer) for layer in layers)
    assert drawn(run, 0) == []  # the widest client holds the network as it is
    again = federation(FedRolex(extraction="random"), half)
    assert [drawn(again, client, number) for client in (1, 2) for number in (1, 2, 3)] == found


def test_drawn_channels_are_sent_and_come_back_to_their_places():
    run = federation(FedRolex(extraction="random", mask=False), ["mlp:1x8@1", "mlp:1x8@0.5", "mlp:1x8@0.25"])
    (one,), (two,) = drawn(run, 1), drawn(run, 2)
    state = {name: tensor.clone() for name, tensor in run.server.state.items()}
    sent = run.method.send(run.server, run.backend.infos[1], Step(), run.ctx).params["main"]
    assert torch.equal(sent["head.weight"], state["head.weight"][:, one])
    replies = {}
    for client, channels in ((1, one), (2, two)):
        sent = run.method.send(run.server, run.backend.infos[client], Step(), run.ctx).params["main"]
        own = {name: torch.full_like(tensor, float(client)) for name, tensor in sent.items()}
        assert own["head.weight"].shape == (3, len(channels))
        replies[client] = Message({"main": own}, meta={"samples": 1})
    run.method.fuse(run.server, replies, Step(), run.ctx)
    for channel in range(8):
        holders = [value for value, held in ((1.0, one), (2.0, two)) if channel in held]
        mean = torch.full((3,), sum(holders) / len(holders)) if holders else state["head.weight"][:, channel]
        assert torch.equal(run.server.state["head.weight"][:, channel], mean), channel


def test_statistics_of_a_drawn_channel_are_the_mean_over_its_holders_of_one_width():
    models = ["cnn:8-16,bn@1", "cnn:8-16,bn@0.5", "cnn:8-16,bn@0.5"]
    run = federation(FedRolex(extraction="random"), models)
    run.ctx.round = 1
    key, replies, held = "cnn:8-16,bn@0.5::stem.norm.running_mean", {}, {}
    for client, (value, batches) in {1: (4.0, 1), 2: (1.0, 2)}.items():
        info = run.backend.infos[client]
        held[client] = set(run.method.held_by(info, run.ctx)["stem.norm.running_mean"].part[0].tolist())
        own = {"stem.norm.running_mean": torch.full((4,), value)}
        replies[client] = Message({"main": own}, meta={"batches": batches})
    run.method.fuse(run.server, replies, STATISTICS, run.ctx)
    for channel, mean in enumerate(run.server.state[key].tolist()):  # (1·4 + 2·1) / 3 = 2
        who = {client for client in held if channel in held[client]}
        assert mean == pytest.approx({(): 0.0, (1,): 4.0, (2,): 1.0, (1, 2): 2.0}[tuple(sorted(who))])
    sent = run.method.send(run.server, run.backend.infos[1], Step("evaluate"), run.ctx).params["main"]
    assert torch.equal(sent["stem.norm.running_mean"], run.server.state[key][sorted(held[1])])


def test_the_server_collects_statistics_of_every_network_that_was_drawn():
    models, clients = ["cnn:8-16,bn@1", "cnn:8-16,bn@0.5", "cnn:8-16,bn@0.5"], synthetic(3, public=True)
    method = FedRolex(extraction="random", statistics="public")
    run = prepare(method, clients, models, Settings(1, training=TRAINING))
    run.run()
    table = run.server.state[f"{models[1]}::stem.norm.running_var"]
    slots = [run.method.held_by(run.backend.infos[c], run.ctx)["stem.norm.running_var"].part[0] for c in (1, 2)]
    held = set(torch.cat(slots).tolist())
    assert {channel for channel, value in enumerate(table.tolist()) if value != 1.0} == held  # 1: as at the start
    whole = run.server.state[f"{models[0]}::stem.norm.running_var"]
    alone = [channel for channel in held if sum(channel in part.tolist() for part in slots) == 1]
    torch.testing.assert_close(table[alone], whole[alone])  # the stem sees the image, whatever the width


@pytest.mark.parametrize(("extraction", "number"), [("rolling", 2), ("random", 4)])
def test_clients_of_a_width_have_one_network_unless_they_draw(extraction, number):
    """One for each of two widths, or of three clients and the global one."""
    models = ["cnn:8-16,bn@1", "cnn:8-16,bn@0.5", "cnn:8-16,bn@0.5"]
    run = federation(FedRolex(extraction=extraction), models)
    assert len(run.method.measured(run.ctx)) == number


# --- a global network that is wider than all clients' ---


def filled(run, number, values, round=1):
    """Let clients return tensors of one value each, in a round, and fuse them."""
    run.ctx.round = round
    replies = {}
    for client in range(number):
        sent = run.method.send(run.server, run.backend.infos[client], Step(), run.ctx).params["main"]
        state = {name: torch.full_like(t, values[client]) for name, t in sent.items()}
        replies[client] = Message({"main": state}, meta={"samples": 1 + client})
    run.method.fuse(run.server, replies, Step(), run.ctx)


def test_windows_roll_over_a_network_that_no_client_could_hold():
    run = federation(FedRolex(server_model="mlp:1x8@1", mask=False), ["mlp:1x8@0.5"])
    before = {name: tensor.clone() for name, tensor in run.server.state.items()}
    assert before["head.weight"].shape == (3, 8) and run.server.main.feature_dim == 8
    filled(run, 3, (7.0, 7.0, 7.0), round=3)
    held = torch.tensor([0, 0, 1, 1, 1, 1, 0, 0]).bool()  # four channels of eight, from the third on
    assert torch.equal(run.server.state["head.weight"], torch.where(held, 7.0, before["head.weight"]))
    layer = next(n for n, t in before.items() if n.endswith("bias") and t.shape == (8,))
    assert torch.equal(run.server.state[layer], torch.where(held, 7.0, before[layer]))
    assert torch.equal(run.server.main.head.weight.sort().values, run.server.state["head.weight"].sort().values)


def test_all_of_a_wider_network_is_trained_in_as_many_rounds_as_its_windows_need():
    moved = []
    for rounds in (4, 5):  # windows of 4 of 8 channels: 8 - 4 + 1 rounds
        run = federation(FedRolex(server_model="mlp:1x8@1", mask=False), ["mlp:1x8@0.5"], rounds)
        start = run.server.state["head.weight"].clone()
        run.run()
        moved.append((run.server.state["head.weight"] != start).any(0).sum().item())
    assert moved == [7, 8]


def test_without_statistics_of_its_own_a_wider_network_is_not_measured():
    models, wide = ["cnn:8-16,bn@0.5"], {"server_model": "cnn:8-16,bn@1"}
    run = federation(FedRolex(**wide), models)
    run.run()
    assert "main" not in run.server.models and run.history[-1]["accuracy"]["global"] is None
    assert "main" in federation(FedRolex(**wide, static_bn=False), models).server.models
    assert "main" in federation(FedRolex(server_model="cnn:8-16@1"), ["cnn:8-16@0.5"]).server.models
    assert "main" in federation(FedRolex(), models).server.models  # that of the clients, who collect them
    clients = synthetic(3, public=True)
    public = prepare(FedRolex(**wide, statistics="public"), clients, models, Settings(1, training=TRAINING))
    public.run()
    assert public.history[-1]["accuracy"]["global"] is not None
    assert public.server.main.stem.norm.running_mean.abs().sum() > 0 and public.server.main.feature_dim == 16


def test_a_server_as_wide_as_the_widest_client_changes_nothing():
    plain, named = federation(FedRolex(), rounds=2), federation(FedRolex(server_model="cnn:8-16"), rounds=2)
    plain.run(), named.run()
    assert set(named.ctx.blueprints) == set(WIDTHS)
    for name, tensor in plain.server.state.items():
        assert torch.equal(named.server.state[name], tensor), name


@pytest.mark.parametrize("server", ["cnn:8-8@1", "cnn:4-16@1", "mlp:1x64"])
def test_a_server_that_lacks_channels_of_a_client_is_refused(server):
    with pytest.raises(InputError, match=f"the server's network {server} does not contain cnn:8-16@1: name one of"):
        federation(FedRolex(server_model=server))


# --- weights ---


@pytest.mark.parametrize(
    ("weighting", "shared"),
    [("uniform", 2.5), ("updates", 2.5), ("samples", 3.0), ("width", 2.0), ("updates_width", 2.0)],
)
def test_weights_by_hand(weighting, shared):
    """Values 1 and 4 of networks with 8 and 4 channels, 1 and 2 samples: (8·1 + 4·4)/12 = 2, (1·1 + 2·4)/3 = 3."""
    run = federation(FedRolex(weighting=weighting, mask=False), ["mlp:1x8@1", "mlp:1x8@0.5"])
    filled(run, 2, (1.0, 4.0), round=2)
    expected = torch.tensor([1.0, shared, shared, shared, shared, 1.0, 1.0, 1.0])
    torch.testing.assert_close(run.server.state["head.weight"], expected.expand(3, 8))


def test_weights_by_all_channels_of_a_network():
    """Two layers of 8 and 16 channels, and half of each: 24 and 12."""
    run = federation(FedRolex(weighting="width", mask=False), ["cnn:8-16@1", "cnn:8-16@0.5"])
    filled(run, 2, (0.0, 3.0))
    torch.testing.assert_close(run.server.state["head.weight"][:, :8], torch.ones(3, 8))


def test_clients_of_one_width_weigh_the_same():
    runs = [federation(FedRolex(weighting=w), ["cnn:8-16@0.5"], rounds=2) for w in ("uniform", "width")]
    for run in runs:
        run.run()
    for name, tensor in runs[0].server.state.items():
        assert torch.equal(runs[1].server.state[name], tensor), name


def test_processes_divide_the_means_unless_the_server_does_more():
    class More(FedRolex):
        name = "more"

        def refine(self, server, replies, ctx):
            """Look at all of it."""

    for method, divided in ((FedRolex(), True), (More(), False)):
        run = federation(method, ["mlp:1x8@1", "mlp:1x8@0.5"])
        places = run.method.fused_into(run.server, run.backend.infos[1], Step(), run.ctx)
        assert (places is not None) == divided
        assert places is None or places["params/main/head.weight"] == "head.weight"
