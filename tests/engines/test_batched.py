"""Stacked clients give the numbers of one client after the other, up to rounding: compared in float64."""

import logging
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch.nn import functional as F

import polyfed as pf
from polyfed.core.message import Message, grouped
from polyfed.core.method import Method
from polyfed.core.samples import Scaling
from polyfed.core.stage import Draw, Stage, Update
from polyfed.engines.batched import Batched
from polyfed.engines.dense import DenseProgram

sys.path.insert(0, str(Path(__file__).parents[1] / "contract"))
from table import synthetic, unequal

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

    def stack(backend, jobs, *rest):
        counted["stacked"] += len(jobs)
        run_stack(backend, jobs, *rest)

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


@pytest.mark.parametrize(
    ("method", "feature_dim"), [("fedprox", None), ("oneshot_fedavg", None), ("fedproto", 8)], ids=lambda one: str(one)
)
def test_losses_that_ask_for_outputs_and_parameters_take_the_short_way_of_perceptrons(method, feature_dim, stacks):
    # Of the batch by a tensor of its own, such a loss was taken for one that needs the whole network.
    clients = unequal((17, 16, 21, 9), None, False)
    runs = [
        pf.run(method, clients, ["mlp:2x16"], 2, SETTINGS["adam"], engine=engine, feature_dim=feature_dim)
        for engine in ("sequential", "batched")
    ]
    assert difference(*runs) < 1e-12
    assert stacks["stacked"] and stacks["dense"] and not stacks["alone"]


def test_clients_of_unequal_sizes_stay_together_in_every_epoch(stacks):
    # 25, 35 and 57 samples in batches of 10: in each epoch five steps of full batches, one of the two rests of 5 and
    # one of the rest of 7. A client that went on after its rest would be alone in all later epochs.
    clients = unequal((25, 35, 57), None, False)
    pf.run("fedavg", clients, ["mlp:1x16"], 1, pf.Training(batch_size=10, epochs=4), engine="batched", workers=1)
    tried = 1  # one step on copies shows that they can be stacked
    assert stacks["dense"] == 4 * 7 + tried


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
class Looking(Method):
    """A loss that looks into the network."""

    name: ClassVar[str] = "looking"
    called: bool = False

    def loss(self, nets: Mapping[str, Any], batch: Any, aux: Any) -> torch.Tensor:
        net = nets["main"]
        logits = net.call("forward", batch.x) if self.called else net(batch.x) / len(list(net.module.children()))
        return F.cross_entropy(logits, batch.y)


@pytest.mark.parametrize("called", [True, False])
def test_a_loss_that_looks_into_a_perceptron_is_stacked_as_any_other(called, stacks):
    runs = [pf.run(Looking(called), synthetic(), ["mlp:1x8"], 1, engine=e) for e in ("sequential", "batched")]
    assert difference(*runs) < 1e-12
    assert stacks == {"stacked": 4, "alone": 0, "dense": 0}


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
    assert stacks == {"stacked": 0, "alone": 8, "dense": 1}  # the trial
    assert "mlp:1x8 run one by one" in caplog.text and "data-dependent control flow" in caplog.text


def test_a_diverging_client_is_named(stacks):
    with pytest.raises(pf.core.errors.TrainingError, match=r"client 0.*batch 2 of 'main/0'"):
        pf.run("local", synthetic(), ["mlp:2x16"], 1, pf.Training(lr=1e200, batch_size=4), engine="sequential")
    with pytest.raises(pf.core.errors.TrainingError, match=r"client [0-3].*batch 2 of 'main/0'"):
        pf.run("local", synthetic(), ["mlp:2x16"], 1, pf.Training(lr=1e200, batch_size=4), engine="batched")


def test_a_stack_of_one_is_not_made():
    assert not Batched().stackable(None, ("a", "b"), [None], None, None)


@dataclass(frozen=True)
class Telling(Method):
    """Adds up logits by label and gradients while it trains, and tells them with its steps and rates."""

    name: ClassVar[str] = "telling"
    sends: ClassVar[str] = "sums"
    gradient_sums: bool = False

    def telling_loss(self, nets, batch, aux):
        logits = nets["main"](batch.x)
        ones = F.one_hot(batch.y, logits.shape[1]).to(logits.dtype)
        return F.cross_entropy(logits, batch.y), {"counts": ones.sum(0), "logits": ones.T @ logits}

    def local(self, client, step, ctx):
        trained = yield Stage(self.telling_loss, sum_gradients=self.gradient_sums)
        told = Message(data=dict(trained.sums), meta={"steps": trained.steps, "rates": trained.rates})
        told.data |= grouped("gradient", trained.gradients.get("main", {}))
        return told

    def fuse(self, server, replies, step, ctx):
        server.memory["told"] = {str(c): {**reply.data, **reply.meta} for c, reply in replies.items()}


@pytest.mark.parametrize("gradient_sums", [False, True])
@pytest.mark.parametrize("model", ["mlp:1x8", "cnn:4-8"])
def test_what_a_stage_tells_does_not_depend_on_the_engine(model, gradient_sums):
    training = pf.Training(epochs=2, batch_size=8, lr=0.05, milestones=(1,))
    one, other = (
        pf.run(Telling(gradient_sums), synthetic(), model, 2, training, engine=engine).server.memory["told"]
        for engine in ("sequential", "batched")
    )
    for client, told in one.items():
        samples = 18 + 5 * int(client)
        assert told["counts"].sum() == 2 * samples and told["steps"] == 2 * -(-samples // 8)
        assert told["rates"] == pytest.approx(told["steps"] * 0.005)
        assert any(name.startswith("gradient/") for name in told) == gradient_sums
        for name, value in told.items():
            torch.testing.assert_close(
                torch.as_tensor(other[client][name]), torch.as_tensor(value), rtol=1e-3, atol=1e-5
            )
