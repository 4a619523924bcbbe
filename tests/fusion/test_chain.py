"""Networks as chains of layers: read, resized, and refused where they are no chains."""

import pytest
import torch
from torch import nn

from polyfed.core.errors import InputError
from polyfed.fusion.chain import layers_of, load_chain, read_chain, shuffled, weight_layers, write_chain
from polyfed.models import build
from polyfed.ops.matching import Matching, match_networks


class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second, self.last = nn.Linear(4, 6), nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x):
        h = self.first(x).relu()
        return self.last(h + self.second(h).relu())


@pytest.mark.parametrize(
    ("spec", "shape", "widths"),
    [
        ("mlp:3x7", (1, 8, 8), [7, 7, 7, 5]),
        ("cnn:4-6", (1, 8, 8), [4, 6, 5]),
        ("convnet", (1, 8, 8), [32, 64, 64, 64, 5]),
        ("cnn2", (3, 8, 8), [32, 64, 512, 5]),
    ],
)
def test_chains_are_read_and_written_back(spec, shape, widths):
    module = build(spec, shape, 5)
    chain = read_chain(module, shape)
    assert [len(layer.weight) for layer in chain] == widths
    again = write_chain(module, chain)
    x = torch.randn((3, *shape), generator=torch.Generator().manual_seed(0))
    assert torch.equal(again(x), module(x))
    assert again.stem is not module.stem


def test_a_channel_owns_its_columns_after_a_flattened_map():
    chain = layers_of(build("convnet", (1, 16, 16), 5))
    assert [layer.weight.shape[2] for layer in chain] == [1, 9, 9, 4, 1]


def test_shuffled_units_give_the_same_function_and_other_weights():
    module = build("cnn2", (1, 8, 8), 5)
    other = write_chain(module, shuffled(read_chain(module, (1, 8, 8)), torch.Generator().manual_seed(3)))
    x = torch.randn((3, 1, 8, 8), generator=torch.Generator().manual_seed(0))
    assert torch.allclose(other(x), module(x), atol=1e-5)
    assert not torch.equal(other.stem.conv.weight, module.stem.conv.weight)


def test_other_widths_are_written_and_loaded_again():
    modules = [build("mlp:2x6", (5,), 3), build("mlp:2x9", (5,), 3)]
    fused = match_networks([layers_of(m) for m in modules], Matching(gamma=50.0), torch.Generator().manual_seed(0))
    wide = write_chain(modules[0], fused.layers)
    assert wide.feature_dim == len(fused.layers[1].weight) == wide.head.in_features
    assert wide.stem.linear.out_features == len(fused.layers[0].weight)
    again = load_chain(modules[1], wide.state_dict())
    x = torch.randn(4, 5)
    assert torch.equal(again(x), wide(x))
    assert modules[0].head.in_features == 6  # the original is untouched


def test_matching_works_on_convolutions():
    module = build("convnet", (1, 8, 8), 4).double()
    generator = torch.Generator().manual_seed(0)
    chain = read_chain(module, (1, 8, 8))
    fused = match_networks(
        [shuffled(chain, torch.Generator().manual_seed(j)) for j in range(3)], Matching(sigma0_2=1e9), generator
    )
    same = write_chain(module, fused.layers)
    x = torch.randn((5, 1, 8, 8), generator=generator, dtype=torch.float64)
    assert [len(layer.weight) for layer in fused.layers] == [32, 64, 64, 64, 4]
    assert torch.allclose(same(x), module(x), atol=1e-6)


@pytest.mark.parametrize(
    ("module", "shape", "words"),
    [
        (Residual(), (4,), "exchanging its hidden units"),
        (
            nn.Sequential(nn.Linear(4, 4), nn.Softmax(1), nn.Unflatten(1, (2, 2)), nn.Flatten(), nn.Linear(4, 2)),
            (4,),
            None,
        ),
        (nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 2)), (4,), "'1' is a LayerNorm"),
        (nn.Sequential(nn.Linear(4, 2)), (4,), "no hidden layer"),
        (build("resnet10:w4", (3, 8, 8), 4), (3, 8, 8), "not applicable"),
        (build("cnn:4-6", (1, 8, 8), 4), None, "pass input_shape"),
        (build("mlp:1x4", (8,), 4), (7,), "cannot take inputs"),
    ],
)
def test_what_is_no_chain_is_refused(module, shape, words):
    if words is None:
        assert len(read_chain(module, shape)) == 2  # softmax treats all units alike
        return
    with pytest.raises(InputError, match=words):
        read_chain(module, shape)


def test_layers_keep_their_names():
    assert [name for name, _ in weight_layers(build("mlp:2x4", (8,), 3))] == ["stem.linear", "layers.0.linear", "head"]
