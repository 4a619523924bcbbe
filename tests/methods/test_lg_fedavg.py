"""LG-FedAvg: the acceptance properties of its spec (F4)."""

from dataclasses import replace

import pytest
import torch
from tests.contract.table import synthetic

import polyfed as pf
from polyfed.api import prepare
from polyfed.build import make_blueprint
from polyfed.config import Networks
from polyfed.core.errors import InputError
from polyfed.core.message import Message
from polyfed.core.settings import Participation, Settings
from polyfed.methods.lg_fedavg import LGFedAvg, last_layers

SGD = pf.Training(epochs=1, batch_size=8, lr=0.05)
HEAD = ("head.weight", "head.bias")


def federation(method, rounds=1, models=("mlp:2x8",), clients=3, share=1.0, feature_dim=None):
    settings = Settings(rounds, training=SGD, participation=Participation(share))
    made = prepare(method, synthetic(clients), list(models), settings, Networks(feature_dim=feature_dim))
    made.run()
    return made


def trained(run, client):
    return run.backend.store.records[client].states["main"]


@pytest.mark.parametrize(
    ("spec", "keep", "modules"),
    [
        ("mlp:2x8", 1, {"head"}),
        ("mlp:2x8", 2, {"head", "layers.0.linear"}),
        ("mlp:2x8", 9, {"head", "layers.0.linear", "stem.linear"}),
        ("cnn2", 2, {"head", "hidden.linear"}),
        ("cnn:4-8,bn", 2, {"head", "stages.0.conv", "stages.0.norm"}),  # a norm goes with the layer before it
        ("mlp:2x8", 0, set()),
    ],
)
def test_the_last_layers_are_counted_from_the_top(spec, keep, modules):
    blueprint = make_blueprint(spec, spec, (1, 8, 8), 3, 0, None, "linear")
    assert {name.rpartition(".")[0] for name in last_layers(blueprint, keep)} == modules


def test_several_weights_of_one_module_are_one_layer():
    blueprint = make_blueprint("mlp:1x8", "mlp:1x8", (1, 8, 8), 3, 0, None, "linear")
    cell = {"cell.weight_ih": (8, 4), "cell.weight_hh": (8, 8), "cell.bias": (8,), "head.weight": (3, 8)}
    assert last_layers(replace(blueprint, shapes=cell), 1) == {"head.weight"}
    assert last_layers(replace(blueprint, shapes=cell), 2) == set(cell)


def test_what_comes_before_the_first_layer_goes_with_it():
    class Normed(torch.nn.Sequential):
        def __init__(self):
            super().__init__(torch.nn.Flatten(), torch.nn.BatchNorm1d(64), torch.nn.Linear(64, 3))

    blueprint = make_blueprint(Normed, "Normed", (1, 8, 8), 3, 0, None, "linear")
    assert last_layers(blueprint, 1) == last_layers(blueprint, 2) == set(blueprint.shapes)


def test_the_top_is_the_mean_by_samples_and_the_rest_stays_at_home():
    run = federation(LGFedAvg())
    sizes = [info.samples for info in run.backend.infos.values()]
    assert len(set(sizes)) == 3 and set(run.server.state) == set(HEAD)
    for name in HEAD:
        mean = sum(n * trained(run, k)[name] for k, n in enumerate(sizes)) / sum(sizes)
        torch.testing.assert_close(run.server.state[name], mean)
    lower = [trained(run, client)["stem.linear.weight"] for client in range(3)]
    assert not torch.equal(lower[0], lower[1]) and not torch.equal(lower[1], lower[2])


def test_everything_is_trained_also_what_is_not_shared():
    run = federation(LGFedAvg())
    start = run.ctx.blueprints["mlp:2x8"].initial
    assert not any(torch.equal(trained(run, 0)[name], start[name]) for name in start)


def test_a_client_begins_with_the_servers_top_and_its_own_bottom():
    run = federation(LGFedAvg(), rounds=1)
    mine = {name: tensor.clone() for name, tensor in trained(run, 1).items()}
    party = run.backend.store.open(1, run.ctx)
    party.inbox = run.method.send(run.server, run.backend.infos[1], run.plan.round[0], run.ctx)
    run.method.receive(party, run.plan.round[0], run.ctx)
    for name, tensor in party.tensors().items():
        assert torch.equal(tensor, run.server.state[name] if name in HEAD else mine[name])
        assert (name in HEAD) != torch.equal(tensor, mine[name])


def test_clients_that_were_not_selected_keep_their_layers_bit_for_bit():
    run = federation(LGFedAvg(), rounds=1, clients=4, share=0.5)
    start = run.ctx.blueprints["mlp:2x8"].initial
    (absent, _) = sorted(set(range(4)) - set(run.history[-1]["participants"]))
    party = run.backend.store.open(absent, run.ctx, scratch=True)
    assert all(torch.equal(tensor, start[name]) for name, tensor in party.tensors().items())


@pytest.mark.parametrize(("keep", "scalars"), [(0, 0), (1, 27), (2, 27 + 72), ("head", 27), ("layers+head", 99)])
def test_only_the_shared_layers_travel(keep, scalars):
    run = federation(LGFedAvg(keep=keep))  # head 8·3 + 3, the layer before it 8·8 + 8
    assert run.meter.bytes["down"] == dict.fromkeys(range(3), 4 * scalars)
    assert run.meter.bytes["up"] == dict.fromkeys(range(3), 4 * scalars + 8)


@pytest.mark.parametrize(("buffers", "statistics"), [("average", 16), ("local", 0)])
def test_running_statistics_of_shared_layers_travel_if_they_are_averaged(buffers, statistics):
    run = federation(LGFedAvg(keep=2, buffers=buffers), models=["cnn:4-8,bn"])
    assert run.meter.bytes["down"][0] == 4 * (27 + 8 * 4 * 9 + 16 + statistics)  # head; convolution and norm


def test_all_of_it_is_fedavg_with_its_global_model():
    ours, plain = federation(LGFedAvg(keep="all"), rounds=2), federation(pf.FedAvg(), rounds=2)
    assert ours.history[-1]["accuracy"]["global"] == plain.history[-1]["accuracy"]["global"] is not None
    assert all(torch.equal(ours.server.main.state_dict()[n], t) for n, t in plain.server.main.state_dict().items())


def test_networks_of_any_kind_share_one_head():
    run = federation(LGFedAvg(), models=["mlp:1x8", "cnn:4-8", "mlp:2x4"], feature_dim=5)
    assert {name: tuple(t.shape) for name, t in run.server.state.items()} == {"head.weight": (3, 5), "head.bias": (3,)}


def test_a_message_without_weights_is_read_back_as_nothing():
    """With `keep=0` nothing travels, and an empty state has no name on the wire."""
    run = federation(LGFedAvg(keep=0))
    sent = run.method.send(run.server, run.backend.infos[0], run.plan.round[0], run.ctx)
    party = run.backend.store.open(0, run.ctx)
    party.inbox = Message.from_bytes(sent.to_bytes())
    assert run.method.shared(party) == {}
    assert run.method.part(run.server, 0, Message(meta={"samples": 3}), run.ctx).state == {}


def test_layers_that_differ_are_refused_with_both_architectures():
    words = r"'head.weight' is \[3, 8\] in mlp:1x8 and \[3, 16\] in mlp:1x16: set feature_dim"
    with pytest.raises(InputError, match=words):
        federation(LGFedAvg(), models=["mlp:1x8", "mlp:1x16"])
    with pytest.raises(InputError, match=r"'layers.0.linear.bias' is no such layer in mlp:1x8 and \[8\] in mlp:2x8"):
        federation(LGFedAvg(keep=2), models=["mlp:1x8", "mlp:2x8"])
    with pytest.raises(InputError, match="mlp:2x8 has none under 'tail'"):
        federation(LGFedAvg(keep="tail"))


@pytest.mark.parametrize(
    ("options", "words"), [({"keep": -1}, "keep"), ({"keep": "head+"}, "keep"), ({"view": "full"}, "leave view out")]
)
def test_values_that_make_no_sense_are_refused(options, words):
    with pytest.raises(InputError, match=words):
        LGFedAvg(**options)
