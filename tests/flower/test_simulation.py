"""The same apps in Flower's simulation runtime give the same numbers, and a run is resumed from its directory."""

from __future__ import annotations

import importlib.util

import problem
import pytest
from test_same_result import TRAINING, tree, trees_equal

import polyfed as pf
from polyfed.core.errors import InputError, PolyfedError

needs_ray = pytest.mark.skipif(
    importlib.util.find_spec("ray") is None, reason="needs Ray: pip install 'polyfed[simulation]'"
)
MODELS = ["mlp:1x16", "mlp:2x16", "cnn:4-8"]


def run(engine, out=None, **more):
    settings = {"rounds": 2, "training": TRAINING, "feature_dim": 8, "engine": engine, "out": out}
    return pf.run("fedproto", problem.clients(), MODELS, **(settings | more))


def states(result):
    return {client: dict(result.models[client].state_dict()) for client in result.models}


def test_pooled_data_is_refused():
    pytest.importorskip("ray")
    with pytest.raises(InputError, match="all data in one place"):
        pf.run("centralized", problem.clients(), MODELS, engine="flower")


def test_without_ray_it_says_how_to_get_it(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(InputError, match=r"polyfed\[simulation\]"):
        run("flower")


@needs_ray
@pytest.mark.slow  # Ray takes about half a minute to start on two cores
def test_flowers_simulation_gives_the_numbers_of_our_own(tmp_path):
    alone = run("sequential")
    together = run("flower", tmp_path / "run")
    assert [line["accuracy"] for line in alone.history] == [line["accuracy"] for line in together.history]
    assert alone.cost.bytes == together.cost.bytes
    assert trees_equal(tree(alone.server), tree(together.server))
    assert trees_equal(states(alone), states(together))
    assert (tmp_path / "run" / "result.json").is_file()


class Enough(PolyfedError):
    """Somebody stops the run."""


@needs_ray
@pytest.mark.slow
def test_a_stopped_simulation_is_resumed(tmp_path):
    def stop(line):
        raise Enough("after one round")

    whole = run("sequential")
    with pytest.raises(Enough):
        run("flower", tmp_path / "run", observers=[stop])
    resumed = run("flower", tmp_path / "run", resume=True)
    assert [line["accuracy"] for line in whole.history] == [line["accuracy"] for line in resumed.history]
    assert trees_equal(states(whole), states(resumed))
