"""Soft labels as weighted copies."""

import numpy as np
import torch
from scipy.optimize import minimize

from polyfed.ops.copies import weighted_copies


def test_a_soft_label_becomes_one_row_for_each_class_with_its_weight():
    rows, classes, weights = weighted_copies(torch.tensor([[0.7, 0.3], [0.0, 1.0]]), torch.tensor([1.0, 2.0]))
    assert rows.tolist() == [0, 0, 1]
    assert classes.tolist() == [0, 1, 1]
    assert weights.tolist() == [torch.tensor(0.7).double().item(), torch.tensor(0.3).double().item(), 2.0]


def test_class_numbers_are_one_copy_each():
    rows, classes, weights = weighted_copies(torch.tensor([2, 0]), torch.tensor([1.0, 0.5]))
    assert (rows.tolist(), classes.tolist(), weights.tolist()) == ([0, 1], [2, 0], [1.0, 0.5])


def test_what_weighs_next_to_nothing_is_left_out_and_the_rest_takes_it_over():
    rows, classes, weights = weighted_copies(
        torch.tensor([[0.5, 0.4995, 0.0005]]).double(), torch.tensor([3.0]).double()
    )
    assert (rows.tolist(), classes.tolist()) == ([0, 0], [0, 1])
    np.testing.assert_allclose(weights.numpy(), [3 * 0.5 / 0.9995, 3 * 0.4995 / 0.9995])


def test_logistic_regression_on_copies_is_the_optimum_of_the_soft_cross_entropy():
    from sklearn.linear_model import LogisticRegression

    rng = np.random.default_rng(0)
    x, soft = rng.normal(size=(40, 2)), rng.dirichlet([1, 1], size=40)
    rows, classes, weights = weighted_copies(torch.tensor(soft), torch.ones(40, dtype=torch.float64))
    found = LogisticRegression(C=1.0, tol=1e-10, max_iter=1000).fit(x[rows], classes.numpy(), weights.numpy())

    def loss(w):  # the penalty of scikit-learn, and the soft cross-entropy summed over samples
        z = x @ w[:2] + w[2]
        return 0.5 * w[:2] @ w[:2] + np.sum(np.logaddexp(0, z) - soft[:, 1] * z)

    best = minimize(loss, np.zeros(3), tol=1e-12).x
    # Probabilities below a thousandth are left out of the copies: here there are none.
    assert soft.min() > 1e-3
    np.testing.assert_allclose([*found.coef_[0], found.intercept_[0]], best, atol=1e-5)
