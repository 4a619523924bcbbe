"""Models that people pass: which clients have the same architecture, and what weights they start from."""

import copy
import sys
import warnings
from pathlib import Path

import pytest
import torch
from torch import nn

import polyfed as pf
from polyfed.api import prepare
from polyfed.compare import compare
from polyfed.config import Networks
from polyfed.core.errors import InputError, PolyfedError
from polyfed.core.settings import Settings
from polyfed.experiment import experiment

sys.path.insert(0, str(Path(__file__).parent / "contract"))
from table import synthetic

ENGINES = ("sequential", "threads", "batched")
LOST = "different weights: fedavg starts from those of the first"


class Net(nn.Module):
    """Somebody's own network."""

    def __init__(self, width=8, norm=True):
        super().__init__()
        self.body = nn.Sequential(nn.Flatten(), nn.Linear(64, width), nn.BatchNorm1d(width) if norm else nn.ReLU())
        self.last = nn.Linear(width, 3)

    def forward(self, x):
        return self.last(self.body(x))


def nets(count, **options):
    with torch.random.fork_rng():
        torch.manual_seed(1)
        return [Net(**options) for _ in range(count)]


def equal(module, other):
    theirs = other.state_dict()
    return all(torch.equal(tensor, theirs[name]) for name, tensor in module.state_dict().items())


def one():
    return Net()


def another():
    return Net()


# --- one architecture ---


@pytest.mark.parametrize("engine", ENGINES)
def test_equal_networks_are_averaged(engine):
    with pytest.warns(UserWarning, match=LOST):
        result = pf.run("fedavg", synthetic(3), nets(3, norm=False), 2, engine=engine)
    assert result.architectures == ["Net"] * 3
    assert all(equal(result.server_model, result.models[client]) for client in range(3))
    assert not equal(result.server_model, nets(1, norm=False)[0])


def test_fedavg_starts_from_the_first_network():
    given = nets(3, norm=False)
    with pytest.warns(UserWarning, match=LOST):
        mixed = pf.run("fedavg", synthetic(3), given, 2)
    same = pf.run("fedavg", synthetic(3), given[0], 2)  # and here nothing is lost, so nothing is said
    assert equal(mixed.models[2], same.models[2])


def test_networks_with_equal_weights_are_not_worth_a_word():
    (net,) = nets(1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        result = pf.run("fedavg", synthetic(3), [net, copy.deepcopy(net), copy.deepcopy(net)], 1)
    assert result.architectures == ["Net"] * 3


def test_functions_that_build_the_same_are_one_architecture():
    result = pf.run("fedavg", synthetic(3), [one, another, Net], 1)
    assert result.architectures == ["one"] * 3
    assert equal(result.models[1], pf.run("fedavg", synthetic(3), one, 1).models[1])


def test_networks_that_differ_in_more_than_weights_stay_apart():
    narrow, wide, bare, again = [*nets(1), *nets(1, width=9), *nets(1, norm=False), *nets(1)]
    result = pf.run("local", synthetic(4), [narrow, wide, bare, again], 1)
    assert result.architectures == ["Net", "Net#1", "Net#2", "Net"]


# --- initial weights ---


@pytest.mark.parametrize("method", ["local", "fedproto", "fedvtc"])  # plain, with data, and with a set-up of its own
@pytest.mark.parametrize("engine", ENGINES)
def test_a_client_starts_from_the_weights_that_it_was_given(engine, method):
    given = [pf.adapt(net, head="last", input_shape=(1, 8, 8)) for net in nets(4, width=16)]
    clients = synthetic(4, public=False)
    options = {"finetune": False} if method == "fedvtc" else {}
    result = pf.run(pf.methods.make(method, options), clients, given, 1, participation=0.25, engine=engine)
    (worked,) = result.history[0]["participants"]
    x, y = clients.test.inputs(), clients.test.labels()
    for client, model in result.models.items():
        assert equal(model, given[client]) == (client != worked)
        with torch.no_grad():
            right = (model(x).argmax(1) == y).float().mean().item()
        assert result.accuracy()["per_client"][client] == pytest.approx(right)
    assert len(set(result.accuracy()["per_client"])) > 2  # so one measure does not stand for others


def test_functions_that_load_weights_keep_them():
    given = nets(2)
    made = [lambda: copy.deepcopy(given[0]), lambda: copy.deepcopy(given[1])]
    result = pf.run("local", synthetic(2), made, 1, pf.Training(lr=1e-12))
    assert result.architectures == ["<lambda>"] * 2
    for client in range(2):
        ours, theirs = result.models[client].last.weight, given[client].last.weight
        assert torch.allclose(ours, theirs, atol=1e-6)


class Enough(PolyfedError):
    """Somebody stops the run."""


def test_a_stopped_run_goes_on_from_the_weights_that_were_given(tmp_path):
    def run(**more):
        return pf.run("local", synthetic(4), nets(4), 3, participation=0.5, checkpoint_seconds=0.0, **more)

    def stop(line):
        raise Enough("after one round")

    whole = run()
    with pytest.raises(Enough):
        run(out=tmp_path / "run", observers=[stop])
    resumed = run(out=tmp_path / "run", resume=True)
    assert [line["accuracy"] for line in resumed.history] == [line["accuracy"] for line in whole.history]
    assert all(equal(resumed.models[client], whole.models[client]) for client in range(4))


def test_one_shot_averaging_says_who_started_elsewhere():
    with pytest.warns(UserWarning, match="client 1, 2 started from other weights"):
        pf.run("oneshot_fedavg", synthetic(3), nets(3), 1)


# --- nothing to average ---


ALONE = ["mlp:1x8", "mlp:1x9", "cnn:4-8"]


@pytest.mark.parametrize("method", [pf.FedAvg(), pf.FedProx(), pf.FedIN(use_in=False)])
def test_a_method_that_would_average_nothing_is_refused(method):
    words = r"an architecture of its own \(mlp:1x8, mlp:1x9, cnn:4-8\), .* Methods that would work: ams, .* \d+ more"
    with pytest.raises(InputError, match=words):
        pf.run(method, synthetic(3), ALONE, 1)


@pytest.mark.parametrize(
    "method, clients, models, feature_dim",
    [
        (pf.FedAvg(), 4, ALONE, None),  # two clients have mlp:1x8
        (pf.FedAvg(), 1, ALONE, None),  # nobody to average with: what one client does alone is no surprise
        (pf.FedAvg(view="same_arch"), 3, ALONE, None),  # the user's word: a control that averages by architecture
        (pf.FedAvg(view="shared:head"), 3, ALONE, 5),
        (pf.FedAvg(), 3, ["resnet10:w4", "resnet14:w4", "resnet18:w4"], None),  # one family: layers in common
        (pf.FedIN(), 2, ["mlp:1x8", "mlp:2x8"], None),
    ],
)
def test_a_method_that_has_something_to_average_is_not(method, clients, models, feature_dim):
    prepare(method, synthetic(clients), models, Settings(1), Networks(feature_dim=feature_dim))


def test_a_comparison_is_refused_before_anything_trains(tmp_path):
    told = experiment(data="digits", limit=60, clients=3, models=ALONE, rounds=1)
    started = []
    with pytest.raises(InputError, match="nothing would be averaged"):
        compare(told, ["local", "fedavg"], 1, tmp_path / "out", lambda config: started.append(config) or ())
    assert not started and not (tmp_path / "out").exists()
