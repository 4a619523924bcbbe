"""Stacked clients give the numbers of one client after the other, up to rounding: compared in float64."""

import logging
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch.nn import functional as F

import polyfed as pf
from polyfed.core.method import Method
from polyfed.core.samples import Scaling
from polyfed.core.stage import Draw, Stage, Update
from polyfed.engines.auto import Auto
from polyfed.engines.batched import Batched
from polyfed.engines.dense import DenseProgram

sys.path.insert(0, str(Path(__file__).parents[1] / "contract"))
from table import CASES, run_case, synthetic, unequal

# Deep BatchNorm networks on 8x8 images normalize over few values, which amplifies rounding: 1e-16 becomes 1e-9.
TOLERANCE = 1e-7


@pytest.fixture(autouse=True)
def double(monkeypatch):
    """Compute in float64, where stacked and single differ by rounding that no step amplifies to something visible."""
    apply = Scaling.apply
    monkeypatch.setattr(Scaling, "apply", lambda self, x: apply(self, x).to(torch.get_default_dtype()))
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.fixture
def stacks(monkeypatch):
    """Count the clients that ran in stacks."""
    counted = {"stacked": 0, "alone": 0, "dense": 0}
    from polyfed.engines import batched

    run_stack, run_alone, update = batched.run_stack, batched.run_alone, DenseProgram.update

    def stack(home, jobs, *rest):
        counted["stacked"] += len(jobs)
        run_stack(home, jobs, *rest)

    def alone(*args):
        counted["alone"] += 1
        run_alone(*args)

    def dense(self, *args):
        counted["dense"] += 1
        return update(self, *args)

    monkeypatch.setattr(batched, "run_stack", stack)
    monkeypatch.setattr(batched, "run_alone", alone)
    monkeypatch.setattr(DenseProgram, "update", dense)
    return counted


def difference(a, b):
    worst = 0.0
    for client in a.models:
        ours, theirs = a.models[client].state_dict(), b.models[client].state_dict()
        for name in ours:
            worst = max(worst, float((ours[name].double() - theirs[name].double()).abs().max()))
    losses = [abs(x.get("loss", 0.0) - y.get("loss", 0.0)) for x, y in zip(a.history, b.history, strict=True)]
    return max(worst, *losses)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_every_method_is_the_same_stacked(case, stacks):
    alone = run_case(case, rounds=1, engine="sequential")
    assert difference(run_case(case, rounds=1, engine="batched", workers=2), alone) < TOLERANCE
    if len(case.models) == 1 and not pf.methods.find(case.method).pools_data:
        assert stacks["stacked"] and not stacks["alone"]


SETTINGS = {
    "momentum": pf.Training(momentum=0.9, weight_decay=0.01, batch_size=8, epochs=2),
    "adam": pf.Training(optimizer="adam", lr=1e-3, weight_decay=0.1, batch_size=8, epochs=2),
    "adamw": pf.Training(optimizer="adamw", lr=1e-3, weight_decay=0.1, batch_size=8, epochs=2),
    "clip": pf.Training(clip=0.1, batch_size=8),
    "decay": pf.Training(decay=0.5, round_decay=0.5, batch_size=8, epochs=3),
}


@pytest.mark.parametrize("models", ["mlp:2x16", "cnn:4-8,bn"])
@pytest.mark.parametrize("name", SETTINGS)
def test_every_optimizer_setting(name, models, stacks):
    # 17 samples in batches of 8: a lone last sample; 1: a lone sample at all; 16: no rest.
    clients = unequal((17, 1, 16, 21, 9), None, False)
    runs = [
        pf.run("fedavg", clients, [models], 2, SETTINGS[name], engine=engine, workers=2)
        for engine in ("sequential", "batched")
    ]
    assert difference(*runs) < 1e-12
    assert stacks["stacked"] == 10 and not stacks["alone"]
    assert (stacks["dense"] > 0) == (models == "mlp:2x16" and name != "clip")


class WithDropout(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = torch.nn.Conv2d(1, 4, 3), torch.nn.Linear(16, 3)
        self.maps, self.drop = torch.nn.Dropout2d(0.3), torch.nn.Dropout(0.5)
        self.hidden = torch.nn.Linear(144, 16)

    def forward(self, x):
        z = self.maps(self.first(x).relu()).flatten(1)
        return self.last(self.drop(self.hidden(z).relu()))


def test_dropout_masks_are_each_clients_own(stacks):
    runs = [pf.run("local", synthetic(), WithDropout, 2, engine=engine) for engine in ("sequential", "batched")]
    assert difference(*runs) < 1e-12
    assert stacks["stacked"] == 8


@dataclass(frozen=True)
class Turns(Method):
    """Two updates for each batch, two combined losses, draws and a projection."""

    name: ClassVar[str] = "turns"

    def one(self, nets: Mapping[str, Any], batch: Any, aux: Any) -> torch.Tensor:
        return F.cross_entropy(nets["main"](batch.x + 0.1 * batch["noise"]), batch.y)

    def two(self, nets: Mapping[str, Any], batch: Any, aux: Any) -> torch.Tensor:
        return nets["main"].still().features(batch.x).pow(2).mean() * aux["weight"]

    def combine(self, grads: Any, aux: Any) -> Any:
        a, b = grads
        return {"main": {n: a["main"][n] + torch.where(a["main"][n] > 0, b["main"][n], 0.0) for n in a["main"]}}

    def clamp(self, params: Any) -> Any:
        return {"main": {n: p.clamp(-0.2, 0.2) for n, p in params["main"].items()}}

    def local(self, client, step, ctx):
        head = Update((self.one,), {"main": ("head",)}, training=pf.Training(lr=0.1, weight_decay=0.1))
        both = Update((self.one, self.two), {"main": None}, self.combine, self.clamp)
        yield Stage(
            updates=(head, both),
            aux={"weight": torch.tensor(1.0 + client.id)},
            draws={"noise": Draw((None, 1, 8, 8)), "unused": Draw((None,), "uniform")},
            steps=5,
        )


@pytest.mark.parametrize("models", ["mlp:2x16", "cnn:4-8,bn"])
def test_several_updates_losses_draws_and_projections(models, stacks):
    runs = [pf.run(Turns(), synthetic(), [models], 2, engine=engine) for engine in ("sequential", "batched")]
    assert difference(*runs) < 1e-12
    assert stacks["stacked"] == 8
    assert max(float(p.detach().abs().max()) for p in runs[1].models[0].parameters()) <= 0.2


@dataclass(frozen=True)
class Headless(Method):
    """A loss that does not use the head: weight decay must not touch it."""

    name: ClassVar[str] = "headless"

    def loss(self, nets: Mapping[str, Any], batch: Any, aux: Any) -> torch.Tensor:
        return nets["main"].features(batch.x).pow(2).mean()


@pytest.mark.parametrize("models", ["mlp:2x16", "cnn:4-8"])
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_unused_parameters_do_not_decay(models, optimizer, stacks):
    training = pf.Training(weight_decay=0.1, momentum=0.9, optimizer=optimizer)
    runs = [pf.run(Headless(), synthetic(), [models], 1, training, engine=e) for e in ("sequential", "batched")]
    assert difference(*runs) < 1e-12
    assert stacks["stacked"] == 4


@dataclass(frozen=True)
class Branching(Method):
    """A loss that looks at its values: it cannot be stacked."""

    name: ClassVar[str] = "branching"

    def loss(self, nets: Mapping[str, Any], batch: Any, aux: Any) -> torch.Tensor:
        loss = F.cross_entropy(nets["main"](batch.x), batch.y)
        return loss * 2 if loss > 1 else loss


def test_what_cannot_be_stacked_runs_one_by_one_and_the_log_says_why(stacks, caplog):
    with caplog.at_level(logging.INFO, logger="polyfed.engine"):
        runs = [pf.run(Branching(), synthetic(), ["mlp:1x8"], 2, engine=e) for e in ("sequential", "batched")]
    assert difference(*runs) == 0.0
    assert stacks == {"stacked": 0, "alone": 8, "dense": 0}
    assert "mlp:1x8 run one by one" in caplog.text and "data-dependent control flow" in caplog.text


def test_a_diverging_client_is_named(stacks):
    with pytest.raises(pf.core.errors.TrainingError, match=r"client 0.*batch 2 of 'main/0'"):
        pf.run("local", synthetic(), ["mlp:2x16"], 1, pf.Training(lr=1e200, batch_size=4), engine="sequential")
    with pytest.raises(pf.core.errors.TrainingError, match=r"client [0-3].*batch 2 of 'main/0'"):
        pf.run("local", synthetic(), ["mlp:2x16"], 1, pf.Training(lr=1e200, batch_size=4), engine="batched")


@pytest.mark.parametrize("chosen", ["batched", "threads"])
def test_auto_gives_the_numbers_of_the_engine_it_chose(chosen, monkeypatch, stacks):
    monkeypatch.setattr("polyfed.engines.auto.gain", lambda *args: 2.0 if chosen == "batched" else 1.0)
    case = replace(CASES[0], models=("mlp:2x16", "cnn:4-8,bn"))
    auto = run_case(case, rounds=3, engine="auto", workers=2)
    assert difference(auto, run_case(case, rounds=3, engine=chosen, workers=2)) == 0.0
    told = auto.history[0]["engine"]
    assert {name: entry["is"] for name, entry in told.items()} == dict.fromkeys(case.models, chosen)
    assert "engine" not in auto.history[1]


def test_auto_times_both_ways_and_changes_nothing(monkeypatch):
    seen = {}
    decide = Auto.stackable

    def watched(self, *args):
        answer = decide(self, *args)
        seen.update(self.gains)
        return answer

    monkeypatch.setattr(Auto, "stackable", watched)
    auto = run_case(replace(CASES[0], models=("mlp:1x16",)), rounds=1, engine="auto")
    assert len(seen) == 1 and next(iter(seen.values())) > 0
    chosen = next(iter(auto.history[0]["engine"].values()))["is"]
    same = run_case(replace(CASES[0], models=("mlp:1x16",)), rounds=1, engine=chosen)
    assert difference(auto, same) == 0.0


def test_a_stack_of_one_is_not_made():
    assert not Batched().stackable(None, ("a", "b"), [None], None, None)
