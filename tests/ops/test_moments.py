"""Moments of classes that hold a single sample: there is no spread to tell."""

import pytest
import torch

from polyfed.ops.moments import class_moments, pooled_moments, root_of


@pytest.mark.parametrize(("kind", "shape"), [("full", (1, 2, 2)), ("diag", (1, 2)), ("shared", (2, 2))])
def test_a_lone_sample_has_a_mean_and_no_covariance(kind, shape):
    alone = class_moments(torch.tensor([[3.0, -1.0]]), torch.tensor([4]), kind)
    pooled = pooled_moments([alone], kind)
    for found in (alone, pooled):
        assert found.means.tolist() == [[3.0, -1.0]] and found.counts.tolist() == [1]
        assert torch.equal(found.covariance, torch.zeros(shape))


@pytest.mark.parametrize("kind", ["full", "diag"])
def test_one_sample_at_each_of_two_clients_has_their_distance(kind):
    """1 and 5: mean 3, variance (4 + 4) / (2 - 1)."""
    parts = [class_moments(torch.tensor([[value]]), torch.tensor([0]), kind) for value in (1.0, 5.0)]
    found = pooled_moments(parts, kind)
    assert found.means.item() == 3.0 and found.covariance.item() == 8.0


def test_a_ridge_is_added_where_a_direction_has_next_to_no_variance_beside_the_others():
    """1 and 1e-14, mean 1/2: a ridge of 0.5 adds 1/4 to both. Small variances that are alike are left as they are."""
    uneven = root_of(torch.diag(torch.tensor([1.0, 1e-14], dtype=torch.float64)), ridge=0.5)
    torch.testing.assert_close(uneven.diagonal(), torch.tensor([1.25**0.5, 0.5], dtype=torch.float64))
    small = root_of(torch.diag(torch.tensor([1e-14, 1e-14], dtype=torch.float64)), ridge=0.5)
    torch.testing.assert_close(small.diagonal(), torch.tensor([1e-7, 1e-7], dtype=torch.float64), rtol=1e-6, atol=0)
