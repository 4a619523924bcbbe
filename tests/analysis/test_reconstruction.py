"""The attack on cases with a known answer, and what noise does to it."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from polyfed.analysis.reconstruction import attack, psnr, reconstruct
from polyfed.core.errors import InputError
from polyfed.core.rng import seeded
from polyfed.models import build


def images(number=4):
    return torch.rand((number, 1, 8, 8), generator=torch.Generator().manual_seed(5))


def test_an_invertible_extractor_gives_the_input_away():
    true = images()
    found, losses = reconstruct(lambda x: 3 * x.flatten(1) - 1, 3 * true.flatten(1) - 1, (1, 8, 8), steps=400)
    assert torch.allclose(found, true, atol=1e-3)
    assert losses[-1] < 1e-5 < losses[0]


def test_what_the_extractor_drops_cannot_be_found():
    true = images()
    left = lambda x: x[..., :4]  # noqa: E731
    found, _ = reconstruct(left, left(true), (1, 8, 8), steps=400, seed=1)
    assert torch.allclose(found[..., :4], true[..., :4], atol=1e-3)
    start = torch.randn((4, 1, 8, 8), generator=torch.Generator().manual_seed(1))
    assert torch.equal(found[..., 4:], start[..., 4:])  # never touched: no gradient comes from there


def test_noise_raises_both_errors_and_the_model_is_left_alone():
    with seeded(0, "stem"):
        model = build("cnn:8-8,bn", (1, 8, 8), 10)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    x = images()
    clean, protected = (attack(model, x, noise, steps=150) for noise in (0.0, 0.8))
    assert clean["losses"][-1] < protected["losses"][-1]
    assert clean["mse"] < protected["mse"]
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert model.training


def test_an_attacker_without_statistics_is_weaker():
    with seeded(0, "stem"):
        model = build("cnn:8-8,bn", (1, 8, 8), 10)
    norm = model.stem.norm
    norm.running_mean += 0.5  # as after training
    norm.running_var *= 3
    x = images()
    strong, weak = (attack(model, x, steps=150, batchnorm=kind)["mse"] for kind in ("statistics", "batch"))
    assert strong < weak


def test_psnr_by_hand():
    assert psnr(torch.full((2, 2), 0.1), torch.zeros(2, 2)) == pytest.approx(20.0)
    assert psnr(torch.zeros(2), torch.zeros(2)) == math.inf


def test_models_without_a_stem_are_refused():
    with pytest.raises(InputError, match="has none"):
        attack(nn.Linear(2, 2), torch.zeros(1, 2))
