"""FedVTC's decoder beyond its counts."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.func import functional_call, stack_module_state, vmap

from polyfed.core.errors import InputError
from polyfed.models import Decoder
from polyfed.models.vtc import start_size


@pytest.mark.parametrize(("shape", "latent"), [((1, 8, 8), 8), ((1, 14, 14), 32), ((3, 30, 17), 2 * 8 * 5)])
def test_any_image_size(shape, latent):
    decoder = Decoder(latent, shape)
    images = decoder(torch.randn(3, latent))
    assert images.shape == (3, *shape)
    assert images.min() >= 0 and images.max() <= 1
    images.sum().backward()
    assert all(parameter.grad is not None for parameter in decoder.parameters())
    assert decoder.eval()(torch.randn(1, latent)).shape == (1, *shape)


def test_layers_are_those_of_the_paper():
    decoder = Decoder(980, (1, 28, 28), c0=20)
    layout = [(layer.conv.kernel_size[0], layer.conv.stride[0], layer.conv.padding[0]) for layer in decoder.layers]
    assert layout == [(3, 1, 1), (4, 2, 1), (3, 1, 1), (4, 2, 1)]
    assert [type(layer.activation) for layer in decoder.layers] == [nn.LeakyReLU] * 3 + [nn.Sigmoid]
    assert all(isinstance(layer.norm, nn.BatchNorm2d) for layer in decoder.layers)


def test_start_is_rounded_up():
    assert start_size((1, 14, 13)) == (4, 4)


@pytest.mark.parametrize(("latent", "c0"), [(100, None), (3, None), (64, 3)])
def test_latent_must_fit(latent, c0):
    with pytest.raises(InputError, match="use for instance"):
        Decoder(latent, (1, 16, 16), c0)


def test_stacked_decoders_equal_one_by_one():
    decoders = [Decoder(8, (1, 8, 8)).double() for _ in range(2)]
    latent = torch.randn(2, 5, 8, dtype=torch.float64)
    parameters, buffers = stack_module_state(decoders)
    together = vmap(lambda p, b, z: functional_call(decoders[0], (p, b), (z,)))(parameters, buffers, latent)
    for place, decoder in enumerate(decoders):
        torch.testing.assert_close(together[place], decoder(latent[place]), rtol=1e-5, atol=1e-5)
