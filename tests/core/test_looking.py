"""Looking at a network without moving it."""

import pytest
import torch
from torch import nn

import polyfed as pf
from polyfed.core.looking import StillLoss, as_function
from polyfed.core.nets import Net
from polyfed.core.party import Context, Party, PartyData
from polyfed.core.samples import Samples
from polyfed.core.stage import Batch


@pytest.fixture
def client():
    party = Party(0, None, PartyData())
    party.models["main"] = nn.Sequential(nn.BatchNorm1d(1))
    return party


@pytest.mark.parametrize(("values", "seen"), [([1.0, 3.0], [-10.0, 10.0]), ([3.0], [30.0])])
def test_a_network_is_seen_with_other_weights_and_its_statistics_stay(client, values, seen):
    """Two samples have the mean 2 and the deviation 1; a lone one is seen with running statistics, 0 and 1."""
    data = Samples(torch.tensor(values).unsqueeze(1), torch.zeros(len(values), dtype=torch.int64))
    ctx = Context(0, 1, 1, pf.Training(), 2, (1,), 1)
    look = as_function(client, data, lambda net, x, y: net(x), ctx, "look")
    found = look({"0.weight": torch.tensor([10.0]), "0.bias": torch.zeros(1)})
    torch.testing.assert_close(found.flatten(), torch.tensor(seen), rtol=1e-4, atol=1e-4)
    norm = client.main[0]
    assert norm.num_batches_tracked == 0 and norm.running_mean == 0 and norm.weight == 1


def test_a_still_loss_moves_no_statistics(client):
    def loss(nets, batch, aux):
        return nets["main"](batch.x).square().mean()

    batch = Batch(torch.tensor([[1.0], [3.0]]), torch.zeros(2, dtype=torch.int64))
    found = StillLoss(loss)({"main": Net(client.main)}, batch, {})
    assert found.item() == pytest.approx(1.0, rel=1e-4) and client.main[0].num_batches_tracked == 0
