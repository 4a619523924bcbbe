"""Metrics by hand-computed numbers, and what is said where they do not exist."""

import math

import numpy as np
import pytest
import torch

import polyfed as pf
from polyfed.core.backend import Measure
from polyfed.core.errors import InputError
from polyfed.core.metrics import calibration_error, make_metrics, named
from polyfed.core.summary import client_columns, over_clients, summarize
from polyfed.core.task import CLASSIFICATION


def value(task, name, predictions, targets):
    return named(task)[name](torch.tensor(predictions), torch.tensor(targets))


P = [[0.9, 0.1], [0.6, 0.4], [0.3, 0.7], [0.8, 0.2]]  # predicted 0, 0, 1, 0
Y = [0, 0, 1, 1]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("accuracy", 3 / 4),
        ("balanced_accuracy", (1 + 1 / 2) / 2),
        ("macro_f1", (2 * (2 / 3) / (2 / 3 + 1) + 2 * 0.5 / 1.5) / 2),
        ("auroc", 3 / 4),  # of four pairs (a one, a zero), the ones have 0.7 and 0.2, the zeros 0.1 and 0.4
        ("log_loss", -(math.log(0.9) + math.log(0.6) + math.log(0.7) + math.log(0.2)) / 4),
    ],
)
def test_classification(name, expected):
    assert value(CLASSIFICATION, name, P, Y) == pytest.approx(expected, abs=1e-6)


def test_auroc_of_several_classes_is_the_mean_over_those_that_it_exists_for():
    p = np.array([[0.6, 0.3, 0.1], [0.5, 0.4, 0.1], [0.2, 0.7, 0.1], [0.55, 0.35, 0.1]])
    y = np.array([0, 0, 1, 1])  # no sample of class 2
    # Class 0: zeros have 0.6, 0.5 against 0.2, 0.55: three of four pairs. Class 1: 0.7, 0.35 against 0.3, 0.4: three.
    assert value(CLASSIFICATION, "auroc", p, y) == pytest.approx(3 / 4)
    assert value(CLASSIFICATION, "auroc", p[:2], y[:2]) is None  # one class only


def test_auroc_of_all_classes_is_that_of_scikit_learn():
    from sklearn.metrics import roc_auc_score

    rng = np.random.default_rng(0)
    y = np.arange(60) % 4
    p = rng.dirichlet(np.ones(4), 60)
    expected = roc_auc_score(y, p, multi_class="ovr", average="macro")
    assert value(CLASSIFICATION, "auroc", p, y) == pytest.approx(expected)


def test_calibration_error_by_hand():
    # Two bins of width 1/2 for the larger probability: (1/2, 1] holds all. Mean confidence 0.75, accuracy 3/4.
    assert calibration_error(np.array(P), np.array(Y), bins=2) == pytest.approx(0.0, abs=1e-12)
    # Five bins: 0.6 in (0.4, 0.6], right: gap 0.4. 0.7 and 0.8 in (0.6, 0.8]: right and wrong, |1 - 1.5| together.
    # 0.9 in (0.8, 1]: right, gap 0.1.
    assert calibration_error(np.array(P), np.array(Y), bins=5) == pytest.approx((0.4 + 0.5 + 0.1) / 4)
    assert calibration_error(np.array([[1.0, 0.0]]), np.array([0])) == 0.0
    assert calibration_error(np.array([[1.0, 0.0]]), np.array([1])) == 1.0


def test_regression():
    task, p, y = pf.Regression(), [[1.0], [2.0], [6.0]], [[1.0], [4.0], [4.0]]
    assert value(task, "mae", p, y) == pytest.approx(4 / 3)
    assert value(task, "rmse", p, y) == pytest.approx(math.sqrt(8 / 3))
    assert value(task, "r2", p, y) == pytest.approx(1 - 8 / 6)  # mean 3, squares 4 + 1 + 1
    assert value(task, "r2", p[:1], y[:1]) is None
    assert value(task, "r2", p[1:], y[1:]) is None  # both targets are 4
    assert value(task, "rmse", p[:1], y[:1]) == 0.0


def test_several_labels():
    task = pf.Multilabel()
    p, y = [[0.9, 0.2], [0.4, 0.3], [0.3, 0.8]], [[1.0, 0.0], [1.0, 0.0], [0.0, 0.0]]
    assert value(task, "accuracy", p, y) == pytest.approx(4 / 6)
    assert value(task, "macro_f1", p, y) == pytest.approx((2 * 1 * 0.5 / 1.5 + 0) / 2)
    assert value(task, "auroc", p, y) == pytest.approx(1.0)  # label 1 has no sample, label 0 is in order
    rows = [math.log(0.9), math.log(0.4), math.log(0.7), math.log(0.8), math.log(0.7), math.log(0.2)]
    assert value(task, "log_loss", p, y) == pytest.approx(-sum(rows) / 6)


def test_own_functions_and_wrong_names():
    def hits(predictions, targets):
        return (predictions.argmax(1) == targets).sum()

    def broken(predictions, targets):
        raise KeyError("x")

    mine, known = make_metrics([hits, "auroc"], CLASSIFICATION)
    assert (mine.name, known.name) == ("hits", "auroc")
    assert mine(torch.tensor(P), torch.tensor(Y)) == 3.0
    assert [metric.name for metric in make_metrics((), pf.Regression())] == ["rmse", "mae"]
    assert make_metrics((), CLASSIFICATION) == ()
    with pytest.raises(InputError, match="Unknown metric for classification 'rmse'"):
        make_metrics(["rmse"], CLASSIFICATION)
    with pytest.raises(InputError, match="'auroc' is given twice"):
        make_metrics(["auroc", "auroc"], CLASSIFICATION)
    with pytest.raises(InputError, match="The metric broken failed with KeyError"):
        make_metrics([broken], CLASSIFICATION)[0](torch.tensor(P), torch.tensor(Y))


def test_what_does_not_exist_is_counted_and_in_no_mean():
    assert over_clients([0.5, None, 1.0]) == {"mean": 0.75, "per_client": [0.5, None, 1.0], "undefined": 1}
    assert over_clients([None]) == {"mean": None, "per_client": [None], "undefined": 1}
    found = summarize({2: Measure(None, 3.0, 1, None, {"mae": 2.0}), 0: Measure(0.5, 1.0, 4, None, {"mae": None})})
    assert found == {
        "mean": 0.5,
        "std": 0.0,
        "worst": 0.5,
        "loss": 2.0,
        "per_client": [0.5, None],
        "undefined": 1,
        "metrics": {"mae": {"mean": 2.0, "per_client": [None, 2.0], "undefined": 1}},
    }
    assert summarize({}) == {}
    columns = client_columns({"per_client": [0.1, 0.2, 0.3], "personal": {**found, "clients": [0, 2]}}, 3)
    assert columns == {
        "accuracy": [0.1, 0.2, 0.3],
        "personal": [0.5, None, None],
        "personal mae": [None, None, 2.0],
    }
