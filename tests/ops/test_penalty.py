"""The gradient penalty against numbers by hand."""

import pytest
import torch

from polyfed.ops.penalty import between, gradient_penalty


def test_inputs_lie_between_fake_and_real_ones_each_at_its_own_place():
    real, fake = torch.full((2, 1, 2), 4.0), torch.full((2, 1, 2), 8.0)
    assert between(real, fake, torch.tensor([0.25, 1.0])).flatten(1).tolist() == [[7.0, 7.0], [4.0, 4.0]]


def test_the_penalty_of_a_linear_score_by_hand():
    """D = sigmoid(3 x1 + 4 x2): its slope is D (1 - D) times (3, 4), of length 5/4 at 0; flat far away."""
    x = torch.tensor([[0.0, 0.0], [100.0, 0.0]])
    found = gradient_penalty(lambda at: at @ torch.tensor([3.0, 4.0]), x)
    assert found.item() == pytest.approx(((5 / 4 - 1) ** 2 + 1) / 2, abs=1e-5)


def test_a_flat_score_has_a_penalty_of_one_and_a_gradient():
    """The root of a slope of 0 would have none."""
    w = torch.zeros(2, requires_grad=True)
    found = gradient_penalty(lambda at: at @ w, torch.ones(3, 2))
    found.backward()
    assert found.item() == pytest.approx(1.0, abs=1e-5) and w.grad.isfinite().all()
