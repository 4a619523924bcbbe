"""The default choice of engine: small networks are stacked, whoever shares the stack, and others work whole."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import polyfed as pf
from polyfed.compare import compare
from polyfed.core.checkpoint import read_json, write_json
from polyfed.engines import batched
from polyfed.engines.auto import sharing, way_of
from polyfed.engines.convolutions import unfolded
from polyfed.engines.dense import is_perceptron
from polyfed.experiment import experiment, read_experiment
from polyfed.models.registry import build

sys.path.insert(0, str(Path(__file__).parents[1] / "contract"))
from table import CASES, Case, everyday, run_case, synthetic


def weights(result: pf.Result, client: int) -> torch.Tensor:
    return torch.cat([tensor.flatten() for tensor in result.models[client].state_dict().values()])


def same(one: pf.Result, other: pf.Result) -> bool:
    return all(torch.equal(weights(one, client), weights(other, client)) for client in one.models)


class Own(nn.Module):
    """A convolutional network that the library knows nothing about."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution, self.last = nn.Conv2d(1, 2, 3), nn.Linear(72, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.convolution(x).relu().flatten(1))


@pytest.fixture
def always(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stack small networks also where few clients share a step, as those of the contract table do."""
    monkeypatch.setattr("polyfed.engines.auto.OTHERS", 0)


@pytest.mark.usefixtures("always")
@pytest.mark.parametrize("model", ["mlp:2x16", "cnn:4-8,bn"])
def test_small_networks_are_stacked_and_others_work_whole(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = replace(CASES[0], models=(model, Own))
    chosen = {engine: run_case(case, rounds=3, engine=engine, workers=2) for engine in ("batched", "threads")}
    monkeypatch.delattr(batched, "run_alone")  # whole clients do not come from stage to stage
    auto = run_case(case, rounds=3, engine="auto", workers=2)
    for client, name in enumerate(auto.architectures):
        expected = chosen["threads" if "Own" in name else "batched"]
        assert torch.equal(weights(auto, client), weights(expected, client))
        assert not torch.equal(weights(chosen["threads"], client), weights(chosen["batched"], client))


STACKED = ("mlp", "cnn:", "resnet")
SMALL = [case for case in CASES if all(str(model).startswith(STACKED) for model in case.models)]


@pytest.mark.usefixtures("always")
@everyday(SMALL, few=True)
def test_numbers_do_not_depend_on_who_shares_a_stack(case: Case) -> None:
    runs = [run_case(case, rounds=2, participation=0.6, engine="auto", workers=workers) for workers in (1, 4)]
    assert same(*runs)
    assert [line.get("loss") for line in runs[0].history] == [line.get("loss") for line in runs[1].history]


@pytest.mark.usefixtures("always")
def test_a_client_alone_in_its_stack_gets_the_numbers_of_a_full_one() -> None:
    everybody = pf.run("local", synthetic(), ["mlp:2x16"], 2, engine="auto", workers=1)
    lone = pf.run("local", synthetic(), ["mlp:2x16", "cnn:4-8", "cnn:4-8", "cnn:4-8"], 2, engine="auto")
    assert torch.equal(weights(everybody, 0), weights(lone, 0))


@pytest.mark.usefixtures("always")
@pytest.mark.parametrize("model", ["cnn:4-8", "cnn:5-7,bn", "cnn2", "resnet10:w3", "resnet10:w4,pre,stem=fedin"])
def test_neighbors_do_not_change_the_numbers_of_convolutions(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(batched, "run_alone")
    clients = pf.split("digits", clients=7, by="dirichlet:1.0", seed=0)
    run = {"rounds": 1, "training": pf.Training(momentum=0.9), "engine": "auto", "workers": 1}
    everybody = pf.run("local", clients, [model], **run)
    for places in ((3,), (0, 5)):  # alone, and two, among others of another architecture
        models = [model if client in places else "mlp:1x8" for client in range(7)]
        fewer = pf.run("local", clients, models, **run)
        assert all(torch.equal(weights(everybody, client), weights(fewer, client)) for client in places)


@pytest.mark.usefixtures("always")
def test_convolutions_whose_loss_needs_more_than_outputs_train_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    threads = pf.run("fml", synthetic(), ["cnn:4-8"], 2, engine="threads")  # each client has a second network
    monkeypatch.delattr(batched, "run_stack")
    assert same(pf.run("fml", synthetic(), ["cnn:4-8"], 2, engine="auto"), threads)


class Scaled(nn.Module):
    """A linear layer, and a parameter that belongs to no layer."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.scale = nn.Parameter(torch.ones(2))


@pytest.mark.parametrize(
    ("module", "expected"),
    [
        (nn.Sequential(nn.Flatten(), nn.Linear(4, 3), nn.Tanh(), nn.Dropout(0.1), nn.Linear(3, 2)), True),
        (nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3)), False),
        (nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten()), False),
        (nn.LSTM(2, 2), False),
        (Scaled(), False),
    ],
)
def test_what_counts_as_a_perceptron(module: nn.Module, expected: bool) -> None:
    assert is_perceptron(module) == expected


def test_how_much_convolutions_unfold() -> None:
    # 8x8 places of a 3x3 kernel over one channel; after pooling 4x4 places of one over 4 channels
    assert unfolded(build("cnn:4-8", (1, 8, 8), 10), (1, 8, 8)) == (64 * 9 + 16 * 36) / 2


@pytest.mark.parametrize(
    ("model", "size", "shared", "batch", "expected"),
    [
        ("mlp:2x512", 28, 6, 256, "stack"),
        ("mlp:2x512", 28, 5.9, 256, "plain"),
        ("mlp:2x512", 28, 1, 256, "plain"),
        ("cnn:16-32", 8, 6, 16, "stack"),
        ("cnn:16-32", 8, 2, 16, "plain"),
        ("cnn:16-32", 8, 1.9, 16, "whole"),
        ("cnn:16-32", 32, 20, 32, "whole"),
        ("resnet10:w8", 8, 6, 16, "stack"),
    ],
)
def test_the_rule(model: str, size: int, shared: float, batch: int, expected: str) -> None:
    assert way_of(build(model, (1, size, size), 10), (1, size, size), shared, batch) == expected


@pytest.mark.parametrize("model", ["mlp:2x16", "cnn:4-8"])
def test_few_clients_are_stacked_in_plain_training_only(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    few = pf.split("digits", clients=3, by=pf.IID(), seed=0)
    run = {"models": [model], "rounds": 1, "workers": 1}
    plain = {engine: pf.run("fedavg", few, engine=engine, **run) for engine in ("auto", "batched", "threads")}
    assert same(plain["auto"], plain["batched"]) and not same(plain["auto"], plain["threads"])
    whole = pf.run("fedprox", few, engine="threads", **run)
    monkeypatch.delattr(batched, "run_stack")
    assert same(pf.run("fedprox", few, engine="auto", **run), whole)


@pytest.mark.parametrize(
    ("samples", "share", "expected"),
    [
        ([30, 30, 30, 30], 1.0, 4),  # one step, of everybody
        ([32, 64, 96], 1.0, 2),  # the first batch of three, the second of two, the third of one
        ([7, 8, 9, 10], 1.0, 1),  # nobody has a batch of another's size
        ([30] * 100, 0.1, 10),  # somebody always takes part
        ([7, 8], 0.5, 1),
    ],
)
def test_how_many_share_a_step(samples: list[int], share: float, expected: float) -> None:
    assert sharing(samples, 32, share) == pytest.approx(expected, rel=1e-3)


def test_clients_of_unequal_sizes_are_stacked_as_far_as_they_share_batches(tmp_path: Path) -> None:
    clients = pf.split("digits", clients=12, by="dirichlet:1.0", seed=0)
    for batch_size, way in ((256, "plain"), (2, "stack")):  # all samples of a client are one batch, or dozens
        training = pf.Training(batch_size=batch_size)
        pf.run("local", clients, ["mlp:1x8"], 1, training=training, out=tmp_path / way)
        assert stored(tmp_path / way)["groups"] == {"mlp:1x8": way}


def stored(out: Path) -> dict[str, Any]:
    return json.loads((out / "config.json").read_text())


def test_it_is_the_default_of_every_way_to_start_a_run(tmp_path: Path) -> None:
    short = {"limit": 60, "clients": 6, "partition": "iid", "models": ["mlp:1x8", "cnn:4-8,exits"], "rounds": 1}
    assert pf.run("local", synthetic(2), "mlp:1x8", 1).config["execution"]["engine"] == "auto"
    (tmp_path / "e.toml").write_text("rounds = 1\n")
    assert read_experiment(tmp_path / "e.toml").base.execution.engine == "auto"
    compare(experiment(**short), ["local"], seeds=1, out=tmp_path / "c")
    found = stored(tmp_path / "c" / "local" / "seed-0")
    assert found["execution"]["engine"] == "auto"
    assert found["groups"] == {"cnn:4-8,exits": "whole", "mlp:1x8": "plain"}


def test_the_choice_is_stored_printed_and_kept_by_a_resume(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "run"
    run = {"models": ["mlp:1x8", "cnn:4-8,exits"], "rounds": 1, "out": out, "progress": True}
    pf.run("local", pf.split("digits", clients=8), **run)
    told = " ".join(capsys.readouterr().err.split())
    assert "mlp:1x8 as stacks in plain training; cnn:4-8,exits as whole clients on threads" in told
    pf.resume(out, rounds=2)  # it writes the configuration again
    assert stored(out)["groups"] == {"cnn:4-8,exits": "whole", "mlp:1x8": "plain"}
    assert stored(out)["rounds"] == 2


def test_a_run_whose_clients_worked_in_another_way_is_not_continued(tmp_path: Path) -> None:
    out = tmp_path / "run"
    pf.run("local", pf.split("digits", clients=4), ["mlp:1x8"], 1, out=out)
    content = {**read_json(out / "config.json"), "groups": {"mlp:1x8": "whole"}}
    write_json(out / "config.json", content)  # as an earlier version of the rule might have chosen
    with pytest.raises(pf.InputError, match=r"mlp:1x8 as whole clients on threads.*mlp:1x8 as stacks"):
        pf.resume(out)
    write_json(out / "config.json", {key: value for key, value in content.items() if key != "groups"})
    pf.resume(out)  # it says nothing about it


def test_engines_that_choose_nothing_store_nothing(tmp_path: Path) -> None:
    pf.run("local", synthetic(2), "mlp:1x8", 1, out=tmp_path / "run", engine="threads")
    assert "groups" not in stored(tmp_path / "run")
