"""Noise on features, by hand."""

import torch

from polyfed.ops.noise import noisy

S = torch.tensor([[0.0, 2.0], [4.0, 2.0]])
UNIT = torch.tensor([[1.0, -1.0], [2.0, 0.5]])


def test_noise_has_the_spread_of_the_whole_tensor():
    """Values 0, 2, 4, 2 have the variance 2."""
    torch.testing.assert_close(noisy(S, 0.5, UNIT), S + 0.5 * 2**0.5 * UNIT)


def test_noise_has_the_spread_of_each_channel():
    """The first channel, 0 and 4, has the deviation 2; the second has none."""
    torch.testing.assert_close(noisy(S, 0.5, UNIT, "channel"), torch.tensor([[1.0, 2.0], [6.0, 2.0]]))
    maps = S.view(2, 2, 1, 1).expand(2, 2, 3, 1)
    torch.testing.assert_close(
        noisy(maps, 0.5, UNIT.view(2, 2, 1, 1), "channel")[:, :, 2, 0], S + S.new_tensor([[1, 0], [2, 0]])
    )


def test_channels_of_one_value_take_the_spread_of_all():
    torch.testing.assert_close(noisy(S[:1], 1.0, UNIT[:1], "channel"), torch.tensor([[1.0, 1.0]]))


def test_the_spread_has_no_gradient():
    s = S.clone().requires_grad_()
    noisy(s, 0.5, UNIT).sum().backward()
    assert torch.equal(s.grad, torch.ones(2, 2))
