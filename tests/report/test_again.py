"""The command that a report prints makes the same configuration again, whatever was set."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pytest
from report_runs import make_run
from typer.testing import CliRunner

from polyfed.api import execute
from polyfed.cli import app
from polyfed.compare import compare
from polyfed.config import short_names
from polyfed.experiment import KEYS, experiment
from polyfed.report import again
from polyfed.report.runs import Run, Study, study

SMALL: dict[str, Any] = {"limit": 60, "clients": 4, "models": ("mlp:1x4",), "rounds": 1, "method": "local"}
PROX = {"method": "fedprox"}
PRIVATE = {"method": "fedavg", "epochs": 1, "batch_size": 5}

# A value other than the default for every key of an experiment, with what else it needs.
VALUES: list[tuple[str, Any, dict[str, Any]]] = [
    ("method", "fedproto", {}),
    ("methods", {"fedprox": {"mu": 0.3}}, PROX),
    ("methods", {"my variant": {"method": "fedprox", "mu": 0.3}}, {"method": "my variant"}),
    ("compare", ("fedprox",), {}),
    ("seeds", 2, {}),
    ("data", "table", {}),
    ("limit", 50, {}),
    ("limit", (60, 30), {}),
    ("resize", 4, {}),
    ("clients", 3, {}),
    ("partition", "iid", {}),
    ("validation", 0.25, {}),
    ("public", 20, {}),
    ("public", 0.1, {}),
    ("min_size", 2, {}),
    ("models", ("cnn:2-2,bn", "mlp:1x4"), {}),
    ("feature_dim", 3, {}),
    ("feature_adapter", "avgpool", {"feature_dim": 2}),
    ("rounds", 2, {}),
    ("participation", 0.5, {}),
    ("dropout", 0.5, {}),
    ("drop", "weakest", {"dropout": 0.25}),
    ("epochs", 2, {}),
    ("batch_size", 7, {}),
    ("optimizer", "adam", {}),
    ("lr", 1e-05, {}),
    ("momentum", 0.9, {}),
    ("weight_decay", 1e-05, {}),
    ("clip", 1.5, {}),
    ("decay", 0.9, {}),
    ("decay_every", 2, {"decay": 0.9}),
    ("round_decay", 0.9, {}),
    ("schedule", "cosine", {}),
    ("milestones", [1, 2], {}),
    ("milestone_decay", 0.5, {}),
    ("warm_up", 1, {}),
    ("augment", "crop:1+flip", {}),
    ("seed", 3, {}),
    ("evaluate", "end", {}),
    ("evaluate", "every=2", {}),
    ("evaluate", 2, {}),
    ("evaluate_clients", 1, {}),
    ("evaluate_samples", 10, {}),
    ("metrics", "macro_f1,auroc", {}),
    ("patience", 1, {"validation": 0.2}),
    ("own_test", 0.25, {}),
    ("task", "regression", {"partition": "iid"}),
    ("checkpoint_seconds", 0.0, {}),
    ("engine", "sequential", {}),
    ("workers", 1, {}),
    ("device", "auto", {}),
    ("kind", "table", {"data": "table"}),
    ("tokenizer", "spelling:letters", {"data": "mail", "models": ("lstm:1x4",), "limit": 60}),
    ("length", 9, {"data": "mail", "models": ("lstm:1x4",)}),
    ("drop_columns", ("b",), {"data": "table"}),
    ("robust", "trimmed:0.25", {"method": "fedavg"}),
    ("attack", "signflip:0.25", {"method": "fedavg"}),
    ("epsilon", 50.0, PRIVATE),
    ("delta", 1e-04, {**PRIVATE, "epsilon": 50.0}),
    ("noise_multiplier", 3.0, {**PRIVATE, "epsilon": 50.0}),
    ("max_norm", 0.5, {**PRIVATE, "epsilon": 50.0}),
    ("clipping", "layer", {**PRIVATE, "epsilon": 50.0}),
    ("unit", "client", {**PRIVATE, "epsilon": 50.0}),
    ("release_norm", 2.0, {**PRIVATE, "method": "fedproto", "epsilon": 50.0}),
    ("release_share", 0.25, {**PRIVATE, "method": "fedproto", "epsilon": 50.0}),
    ("scaling", "own", {"data": "table", "own_test": 0.25}),
    ("sweep", {"lr": [0.1, 0.2]}, {"validation": 0.2}),
]


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """Work in a folder with a small table, and leave out the pages that no test here looks at."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("polyfed.report.write_report", lambda out: Path(out) / "report.html")
    values = np.random.default_rng(0).normal(size=(80, 3)).round(3)
    frame = pandas.DataFrame(values, columns=["a", "b", "c"]).assign(label=np.arange(80) % 2)
    Path("spelling.py").write_text("def letters(text):\n    return [ord(letter) % 97 for letter in text[:30]]\n")
    Path("table").mkdir()
    for name, rows in (("train", frame[:60]), ("test", frame[60:])):
        rows.to_parquet(f"table/{name}.parquet")


def repeat(line: str, out: str) -> None:
    words = shlex.split(line)
    assert words[0] == "polyfed"
    outcome = CliRunner().invoke(app, [*words[1:], "--quiet", "--out", out])
    assert outcome.exit_code == 0, (line, outcome.output, outcome.exception)


def configurations(folder: str) -> dict[str, Any]:
    """Return every configuration in a folder by its place there."""
    files = Path(folder).rglob("config.json")
    return {str(file.relative_to(folder)): json.loads(file.read_text()) for file in files}


def test_every_key_of_an_experiment_is_tried():
    tables_only = {
        "test",
        "path",
        "name",
        "inputs",
        "label",
        "columns",
        "num_classes",
        "class_names",
        "normalize",
    }  # see test_config
    tables_only |= {"split_seed", "limit_seed"}
    assert {key for key, _, _ in VALUES} == {*KEYS, *short_names()} - tables_only


# Budgets are worked out anew in each run: every day a single one.
OFTEN = [value if "epsilon" not in value[2] else pytest.param(*value, marks=pytest.mark.long) for value in VALUES]


@pytest.mark.parametrize(("key", "value", "more"), OFTEN, ids=lambda value: str(value)[:30])
def test_the_command_of_a_run_says_every_setting(key, value, more):
    execute(experiment(**{**SMALL, **more, key: value}).config(), out="first")
    (line,) = again.commands(study("first"))
    repeat(line, "second")
    assert configurations("second") == configurations("first")


@pytest.mark.long
@pytest.mark.parametrize(("key", "value", "more"), VALUES, ids=lambda value: str(value)[:30])
def test_the_command_of_a_comparison_says_every_setting(key, value, more):
    seeds = {"seeds": 1} if key != "seeds" else {}
    compare(experiment(**{**SMALL, **seeds, **more, key: value}), out="first")
    (line,) = again.commands(study("first"))
    repeat(line, "second")
    assert configurations("second") == configurations("first")


def test_what_only_a_script_can_make_has_no_command():
    config = {**execute(experiment(**SMALL).config()).config, "script": ["models"]}
    run = make_run("local", 0, [[0.5] * 3])
    assert again.commands(Study({"local": [Run("local", 0, run.summary, run.history, config)]})) == []


def test_the_command_of_a_comparison_says_what_one_label_has_of_its_own():
    own = {"fedprox": {"mu": 0.5, "settings": {"lr": 0.07, "models": ["mlp:1x4"]}}}
    compare(experiment(**{**SMALL, "seeds": 1, "methods": own}), ["fedprox"], out="first")
    (line,) = again.commands(study("first"))
    repeat(line, "second")
    assert configurations("second") == configurations("first")
