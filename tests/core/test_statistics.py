"""BatchNorm statistics that are collected anew."""

import pytest
import torch
from torch import nn

from polyfed.core.samples import Samples
from polyfed.core.statistics import collect_statistics
from polyfed.models import build


class Dropping(nn.Module):
    """A network whose norm is behind a dropout."""

    def __init__(self):
        super().__init__()
        self.conv, self.drop, self.norm = nn.Conv2d(2, 4, 3), nn.Dropout(0.5), nn.BatchNorm2d(4)

    def forward(self, x):
        maps = self.conv(x)
        return self.norm(self.drop(maps)).mean((2, 3))


@pytest.mark.parametrize("model", [Dropping, lambda: build("cnn:4-8,bn", (2, 9, 9), 3)])
def test_the_statistics_are_means_over_batches_of_a_network_that_predicts(model):
    """The first call tries whether a network works channels last: that must not turn its dropout on."""
    model = model()
    data = Samples(torch.rand(10, 2, 9, 9), torch.zeros(10, dtype=torch.long))
    seen = []
    norm = next(part for part in model.modules() if isinstance(part, nn.BatchNorm2d))
    hook = norm.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    before = {name: value.clone() for name, value in model.named_parameters()}
    assert collect_statistics(model, data, 4) == 3
    hook.remove()
    plain = model.conv if isinstance(model, Dropping) else model.stem.conv
    expected = [plain(part).detach() for part in data.x.split(4)]
    assert torch.allclose(norm.running_mean, torch.stack([x.mean((0, 2, 3)) for x in expected]).mean(0), atol=1e-6)
    assert torch.allclose(norm.running_var, torch.stack([x.var((0, 2, 3)) for x in expected]).mean(0), atol=1e-6)
    assert all(not x.is_contiguous() for x in seen[-3:]), "collected in the slow order of axes"
    assert model.training and norm.momentum == 0.1
    for name, value in model.named_parameters():
        assert torch.equal(value, before[name]) and value.is_contiguous()
