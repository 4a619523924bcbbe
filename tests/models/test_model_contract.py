"""The contract itself: what is checked, said and counted."""

from __future__ import annotations

import pytest
import torch
from model_examples import make
from torch import nn

from polyfed.core.errors import InputError
from polyfed.models import Model, check_model, count_parameters, parameter_parts, properties, signature
from polyfed.models.contract import cut_shapes


class Own(nn.Module):
    """A user's model that keeps the contract by itself, without a split."""

    def __init__(self, feature_dim=6, num_classes=3):
        super().__init__()
        self.body = nn.Sequential(nn.Flatten(), nn.Linear(16, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Dropout(0.5))
        self.head = nn.Linear(6, 3)
        self.feature_dim, self.num_classes = feature_dim, num_classes

    def features(self, x):
        return self.body(x)

    def forward(self, x):
        return self.head(self.features(x))


class Softmax(Own):
    def forward(self, x):
        return super().forward(x).softmax(1)


class Leaky(Own):
    """Its middle knows something that the stem does not give."""

    def stem(self, x):
        return x

    def middle(self, s):
        return self.body(s) + 1


def test_a_plain_module_of_the_right_form_is_enough():
    model = Own()
    check_model(model, (1, 4, 4))
    assert isinstance(model, Model) and not isinstance(nn.Linear(2, 2), Model)
    assert isinstance(make("mlp:1x4"), Model)
    assert properties(model) == {"features", "batchnorm", "dropout"}
    assert properties(nn.Linear(2, 2)) == {"mlp"}
    assert properties(nn.Conv2d(1, 1, 1)) == frozenset()
    assert "dropout" not in properties(nn.Dropout(0.0))
    assert parameter_parts(model, (16,))["body.2.weight"] == "features"


def test_optional_members_are_seen_by_presence():
    model = Leaky()
    model.exits = lambda x: [model(x)]
    model.width_groups = dict
    assert properties(model) >= {"split3", "exits", "width"}


def test_what_enters_and_leaves_the_middle_is_measured():
    assert cut_shapes(make("cnn:4-8"), (1, 8, 8)) == {"s_in": (4, 4, 4), "s_out": (8,)}
    assert cut_shapes(Own(), (1, 4, 4)) == {}
    parts = nn.Linear(2, 2)
    parts.stem, parts.middle = nn.Linear(2, 3), nn.Linear(5, 2)  # of a user's own, which do not follow each other
    assert cut_shapes(parts, (2,)) == {}


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (nn.Linear(16, 3), "no 'features' or 'head' .* pf.adapt"),
        (Own(feature_dim=5), "feature_dim says"),
        (Own(num_classes=4), "num_classes says"),
        (Softmax(), "softmax"),
        (Leaky(), "middle.stem"),
        (Own, "instance, not a class"),
    ],
)
def test_what_is_wrong_is_said(model, words):
    with pytest.raises(InputError, match=words):
        check_model(model, (1, 4, 4))


def test_a_wrong_input_shape_is_said():
    with pytest.raises(InputError, match="inputs of shape"):
        check_model(Own(), (1, 5, 5))


def test_checking_leaves_no_trace():
    model = Own().train()
    model.body[2].eval()
    model.body[1].weight.requires_grad_(False)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    random_state = torch.get_rng_state()
    check_model(model, (1, 4, 4))
    parameter_parts(model, (1, 4, 4))
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), random_state)
    assert model.training and model.body[4].training and not model.body[2].training
    assert not model.body[1].weight.requires_grad and model.head.weight.requires_grad
    assert all(parameter.grad is None for parameter in model.parameters())


def test_signature_names_the_architecture():
    assert signature(make("mlp:1x4", (2,), 3)) == {
        "stem.linear.weight": ((4, 2), "float32"),
        "stem.linear.bias": ((4,), "float32"),
        "head.weight": ((3, 4), "float32"),
        "head.bias": ((3,), "float32"),
    }
    assert signature(make("cnn:4,bn"))["stem.norm.num_batches_tracked"] == ((), "int64")
    assert signature(make("resnet10:w4")) == signature(make("resnet10:w4", seed=3))
    assert signature(make("resnet10:w4")) != signature(make("resnet10:w4@0.5"))
    assert count_parameters(make("mlp:1x4", (2,), 3)) == 8 + 4 + 12 + 3
