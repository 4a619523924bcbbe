"""Model strings and the registry."""

from __future__ import annotations

import pytest
import torch

from polyfed.core.errors import InputError
from polyfed.models import build, describe, names, register
from polyfed.models.registry import _registry


def test_every_example_is_described():
    rows = describe()
    assert [row["name"] for row in rows] == names()
    assert all(
        (row["parameters"] or 1) > 0 and row["summary"] and row["example"].startswith(row["name"]) for row in rows
    )
    torch.manual_seed(0)
    before = torch.get_rng_state()
    describe((1, 8, 8), 3)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("resnet19", "did you mean 'resnet1"),
        ("transformers9", "Unknown model"),
        ("resnet-18", "did you mean 'resnet18'"),
        ("resnet18:w", "known are: .*w<width>"),
        ("resnet18:w16,bn", "Unknown option for the model 'resnet18' 'bn'"),
        ("resnet50:pre", "Unknown option"),
        ("resnet18:stem=fedinn", "did you mean 'fedin'"),
        ("resnet18:w16,", "empty"),
        ("resnet", "blocks per stage"),
        ("resnet:18", "blocks per stage"),
        ("cnn:16-x", "Unknown option"),
        ("cnn:0-4", "Unknown option"),
        ("mlp:0", "Unknown option"),
        ("cnn2:16", "Unknown option"),
        ("wrn-12-1", "wrn-16-1"),
        ("wrn", "wrn-16-1"),
        ("mlp:2@0", "not in"),
        ("mlp:2@1.5", "not in"),
        ("mlp:2@half", "'half'"),
        ("mlp:2@nan", "not in"),
        ("mlp:2@", "not in"),
        ("", "Unknown model"),
    ],
)
def test_wrong_strings_are_explained(spec, words):
    with pytest.raises(InputError, match=words):
        build(spec, (1, 8, 8), 10)


@pytest.mark.parametrize(
    ("spec", "shape", "classes", "words"),
    [("cnn", (64,), 10, "an mlp"), ("resnet10:w4", (8, 8), 10, "an mlp"), ("mlp", (), 10, "shape"),
     ("mlp", (0,), 10, "shape"), ("mlp", (4,), 0, "class")],
)  # fmt: skip
def test_wrong_sizes_are_explained(spec, shape, classes, words):
    with pytest.raises(InputError, match=words):
        build(spec, shape, classes)


def test_spaces_and_order_of_options_do_not_matter():
    one, other = build("resnet10:w4,stem=fedin@0.5", (1, 8, 8), 3), build(" resnet10:stem=fedin, w4@.5", (1, 8, 8), 3)
    assert one.family == other.family
    assert one.state_dict().keys() == other.state_dict().keys()


def test_own_models_can_be_registered():
    try:

        @register("own", example="own:3", summary="one linear layer", options=("<n>",))
        def build_own(options, input_shape, num_classes, rate):
            assert options.take(r"\d")[0] == "3"
            return torch.nn.Linear(input_shape[0], num_classes)

        assert build("own:3", (5,), 2)(torch.ones(1, 5)).shape == (1, 2)
        with pytest.raises(InputError, match="registered already"):
            register("own", example="", summary="")(build_own)
    finally:
        _registry.pop("own", None)
