"""Trackers against the real libraries: what was measured can be read back."""

from __future__ import annotations

import csv

import pytest
from typer.testing import CliRunner

from polyfed.cli import app
from polyfed.core.errors import InputError
from polyfed.terminal import trackers

LINE = {
    "round": 3,
    "phase": "round",
    "participants": [0, 1],
    "loss": 0.5,
    "bytes_up": 8,
    "bytes_down": 16,
    "accuracy": {"mean": 0.25, "worst": 0.1, "per_client": [0.1, 0.4], "global": None},
    "seconds": {"total": 2.0},
}


def test_numbers_are_flat():
    assert trackers.numbers(LINE) == {
        "loss": 0.5,
        "bytes/up": 8.0,
        "bytes/down": 16.0,
        "accuracy/mean": 0.25,
        "accuracy/worst": 0.1,
        "seconds/total": 2.0,
    }


def test_csv(tmp_path):
    for _ in range(2):  # a resumed run goes on in the same file
        tracker = trackers.make("csv", tmp_path, "alpha #0")
        tracker(LINE)
        tracker.close()
    rows = list(csv.DictReader((tmp_path / "alpha_0.csv").open()))
    assert len(rows) == 12
    assert {"round": "3", "phase": "round", "name": "accuracy/mean", "value": "0.25"} in rows


def test_tensorboard(tmp_path):
    pytest.importorskip("tensorboard", reason="needs the extra tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    tracker = trackers.make("tensorboard", tmp_path, "alpha", {"lr": 0.1})
    tracker(LINE)
    tracker.close()
    events = EventAccumulator(str(tmp_path / "tensorboard" / "alpha"))
    events.Reload()
    (scalar,) = events.Scalars("accuracy/mean")
    assert (scalar.step, scalar.value) == (3, 0.25)
    assert "accuracy/clients" in events.Tags()["histograms"]


def test_mlflow(tmp_path, monkeypatch):
    mlflow = pytest.importorskip("mlflow", reason="needs the extra mlflow")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    tracker = trackers.make("mlflow", tmp_path, "alpha", {"lr": 0.1})
    tracker(LINE)
    tracker.close()
    client = mlflow.MlflowClient(tracking_uri=(tmp_path / "mlruns").resolve().as_uri())
    experiment = client.get_experiment_by_name("polyfed")
    (run,) = client.search_runs([experiment.experiment_id])
    assert run.data.metrics["accuracy/mean"] == 0.25
    assert run.data.params["lr"] == "0.1"
    assert run.info.status == "FINISHED"
    assert client.get_metric_history(run.info.run_id, "bytes/up")[0].step == 3


def test_unknown_trackers_are_refused_before_anything_runs(tmp_path):
    with pytest.raises(InputError, match="did you mean 'tensorboard'"):
        trackers.make("tensorbord", tmp_path, "alpha")
    out = tmp_path / "run"
    words = ["run", "--method", "local", "--data", "digits", "--rounds", "1", "--out", str(out), "--log", "wandb"]
    outcome = CliRunner().invoke(app, words)
    assert isinstance(outcome.exception, InputError)
    assert not out.exists()


def test_a_missing_package_is_named_before_anything_runs(tmp_path, monkeypatch):
    monkeypatch.setattr(trackers, "find_spec", lambda name: None)
    with pytest.raises(InputError, match=r"polyfed\[mlflow\]"):
        trackers.make("mlflow", tmp_path, "alpha")


def test_a_run_is_logged_and_reported(tmp_path):
    out = tmp_path / "run"
    words = ["run", "--method", "fedavg", "--data", "digits", "--limit", "80", "--clients", "2", "--rounds", "2"]
    words += ["--models", "mlp:1x8", "--out", str(out), "--log", "csv"]
    outcome = CliRunner().invoke(app, words)
    assert outcome.exit_code == 0, outcome.output
    rows = list(csv.DictReader((out / "log" / "fedavg.csv").open()))
    assert [row["round"] for row in rows if row["name"] == "accuracy/mean"] == ["1", "2"]
    assert (out / "report.html").is_file()
    assert "Report:" in outcome.output
