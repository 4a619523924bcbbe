"""SCAFFOLD: the acceptance properties of its spec."""

import pytest
import torch
from tests.contract.table import synthetic

import polyfed as pf
from polyfed.api import prepare
from polyfed.core.errors import InputError
from polyfed.core.settings import Participation, Settings
from polyfed.methods.fedavg import FedAvg
from polyfed.methods.scaffold import Scaffold
from polyfed.models import build
from polyfed.testing.watch import double_precision

SGD = pf.Training(epochs=2, batch_size=8, lr=0.05)
DEPTHS = ["mlp:1x8", "mlp:2x8"]


def federation(method, rounds=2, training=SGD, models=("mlp:1x8",), clients=3, share=1.0):
    settings = Settings(rounds, training=training, participation=Participation(share))
    made = prepare(method, synthetic(clients), list(models), settings)
    made.run()
    return made


def controls(run):
    """Every client's control variate; one that was never active has none yet, which counts as zero."""
    found = {client: record.memory.get("control", {}) for client, record in run.backend.store.records.items()}
    return {client: found.get(client, {}) for client in run.backend.infos}


@pytest.mark.parametrize("models", [["mlp:1x8"], DEPTHS])
@pytest.mark.parametrize("share", [1.0, 0.5])
@pytest.mark.parametrize("option", ["I", "II", "gradient"])
def test_the_servers_variate_is_the_mean_of_all_clients(models, share, option):
    run = federation(Scaffold(option=option), rounds=3, models=models, clients=4, share=share)
    for key, c in run.server.memory["control"].items():
        owners = [
            client for client, info in run.backend.infos.items() if key in run.ctx.blueprints[info.architecture].shapes
        ]
        assert (run.server.memory["owners"][key] == len(owners)).all()
        total = sum((controls(run)[client].get(key, torch.zeros_like(c)) for client in owners), torch.zeros_like(c))
        torch.testing.assert_close(c, total / len(owners), rtol=1e-5, atol=1e-6)
        assert c.abs().max() > 0


def test_of_slices_every_entry_has_the_mean_of_the_clients_that_hold_it():
    run = federation(Scaffold(view="prefix"), models=["mlp:1x8@1", "mlp:1x8@0.5", "mlp:1x8@1"])
    wide, narrow, other = (controls(run)[client]["stem.linear.bias"] for client in range(3))
    c = run.server.memory["control"]["stem.linear.bias"]
    torch.testing.assert_close(c[:4], (wide[:4] + narrow + other[:4]) / 3, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(c[4:], (wide[4:] + other[4:]) / 2, rtol=1e-5, atol=1e-6)


def test_the_first_round_is_that_of_uniform_fedavg():
    ours, plain = federation(Scaffold(), rounds=1), federation(FedAvg(weighting="uniform"), rounds=1)
    for name, tensor in plain.server.state.items():
        assert torch.equal(ours.server.state[name], tensor)


def test_one_client_is_plain_sgd_and_a_second_round_differs_from_fedavg():
    ours, plain = (federation(m, rounds=3, clients=1) for m in (Scaffold(), FedAvg()))
    for name, tensor in plain.server.state.items():
        torch.testing.assert_close(ours.server.state[name], tensor, rtol=1e-4, atol=1e-6)
    ours, plain = (federation(m, rounds=2) for m in (Scaffold(), FedAvg(weighting="uniform")))
    assert not any(torch.allclose(ours.server.state[n], t, rtol=1e-4) for n, t in plain.server.state.items())


def test_both_options_agree_for_plain_sgd():
    with double_precision():
        one, other = federation(Scaffold(option="II"), 3), federation(Scaffold(option="gradient"), 3)
    for name, tensor in one.server.memory["control"].items():
        torch.testing.assert_close(other.server.memory["control"][name], tensor, rtol=0, atol=1e-9)
        torch.testing.assert_close(other.server.state[name], one.server.state[name], rtol=0, atol=1e-9)


def test_layers_that_stay_at_the_client_are_trained_without_a_correction():
    """Only the classifier is shared: one full batch moves the first layer by the plain gradient, in every round."""
    training = pf.Training(epochs=1, batch_size=100, lr=0.1)
    ours, plain = (federation(m(view="shared:head"), 1, training) for m in (Scaffold, FedAvg))
    assert ours.server.memory["control"].keys() == {"head.weight", "head.bias"}
    for client, record in plain.backend.store.records.items():
        for name, tensor in record.states["main"].items():
            assert torch.equal(ours.backend.store.records[client].states["main"][name], tensor), name
    assert federation(Scaffold(view="shared:head"), 2, training).history[-1]["loss"] < plain.history[0]["loss"]


def frozen_stem(input_shape, num_classes):
    module = build("mlp:1x8", input_shape, num_classes)
    module.stem.requires_grad_(False)
    return module


@pytest.mark.parametrize("option", ["I", "II", "gradient"])
def test_a_frozen_layer_that_is_shared_by_name_has_no_variate(option):
    run = federation(Scaffold(view="shared:stem+head", option=option), models=[frozen_stem])
    assert run.server.memory["control"].keys() == {"head.weight", "head.bias"}
    assert "stem.linear.weight" in run.server.state


def test_a_gradient_is_clipped_after_its_correction():
    """Variates are means of whole gradients, far longer than the bound; a step is the rate times the bound."""
    training = pf.Training(epochs=1, batch_size=100, lr=0.1, clip=0.01)
    first, second = (federation(Scaffold(), rounds, training) for rounds in (1, 2))
    for client, control in controls(first).items():
        correction = [first.server.memory["control"][name] - control[name] for name in control]
        assert torch.cat([c.flatten() for c in correction]).norm() > 0.05
        own = second.backend.store.records[client].states["main"]
        way = torch.cat([(own[name] - w).flatten() for name, w in first.server.state.items()])
        assert float(way.norm()) == pytest.approx(0.1 * 0.01, rel=1e-3)


def test_statistics_have_no_variate_and_the_plain_mean():
    whole, half = (federation(Scaffold(server_lr=rate), 1, models=["cnn:4,bn"]) for rate in (1.0, 0.5))
    parameters = {name: p.numel() for name, p in whole.server.main.named_parameters()}
    assert whole.server.memory["control"].keys() == controls(whole)[0].keys() == parameters.keys()
    for name, tensor in whole.server.state.items():
        assert torch.equal(half.server.state[name], tensor) == (name not in parameters), name
    means = [record.states["main"]["stem.norm.running_mean"] for record in whole.backend.store.records.values()]
    torch.testing.assert_close(whole.server.state["stem.norm.running_mean"], sum(means) / 3)
    size = 4 * (2 * sum(parameters.values()) + 2 * 4)  # two vectors of statistics, once
    assert whole.meter.bytes["down"] == dict.fromkeys(range(3), size)
    assert whole.meter.bytes["up"] == dict.fromkeys(range(3), size + 8)


def test_option_one_is_the_gradient_at_the_received_weights():
    """One full batch: the first of its steps has that gradient."""
    training = pf.Training(epochs=1, batch_size=100, lr=0.1)
    one, other = (federation(Scaffold(option=o), 1, training) for o in ("I", "gradient"))
    for client, control in controls(one).items():
        for name, tensor in control.items():
            torch.testing.assert_close(tensor, controls(other)[client][name])


def test_option_one_looks_at_all_batches_alike():
    """Client 0 has 18 samples: two batches of 9 have the gradient of all, whose steps would have moved."""
    halves, whole = (
        federation(Scaffold(option="I"), 1, pf.Training(epochs=1, batch_size=size, lr=0.1)) for size in (9, 18)
    )
    for name, tensor in controls(whole)[0].items():
        torch.testing.assert_close(controls(halves)[0][name], tensor)


def test_option_one_looks_without_moving_weights_or_statistics():
    training = pf.Training(epochs=1, batch_size=100, lr=0.1)
    one, other = (federation(Scaffold(option=o), 1, training, ["cnn:4-8,bn"]) for o in ("I", "gradient"))
    for name, tensor in other.server.state.items():
        torch.testing.assert_close(one.server.state[name], tensor, msg=name)


@pytest.mark.parametrize(
    "training",
    [
        pf.Training(momentum=0.9),
        pf.Training(weight_decay=1e-3),
        pf.Training(clip=1.0),
        pf.Training(optimizer="adam"),
    ],
)
def test_option_two_is_refused_where_it_is_no_gradient(training):
    with pytest.raises(InputError, match="use 'gradient'"):
        federation(Scaffold(option="II"), training=training)
    run = federation(Scaffold(), training=training)  # auto takes the gradients
    assert run.history[-1]["loss"] < 10


def test_the_servers_step_goes_so_far_towards_the_mean():
    whole, half, none = (federation(Scaffold(server_lr=rate), rounds=1) for rate in (1.0, 0.5, 0.0))
    for name, w in none.server.state.items():
        assert torch.equal(w, none.ctx.blueprints["mlp:1x8"].initial[name])
        torch.testing.assert_close(half.server.state[name], (w + whole.server.state[name]) / 2)
        assert torch.equal(half.server.main.state_dict()[name], half.server.state[name])


def test_twice_the_parameters_travel_and_one_row_tells_of_the_variates():
    run = federation(Scaffold(), rounds=1)
    size = 4 * sum(tensor.numel() for tensor in run.server.state.values())
    assert run.meter.bytes["down"] == dict.fromkeys(range(3), 2 * size)
    assert run.meter.bytes["up"] == dict.fromkeys(range(3), 2 * size + 8)
    assert run.meter.kinds["main/up/data/control"] == 3 * size


@pytest.mark.parametrize(("momentum", "option"), [(0.0, "II"), (0.9, "gradient")])
def test_auto_is_option_two_for_plain_sgd_and_sums_gradients_otherwise(momentum, option):
    training = pf.Training(epochs=2, batch_size=8, lr=0.05, momentum=momentum)
    auto, named = (federation(method, 2, training) for method in (Scaffold(), Scaffold(option=option)))
    for name, tensor in named.server.memory["control"].items():
        assert torch.equal(auto.server.memory["control"][name], tensor), name  # the other one differs by rounding


def test_noise_is_planned_for_all_epochs_on_own_samples():
    assert Scaffold(option="I").own_epochs(3, 5) == 20  # its variate is one more pass a round
    assert Scaffold(option="II").own_epochs(3, 5) == Scaffold(option="gradient").own_epochs(3, 5) == 15
