"""t-SNE: what is apart stays apart, the same seed gives the same picture, and the silhouette is right."""

from __future__ import annotations

import math

import numpy as np
import pytest

from polyfed.analysis.embedding import embed, separation
from polyfed.core.errors import InputError


def clouds():
    rng = np.random.default_rng(0)
    groups = np.repeat([0, 1], 20)
    return rng.normal(size=(40, 5)) * 0.1 + 50 * groups[:, None], groups


def test_far_clouds_stay_apart():
    features, groups = clouds()
    points = embed(features)
    assert points.shape == (40, 2)
    distances = np.linalg.norm(points[:, None] - points[None], axis=2) + 1e9 * np.eye(40)
    assert (groups[distances.argmin(1)] == groups).all()


def test_the_same_seed_gives_the_same_picture():
    features, _ = clouds()
    assert np.array_equal(embed(features, seed=3), embed(features, seed=3))


def test_silhouette_by_hand():
    # group 0 at 0 and 1, group 1 at 10 and 11: for the point 0, a = 1, b = 10.5, s = 9.5 / 10.5; for 1: 8.5 / 9.5
    values = np.array([[0.0], [1.0], [10.0], [11.0]])
    assert separation(values, np.array([0, 0, 1, 1])) == pytest.approx((9.5 / 10.5 + 8.5 / 9.5) / 2)
    assert separation(values, np.array([0, 1, 0, 1])) < 0
    assert math.isnan(separation(values, np.array([0, 0, 0, 0])))


def test_too_few_rows_are_refused():
    with pytest.raises(InputError, match="at least 4"):
        embed(np.zeros((3, 2)))
