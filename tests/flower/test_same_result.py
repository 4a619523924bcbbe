"""The same method gives the same numbers over a network as in one process, bit for bit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import problem
import pytest
import torch
from table import CASES, Case

import polyfed as pf
from polyfed.config import Config, Networks
from polyfed.core.party import Party
from polyfed.core.settings import Evaluation, Execution, Training
from polyfed.flower.running import Given, run_federation
from polyfed.flower.serve import start_directory
from polyfed.methods import make, registry
from polyfed.result import Result

TRAINING = Training(epochs=2, batch_size=8, lr=0.05)
REAL = [case for case in CASES if not make(case.method, case.options).pools_data]


# Every paper, and one method of every family; the others belong to `make test-long`, since each takes seconds.
OFTEN = ("local", "fedavg", "fedin", "fedfd", "fedvtc", "ams", "fedmd_global", "heterofl", "fedproto", "scaffold")
OFTEN += ("fedrolex", "depthfl", "feddf", "fedgh", "fml", "fens")


def sometimes(cases: list[Case]) -> Any:
    seen: set[str] = set()
    params = []
    for case in cases:
        often = case.method in OFTEN and case.method not in seen
        seen.add(case.method)
        params.append(pytest.param(case, id=case.id, marks=() if often else pytest.mark.long))
    return pytest.mark.parametrize("case", params)


def test_a_method_of_every_family_goes_over_the_network_every_day():
    families = {kind.family for kind in registry().values()}
    assert {registry()[name].family for name in OFTEN} == families


def in_process(case: Case) -> Result:
    return pf.run(
        make(case.method, case.options),
        problem.clients(case.public),
        models_of(case),
        rounds=2,
        training=TRAINING,
        feature_dim=case.feature_dim,
        engine="sequential",
    )


def models_of(case: Case) -> list[str]:
    return [case.models[k % len(case.models)] for k in range(3)]


def over_flower(case: Case, local_federation: Any, out: Path) -> Result:
    local_federation.models.write_text(json.dumps(dict(zip(problem.SITES, models_of(case), strict=True))))
    method = make(case.method, case.options)
    networks, every_round = Networks(feature_dim=case.feature_dim), Execution(checkpoint_seconds=0.0)
    config = Config(method, method.name, 2, training=TRAINING, models=networks, execution=every_round)
    directory, run = start_directory(config, out, problem.SITES, False)
    data = problem.clients(case.public)
    given = Given(method, config.settings(), run, problem.SITES, directory, data.public, None, data.test)
    return run_federation(local_federation.post(), given)


def trees_equal(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(trees_equal(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(trees_equal(x, y) for x, y in zip(a, b, strict=True))
    return bool(a == b)


def tree(server: Party) -> dict[str, Any]:
    models = {name: dict(module.state_dict()) for name, module in server.models.items()}
    return {"state": server.state, "memory": server.memory, "models": models}


@sometimes(REAL)
def test_the_network_changes_nothing(case, local_federation, tmp_path):
    alone, together = in_process(case), over_flower(case, local_federation, tmp_path / "run")
    for here, there in zip(alone.history, together.history, strict=True):
        for key in ("round", "phase", "participants", "loss", "accuracy", "stages", "bytes_up", "bytes_down"):
            assert here.get(key) == there.get(key), f"round {here['round']}: {key}"
        assert "missing" not in there
    assert alone.cost.bytes == together.cost.bytes
    assert alone.cost.kinds == together.cost.kinds
    assert alone.cost.wire == together.cost.wire
    assert trees_equal(tree(alone.server), tree(together.server))
    assert json.loads((tmp_path / "run" / "result.json").read_text())["accuracy"]["mean"] == alone.accuracy()["mean"]


def test_an_exchange_with_little_work_takes_less_than_flowers_own_six_seconds(local_federation, tmp_path):
    local_federation.models.write_text(json.dumps(dict.fromkeys(problem.SITES, "mlp:1x16")))
    training = Training(epochs=1, batch_size=64)
    config = Config(make("local", {}), "local", 6, training=training, evaluation=Evaluation(0))
    directory, run = start_directory(config, tmp_path / "run", problem.SITES, False)
    result = run_federation(
        local_federation.post(), Given(config.method, config.settings(), run, problem.SITES, directory)
    )
    # The quickest of six: how long the others take depends on what else this machine does.
    assert min(line["seconds"]["local"] for line in result.history) < 6.0
