"""Depth: the same tiny problem as the authors' programs compute it."""

import pytest
import torch
from tests.released.tiny_problem import clients, in_one, wave
from torch import nn

from polyfed.api import prepare
from polyfed.core.settings import Settings, Training
from polyfed.methods.depthfl import DepthFL
from polyfed.methods.inco import InCo

INCO = [
    *(-0.0101171, -0.0165665, -0.0077848, 0.0081542, 0.0165963, 0.0097798, -0.0060282, -0.0162939, -0.011579),
    *(-0.0366763, -0.0639233, -0.0323995, 0.0289122, 0.0636422, 0.0398598, -0.0205695, -0.0620873, -0.0465223),
    *(0.0291555, 0.1, 0.0898246, -0.0130402, -0.1, -0.0992518, -0.0033361, 0.0956469, 0.1),
]


class Deep(nn.Module):
    """Up to two layers of three units, each with an exit."""

    family = "deep"

    def __init__(self, depth):
        super().__init__()
        self.body = nn.ModuleList([nn.Linear(2, 3), nn.Linear(3, 3)][:depth])
        self.head = nn.ModuleList([nn.Linear(3, 3) for _ in range(depth)])
        for name, parameter in self.named_parameters():
            parameter.data = wave(parameter.shape, 1.0 + sum(map(ord, name)) % 7)

    def exits(self, x):
        found = []
        for body, head in zip(self.body, self.head, strict=True):
            x = torch.tanh(body(x))
            found.append(head(x))
        return found

    def forward(self, x):
        return self.exits(x)[-1]


def deep():
    return Deep(2)


def shallow():
    return Deep(1)


def test_three_rounds_of_depthfl():
    """adap/flower, baselines/depthfl (`train`, `aggregate`): clients of two, one and two exits, lambda of 0, 1/2, 1."""
    training = Training(epochs=3, batch_size=100, lr=0.1)
    run = prepare(DepthFL(alpha=0.1, ramp=2), clients(), [deep, shallow, deep], Settings(3, training=training))
    run.run()
    expected = {
        "body.0.bias": [-0.1235968, 0.2427035, 0.4198618],
        "body.1.bias": [0.7011852, 0.6188482, -0.0293316],
        "head.0.bias": [0.0987472, 0.3784505, 0.2062669],
        "head.1.bias": [0.4876943, 0.0932837, 0.4482536],
    }
    for name, values in expected.items():
        assert run.server.state[name].tolist() == pytest.approx(values, abs=5e-6), name
    everything = [run.server.state[name] for name, _ in Deep(2).named_parameters()]
    assert in_one(everything) == pytest.approx(-0.1940221, abs=1e-5)


def test_the_mixture_of_inco():
    """ChanYunHin/InCo-Aggregation, `aggregate_IN_gradients`: three kernels, the second beyond theta's limit."""
    g0, gk = wave((3, 1, 3, 3), 1.0, 0.05).double(), wave((3, 1, 3, 3), 4.0, 0.03).double()
    g0[1] *= 0.04
    gk[2] *= 4
    found = InCo().mixed(g0, gk).clamp(-0.1, 0.1).flatten().tolist()
    assert found == pytest.approx(INCO, abs=2e-7)
