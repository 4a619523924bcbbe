"""The memory of one update, counted by hand for a two-layer network."""

import torch
from torch import nn

from polyfed.analysis.memory import update_memory
from polyfed.core.stage import Batch, Update


def loss(nets, batch, aux):
    return nets["main"](batch.x).pow(2).sum()


def test_counts_by_hand():
    model = nn.Sequential(nn.Linear(3, 4), nn.Sigmoid(), nn.Linear(4, 2))
    batch = Batch(torch.ones(5, 3), torch.zeros(5, dtype=torch.long))
    whole = update_memory(Update((loss,), {"main": None}), {"main": model}, batch, {})
    # Kept for the backward pass: the sigmoid's output (5x4), which is the second layer's input too, and the output 5x2.
    assert whole == {
        "parameters": 4 * 26,
        "gradients": 4 * 26,
        "activations": 4 * (20 + 10),
        "total": 4 * (26 + 26 + 30),
    }
    last = update_memory(Update((loss,), {"main": ("2",)}), {"main": model}, batch, {})
    assert last["gradients"] == 4 * 10
    assert last["total"] == sum(last[key] for key in ("parameters", "gradients", "activations"))
    assert all(p.requires_grad and p.grad is None for p in model.parameters())


def test_shapes_alone_give_the_same_count():
    """On the device `meta` nothing is calculated: networks that do not fit into memory can be counted."""

    def build(device):
        model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2)).to(device)
        batch = Batch(torch.ones(5, 3, device=device), torch.zeros(5, dtype=torch.long, device=device))
        return update_memory(Update((loss,), {"main": None}), {"main": model}, batch, {})

    assert build("meta") == build("cpu")
