"""When two modules are the same architecture: they compute the same from the same tensors."""

import copy

import pytest
import torch
from torch import nn

import polyfed as pf
from polyfed.models import build
from polyfed.models.structure import structure


class Net(nn.Module):
    """Somebody's network. `scale` and `activation` show neither in its tensors nor in its repr."""

    def __init__(self, width=4, scale=1.0, p=0.5, power=1, mask=(1.0, 2.0)):
        super().__init__()
        self.first = nn.Linear(3, width)
        self.norm = nn.BatchNorm1d(width)
        self.drop = nn.Dropout(p)
        self.scale = scale
        self.activation = lambda x: x.relu() ** power
        self.register_buffer("mask", torch.tensor(mask), persistent=False)

    def forward(self, x):
        return self.drop(self.activation(self.norm(self.first(x)))) * self.scale


class Other(Net):
    """The same layers, another forward."""

    def forward(self, x):
        return self.first(x)


def frozen(net):
    net.first.weight.requires_grad_(False)
    return net


def tied(net):
    net.again = nn.Linear(3, 4)
    net.again.weight = net.first.weight
    return net


def untied(net):
    net.again = nn.Linear(3, 4)
    return net


EQUAL = {
    "own network": Net,
    "frozen": lambda: frozen(Net()),
    "tied": lambda: tied(Net()),
    "lstm": lambda: nn.LSTM(3, 4, num_layers=2, dropout=0.1),
    "transformer": lambda: nn.TransformerEncoderLayer(8, 2, 16),
    "sequential": lambda: nn.Sequential(nn.Flatten(), nn.Linear(3, 2), nn.Softplus(beta=2)),
    "adapted": lambda: pf.adapt(nn.Sequential(nn.Flatten(), nn.Linear(64, 5), nn.Linear(5, 3)), head="2"),
    "projected": lambda: pf.with_feature_dim(build("cnn:4-8,bn", (1, 8, 8), 3), 6),
    "zoo": lambda: build("resnet10:w4", (1, 8, 8), 3),
}

DIFFERENT = {
    "width": Net(width=5),
    "a number that only forward knows": Net(scale=2.0),
    "dropout": Net(p=0.1),
    "what a lambda remembers": Net(power=2),
    "a buffer that is not part of the state": Net(mask=(1.0, 3.0)),
    "forward": Other(),
    "a frozen layer": frozen(Net()),
    "half precision": Net().half(),
    "another layer": untied(Net()),
    "a hook": copy.deepcopy(Net()),
}
DIFFERENT["a hook"].first.register_forward_hook(lambda module, inputs, output: output * 2)


@pytest.mark.parametrize("name", EQUAL)
def test_what_is_made_twice_has_one_structure(name):
    first, second = EQUAL[name](), EQUAL[name]()
    assert any(not torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))
    assert structure(first) == structure(second.eval()) == structure(copy.deepcopy(first))
    assert hash(structure(first)) == hash(structure(second))


@pytest.mark.parametrize("name", DIFFERENT)
def test_what_computes_something_else_has_another_structure(name):
    assert structure(DIFFERENT[name]) != structure(Net())


def test_tied_layers_are_not_two_layers():
    assert structure(tied(Net())) != structure(untied(Net()))


def test_what_cannot_be_looked_into_is_never_equal():
    first, second = Net(), Net()
    first.helper, second.helper = object(), object()
    assert structure(first) != structure(second) and structure(first) == structure(first)
