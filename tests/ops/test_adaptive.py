"""A server's adaptive step, by hand."""

import pytest
import torch

from polyfed.ops.adaptive import adam_step


def test_one_step_of_fedadam_by_hand():
    """m = 0.25·1 + 0.75·2 = 1.75, v = 0.625·12 + 0.375·4 = 9, w = 1 + 0.1·1.75 / (3 + 0.5) = 1.05."""
    state, change = {"w": torch.tensor([1.0]), "left": torch.tensor([7.0])}, {"w": torch.tensor([2.0])}
    moments = {"m": {"w": torch.tensor([1.0])}, "v": {"w": torch.tensor([12.0])}}
    moved, after = adam_step(state, change, moments, lr=0.1, beta_1=0.25, beta_2=0.625, tiny=0.5)
    assert moved["w"].item() == pytest.approx(1.05) and set(moved) == {"w"}
    assert after["m"]["w"].item() == 1.75 and after["v"]["w"].item() == 9.0
    assert state["w"].item() == 1.0 and moments["m"]["w"].item() == 1.0  # what was given stays


def test_no_moments_are_zeros():
    """m = 0.5·4 = 2, v = 0.25·16 = 4: 2 / (2 + 0.001)."""
    moved, _ = adam_step({"w": torch.zeros(1)}, {"w": torch.tensor([4.0])}, {}, 1.0, 0.5, 0.75)
    assert moved["w"].item() == pytest.approx(2 / 2.001)
