"""Networks of other packages by name, and heads that are found without being named."""

from __future__ import annotations

import logging
import sys

import numpy as np
import pytest
import torch
from torch import nn

import polyfed as pf
from polyfed.core.errors import InputError
from polyfed.core.shape import InputShape
from polyfed.models import build, check_model

TEXT = InputShape((6,), words=20)


class Named(nn.Module):
    def __init__(self, name, own=False):
        super().__init__()
        self.first = nn.Linear(4, 5)
        self.add_module(name, nn.Linear(5, 3))
        self.name = name
        if own:
            self.get_classifier = lambda: getattr(self, name)

    def forward(self, x):
        return getattr(self, self.name)(self.first(x).relu())


@pytest.mark.parametrize(("name", "own"), [("fc", False), ("classifier", False), ("score", False), ("strange", True)])
def test_a_head_is_found_and_told(name, own, caplog):
    caplog.set_level(logging.INFO, "polyfed.models")
    model = pf.adapt(Named(name, own), input_shape=(4,))
    assert model.head_name == name and model.feature_dim == 5 and f"is '{name}'" in caplog.text
    assert pf.adapt(Named(name, own)).head_name == name  # also without trying it out


def test_the_right_one_of_several_is_found():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.classifier = nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3))
            self.fc = nn.Linear(4, 3)  # not used

        def forward(self, x):
            return self.classifier[2](self.classifier[1](self.classifier[0](x)))

    assert pf.adapt(Two(), input_shape=(4,)).head_name == "classifier.2"


def test_no_head_is_told():
    with pytest.raises(InputError, match=r"no linear layer that could be its head"):
        pf.adapt(nn.Sequential(nn.ReLU()))
    with pytest.raises(InputError, match=r"No head of Sequential was found among 0: "):
        pf.adapt(nn.Sequential(nn.Linear(4, 3), nn.Softmax(1)), input_shape=(4,))


@pytest.mark.parametrize(
    ("spec", "shape", "package"),
    [("timm:resnet18", (3, 32, 32), "timm"), ("torchvision:resnet18", (3, 32, 32), "torchvision.models"),
     ("hf:distilbert", TEXT, "transformers")],
)  # fmt: skip
def test_a_package_that_is_not_there_is_told(spec, shape, package, monkeypatch):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(InputError, match=r"pip install 'polyfed\[|does not work with"):
        build(spec, shape, 3)


@pytest.mark.parametrize(
    ("spec", "shape", "message"),
    [
        ("hf:distilbert", (4,), "takes texts"),
        ("timm:resnet18", TEXT, "needs images"),
        ("timm", (3, 8, 8), "needs a name"),
        ("torchvision:resnet18", (1, 8, 8), "three channels"),
        ("hf:distilbert@0.5", TEXT, "no width rates"),
    ],
)
def test_wrong_uses_are_told(spec, shape, message):
    with pytest.raises(InputError, match=message):
        build(spec, shape, 3)


SMALL = "hf:distilbert,dim=16,n_layers=1,n_heads=2,hidden_dim=16"


def test_a_small_distilbert_from_its_configuration():
    pytest.importorskip("transformers")
    model = build(SMALL, TEXT, 3)
    assert model.head_name == "model.classifier" and model.feature_dim == 16
    check_model(model, TEXT)
    x = torch.tensor([[3, 4, 0, 0, 0, 0]])
    with torch.no_grad():
        before = model.eval()(x)
        model.model.model.get_input_embeddings().weight[0] = 9.0
        torch.testing.assert_close(model(x), before)  # nobody looks at padding


def test_a_distilbert_and_a_network_of_the_zoo_learn_together():
    pytest.importorskip("transformers")
    texts = [f"{['good', 'bad'][row % 2]} thing {row % 3}" for row in range(60)]
    clients = pf.split(pf.load((texts, np.arange(60) % 2)), clients=2, public=12)
    training = pf.Training(optimizer="adam", lr=0.01, epochs=4)
    result = pf.run("fedmd", clients, models=[SMALL, "cnn1d:1x8"], rounds=1, training=training)
    assert result.accuracy()["mean"] > 0.8


def test_networks_of_timm_and_torchvision():
    pytest.importorskip("timm", exc_type=Exception)  # it may be there for another torch
    for spec, head in (("timm:resnet18", "fc"), ("torchvision:resnet18", "fc")):
        model = build(spec, (3, 32, 32), 4)
        assert model.head_name == head and model.feature_dim == 512


def test_a_type_that_transformers_does_not_know_is_one_sentence():
    pytest.importorskip("transformers")
    with pytest.raises(InputError, match="knows no type 'nosuch'") as found:
        build("hf:nosuch", InputShape((8,), words=50), 2)
    assert len(str(found.value)) < 200
