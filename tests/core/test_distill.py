"""Distillation at the server."""

import pytest
import torch
from tests.core.test_stage import context
from torch import nn

from polyfed.core.distill import distill
from polyfed.core.passes import count_right, logits_of
from polyfed.core.runner import run_stage
from polyfed.core.samples import Samples
from polyfed.core.settings import Training
from polyfed.ops.aggregate import mean_state

TRAINING = Training(epochs=30, batch_size=16, optimizer="adam", lr=0.05)


def problem(labels=None):
    rng = torch.Generator().manual_seed(0)
    x = torch.randn(64, 3, generator=rng)
    return Samples(x, (x[:, 0] > 0).long() if labels is None else labels)


def at_server():
    ctx = context()
    ctx.run_stage = lambda stage, party, name: run_stage(stage, party, ctx, name)
    return ctx


def network(seed):
    torch.manual_seed(seed)
    return nn.Linear(3, 2)


def test_a_student_learns_its_targets_and_labels_play_no_part():
    teacher, data = network(0), problem()
    found = []
    for labels in (None, 1 - data.y):
        student = network(1)
        distill(student, problem(labels), logits_of(teacher, data), at_server(), TRAINING)
        assert count_right(student, Samples(data.x, logits_of(teacher, data).argmax(1))) >= 62
        found.append(student.weight.detach())
    assert torch.equal(*found)


def test_a_student_that_knows_everything_stays_as_it_is():
    teacher, data = network(0), problem()
    student = network(0)
    distill(student, data, logits_of(teacher, data), at_server(), Training(epochs=2, lr=1.0))
    torch.testing.assert_close(student.weight, teacher.weight, rtol=1e-6, atol=1e-6)


def test_the_best_student_on_validation_data_is_kept_and_patience_ends_it():
    data = problem()
    good = torch.stack([-data.x[:, 0], data.x[:, 0]], dim=1) * 5
    student = network(1)
    known = {"validation": data, "every": 4, "patience": 8}
    learned = distill(student, data, good, at_server(), TRAINING, steps=400, **known)
    best = count_right(student, data)
    assert best >= 62 and learned.steps < 400
    spoiled = distill(student, data, -good, at_server(), TRAINING, steps=400, **known)  # worse with every step
    assert spoiled.steps == 12 and count_right(student, data) > 40  # that of the fourth step, not of the last
    assert distill(student, data, -good, at_server(), TRAINING, steps=60).steps == 60
    assert count_right(student, data) < 10  # without validation data the last is kept


def test_the_rate_falls_along_half_a_wave():
    trained = distill(network(1), problem(), torch.zeros(64, 2), at_server(), Training(lr=1.0), steps=10, cosine=True)
    assert abs(trained.rates - 5.5) < 1e-9  # the sum of (1 + cos(pi s / 10)) / 2 over s = 0 .. 9


@pytest.mark.parametrize(("epochs", "rates"), [(3, 6.5), (None, 4.5)])
def test_the_wave_is_as_long_as_the_epochs(epochs, rates):
    """Four batches of 60 samples, in three epochs or the two of the training: (12 + 1) / 2 and (8 + 1) / 2."""
    training, data = Training(epochs=2, batch_size=16, lr=1.0), problem().select(torch.arange(60))
    trained = distill(network(1), data, torch.zeros(60, 2), at_server(), training, epochs=epochs, cosine=True)
    assert abs(trained.rates - rates) < 1e-9


def test_the_mean_of_states():
    states = [{"w": torch.tensor([1.0, 2.0])}, {"w": torch.tensor([4.0, 8.0])}]
    assert mean_state(states, [2, 1])["w"].tolist() == [2.0, 4.0]
    same = {"w": torch.rand(7)}
    assert torch.equal(mean_state([same] * 5, [0.3, 1, 7, 2, 9])["w"], same["w"]) and states[0]["w"][0] == 1
