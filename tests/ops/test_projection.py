"""Projections with orthonormal columns, and the divergence of features, against numbers worked out by hand."""

import math
from typing import get_args

import pytest
import torch
from torch.distributions import Categorical, kl_divergence

from polyfed.ops.projection import (
    LinearProjection,
    OrthMap,
    OrthogonalProjection,
    cayley,
    feature_distance,
    feature_kl,
    gram_schmidt,
    orthogonal,
    series,
    skew,
    taylor,
)

EXACT = tuple(name for name in get_args(OrthMap) if name != "taylor")  # orthogonal whatever the size of the parameter
every_exact = pytest.mark.parametrize("orth_map", EXACT)
every = pytest.mark.parametrize("orth_map", get_args(OrthMap))


def drawn(rows, scale=0.01, seed=0, dtype=torch.float32):
    return torch.randn(rows, rows, generator=torch.Generator().manual_seed(seed)).to(dtype) * scale


def of_norm(rows, norm, dtype=torch.float64):
    """A skew-symmetric matrix with this spectral norm."""
    matrix = skew(drawn(rows, dtype=dtype))
    return matrix * (norm / torch.linalg.matrix_norm(matrix, 2))


def off_identity(matrix):
    return float((matrix - torch.eye(len(matrix), dtype=matrix.dtype)).abs().max())


def projection(inputs, outputs, orth_map="matrix_exp", scale=0.01, seed=0):
    module = OrthogonalProjection(inputs, outputs, orth_map)
    module.reset(torch.Generator().manual_seed(seed), scale)
    return module


# --- from a parameter to an orthogonal matrix ---


def test_the_parametrisation_is_skew_symmetric_exactly():
    parameter = drawn(33, scale=3.7)
    matrix = skew(parameter)
    assert torch.equal(matrix, -matrix.T) and bool((matrix.diagonal() == 0).all())
    assert matrix[2, 5] == parameter[2, 5] - parameter[5, 2] != 0


def turned(angle):
    return torch.tensor([[math.cos(angle), -math.sin(angle)], [math.sin(angle), math.cos(angle)]], dtype=torch.float64)


@pytest.mark.parametrize("angle", [0.1, 1.0, 3.0, 30.0])
def test_in_two_dimensions_the_exponential_is_a_rotation_by_the_entry(angle):
    matrix = torch.tensor([[0.0, -angle], [angle, 0.0]], dtype=torch.float64)
    parameter = torch.tensor([[0.0, -angle], [0.0, 0.0]], dtype=torch.float64)
    torch.testing.assert_close(skew(parameter), matrix)
    torch.testing.assert_close(orthogonal(parameter, "matrix_exp"), turned(angle))
    torch.testing.assert_close(series(matrix, 14), turned(angle), atol=1e-9, rtol=0)
    torch.testing.assert_close(cayley(matrix), turned(2 * math.atan(angle / 2)))


def test_the_plain_series_has_the_terms_it_says():
    matrix = torch.tensor([[0.0, -2.0], [2.0, 0.0]])
    assert taylor(matrix, 1).tolist() == [[1, -2], [2, 1]]
    assert taylor(matrix, 2).tolist() == [[-1, -2], [2, -1]]  # + W^2/2 = -2 I
    assert orthogonal(torch.tensor([[0.0, -2.0], [0.0, 0.0]]), "taylor", 2).tolist() == [[-1, -2], [2, -1]]
    torch.testing.assert_close(taylor(matrix, 3), torch.tensor([[-1, -2 + 4 / 3], [2 - 4 / 3, -1]]))


def test_the_plain_series_fails_for_large_matrices_and_scaling_repairs_it():
    small, large = of_norm(24, 0.5), of_norm(24, 3.0)
    error = {n: off_identity(taylor(small, n) @ taylor(small, n).T) for n in (3, 5, 8)}
    assert 1e-4 < error[3] < 1e-2 and 1e-6 < error[5] < 1e-4 and error[8] < 1e-6
    assert off_identity(taylor(large, 5) @ taylor(large, 5).T) > 0.01
    assert off_identity(series(large, 8) @ series(large, 8).T) < 1e-6


@pytest.mark.parametrize("norm", [0.0, 0.3, 1.1, 3.0, 20.0])
@pytest.mark.parametrize("rows", [3, 64])
def test_the_scaled_series_agrees_with_the_exact_exponential(rows, norm):
    matrix = of_norm(rows, norm) if norm else torch.zeros(rows, rows, dtype=torch.float64)
    for dtype in (torch.float32, torch.float64):
        found = series(matrix.to(dtype))
        torch.testing.assert_close(found.double(), torch.matrix_exp(matrix), atol=1e-5, rtol=0)


def test_gram_schmidt_by_hand():
    matrix = torch.tensor([[3.0, 1.0], [4.0, 1.0]])
    # first column (3, 4)/5; the second minus its part along it: (1, 1) - 7/5·(3, 4)/5 = (4, -3)/25
    torch.testing.assert_close(gram_schmidt(matrix), torch.tensor([[0.6, 0.8], [0.8, -0.6]]))
    flipped = gram_schmidt(-torch.eye(3))
    torch.testing.assert_close(flipped, -torch.eye(3))


@every
def test_zeros_give_the_identity(orth_map):
    torch.testing.assert_close(orthogonal(torch.zeros(5, 5), orth_map), torch.eye(5))


@every
def test_first_order_agrees_with_the_exponential(orth_map):
    parameter = skew(drawn(8, scale=1e-4, dtype=torch.float64)) / 2  # skew already, so that W = parameter · 2 · 1/2
    expected = torch.matrix_exp(parameter)
    found = orthogonal(parameter if orth_map == "gram_schmidt" else parameter / 2, orth_map)
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=0)


@every
def test_gradients_are_those_of_the_map(orth_map):
    parameter = drawn(4, scale=0.2, dtype=torch.float64).requires_grad_()
    assert torch.autograd.gradcheck(lambda a: orthogonal(a, orth_map, 6), parameter)


def test_a_broken_parameter_gives_a_broken_matrix_and_not_a_crash():
    assert bool(series(torch.full((3, 3), math.nan)).isnan().any())


# --- projections ---


def trained(module, steps):
    """Descend on a distance to random targets; return the columns before and after, and the losses."""
    optimizer = torch.optim.SGD(module.parameters(), lr=0.5, momentum=0.9)
    dtype = module.matrix.dtype
    z = torch.rand(32, module.inputs, generator=torch.Generator().manual_seed(1)).to(dtype)
    target = torch.rand(32, module.outputs, generator=torch.Generator().manual_seed(2)).to(dtype) * 3
    first, losses = module.columns().detach(), []
    for _ in range(steps):
        loss = feature_distance(module(z), target, "mse")
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return first, module.columns().detach(), losses


@every_exact
@pytest.mark.parametrize("inputs, outputs", [(64, 26), (7, 6), (5, 1)])
def test_columns_are_orthonormal_before_and_after_training(orth_map, inputs, outputs):
    first, last, losses = trained(projection(inputs, outputs, orth_map), 100)
    assert max(off_identity(first.T @ first), off_identity(last.T @ last)) <= 1e-5
    assert losses[-1] < losses[0]
    assert float((last - first).abs().max()) > 0.05  # it moved far and stayed orthonormal


@every_exact
def test_columns_are_orthonormal_to_the_last_digits_in_double_precision(orth_map):
    module = projection(64, 26, orth_map, scale=0.1).double()
    module.terms = 14  # the eight terms of `series` are meant for single precision
    first, last, _ = trained(module, 100)
    assert max(off_identity(first.T @ first), off_identity(last.T @ last)) <= 1e-10
    assert float((last - first).abs().max()) > 0.05


@every_exact
def test_columns_are_orthonormal_at_the_size_of_a_resnet(orth_map):
    first, last, _ = trained(projection(512, 205, orth_map), 3)
    assert last.shape == (512, 205)
    assert max(off_identity(first.T @ first), off_identity(last.T @ last)) <= 1e-4
    assert float((last - first).abs().max()) > 1e-3


@pytest.mark.parametrize("scale, bound", [(0.01, 4e-6), (0.05, 3e-5)])  # ||W|| = 0.6 as at the start, and 3
def test_the_scaled_series_is_as_orthogonal_as_the_page_says(scale, bound):
    matrix = orthogonal(drawn(512, scale), "series").double()
    assert off_identity(matrix.T @ matrix) <= bound


@every_exact
def test_a_wider_teacher_has_orthonormal_rows(orth_map):
    columns = projection(20, 33, orth_map, scale=0.1).columns().detach()
    assert columns.shape == (20, 33)
    assert off_identity(columns @ columns.T) <= 1e-5
    assert off_identity(columns.T @ columns) > 0.1  # and not orthonormal columns: there is no room


def test_norms_shrink_unless_the_vector_lies_in_the_span():
    module = projection(32, 12, scale=0.3).double()
    columns = module.columns().detach()
    z = torch.randn(200, 32, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    assert bool((module(z).norm(dim=1) <= z.norm(dim=1) * (1 + 1e-12)).all())
    assert bool((module(z).norm(dim=1) < 0.95 * z.norm(dim=1)).any())
    y = torch.randn(50, 12, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    inside = y @ columns.T
    torch.testing.assert_close(inside.norm(dim=1), y.norm(dim=1))  # M^T preserves norms
    torch.testing.assert_close(module(inside), y)


def test_projections_start_near_the_first_features():
    module = projection(64, 26)
    z = torch.rand(4, 64)
    assert float((module(z) - z[:, :26]).detach().abs().max()) < 0.5
    assert torch.equal(projection(64, 26).matrix, module.matrix)
    assert not torch.equal(projection(64, 26, seed=1).matrix, module.matrix)
    assert float(module.matrix.detach().std()) == pytest.approx(0.01, rel=0.05)


def test_a_free_projection_is_drawn_like_a_linear_layer():
    module = LinearProjection(100, 40)
    module.reset(torch.Generator().manual_seed(0), 5.0)
    weights = module.matrix.detach()
    assert weights.shape == (100, 40)
    assert 0.099 < float(weights.abs().max()) <= 0.1  # 1/sqrt(100)
    assert float(weights.std()) == pytest.approx(0.1 / math.sqrt(3), rel=0.03)
    z = torch.rand(3, 100)
    torch.testing.assert_close(module(z), z @ weights)
    assert off_identity(weights.T @ weights) > 0.1


# --- the divergence ---


def test_divergence_by_hand_in_both_directions():
    teacher, student = torch.tensor([[0.0, 0.0]]), torch.tensor([[0.0, math.log(3.0)]])  # (1/2, 1/2) and (1/4, 3/4)
    forward = 0.5 * math.log(2) + 0.5 * math.log(2 / 3)
    backward = 0.25 * math.log(0.5) + 0.75 * math.log(1.5)
    assert float(feature_kl(student, teacher)) == pytest.approx(forward, abs=1e-6)
    assert float(feature_kl(student, teacher, direction="student_teacher")) == pytest.approx(backward, abs=1e-6)
    assert abs(forward - backward) > 0.01
    assert float(feature_kl(student * 2, teacher, temperature=2.0)) == pytest.approx(forward, abs=1e-6)


@pytest.mark.parametrize("temperature", [1.0, 0.1])
def test_divergence_is_that_of_torch_averaged_over_the_batch(temperature):
    draw = torch.Generator().manual_seed(5)
    student, teacher = torch.rand(9, 26, generator=draw), torch.rand(9, 26, generator=draw)
    p, q = Categorical(logits=teacher / temperature), Categorical(logits=student / temperature)
    torch.testing.assert_close(feature_kl(student, teacher, temperature), kl_divergence(p, q).mean())
    swapped = feature_kl(student, teacher, temperature, "student_teacher")
    torch.testing.assert_close(swapped, kl_divergence(q, p).mean())


@pytest.mark.parametrize("direction", ["teacher_student", "student_teacher"])
def test_equal_up_to_a_shift_there_is_no_divergence_and_no_gradient(direction):
    teacher = torch.rand(6, 10, generator=torch.Generator().manual_seed(6), dtype=torch.float64)
    student = (teacher + torch.arange(6.0).unsqueeze(1)).requires_grad_()
    loss = feature_kl(student, teacher, direction=direction)
    (gradient,) = torch.autograd.grad(loss, student)
    assert abs(float(loss.detach())) < 1e-14
    assert float(gradient.abs().max()) < 1e-14


def test_squared_difference_by_hand():
    student, teacher = torch.tensor([[1.0, 2.0], [0.0, 0.0]]), torch.tensor([[0.0, 4.0], [0.0, 0.0]])
    assert float(feature_distance(student, teacher, "mse")) == 1.25
    assert torch.equal(feature_distance(student, teacher, "kl", 0.5), feature_kl(student, teacher, 0.5))


def test_the_plain_series_is_not_scaled():
    """W = [[0, 2], [-2, 0]] has the square -4 I: I + W + W²/2 = W - I."""
    found = orthogonal(torch.tensor([[0.0, 2.0], [0.0, 0.0]]), "taylor", terms=2)
    assert found.tolist() == [[-1.0, 2.0], [-2.0, -1.0]]
