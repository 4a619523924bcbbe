"""Tasks, own test data, metrics and patience in whole runs: figures recomputed from the models that runs hand out."""

import json

import numpy as np
import pytest
import torch
from sklearn.metrics import r2_score, roc_auc_score
from typer.testing import CliRunner

import polyfed as pf
from polyfed.cli import app
from polyfed.compare import compare
from polyfed.core.errors import InputError, RunDirectoryError
from polyfed.experiment import experiment
from polyfed.report import table, write_report
from polyfed.terminal.stopping import Stopped

RNG = np.random.default_rng(1)
X = RNG.normal(size=(160, 6)).astype(np.float32)
VALUES = 200 + 30 * (X[:, 0] - X[:, 1]) + 3 * RNG.normal(size=160)
SLOW = pf.Training(lr=0.05, batch_size=16)


def regression(**more):
    return pf.split(pf.load((X, VALUES), test=(X[120:], VALUES[120:]), task="regression"), 3, by="iid", **more)


def digits(**more):
    return pf.split(pf.load("digits", limit=(240, 80)), 3, by="dirichlet:0.5", **more)


def outputs_of(result, client, samples):
    with torch.no_grad():
        return result.models[client](samples.inputs())


def test_a_regression_learns_and_its_figures_are_those_of_its_models():
    clients = regression(test=0.25)
    result = pf.run("fedavg", clients, "mlp:1x16", 8, SLOW)
    accuracy = result.accuracy()
    assert accuracy["mean"] > 0.7  # the noise leaves 99 % of the variance to be explained
    values = result.task.predictions(outputs_of(result, 1, clients.test)).numpy()
    truth = clients.test.labels().numpy()
    assert accuracy["per_client"][1] == pytest.approx(r2_score(truth, values), abs=1e-6)
    assert accuracy["metrics"]["rmse"]["per_client"][1] == pytest.approx(
        np.sqrt(((values - truth) ** 2).mean()), rel=1e-5
    )
    assert accuracy["metrics"]["mae"]["per_client"][1] == pytest.approx(np.abs(values - truth).mean(), rel=1e-5)
    own = clients.own_test[2]
    personal = result.task.predictions(outputs_of(result, 2, own)).numpy()
    assert accuracy["personal"]["per_client"][2] == pytest.approx(r2_score(own.labels().numpy(), personal), abs=1e-6)
    assert (accuracy["score"], result.summary()["task"]) == ("R²", "regression")


@pytest.mark.parametrize("engine", ["threads", "batched", "auto"])
def test_engines_measure_the_same_on_own_data(engine):
    clients, options = digits(test="own", validation=0.2), {"metrics": "auroc,log_loss", "progress": False}
    one = pf.run("fedprox", clients, ["mlp:1x8"], 2, SLOW, engine="sequential", **options).accuracy()
    other = pf.run("fedprox", clients, ["mlp:1x8"], 2, SLOW, engine=engine, workers=2, **options).accuracy()
    if engine == "threads":
        assert one == other
    for kind in ("personal", "validation"):
        assert one[kind]["per_client"] == pytest.approx(other[kind]["per_client"], abs=1e-3)
        for name in ("auroc", "log_loss"):
            mine, theirs = (found[kind]["metrics"][name]["per_client"] for found in (one, other))
            assert mine == pytest.approx(theirs, abs=1e-3)


def test_personal_and_general_figures_of_a_classifier():
    clients = digits(test=0.3)
    result = pf.run("local", clients, "mlp:1x16", 3, SLOW, metrics="auroc,calibration_error")
    accuracy = result.accuracy()
    for client in range(3):
        own = clients.own_test[client]
        right = outputs_of(result, client, own).argmax(1) == own.labels()
        assert accuracy["personal"]["per_client"][client] == pytest.approx(float(right.float().mean()))
    scores, truth = outputs_of(result, 0, clients.test).softmax(1).double().numpy(), clients.test.labels().numpy()
    expected = roc_auc_score(truth, scores / scores.sum(1, keepdims=True), multi_class="ovr", average="macro")
    assert accuracy["metrics"]["auroc"]["per_client"][0] == pytest.approx(expected, abs=1e-6)
    assert accuracy["personal"]["mean"] > accuracy["mean"]  # each has few classes, and learned those
    frame = result.frame()
    assert list(frame["personal"]) == accuracy["personal"]["per_client"]
    assert {"accuracy", "auroc", "personal auroc", "calibration_error"} <= set(frame.columns)


def test_pooled_data_is_measured_for_every_client_on_its_own_test_data():
    clients = digits(test=0.3, validation=0.2)
    result = pf.run("centralized", clients, ["mlp:1x8", "mlp:2x8"], 2, SLOW, metrics="macro_f1")
    accuracy = result.accuracy()
    assert accuracy["personal"]["clients"] == [0, 1, 2]
    for client, party in enumerate((0, 1, 0)):  # one network of each kind
        own = clients.own_test[client]
        right = outputs_of(result, party, own).argmax(1) == own.labels()
        assert accuracy["personal"]["per_client"][client] == pytest.approx(float(right.float().mean()))
    assert accuracy["validation"]["per_client"][0] == accuracy["validation"]["per_client"][2]
    assert result.frame()["validation macro_f1"].notna().all()


def test_undefined_figures_are_counted():
    one = np.zeros(10, dtype=int)
    mixed = np.arange(10) % 2
    clients = pf.Clients.from_parts([(X[:10], mixed), (X[:10], mixed)], test=[(X[:10], one), (X[:10], mixed)])
    personal = pf.run("local", clients, "mlp:1x8", 1, metrics="auroc").accuracy()["personal"]
    assert personal["metrics"]["auroc"]["per_client"][0] is None
    assert personal["metrics"]["auroc"]["undefined"] == 1
    values = pf.Clients.from_parts(
        [(X[:10], VALUES[:10])] * 2, test=[(X[:1], VALUES[:1]), (X[:9], VALUES[:9])], task="regression"
    )
    accuracy = pf.run("local", values, "mlp:1x8", 1).accuracy()
    assert accuracy["personal"]["per_client"][0] is None and accuracy["personal"]["undefined"] == 1
    assert accuracy["personal"]["mean"] == accuracy["personal"]["per_client"][1]


def test_a_fused_model_is_judged_by_its_own_metrics_and_clients_keep_theirs():
    clients = regression(test=0.25)
    accuracy = pf.run("ensemble", clients, "mlp:1x16", training=SLOW).accuracy()
    assert accuracy["metrics"]["rmse"]["per_client"] == [accuracy["global_metrics"]["rmse"]] * 3
    assert accuracy["own"]["metrics"]["rmse"]["mean"] >= accuracy["global_metrics"]["rmse"]  # squares are convex
    assert accuracy["own"]["personal"]["clients"] == [0, 1, 2] and "personal" not in accuracy


# --- choosing rounds ---


def test_best_round_gives_what_was_measured_then():
    result = pf.run("fedavg", digits(validation=0.3), "mlp:1x8", 4, SLOW)
    best = result.best_round()
    lines = {line["round"]: line["accuracy"] for line in result.history}
    scores = [lines[number]["validation"]["mean"] for number in (1, 2, 3, 4)]
    assert best.round == int(best) == 1 + scores.index(max(scores))
    assert best.validation == max(scores) and best.accuracy == lines[best.round]
    assert result.summary()["best_round"]["accuracy"]["mean"] == lines[best.round]["mean"]
    assert len(lines[1]["validation"]["per_client"]) == 3
    with pytest.raises(InputError, match="needs validation data"):
        pf.run("local", digits(), "mlp:1x8", 1).best_round()


STILL = pf.Training(lr=1e-12)  # nothing gets better after the first round


def test_patience_ends_a_run_and_its_last_round_is_measured_in_full():
    clients = digits(validation=0.3)
    result = pf.run("fedavg", clients, "mlp:1x8", 9, STILL, patience=2, evaluate_samples=10, evaluate_clients=1)
    assert result.rounds == 3 == result.history[-1]["round"] == len(result.history)
    assert result.history[-1]["stopped"] == {"reason": "patience", "patience": 2, "best_round": 1}
    assert result.summary()["stopped"]["best_round"] == 1
    assert "samples" in result.history[1]["accuracy"] and "samples" not in result.history[2]["accuracy"]
    assert len(result.accuracy()["per_client"]) == 3
    assert not any("stopped" in line for line in pf.run("fedavg", clients, "mlp:1x8", 3, STILL, patience=2).history)


def test_patience_lets_what_follows_the_rounds_happen():
    clients = digits(validation=0.3)
    result = pf.run("ccvr", clients, "mlp:1x8", 9, STILL, patience=1)
    assert [(line["phase"], line["round"]) for line in result.history] == [("round", 1), ("round", 2), ("after", 2)]


def test_a_resumed_run_stops_where_the_whole_one_does(tmp_path):
    clients = digits(validation=0.3)
    options = {"patience": 2, "checkpoint_seconds": 0.0, "metrics": ["macro_f1"]}
    whole = pf.run("fedavg", clients, "mlp:1x8", 9, STILL, **options)

    def stop(line):
        if line["round"] == 2:
            raise Stopped("here")

    with pytest.raises(Stopped):
        pf.run("fedavg", clients, "mlp:1x8", 9, STILL, out=tmp_path / "run", observers=[stop], **options)
    again = pf.resume(tmp_path / "run")
    assert [line["accuracy"] for line in again.history] == [line["accuracy"] for line in whole.history]
    assert again.history[-1]["stopped"] == whole.history[-1]["stopped"]
    once_more = pf.run("fedavg", clients, "mlp:1x8", 9, STILL, out=tmp_path / "run", resume=True, **options)
    assert once_more.rounds == 3  # a run that has stopped stays so


def test_patience_without_validation_data_is_refused():
    with pytest.raises(InputError, match="patience needs validation data"):
        pf.run("local", digits(), "mlp:1x8", 3, patience=1)
    with pytest.raises(InputError, match="leave out evaluate=end"):
        pf.run("local", digits(validation=0.2), "mlp:1x8", 3, patience=1, evaluate="end")


# --- files and commands ---


def spread_of_scores(predictions, targets):
    return predictions.max() - predictions.min()


def test_a_run_with_its_own_metric_is_continued_by_its_script_only(tmp_path):
    clients = digits()
    options = {"out": tmp_path / "run", "metrics": ["auroc", spread_of_scores], "checkpoint_seconds": 0.0}
    result = pf.run("local", clients, "mlp:1x8", 1, **options)
    assert list(result.accuracy()["metrics"]) == ["auroc", "spread_of_scores"]
    with pytest.raises(RunDirectoryError, match="used metrics from a script"):
        pf.resume(tmp_path / "run")
    with pytest.raises(RunDirectoryError, match=r"evaluation\.metrics was"):
        pf.run("local", clients, "mlp:1x8", 1, out=tmp_path / "run", resume=True)


def test_the_command_line_the_table_and_the_report(tmp_path):
    out = tmp_path / "run"
    words = "--data digits --limit 200 --clients 3 --partition iid --rounds 2 --models mlp:1x8 --method fedavg"
    asked = f"{words} --own-test 0.25 --validation 0.2 --metrics auroc,macro_f1 --patience 5 --out {out}"
    result = CliRunner().invoke(app, ["run", *asked.split()])
    assert result.exit_code == 0, result.output
    assert "own %" in result.output and "val. %" in result.output and "macro_f1" in result.output
    found = json.loads((out / "result.json").read_text())["accuracy"]
    assert len(found["personal"]["per_client"]) == len(found["validation"]["per_client"]) == 3
    leaderboard, clients = table(out), table(out, "clients")
    assert leaderboard["own test %"][0] == pytest.approx(100 * found["personal"]["mean"])
    assert leaderboard["auroc"][0] == pytest.approx(found["metrics"]["auroc"]["mean"])
    assert list(clients["own test %"]) == pytest.approx([100 * value for value in found["personal"]["per_client"]])
    assert list(clients["validation %"]) == pytest.approx([100 * v for v in found["validation"]["per_client"]])
    assert "Every client" in write_report(out, tmp_path / "page.html").read_text()


def test_a_regression_from_the_command_line(tmp_path):
    words = "--data digits --limit 150 --clients 2 --rounds 1 --models mlp:1x8 --method fedavg --task regression"
    refused = CliRunner().invoke(app, ["run", *words.split()])
    assert "deals by class, but regression has none" in str(refused.exception)
    done = CliRunner().invoke(app, ["run", *words.split(), "--partition", "iid", "--out", str(tmp_path / "run")])
    assert done.exit_code == 0 and "R² %" in done.output
    assert "what is called accuracy here is R²" in (tmp_path / "run" / "report.html").read_text()


def test_a_comparison_has_both_figures():
    settings = {"data": "digits", "limit": 150, "clients": 2, "rounds": 1, "models": "mlp:1x8", "own_test": 0.3}
    rows = compare(experiment(method="fedavg", metrics="macro_f1", seeds=1, **settings))
    assert [len(row.personal) for row in rows] == [1, 1]
    assert all(0 <= row.metrics["macro_f1"][0] <= 1 for row in rows)
