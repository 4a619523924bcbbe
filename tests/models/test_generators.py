"""Generators of inputs and of features."""

import math

import pytest
import torch

from polyfed.models.generators import FeatureGenerator, averaged_state, generated, input_generator


@pytest.mark.parametrize("shape", [(1, 8, 8), (1, 28, 28), (3, 32, 32), (2, 30, 17), (13,), (5, 4)])
def test_inputs_of_any_shape_begin_with_mean_zero_and_deviation_one(shape):
    torch.manual_seed(0)
    generator = input_generator(6, shape, 4)
    noise = torch.randn(64, 6)
    made = generator(noise)
    assert made.shape == (64, *shape)
    axes = (0, 2, 3) if len(shape) == 3 else (0,)
    if not any(side % 4 for side in shape[1:]):  # otherwise some of what was scaled is cropped
        torch.testing.assert_close(made.mean(axes), torch.zeros(made.mean(axes).shape), atol=1e-4, rtol=0)
        torch.testing.assert_close(made.var(axes, correction=0), torch.ones(made.mean(axes).shape), atol=0.1, rtol=0)
    made.square().sum().backward()
    assert all(parameter.grad is not None for parameter in generator.parameters())


def test_a_generator_in_prediction_mode_treats_every_sample_alone():
    generator = input_generator(6, (1, 8, 8), 4)
    noise = torch.randn(5, 6)
    whole = generated(generator, noise)
    assert torch.allclose(generated(generator, noise[:1]), whole[:1], atol=1e-6)
    assert torch.allclose(generated(generator, noise, chunk=2), whole, atol=1e-6)
    assert generator.training and not whole.requires_grad


def test_features_depend_on_noise_and_label():
    generator = FeatureGenerator(noise_dim=3, num_classes=4, hidden=6, feature_dim=5).eval()
    noise = torch.rand(2, 3)
    z = generator(noise, torch.tensor([1, 1]))
    assert z.shape == (2, 5) and not torch.equal(z[0], z[1])
    # The first layer sees the noise and then a 1 at the place of the label.
    by_hand = torch.cat([noise, torch.tensor([[0.0, 1, 0, 0]] * 2)], dim=1)
    hidden = generator.norm(by_hand @ generator.hidden.weight.T + generator.hidden.bias).relu()
    torch.testing.assert_close(z, generator.output(hidden))
    assert not torch.allclose(z, generator(noise, torch.tensor([2, 1])))


def test_counters_do_not_travel():
    state = averaged_state(FeatureGenerator(3, 4, 6, 5))
    assert sum(tensor.numel() for tensor in state.values()) == 7 * 6 + 6 + 4 * 6 + 6 * 5 + 5
    assert not any("num_batches" in name for name in state)
    images = averaged_state(input_generator(6, (1, 8, 8), 4))
    convolutions = 9 * (8 * 8 + 8 * 4 + 4 * 1)
    assert sum(math.prod(tensor.shape) for tensor in images.values()) == 7 * 32 + convolutions + 4 * (8 + 8 + 4 + 1)
