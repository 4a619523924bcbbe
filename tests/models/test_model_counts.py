"""Parameter counts of the papers' tables: the cheapest check that a layout is theirs."""

from __future__ import annotations

import pytest
import torch

from polyfed.models import Decoder, build, count_parameters


def count(spec, shape=(3, 32, 32), classes=10):
    with torch.device("meta"):
        return count_parameters(build(spec, shape, classes))


FEDIN = ["resnet10", "resnet14", "resnet18", "resnet22", "resnet26"]


@pytest.mark.parametrize("stem", ["3x3", "fedin", "pool"])
def test_fedin_family_with_3x3_stem(stem):
    counts = [count(f"{name}:stem={stem}") for name in FEDIN]
    assert counts == [4_903_242, 10_804_554, 11_173_962, 17_075_274, 17_444_682]
    assert round(sum(counts) / 5e6, 2) == 12.28


def test_fedin_family_with_7x7_stem():
    counts = [count(f"{name}:stem=7x7") for name in FEDIN]
    assert [round(number / 1e6, 3) for number in counts] == [4.911, 10.812, 11.182, 17.083, 17.452]
    assert round(sum(counts) / 5e6, 3) == 12.288


@pytest.mark.long
def test_width_slices_beside_fedins_family():
    """FedIN's table has 16.29 million for HeteroFL and FedRolex; ResNet152 in five equal shares of widths has 15.5."""
    counts = [count(f"resnet152:stem=fedin@{0.5**level}") for level in range(5)]
    assert round(sum(counts) / 5e6, 2) == 15.51 and counts == sorted(counts, reverse=True)


def test_fedin_feature_sizes():
    with torch.device("meta"):
        model = build("resnet10:stem=fedin", (3, 32, 32), 10)
        assert model.stem(torch.empty(16, 3, 32, 32)).shape == (16, 64, 8, 8)
        assert model.feature_dim == 512


def test_seven_by_seven_is_the_widespread_layout():
    published = {18: 11_689_512, 34: 21_797_672, 50: 25_557_032, 101: 44_549_160, 152: 60_192_808}
    assert {depth: count(f"resnet{depth}:stem=7x7", (3, 224, 224), 1000) for depth in published} == published


RATES = [1.0, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1]


def test_fedfd_levels_are_the_plain_resnet18():
    counts = [round(count(f"resnet18@{rate}") / 1e6, 3) for rate in RATES]
    assert counts == [11.174, 9.078, 7.176, 5.506, 4.049, 2.798, 1.803, 1.017, 0.458, 0.117]
    with torch.device("meta"):
        widths = [build(f"resnet18@{rate}", (3, 32, 32), 10).feature_dim for rate in RATES]
        level = build("resnet18@0.7", (3, 32, 32), 10)
    assert widths == [512, 461, 410, 359, 308, 256, 205, 154, 103, 52]
    stages = [stage[-1].layers[-1].conv.out_channels for stage in level.stages]
    assert [level.stem.first.conv.out_channels, *stages] == [45, 45, 90, 180, 359]


def test_heterofl_levels_are_the_preactivation_resnet18():
    halves = [round(count(f"resnet18:pre@{0.5**level}") / 1e6, 3) for level in range(5)]
    assert halves == [11.172, 2.797, 0.701, 0.176, 0.045]
    tenths = [round(count(f"resnet18:pre@{rate}") / 1e6, 3) for rate in RATES]
    assert tenths == [11.172, 9.077, 7.174, 5.505, 4.048, 2.797, 1.803, 1.017, 0.457, 0.117]


def test_wide_resnets_of_fedmd_global():
    table = {10: 79_486, 16: 176_926, 22: 274_366, 28: 371_806, 34: 469_246, 40: 566_686}
    assert {depth: count(f"wrn-{depth}-1", classes=30) for depth in table} == table
    clients = [10] * 6 + [16] * 4 + [22] * 4 + [28] * 4 + [34] * 2
    assert sum(table[depth] for depth in clients) == pytest.approx(4.708e6, abs=500)


def test_small_nets():
    assert count("cnn2", (1, 28, 28)) == 1_663_370  # the figure of the FedAvg paper
    assert count("convnet") == 3 * 9 * 32 + 32 + 32 * 9 * 64 + 64 + 64 * 9 * 64 + 64 + 1024 * 64 + 64 + 650
    assert count("mlp:1", (1, 8, 8)) == 64 * 100 + 100 + 1010
    assert count("mlp:3x20", (2,), 2) == 60 + 2 * 420 + 42
    with torch.device("meta"):
        widths = [build(f"cnn:16-32-64@{rate}", (1, 14, 14), 10).feature_dim for rate in (1, 0.7, 0.4)]
    assert widths == [64, 45, 26]


@pytest.mark.parametrize(
    ("latent", "shape", "start", "parameters"),
    [
        (980, (1, 28, 28), (20, 7, 7), 76_899),
        (4096, (3, 32, 32), (64, 8, 8), 91_625),
        (4096, (3, 64, 64), (16, 16, 16), 77_801),
        (128, (1, 16, 16), (8, 4, 4), 8 * 32 * 9 + 32 + 32_832 + 36_928 + 1_025 + 322),
    ],
)
def test_decoders_of_fedvtc(latent, shape, start, parameters):
    decoder = Decoder(latent, shape)
    assert decoder.start == start
    assert count_parameters(decoder) == parameters
    assert decoder(torch.randn(2, latent)).shape == (2, *shape)
