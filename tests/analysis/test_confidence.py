"""Absolute confidence by label: log10 by hand, AUROC by hand, and the experiment on digits."""

import json
import math

import numpy as np
import pytest
import torch
from torch import nn

import polyfed as pf
from polyfed.analysis.confidence import auroc, compare_confidence, confidence_experiment, log10_confidence, main
from polyfed.core.errors import InputError
from polyfed.core.samples import Samples


class Given(nn.Module):
    """Returns its inputs as logits."""

    def __init__(self):
        super().__init__()
        self.drop = nn.Dropout(0.5)  # must be off

    def forward(self, x):
        return self.drop(x)


def test_auroc_by_hand():
    assert auroc(np.array([3.0, 4.0]), np.array([1.0, 2.0])) == 1.0
    assert auroc(np.array([1.0]), np.array([1.0, 1.0])) == 0.5
    assert auroc(np.array([1.0, 3.0]), np.array([2.0])) == 0.5
    assert auroc(np.array([0.0]), np.array([1.0])) == 0.0


def test_log10_of_the_largest_logit_beyond_the_range_of_exp():
    samples = Samples(torch.tensor([[math.log(1000.0), 0.0], [-5.0, 2000.0]]), torch.tensor([0, 1]))
    assert log10_confidence(Given(), samples) == pytest.approx([3.0, 2000.0 / math.log(10.0)], rel=1e-5)


def test_labels_are_compared_by_hand():
    ten = math.log(10.0)
    x = torch.tensor([[8.0, 0.0], [6.0, 1.0], [0.0, 3.0], [5.0, 1.0], [7.0, 0.0]]) * ten
    found = compare_confidence(Given(), Samples(x, torch.tensor([0, 0, 1, 1, 2])), trained=[0, 2])
    assert found["median_trained"] == pytest.approx(7.0)
    assert found["median_other"] == pytest.approx(4.0)
    assert found["auroc"] == 1.0
    assert found["by_label"]["0"]["quartiles"] == pytest.approx([6.5, 7.0, 7.5])
    assert found["by_label"]["1"] == {"trained": False, "samples": 2, "quartiles": pytest.approx([3.5, 4.0, 4.5])}
    with pytest.raises(InputError, match="labels that it was not"):
        compare_confidence(Given(), Samples(x, torch.tensor([0, 0, 0, 0, 2])), trained=[0, 2])


def test_a_network_is_surer_of_digits_it_has_seen():
    training = pf.Training(epochs=12, batch_size=64, optimizer="adam", lr=3e-3)
    found = confidence_experiment("digits", (0, 1, 2, 5, 9), "mlp:2x50", training)
    assert found["auroc"] > 0.85
    assert found["median_trained"] > found["median_other"] + 0.5
    assert [label for label, row in found["by_label"].items() if row["trained"]] == ["0", "1", "2", "5", "9"]
    assert len(found["values"]) == len(found["labels"]) == 397
    again = confidence_experiment("digits", (0, 1, 2, 5, 9), "mlp:2x50", training)
    assert again["auroc"] == found["auroc"]


def test_unknown_labels_are_refused_and_it_runs_from_the_command_line(capsys):
    with pytest.raises(InputError, match="0 to 9"):
        confidence_experiment("digits", (3, 12))
    main(["--data", "digits", "--labels", "0,1", "--model", "mlp:1x10", "--epochs", "1"])
    assert 0 <= json.loads(capsys.readouterr().out)["auroc"] <= 1


def test_the_network_is_trained_as_a_client_of_ams_is(monkeypatch):
    """With its penalty: without one the largest logits are others."""
    stages = []
    monkeypatch.setattr("polyfed.analysis.confidence.train_alone", lambda network, stage, *rest: stages.append(stage))
    confidence_experiment("digits", (0, 1), "mlp:1x8", pf.Training(epochs=1))
    (stage,) = stages
    assert stage.l1 == pf.AMS().l1 > 0 and set(stage.data.labels().tolist()) == {0, 1}
