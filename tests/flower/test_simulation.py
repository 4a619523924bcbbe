"""The same apps in Flower's simulation runtime give the same numbers."""

from __future__ import annotations

import importlib.util

import problem
import pytest
from test_same_result import TRAINING, tree, trees_equal

import polyfed as pf
from polyfed.core.federation import Settings
from polyfed.methods import make

needs_ray = pytest.mark.skipif(
    importlib.util.find_spec("ray") is None, reason="needs Ray: pip install 'flwr[simulation]'"
)


@needs_ray
@pytest.mark.slow  # Ray takes about half a minute to start on two cores
def test_flowers_simulation_gives_the_numbers_of_our_own(monkeypatch):
    from polyfed.backends.flower.simulation import simulate

    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    data, models = problem.clients(), ["mlp:1x16", "mlp:2x16", "cnn:4-8"]
    alone = pf.run("fedproto", data, models, rounds=2, training=TRAINING, feature_dim=8, engine="sequential")
    settings = Settings(2, 0, TRAINING)
    together = simulate(make("fedproto", {}), data, models, settings, feature_dim=8)
    assert [line["accuracy"] for line in alone.history] == [line["accuracy"] for line in together.history]
    assert alone.cost.bytes == together.cost.bytes
    assert trees_equal(tree(alone.server), tree(together.server))
