"""Data impressions: class similarities by hand, targets, and inputs that give their targets."""

import pytest
import torch
from torch import nn

from polyfed.core.errors import InputError
from polyfed.fusion.impressions import class_similarity, impressions, last_weight_name, soft_targets


def test_similarity_is_scaled_to_the_unit_interval_row_by_row():
    weight = torch.tensor([[1.0, 0.0], [0.0, 2.0], [-3.0, 0.0]])  # cosines 1, 0, -1
    found = class_similarity(weight)
    assert torch.allclose(found[0], torch.tensor([1.0, 0.5, 1e-3], dtype=torch.float64))
    assert torch.allclose(found[1], torch.tensor([1e-3, 1.0, 1e-3], dtype=torch.float64))


def test_targets_are_distributions_that_prefer_similar_classes():
    similarity = torch.tensor([[1.0, 0.8, 0.001], [0.001, 1.0, 0.001], [0.001, 0.001, 1.0]], dtype=torch.float64)
    targets = soft_targets(similarity, [0, 2], 300, (1.0, 0.1), torch.Generator().manual_seed(0))
    assert targets.shape == (600, 3)
    assert torch.allclose(targets.sum(1), torch.ones(600), atol=1e-5)
    expected = similarity[0] / similarity[0].sum()
    assert torch.allclose(targets[:300].mean(0).double(), expected, atol=0.06)
    assert float(targets[300:].mean(0)[2]) > 0.98
    spread = targets[:300].amax(1)
    assert float(spread[1::2].mean()) > float(spread[0::2].mean()) + 0.1  # a small beta gives surer targets


def test_inputs_reach_their_targets_and_do_not_depend_on_their_company():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        network = nn.Sequential(nn.Linear(6, 20), nn.ReLU(), nn.Linear(20, 3)).eval()
    targets = torch.tensor([[0.5, 0.3, 0.2], [0.2, 0.6, 0.2]])

    def make(rows, t=1.0):
        return impressions(network, rows, (6,), torch.Generator().manual_seed(0), temperature=t, steps=300, lr=0.05)

    both = make(targets)
    assert torch.allclose(network(both).softmax(1), targets, atol=0.02)
    assert torch.allclose((network(make(targets, 2.0)) / 2.0).softmax(1), targets, atol=0.02)
    assert torch.allclose(make(targets[:1]), both[:1], atol=1e-4)
    assert all(parameter.grad is None for parameter in network.parameters())


def test_the_last_linear_layer_is_named():
    assert last_weight_name(nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 4))) == "2.weight"
    assert last_weight_name(nn.Linear(2, 3)) == "weight"
    with pytest.raises(InputError, match="no linear layer"):
        last_weight_name(nn.Conv2d(1, 2, 3))
