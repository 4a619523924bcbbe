"""The seed tree: blocks that run with the global generators at a seed."""

import random

import numpy as np
import torch

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
