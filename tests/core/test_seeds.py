"""The seed tree: blocks that run with the global generators at a seed."""

import random

import numpy as np
import torch

from polyfed.build import make_blueprint
from polyfed.core.rng import seed_of, seeded


def draws():
    return torch.rand(1).item(), random.random(), np.random.random()


def test_a_block_draws_what_its_seed_gives_and_leaves_the_generators_as_they_were():
    torch.manual_seed(seed_of(3, "init", 1, 2))
    expected = torch.rand(1).item()
    torch.manual_seed(7)
    after = torch.rand(1).item()
    torch.manual_seed(7)
    with seeded(3, "init", 1, 2):
        first = draws()
    assert first[0] == expected
    assert torch.rand(1).item() == after
    with seeded(3, "init", 1, 2):
        assert draws() == first
    with seeded(3, "init", 1, 3):
        assert all(a != b for a, b in zip(draws(), first, strict=True))


def test_a_projection_does_not_disturb_what_the_rest_of_a_network_starts_from():
    plain, projected = (make_blueprint("mlp:2x16", "mlp:2x16", (4,), 3, 0, size, "linear") for size in (None, 5))
    body = [name for name in plain.initial if not name.startswith("head")]
    assert len(body) == 4
    for name in body:
        assert torch.equal(projected.initial[f"model.{name}"], plain.initial[name]), name
