"""Few clients of an architecture: what is stacked of them, and that nothing else about a run changes their numbers."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import polyfed as pf
from polyfed.compare import compare
from polyfed.core.method import Local as Work
from polyfed.core.stage import Stage
from polyfed.engines.auto import sharing, way_of
from polyfed.engines.steps import clip
from polyfed.experiment import experiment
from polyfed.methods.ensemble import Ensemble
from polyfed.methods.fedavg import FedAvg
from polyfed.methods.local import Local
from polyfed.models.registry import build


def states(result: pf.Result) -> list[dict[str, Tensor]]:
    return [model.state_dict() for _, model in sorted(result.models.items())]


def same(one: list[dict[str, Tensor]], other: list[dict[str, Tensor]]) -> bool:
    return all(torch.equal(a[name], b[name]) for a, b in zip(one, other, strict=True) for name in a)


def equal_clients(number: int) -> pf.Clients:
    return pf.split("digits", clients=number, by=pf.IID(), seed=0)


@dataclass(frozen=True)
class Sometimes(FedAvg):
    """A first round that adds up gradients, which perceptrons are not stacked for; later ones train plainly."""

    name = "sometimes"

    def stage(self, client: Any, ctx: Any) -> Stage:
        return Stage(self.loss, sum_gradients=ctx.round == 1)


def test_what_is_stacked_does_not_depend_on_the_rounds_before(tmp_path: Path) -> None:
    run: dict[str, Any] = {"models": ["mlp:1x8"], "training": pf.Training(epochs=1)}
    whole = pf.run(Sometimes(), equal_clients(3), rounds=3, **run)

    def stop(line: dict[str, Any]) -> None:
        if line["round"] == 1:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        pf.run(Sometimes(), equal_clients(3), rounds=3, out=tmp_path / "run", observers=[stop], **run)
    resumed = pf.run(Sometimes(), equal_clients(3), rounds=3, out=tmp_path / "run", resume=True, **run)
    assert same(states(whole), states(resumed))


class Spare(nn.Module):
    """A perceptron with a layer that its outputs do not depend on."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last, self.spare = nn.Linear(64, 16), nn.Linear(16, 10), nn.Linear(16, 3)

    def features(self, x: Tensor) -> Tensor:
        return self.first(x.flatten(1)).relu()

    def head(self, z: Tensor) -> Tensor:
        return self.last(z)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.features(x))


@pytest.mark.parametrize("weight_decay", [0.0, 1e-3])
@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_a_penalty_moves_parameters_without_gradient_in_every_engine(optimizer: str, weight_decay: float) -> None:
    training = pf.Training(epochs=1, optimizer=optimizer, lr=0.01, weight_decay=weight_decay)
    run = {"models": [Spare], "rounds": 1, "training": training}
    found = {e: pf.run(Ensemble(l1=0.01), equal_clients(2), engine=e, **run) for e in ("threads", "batched")}
    plain = pf.run(Ensemble(l1=0.0), equal_clients(2), engine="threads", **run)
    threads, batched, without = (states(result)[0]["spare.weight"] for result in (*found.values(), plain))
    torch.testing.assert_close(batched, threads, rtol=1e-4, atol=1e-5)
    assert not torch.allclose(threads, without)


class Scaled(nn.Module):
    """A network with a parameter that is one number."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.temperature = nn.Linear(64, 10), nn.Parameter(torch.tensor(1.0))

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x.flatten(1)) * self.temperature


@pytest.mark.parametrize("clipped", [None, 0.1])
@pytest.mark.parametrize("optimizer", ["adam", "adamw"])
def test_a_parameter_may_be_one_number(optimizer: str, clipped: float | None) -> None:
    training = pf.Training(epochs=1, optimizer=optimizer, lr=0.01, clip=clipped)
    run = {"models": [Scaled], "rounds": 1, "training": training}
    found = [states(pf.run("local", equal_clients(2), engine=e, **run))[0] for e in ("threads", "batched")]
    torch.testing.assert_close(found[0]["temperature"], found[1]["temperature"], rtol=1e-4, atol=1e-5)
    assert float(found[0]["temperature"]) != 1.0


def test_gradients_of_single_numbers_are_clipped_with_the_others() -> None:
    grads = {"main": {"a": torch.tensor([3.0, 0.3]), "b": torch.tensor([[4.0], [0.4]])}}
    found = clip(grads, 1.0)["main"]
    torch.testing.assert_close(found["a"], torch.tensor([0.6, 0.3]), rtol=1e-5, atol=0)
    torch.testing.assert_close(found["b"], torch.tensor([[0.8], [0.4]]), rtol=1e-5, atol=0)


@dataclass(frozen=True)
class Given(Local):
    """Moves by tensors of its aux, which are its own."""

    name = "given"

    def local(self, client: Any, step: Any, ctx: Any) -> Work:
        still = {"main": {name: torch.zeros_like(p) for name, p in client.main.named_parameters()}}
        yield Stage(self.loss, gradients=lambda grads, aux: aux["still"], aux={"still": still}, l1=0.1, steps=3)
        assert all(not tensor.any() for tensor in still["main"].values())
        return None


def test_a_penalty_leaves_the_tensors_of_a_method_alone() -> None:
    pf.run(Given(), equal_clients(2), ["mlp:1x4"], 1, engine="threads")


def few(tmp_path: Path, labels: list[str]) -> list[bytes]:
    """Return the networks of a label with a third of the clients in a round, compared with others or not."""
    made = experiment(
        data="digits", clients=6, partition="dirichlet:1.0", batch_size=32, models=["cnn:4-8"], rounds=2, epochs=1,
        compare=["fedavg", "few"],
        methods={"few": {"method": "fedavg", "settings": {"participation.share": 0.3}}},
    )  # fmt: skip
    out = tmp_path / "-".join(labels)
    compare(made, labels, seeds=1, out=out, jobs=1, reference=False)
    return [file.read_bytes() for file in sorted((out / "few" / "seed-0" / "models").iterdir())]


def test_whole_clients_do_not_recall_what_a_stack_trained(tmp_path: Path) -> None:
    assert few(tmp_path, ["fedavg", "few"]) == few(tmp_path, ["few"])


@pytest.mark.parametrize("percent", range(1, 101, 3))
def test_a_lone_step_is_one_whatever_the_share(percent: int) -> None:
    """Mathematically one client shares a step with nobody; as a sum of powers it may be a little less."""
    shared = sharing([50, 60, 70], 256, percent / 100)
    assert way_of(build("mlp:1x8", (1, 8, 8), 10), (1, 8, 8), shared, 256) == "plain"
