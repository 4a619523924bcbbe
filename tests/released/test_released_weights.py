"""Weights: the same tiny problem as the authors' programs compute it."""

import pytest
from tests.released.tiny_problem import finished, in_few

from polyfed.methods.fednova import FedNova
from polyfed.methods.moon import Moon
from polyfed.methods.scaffold import Scaffold


def assert_few(state, bias, total):
    found_bias, found_total = in_few(state)
    assert found_bias == pytest.approx(bias, abs=2e-6)
    assert found_total == pytest.approx(total, abs=1e-5)


@pytest.mark.parametrize(
    ("options", "momentum", "bias", "total"),
    [
        ({}, 0.0, [-0.5492774, -0.5046213, 0.0563275], -0.0840211),
        ({}, 0.9, [-0.7253538, -0.5351327, 0.2629154], -0.3152735),
        ({"mu": 0.5}, 0.0, [-0.5495999, -0.5049878, 0.0570166], -0.0839694),
        ({"gmf": 0.5}, 0.0, [-0.5978073, -0.5103324, 0.1105685], -0.1263851),
    ],
)
def test_two_rounds_of_fednova(options, momentum, bias, total):
    """JYWa/FedNova, distoptim/FedNova.py: `step` and `average`, clients weighted by samples."""
    assert_few(finished(FedNova(**options), 2, momentum).server.state, bias, total)


def test_three_rounds_of_scaffold():
    """Xtra-Computing/NIID-Bench, `train_net_scaffold`: option II; weights by samples, c over the number of parties."""
    run = finished(Scaffold(option="II", weighting="samples"), 3)
    assert_few(run.server.state, [-0.5301721, -0.5301587, 0.0627597], -0.0701801)
    assert_few(run.server.memory["control"], [0.0044004, 0.0175418, -0.0219422], 0.0969202)


@pytest.mark.parametrize(
    ("previous", "bias", "total"),
    [(1, [-1.0689739, -0.6177394, 0.6891421], 1.229444), (2, [-1.0472025, -0.6580537, 0.7076851], -0.3714944)],
)
def test_three_rounds_of_moon(previous, bias, total):
    """QinbinLi/MOON, `train_net_fedcon`: mu 5, temperature 0.5, SGD with momentum 0.9, a pool of the last networks."""
    run = finished(Moon(mu=5.0, temperature=0.5, previous=previous), 3, momentum=0.9)
    assert_few(run.server.state, bias, total)
