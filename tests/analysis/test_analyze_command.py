"""`polyfed analyze`: runs are opened again, figures and numbers are written."""

from __future__ import annotations

import json
import re

import pytest
import torch
from typer.testing import CliRunner

import polyfed as pf
from polyfed.analysis.cka import cka_matrix
from polyfed.analysis.command import ANALYSES, analyze
from polyfed.analysis.opening import open_run, stage_outputs
from polyfed.analysis.robustness import accuracy_by_alpha
from polyfed.cli import app
from polyfed.core.errors import InputError, RunDirectoryError
from polyfed.models import build

pytestmark = pytest.mark.xdist_group("analyses")  # its runs are made once

pytest.importorskip("matplotlib")


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Return run directories of fedavg with two values of alpha, and the first one's result."""
    root = tmp_path_factory.mktemp("runs")
    results = {}
    for alpha in ("0.1", "10"):
        clients = pf.split(pf.load("digits", limit=(200, 80)), 3, f"dirichlet:{alpha}", seed=0)
        results[alpha] = pf.run(
            "fedavg", clients, ["mlp:2x8", "cnn:4-4,bn"], rounds=1, feature_dim=8, out=root / alpha, evaluate="end"
        )
    return root / "0.1", root / "10", results["0.1"]


def test_an_opened_run_predicts_as_the_models_of_the_result(runs):
    path, _, result = runs
    opened = open_run(path)
    x = opened.clients.test.inputs(torch.arange(5))
    for client, model in opened.models.items():
        outputs = stage_outputs(model, x)
        original = result.models[client].eval()
        assert torch.allclose(outputs["logits"], original(x).detach(), atol=1e-6)
        assert torch.allclose(outputs["features"], original.features(x).detach(), atol=1e-6)


def test_stages_of_a_resnet():
    model = build("resnet10:w4", (1, 8, 8), 10)
    outputs = stage_outputs(model, torch.zeros(2, 1, 8, 8))
    assert list(outputs) == ["stem", "stage 1", "stage 2", "stage 3", "stage 4", "features", "logits"]
    assert outputs["stage 4"].shape == (2, 32)  # 8 channels a stage doubled three times, one pixel
    assert model.training


@pytest.mark.long
def test_cka_command(runs, tmp_path):
    path, _, result = runs
    outcome = CliRunner().invoke(app, ["analyze", "cka", str(path), "--out", str(tmp_path), "--set", "samples=40"])
    assert outcome.exit_code == 0, outcome.output
    (numbers,) = json.loads((tmp_path / "numbers.json").read_text())
    assert numbers["samples"] == 40
    matrix = numbers["stages"]["features"]["matrix"]
    x = open_run(path).clients.test.inputs(torch.arange(40))
    first, third = (result.models[client].eval().features(x).detach() for client in (0, 2))
    assert matrix[0][2] == pytest.approx(float(cka_matrix([first, third])[0, 1]), abs=1e-6)
    assert 0 < matrix[0][1] < 1
    assert (tmp_path / "stages.png").is_file() and (tmp_path / "clients-fedavg-seed0.pdf").is_file()


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "settings", "file"),
    [
        ("embedding", ["samples=20"], "networks-fedavg-seed0.png"),
        ("reconstruction", ["client=1", "steps=5", "samples=2", "noise=[0, 1]"], "images-fedavg-seed0.png"),
        ("confidence", ["client=0"], "confidence-fedavg.png"),
        ("disturbing", ["seeds=2", "epochs=5"], "disturbing.png"),
    ],
)
def test_every_analysis_writes_its_figure(runs, tmp_path, name, settings, file):
    lines = list(analyze(name, [runs[0]], tmp_path, settings))
    assert lines[-1] == f"Figures and numbers are in {tmp_path}"
    assert (tmp_path / file).read_bytes().startswith(b"\x89PNG")
    json.loads((tmp_path / "numbers.json").read_text())


def test_disturbing_draws_the_worst_and_the_best_seed_and_a_histogram(tmp_path):
    numbers, figures, _ = ANALYSES["disturbing"]([], seeds=6, epochs=20)
    assert list(figures) == ["disturbing", "disturbing-histogram", "disturbing-example", "disturbing-success"]
    best = max(numbers["runs"], key=lambda run: run["fused"])
    success = figures["disturbing-success"].axes[2]
    assert success.get_title(loc="left") == f"sum of both: {100 * best['fused']:.0f} %"
    (axes,) = figures["disturbing-histogram"].axes
    assert sum(bar.get_height() for bar in axes.patches) == 6
    worst = min(numbers["runs"], key=lambda run: run["fused"])
    panels = figures["disturbing-example"].axes
    titles = [panel.get_title(loc="left") for panel in panels]
    assert [title.split(":")[0] for title in titles] == ["left network", "right network", "sum of both"]
    assert titles[2] == f"sum of both: {100 * worst['fused']:.0f} %"
    for panel, title in zip(panels, titles, strict=True):
        clouds = [cloud for cloud in panel.collections if len(cloud.get_offsets())]  # without those for the legend
        assert sum(len(cloud.get_offsets()) for cloud in clouds) == 300
        right = sum(int((cloud.get_alpha() > 0.5).sum()) for cloud in clouds)  # a strong colour: the label is believed
        assert title.endswith(f" {100 * right / 300:.0f} %")


def test_robustness_orders_by_alpha(runs, tmp_path):
    skewed, even, _ = runs
    rows = accuracy_by_alpha([even, skewed])["methods"]["fedavg"]["rows"]
    assert [row["alpha"] for row in rows] == [0.1, 10]
    accuracy = json.loads((skewed / "result.json").read_text())["accuracy"]
    expected = accuracy["mean"] if accuracy["global"] is None else accuracy["global"]
    assert rows[0]["accuracy"] == pytest.approx(expected)
    list(analyze("robustness", [skewed, even], tmp_path))
    assert (tmp_path / "alpha.pdf").is_file()


def test_unknown_names_and_options_are_refused(runs, tmp_path):
    with pytest.raises(InputError, match="did you mean 'cka'"):
        list(analyze("ckaa", [runs[0]], tmp_path))
    with pytest.raises(InputError, match="did you mean 'samples'"):
        list(analyze("cka", [runs[0]], tmp_path, ["sample=3"]))


@pytest.mark.parametrize(
    ("name", "setting", "words"),
    [
        ("cka", "samples", "--set takes key=value"),
        ("cka", "samples=many", "cka: samples must be a whole number, got 'many'"),
        ("cka", "samples = 0", "cka: samples must be at least 1, got 0"),
        ("reconstruction", "noise=[0, -1]", "reconstruction: noise must not be negative"),
        ("embedding", "label=1.5", "embedding: label must be a whole number"),
    ],
)
def test_values_of_options_are_refused_as_those_of_all_settings(runs, tmp_path, name, setting, words):
    with pytest.raises(InputError, match=re.escape(words)):
        list(analyze(name, [runs[0]], tmp_path / "new", [setting]))
    assert not (tmp_path / "new").exists()


def test_unfinished_runs_are_refused(runs, tmp_path):
    (tmp_path / "config.json").write_text((runs[0] / "config.json").read_text())
    with pytest.raises(RunDirectoryError, match="not finished"):
        open_run(tmp_path)
