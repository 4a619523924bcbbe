"""Linear CKA against hand-computed values and its invariances."""

from __future__ import annotations

import math

import pytest
import torch

from polyfed.analysis.cka import cka_matrix, pair_mean


def linear_cka(x, y):
    return float(cka_matrix([x, y])[0, 1])


def test_by_hand():
    # centred: x = (-1, 0, 1), y = (-1, 1, 0) up to a shift; |y'x|² = 1, |x'x| = 2, |y'y| = 2
    x, y = torch.tensor([[0.0], [1.0], [2.0]]), torch.tensor([[3.0], [5.0], [4.0]])
    assert linear_cka(x, y) == pytest.approx(1 / 4)


def test_by_hand_with_two_columns():
    # centred columns: X = [(1,0), (-1,0), (0,1), (0,-1)], Y = (1, -1, 1, -1)
    # Y'X = (2, 2): squared norm 8; |X'X| = |diag(2, 2)| = √8; |Y'Y| = 4
    x = torch.tensor([[1.0, 0.0], [-1.0, 0.0], [0.0, 1.0], [0.0, -1.0]])
    y = torch.tensor([[1.0], [-1.0], [1.0], [-1.0]])
    assert linear_cka(x, y) == pytest.approx(8 / (math.sqrt(8) * 4))


def test_invariances():
    rng = torch.Generator().manual_seed(0)
    x, y = torch.randn(40, 7, generator=rng), torch.randn(40, 90, generator=rng)
    rotation, _ = torch.linalg.qr(torch.randn(7, 7, generator=rng))
    expected = linear_cka(x, y)
    assert 0 < expected < 1
    assert linear_cka(x, x.clone()) == pytest.approx(1)
    assert linear_cka(y, x) == pytest.approx(expected)
    assert linear_cka(x @ rotation, y) == pytest.approx(expected, rel=1e-5)
    assert linear_cka(3.7 * x + 11, y) == pytest.approx(expected, rel=1e-5)
    stretched = x * torch.tensor([10.0, 1, 1, 1, 1, 1, 1])  # not invariant to unequal factors
    assert abs(linear_cka(stretched, y) - expected) > 1e-3


def test_both_formulas_agree():
    rng = torch.Generator().manual_seed(1)
    x, y = torch.randn(9, 4, generator=rng).double(), torch.randn(9, 30, generator=rng).double()
    a, b = x - x.mean(0), y - y.mean(0)
    by_columns = (b.T @ a).norm() ** 2 / ((a.T @ a).norm() * (b.T @ b).norm())
    assert linear_cka(x, y) == pytest.approx(float(by_columns))


def test_matrix_and_mean_over_pairs():
    x = torch.tensor([[0.0], [1.0], [2.0]])
    y = torch.tensor([[3.0], [5.0], [4.0]])
    matrix = cka_matrix([x, y, -2 * x])
    assert matrix.diagonal().tolist() == [1, 1, 1]
    assert matrix[0, 1] == pytest.approx(0.25)
    assert matrix[0, 2] == pytest.approx(1)
    assert pair_mean(matrix) == pytest.approx((0.25 + 1 + 0.25) / 3)


def test_constant_features_have_no_alignment():
    assert math.isnan(linear_cka(torch.ones(4, 2), torch.randn(4, 2)))
