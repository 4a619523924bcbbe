"""Distances between states and between predictions, by hand."""

import math

import pytest
import torch

from polyfed.ops.distance import (
    diversity,
    entropy,
    kl_divergence,
    l1,
    l1_norm,
    l2,
    log_of,
    soft_cross_entropy,
    squared_distance,
)

P = [[0.75, 0.25], [0.2, 0.8]]
Q = [[0.6, 0.4], [0.25, 0.75]]


def logits(rows, temperature=1.0):
    """Logits of distributions at a temperature; each row is shifted, which a softmax does not see."""
    return temperature * (torch.tensor(rows, dtype=torch.float64).log() + torch.tensor([[3.0], [-1.0]]))


def test_the_squared_distance_is_the_sum_over_the_anchors_names():
    params = {"a": torch.tensor([1.0, -2.0]), "b": torch.tensor([[3.0]]), "free": torch.tensor([9.0])}
    assert squared_distance(params, {"a": torch.zeros(2), "b": torch.ones(1, 1)}) == 1 + 4 + 4
    assert squared_distance(params, {}) == 0


@pytest.mark.parametrize("fixed", [True, False], ids=["a fixed anchor", "an anchor that learns"])
def test_the_squared_distance_can_be_differentiated_twice_and_in_stacks(fixed):
    w, w0 = torch.tensor([[1.0, -2.0], [4.0, 0.5]]), torch.tensor([[0.0, 1.0], [1.0, 1.0]])
    params, anchor = {"w": w[0].clone().requires_grad_()}, {"w": w0[0].clone().requires_grad_(not fixed)}
    (slope,) = torch.autograd.grad(0.5 * squared_distance(params, anchor), params["w"], create_graph=True)
    assert slope.tolist() == [1.0, -3.0]  # w - w0
    assert torch.autograd.grad(slope.sum(), params["w"])[0].tolist() == [1.0, 1.0]
    if not fixed:
        assert torch.autograd.grad(squared_distance(params, anchor), anchor["w"])[0].tolist() == [-2.0, 6.0]
    slopes = torch.func.vmap(torch.func.grad(lambda a, b: squared_distance({"w": a}, {"w": b})))(w, w0)
    assert slopes.tolist() == (2 * (w - w0)).tolist()


def test_a_function_of_the_squared_distance_can_be_differentiated_twice():
    """(a^2 + b^2)^2 at a = 1, b = 2 is 25; by a 4 (a^2 + b^2) a = 20; of that 4 (3 a^2 + b^2) = 28 and 8 a b = 16."""
    params = {"a": torch.tensor([1.0], requires_grad=True), "b": torch.tensor([2.0], requires_grad=True)}
    value = squared_distance(params, {"a": torch.zeros(1), "b": torch.zeros(1)}) ** 2
    (slope,) = torch.autograd.grad(value, params["a"], create_graph=True)
    assert (value, slope) == (25, 20)
    assert [grad.item() for grad in torch.autograd.grad(slope, list(params.values()))] == [28, 16]


def test_differences_are_means_over_batch_and_outputs():
    one, other = torch.tensor([[1.0, 2.0], [0.0, 4.0]]), torch.tensor([[3.0, 2.0], [0.0, 0.0]])
    assert l1(one, other) == (2 + 4) / 4 and l2(one, other) == (4 + 16) / 4


def test_the_l1_norm():
    assert l1_norm({"a": torch.tensor([-1.0, 2.0]), "b": torch.tensor([[-3.0]])}) == 6
    assert l1_norm({}) == 0


@pytest.mark.parametrize("temperature", [1.0, 2.0])
def test_soft_cross_entropy_and_kl_divergence(temperature):
    student, teacher = logits(Q, temperature), logits(P, temperature)
    crossed = -(0.75 * math.log(0.6) + 0.25 * math.log(0.4) + 0.2 * math.log(0.25) + 0.8 * math.log(0.75)) / 2
    assert soft_cross_entropy(student, teacher, temperature).item() == pytest.approx(crossed)
    own = -(0.75 * math.log(0.75) + 0.25 * math.log(0.25) + 0.2 * math.log(0.2) + 0.8 * math.log(0.8)) / 2
    assert kl_divergence(student, teacher, temperature).item() == pytest.approx(crossed - own)
    assert kl_divergence(teacher, teacher, temperature).abs() < 1e-12


def test_temperature_is_that_of_both():
    assert kl_divergence(logits(Q), logits(P), 2.0) == pytest.approx(float(kl_divergence(logits(Q) / 2, logits(P) / 2)))
    assert soft_cross_entropy(logits(Q), logits(P), 2.0) == pytest.approx(
        float(soft_cross_entropy(logits(Q) / 2, logits(P) / 2))
    )


def test_logarithms_of_probabilities_stay_finite():
    probabilities = torch.tensor([[0.0, 0.25, 0.75]])
    assert log_of(probabilities).isfinite().all()
    torch.testing.assert_close(log_of(probabilities).softmax(1), probabilities)


def test_entropy_is_a_mean_over_rows_in_nats():
    expected = -(0.75 * math.log(0.75) + 0.25 * math.log(0.25) + 0.2 * math.log(0.2) + 0.8 * math.log(0.8)) / 2
    assert entropy(logits(P)) == pytest.approx(expected)


def test_diversity_looks_at_pairs():
    """||e||²: 1/2 · (1 + 4), 2, 0.5 for the pairs 01, 02, 12; |g|: 2, 5, 3; each pair twice, of nine."""
    noise, made = torch.tensor([[0.0, 0.0], [1.0, 2.0], [0.0, 2.0]]), torch.tensor([[1.0], [3.0], [6.0]])
    assert diversity(noise, made).item() == pytest.approx(math.exp(-2 * (2.5 * 2 + 2 * 5 + 0.5 * 3) / 9))
    assert diversity(noise, torch.ones(3, 4)) == 1
