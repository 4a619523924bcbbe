"""The default choice of engine: perceptrons are stacked, whoever shares the stack, and others work whole."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

import polyfed as pf
from polyfed.engines import batched
from polyfed.engines.auto import is_perceptron

sys.path.insert(0, str(Path(__file__).parents[1] / "contract"))
from table import CASES, Case, everyday, run_case, synthetic


def weights(result: pf.Result, client: int) -> torch.Tensor:
    return torch.cat([tensor.flatten() for tensor in result.models[client].state_dict().values()])


def same(one: pf.Result, other: pf.Result) -> bool:
    return all(torch.equal(weights(one, client), weights(other, client)) for client in one.models)


def test_perceptrons_are_stacked_and_others_work_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    case = replace(CASES[0], models=("mlp:2x16", "cnn:4-8,bn"))
    chosen = {engine: run_case(case, rounds=3, engine=engine, workers=2) for engine in ("batched", "threads")}
    monkeypatch.delattr(batched, "run_alone")  # whole clients do not come from stage to stage
    auto = run_case(case, rounds=3, engine="auto", workers=2)
    for client, name in enumerate(auto.architectures):
        expected = chosen["batched" if name.startswith("mlp") else "threads"]
        assert torch.equal(weights(auto, client), weights(expected, client))


PERCEPTRONS = [case for case in CASES if all(model.startswith("mlp") for model in case.models)]


@everyday(PERCEPTRONS)
def test_numbers_do_not_depend_on_who_shares_a_stack(case: Case) -> None:
    runs = [run_case(case, rounds=2, participation=0.6, engine="auto", workers=workers) for workers in (1, 4)]
    assert same(*runs)
    assert [line.get("loss") for line in runs[0].history] == [line.get("loss") for line in runs[1].history]


def test_a_client_alone_in_its_stack_gets_the_numbers_of_a_full_one() -> None:
    everybody = pf.run("local", synthetic(), ["mlp:2x16"], 2, engine="auto", workers=1)
    lone = pf.run("local", synthetic(), ["mlp:2x16", "cnn:4-8", "cnn:4-8", "cnn:4-8"], 2, engine="auto")
    assert torch.equal(weights(everybody, 0), weights(lone, 0))


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
