"""Blocks and stacks by the names of tensors."""

import pytest

from polyfed.core.depth import place_of, stacks_of


@pytest.mark.parametrize(
    ("name", "place"),
    [
        ("layers.2.linear.weight", ("layers", 2, "linear.weight")),
        ("stages.1.0.layers.1.conv.weight", ("stages.1", 0, "layers.1.conv.weight")),
        ("layer3.10.conv2.weight", ("layer3", 10, "conv2.weight")),
        ("resnet10:w4::stages.1.0.layers.1.conv.weight", ("resnet10:w4::stages.1", 0, "layers.1.conv.weight")),
        ("0.weight", ("", 0, "weight")),
        ("scales.3", ("scales", 3, "")),
        ("stem.first.conv.weight", None),
        ("head.weight", None),
    ],
)
def test_where_a_tensor_is(name, place):
    assert place_of(name) == place


def test_stacks_hold_blocks_in_the_order_of_their_names():
    names = ["stem.weight", "layers.0.w", "layers.0.b", "layers.1.w", "stages.0.0.w", "stages.1.0.w"]
    assert stacks_of(names) == {
        "layers": {0: {"w": "layers.0.w", "b": "layers.0.b"}, 1: {"w": "layers.1.w"}},
        "stages.0": {0: {"w": "stages.0.0.w"}},
        "stages.1": {0: {"w": "stages.1.0.w"}},
    }
