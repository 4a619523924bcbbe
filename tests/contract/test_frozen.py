"""A parameter with `requires_grad=False` stays as it is, in every method and engine, and does not travel."""

import sys
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from torch import nn

import polyfed as pf
from polyfed import methods
from polyfed.build import make_blueprint
from polyfed.core.cost import CostMeter
from polyfed.core.errors import InputError
from polyfed.core.method import Method
from polyfed.core.nets import frozen_names
from polyfed.core.stage import Stage
from polyfed.core.views import Full, Owned, Prefix, SameArch, Shared
from polyfed.flower.agree import settle
from polyfed.flower.describe import introduce, read_introduction
from polyfed.flower.sitedata import SiteData
from polyfed.models import build

sys.path.insert(0, str(Path(__file__).parents[1] / "contract"))
from table import FEW_CASES, FEW_SAMPLES, everyday, run_case, synthetic, unequal

cases = everyday(few=True)
TOP_ONLY = {"lg_fedavg", "fedgh"}  # only the last layers travel, and those are not frozen here


@dataclass(frozen=True)
class FrozenFirst:
    """Builds a network of the zoo with one frozen layer (the first), under the name of the network."""

    spec: str
    place: int = 0

    @property
    def __name__(self):
        return self.spec

    def __call__(self, input_shape, num_classes):
        module = build(self.spec, input_shape, num_classes)
        layers = [m for m in module.modules() if next(m.parameters(recurse=False), None) is not None]
        layers[self.place].requires_grad_(False)
        return module


def blueprint_of(model, feature_dim=None, seed=0):
    return make_blueprint(model, model.spec, (1, 8, 8), 3, seed, feature_dim, "linear")


def frozen_run(case, **more):
    """Run a case with frozen first layers; also return the blueprints that it began with."""
    models = tuple(map(FrozenFirst, case.models))
    result = run_case(replace(case, models=models), rounds=1, sizes=FEW_SAMPLES, **more)
    return result, [blueprint_of(model, case.feature_dim) for model in models]


@pytest.mark.parametrize("engine", ["sequential", "batched"])
@cases
def test_frozen_stays_frozen_in_every_method(case, engine):
    assert_frozen_stays(case, engine)


@pytest.mark.parametrize("engine", ["threads", "auto"])  # they train by the functions of the other two
@pytest.mark.parametrize("case", FEW_CASES, ids=lambda case: case.id)
def test_frozen_stays_frozen_in_the_other_engines(case, engine):
    assert_frozen_stays(case, engine)


def assert_frozen_stays(case, engine):
    result, blueprints = frozen_run(case, engine=engine, workers=2)
    for client, model in result.models.items():
        blueprint = blueprints[client % len(blueprints)]
        assert blueprint.frozen and frozen_names(model) == blueprint.frozen
        state = model.state_dict()
        assert all(torch.equal(state[name], blueprint.initial[name]) for name in blueprint.frozen), client
        assert any(not torch.equal(state[name], blueprint.initial[name]) for name in state)
    server = result.server.models.get("main")
    for name in frozen_names(server) if server is not None else ():
        assert any(torch.equal(server.state_dict()[name], b.initial[name]) for b in blueprints if name in b.initial)


@cases
def test_frozen_tensors_do_not_travel(case, monkeypatch):
    carried = []  # of every message that holds weights of the main network: client, name -> bytes
    count = CostMeter.count

    def watched(self, direction, client, step, message):
        weights = message.params.get("main", message.params.get("slice"))  # whole, or narrower than the network
        if weights is not None:
            carried.append((client, {name: tensor.nbytes for name, tensor in weights.items()}))
        count(self, direction, client, step, message)

    monkeypatch.setattr(CostMeter, "count", watched)
    run_case(case, rounds=1, engine="sequential", sizes=FEW_SAMPLES)
    whole = list(carried)
    carried.clear()
    _, blueprints = frozen_run(case, engine="sequential")
    frozen = [blueprint.frozen for blueprint in blueprints]
    without = [(c, {n: size for n, size in names.items() if n not in frozen[c % len(frozen)]}) for c, names in whole]
    assert carried == without
    shares = methods.find(case.method).shares  # weights that are kept one by one travel as one list
    top_only = case.method in TOP_ONLY or case.options.get("share") == "head" or case.options.get("form") == "clients"
    if "main" in shares and "kept" not in shares and not top_only:
        assert without != whole


SETTINGS = {
    "sgd": pf.Training(momentum=0.9, weight_decay=0.1, batch_size=8, epochs=2),
    "adam": pf.Training(optimizer="adam", lr=1e-2, weight_decay=0.1, batch_size=8, epochs=2),
    "adamw": pf.Training(optimizer="adamw", lr=1e-2, weight_decay=0.1, batch_size=8, epochs=2),
    "clip": pf.Training(clip=0.1, weight_decay=0.1, batch_size=8),
}


@pytest.mark.parametrize("place", [0, 1, -1])
@pytest.mark.parametrize("spec", ["mlp:3x16", "cnn:4-8,bn"])
@pytest.mark.parametrize("name", SETTINGS)
def test_weight_decay_and_momentum_leave_frozen_layers_alone_and_stacks_agree(name, spec, place):
    clients = unequal((17, 9, 16), None, False)
    model = FrozenFirst(spec, place)
    runs = [pf.run("fedavg", clients, [model], 2, SETTINGS[name], engine=e) for e in ("sequential", "batched")]
    blueprint = blueprint_of(model)
    for run in runs:
        state = run.models[0].state_dict()
        assert blueprint.frozen and all(torch.equal(state[n], blueprint.initial[n]) for n in blueprint.frozen)
    alone, stacked = (run.models[0].state_dict() for run in runs)
    assert all(torch.allclose(alone[n], stacked[n], rtol=1e-3, atol=1e-4) for n in alone)


class TwoHeads(nn.Module):
    """A frozen body with BatchNorm, and a head."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.BatchNorm1d(8), nn.ReLU())
        self.head = nn.Linear(8, 3)
        self.body.requires_grad_(False)

    def forward(self, x):
        return self.head(self.body(x))


def test_bytes_are_those_of_what_is_trained_and_averaged():
    result = pf.run(pf.FedAvg(buffers="local"), synthetic(2), TwoHeads, rounds=1)
    assert result.cost.total("down") == 2 * 4 * (8 * 3 + 3)
    assert result.cost.total("up") == result.cost.total("down") + 2 * 8  # and the numbers of samples
    statistics = pf.run(pf.FedAvg(), synthetic(2), TwoHeads, rounds=1)
    assert statistics.cost.total("down") == 2 * 4 * (8 * 3 + 3 + 2 * 8)
    assert not torch.equal(statistics.models[0].body[2].running_mean, torch.zeros(8))  # as in torch: statistics move


def test_a_view_leaves_frozen_tensors_out_unless_they_are_named():
    frozen = blueprint_of(FrozenFirst("mlp:2x16"))
    plans = {frozen.name: frozen}
    assert frozen.frozen == {"stem.linear.weight", "stem.linear.bias"}
    for view in (Full(), Owned(), SameArch(), Prefix()):
        assert not {n.split("::")[-1] for n in view.layout(plans)} & frozen.frozen
        assert set(view.slots(frozen, plans)) == set(frozen.initial) - frozen.frozen
    assert set(Shared(("stem",)).slots(frozen, plans)) == set(Shared(("stem",)).layout(plans)) == frozen.frozen
    named = pf.run(pf.FedAvg(view="shared:stem+head"), synthetic(2), [FrozenFirst("mlp:2x16")], rounds=1)
    state = named.models[1].state_dict()
    assert all(torch.equal(state[name], frozen.initial[name]) for name in frozen.frozen)
    assert named.cost.total("down") == 2 * 4 * (64 * 16 + 16 + 16 * 3 + 3)


def all_frozen():
    return build("mlp:1x8", (1, 8, 8), 3).requires_grad_(False)


def test_a_network_that_is_frozen_altogether_is_refused():
    with pytest.raises(InputError, match=r"all_frozen has nothing to train: all of its parameters are frozen"):
        pf.run("local", synthetic(2), all_frozen, rounds=1)


@dataclass(frozen=True)
class StemOnly(Method):
    """A loss, or a choice of parameters, that concerns frozen ones only."""

    name = "stemonly"
    by_loss: bool = True

    def loss(self, nets, batch, aux):
        return nets["main"].stem(batch.x).pow(2).mean()

    def local(self, client, step, ctx):
        yield Stage(self.loss) if self.by_loss else Stage(super().loss, trainable={"main": ("stem",)})


@pytest.mark.parametrize("engine", ["sequential", "batched"])
@pytest.mark.parametrize("by_loss", [True, False])
def test_a_stage_that_could_move_frozen_parameters_only_is_refused(engine, by_loss):
    with pytest.raises(InputError, match=r"client 0 has nothing to train in 'main/0'.*frozen \(requires_grad=False\)"):
        pf.run(StemOnly(by_loss), synthetic(2), [FrozenFirst("mlp:2x16")], rounds=1, engine=engine)


def test_a_site_tells_which_of_its_parameters_are_frozen():
    method = pf.FedAvg()
    run = {"seed": 0, "feature_dim": None, "feature_adapter": "linear"}
    train, _ = synthetic(1).client(0)
    data = SiteData(train, train, 3)
    known = {}
    for site, model in (("one", TwoHeads()), ("two", TwoHeads().requires_grad_(True))):
        blueprint = make_blueprint(model, "TwoHeads", (1, 8, 8), 3, 0, None, "linear")
        head, blob = introduce(method, model, data, blueprint)
        known[site] = read_introduction(site, head, blob, method, run, 1 << 20)
        assert known[site][1].frozen == blueprint.frozen
    assert known["one"][1].frozen == {f"body.{place}.{kind}" for place in (1, 2) for kind in ("weight", "bias")}
    infos, blueprints = settle(known, ["one", "two"])
    assert infos[0].architecture != infos[1].architecture and len(blueprints) == 2


@pytest.mark.parametrize("engine", ["sequential", "batched"])
@pytest.mark.parametrize("place", [1, 2])
def test_fedin_leaves_a_frozen_layer_of_the_middle_alone(engine, place):
    method = pf.FedIN(combine="analytic", feature_batch=4)  # two gradients, combined by name
    models = [FrozenFirst("mlp:2x16", place), FrozenFirst("mlp:3x16", place)]  # the middle: all of it, or half
    result = pf.run(method, synthetic(4), models, rounds=2, engine=engine)  # features come in the second round
    for client, model in result.models.items():
        blueprint = blueprint_of(models[client % 2])
        state = model.state_dict()
        assert all(torch.equal(state[name], blueprint.initial[name]) for name in blueprint.frozen)
        assert not any(torch.equal(state[name], blueprint.initial[name]) for name in state.keys() - blueprint.frozen)
