"""What a run hands out: numbers for every client, and models ready to predict."""

import sys
from pathlib import Path

import pytest

import polyfed as pf
from polyfed.analysis.opening import open_run

sys.path.insert(0, str(Path(__file__).parents[1] / "contract"))
from table import synthetic


@pytest.mark.parametrize("share", [1.0, 0.5])
@pytest.mark.parametrize("models", [("mlp:1x8",), ("mlp:1x8", "mlp:2x8")])
def test_pooled_data_with_few_measured_clients(models, share):
    clients = synthetic(4, public=False)
    result = pf.run("centralized", clients, models, 3, participation=share, evaluate_clients=1)
    full = pf.run("centralized", clients, models, 3, participation=share)
    assert result.accuracy()["per_client"] == full.accuracy()["per_client"]
    assert list(result.frame()["accuracy"]) == full.accuracy()["per_client"]
    # Before the end one architecture stands for all; each of its clients counts.
    early = [line["accuracy"]["per_client"][0] for line in result.history[:2]]
    assert result.accuracy()["last_five"] == pytest.approx((sum(early) + full.accuracy()["mean"]) / 3)


def test_models_are_ready_to_predict(tmp_path):
    clients = pf.split(pf.load("digits", limit=(120, 60)), clients=2, by="iid", seed=0)
    result = pf.run("fedavg", clients, "cnn:4-8,bn", 1, out=tmp_path / "run")
    opened = open_run(tmp_path / "run")
    fused = pf.fuse(list(result.models.values()), method="ensemble")
    for model in (result.models[0], result.server_model, opened.models[1], fused):
        assert not any(module.training for module in model.modules())
