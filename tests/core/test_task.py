"""A task: its loss, what its outputs mean, and what the mean of several predictions is, in numbers."""

import math

import pytest
import torch

import polyfed as pf
from polyfed.core.errors import InputError
from polyfed.core.stage import Batch
from polyfed.core.task import CLASSIFICATION, as_task, check_score, describe, from_description


def logit(p):
    return math.log(p / (1 - p))


def test_a_batch_knows_the_loss_of_the_task():
    x, logits = torch.zeros(2, 1), torch.tensor([[0.0, 0.0], [0.0, math.log(3.0)]])
    classes = Batch(x, torch.tensor([0, 1]))
    assert float(classes.loss(logits)) == pytest.approx((math.log(2) - math.log(0.75)) / 2)
    labels = Batch(x, torch.tensor([[1.0, 0.0], [1.0, 1.0]]), task=pf.Multilabel())
    expected = (3 * math.log(2) - math.log(0.75)) / 4
    assert float(labels.loss(logits)) == pytest.approx(expected)
    values = Batch(x, torch.tensor([[10.0], [14.0]]), task=pf.Regression(center=(10.0,), spread=(2.0,)))
    assert float(values.loss(torch.tensor([[1.0], [1.0]]))) == pytest.approx((1 + 1) / 2)  # targets are 0 and 2
    plain = Batch(x, torch.tensor([[10.0], [14.0]]), task=pf.Regression())
    assert float(plain.loss(torch.tensor([[9.0], [11.0]]))) == pytest.approx((1 + 9) / 2)


def test_a_measurement_adds_up_the_losses_of_samples():
    logits = torch.tensor([[0.0, 0.0], [0.0, math.log(3.0)]])
    assert CLASSIFICATION.total_loss(logits, torch.tensor([0, 1])) == pytest.approx(math.log(2) - math.log(0.75))
    values = torch.tensor([[9.0], [11.0], [10.0]]), torch.tensor([[10.0], [14.0], [10.0]])
    assert pf.Regression().total_loss(*values) == pytest.approx(1 + 9)


def test_the_mean_of_predictions():
    two = torch.tensor([[[0.0, math.log(3.0)]], [[0.0, 0.0]]])  # (1/4, 3/4) and (1/2, 1/2)
    assert CLASSIFICATION.mean(two).exp().flatten().tolist() == pytest.approx([0.375, 0.625])
    labels = torch.tensor([[[logit(0.9), logit(0.2)]], [[logit(0.5), logit(0.4)]]])
    assert pf.Multilabel().mean(labels).sigmoid().flatten().tolist() == pytest.approx([0.7, 0.3])
    assert pf.Regression().mean(torch.tensor([[[1.0]], [[4.0]]])).tolist() == [[2.5]]


def test_sure_networks_do_not_make_the_mean_infinite():
    sure = torch.tensor([[[200.0, -200.0]], [[200.0, -200.0]]])
    for task in (CLASSIFICATION, pf.Multilabel()):
        assert torch.isfinite(task.mean(sure)).all()


def test_predictions_are_in_the_units_of_the_targets():
    task = pf.Regression(center=(10.0, 0.0), spread=(2.0, 5.0))
    assert task.predictions(torch.tensor([[1.0, -1.0]])).tolist() == [[12.0, -5.0]]
    assert pf.Multilabel().predictions(torch.tensor([[0.0]])).tolist() == [[0.5]]


def test_right_answers():
    assert CLASSIFICATION.right(torch.tensor([[1.0, 0.0], [0.0, 1.0]]), torch.tensor([0, 0])) == 1
    outputs, targets = torch.tensor([[1.0, -1.0], [1.0, 1.0]]), torch.tensor([[1.0, 0.0], [0.0, 1.0]])
    assert pf.Multilabel().right(outputs, targets) == 1.5
    assert pf.Regression().right(outputs, targets) is None


@pytest.mark.parametrize("task", [CLASSIFICATION, pf.Multilabel(), pf.Regression(), pf.Regression((1.5,), (2.0,))])
def test_a_task_survives_being_written(task):
    assert from_description(describe(task)) == task


def test_unknown_tasks_are_refused_in_words():
    assert as_task(None) == as_task("classification") == CLASSIFICATION
    with pytest.raises(InputError, match="not one for every pixel"):
        as_task("segmentation")
    with pytest.raises(InputError, match="did you mean 'regression'"):
        as_task("regresion")
    with pytest.raises(InputError, match="center and a positive spread"):
        pf.Regression(center=(1.0,), spread=(0.0,))


def test_a_score_that_cannot_exist_is_refused():
    check_score(CLASSIFICATION, torch.tensor([1, 1]), "x")
    check_score(pf.Regression(), torch.tensor([[1.0], [2.0]]), "x")
    with pytest.raises(InputError, match=r"targets of the test set \(2 samples\) do not vary"):
        check_score(pf.Regression(), torch.tensor([[1.0, 2.0], [3.0, 2.0]]), "the test set")
