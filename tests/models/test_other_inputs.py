"""Networks for tables, texts and signals: the contract, padding that nobody sees, and federations of different ones."""

from __future__ import annotations

import copy
import pickle

import numpy as np
import pytest
import torch
from model_examples import OTHERS, SIGNAL, TABLE, TEXT, inputs, make
from torch import nn

import polyfed as pf
from polyfed.core.errors import InputError
from polyfed.core.shape import InputShape
from polyfed.engines import batched
from polyfed.models import check_model, properties

every = pytest.mark.parametrize(("spec", "shape"), OTHERS)


@every
def test_parts_make_up_the_whole(spec, shape):
    model, x = make(spec, shape).eval(), inputs(shape)
    with torch.no_grad():
        logits = model(x)
        assert logits.shape == (4, 7) and model.features(x).shape == (4, model.feature_dim)
        assert torch.equal(model.head(model.features(x)), logits)
        torch.testing.assert_close(model(x[:1]), logits[:1], rtol=1e-4, atol=1e-4)
        if "split3" in properties(model):
            assert torch.equal(model.middle(model.stem(x)), model.features(x))
    check_model(model, shape)
    assert "features" in properties(model)


@every
def test_every_parameter_gets_a_gradient(spec, shape):
    model = make(spec, shape).train()
    nn.functional.cross_entropy(model(inputs(shape)), torch.arange(4)).backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
    assert sum(p.grad.abs().sum() > 0 for p in model.parameters()) > 0.7 * len(list(model.parameters()))


@pytest.mark.parametrize("spec", ["transformer:2x16", "lstm:1x8", "cnn1d:2x8"])
def test_padding_changes_nothing(spec):
    model = make(spec, TEXT).eval()
    x = torch.zeros(1, 12, dtype=torch.int64)
    x[0, :5] = torch.tensor([3, 9, 4, 29, 1])
    with torch.no_grad():
        before = model(x)
        model.steps.words.weight[0] = 1000.0  # what padding stands for
        torch.testing.assert_close(model(x), before)
        x[0, 5] = 7
        assert not torch.allclose(model(x), before)


def test_a_value_that_training_does_not_know_is_no_embedding():
    model = make("tabular:1x8", TABLE).eval()
    x = torch.zeros(1, 9)
    stem = model.stem[0](x)
    assert stem.shape == (1, 4 + 1 + 2) and not stem.any()
    x[0, 5] = 1.0  # the second value of the first column
    assert torch.equal(model.stem[0](x)[0, 4:5], model.stem[0].tables[0][1])


@pytest.mark.parametrize(
    ("spec", "shape", "message"),
    [
        ("mlp:1x8", TEXT, "takes numbers, but the inputs are token ids: use transformer"),
        ("cnn:4-8", SIGNAL, r"\(a signal\): use cnn1d"),
        ("cnn:4-8", TEXT, r"\(a text\): use transformer"),
        ("transformer:1x8", (12,), "kind='tokens'"),
        ("tabular:1x8", SIGNAL, "takes rows of a table"),
        ("lstm:1x8", (1, 8, 8), "use a cnn"),
        ("transformer:1x10,heads=3", TEXT, "3 heads cannot share"),
        ("lstm:1x8@0.5", TEXT, "no width rates"),
        ("transformer:1x8,heads=2@0.5", TEXT, "no width rates"),
    ],
)
def test_inputs_that_do_not_fit_are_told(spec, shape, message):
    with pytest.raises(InputError, match=message):
        make(spec, shape)


def test_a_shape_keeps_what_it_knows():
    assert TEXT == (12,) and TEXT.kind == "text" and InputShape(TEXT).words == 30
    for again in (pickle.loads(pickle.dumps(TABLE)), copy.deepcopy(TABLE), InputShape.load(TABLE.dump())):
        assert again == TABLE and again.groups == (2, 3)


# --- federations ---


def texts():
    rng = np.random.default_rng(0)
    said = [["good", "nice", "fine"], ["bad", "poor", "awful"]]
    rows = [
        " ".join([*rng.choice(said[row % 2], 2), *rng.choice(["a", "the"], rng.integers(0, 4))]) for row in range(160)
    ]
    return pf.load((rows, np.arange(160) % 2))


def signals():
    rng = np.random.default_rng(0)
    x = rng.normal(0, 0.3, (160, 2, 24))
    x[np.arange(160) % 2 == 1] += np.sin(np.arange(24) / 2.0)
    return pf.load((x, np.arange(160) % 2))


def tables():
    import pandas

    rng = np.random.default_rng(0)
    table = pandas.DataFrame({"age": rng.normal(50, 10, 160), "ward": rng.choice(list("abc"), 160)})
    table["label"] = np.where(table["ward"] == "a", "ill", "well")
    return pf.load(table)


KINDS = [
    (texts, ["transformer:1x16", "lstm:1x16", "cnn1d:1x16"]),
    (signals, ["cnn1d:1x16", "lstm:1x16", "mlp:1x16"]),
    (tables, ["tabular:2x16", "mlp:1x16"]),
]
ADAM = pf.Training(optimizer="adam", lr=0.02, epochs=3)


@pytest.mark.parametrize(("data", "models"), KINDS)
@pytest.mark.parametrize("method", ["fedavg", "fedproto", "fedmd"])
def test_different_networks_learn_together(data, models, method):
    clients = pf.split(data(), clients=2 * len(models), public=30)
    result = pf.run(method, clients, models=models, rounds=3, training=ADAM)
    assert result.accuracy()["mean"] > 0.8


@pytest.mark.parametrize(
    ("data", "model", "stacks"),
    [
        (texts, "transformer:1x16", True),
        (texts, "lstm:1x8", False),
        (signals, "cnn1d:1x16", True),
        (tables, "tabular:2x8", True),
    ],
)
def test_the_stacked_engine_agrees_or_falls_back(data, model, stacks, monkeypatch):
    clients = pf.split(data(), clients=4)
    stacked = []
    run_stack = batched.run_stack
    monkeypatch.setattr(batched, "run_stack", lambda *given: (stacked.append(1), run_stack(*given))[1])
    runs = [
        pf.run("fedavg", clients, models=model, rounds=1, engine=engine, workers=1)
        for engine in ("sequential", "batched")
    ]
    assert bool(stacked) == stacks
    for name, tensor in runs[0].models[0].state_dict().items():
        torch.testing.assert_close(runs[1].models[0].state_dict()[name], tensor, rtol=1e-4, atol=1e-5)


def test_an_embedding_layer_of_ones_own():
    model = nn.Sequential(nn.EmbeddingBag(40, 8), nn.Linear(8, 2))
    clients = pf.split(texts(), clients=2)
    assert pf.run("fedavg", clients, models=pf.adapt(model, head="1"), rounds=1).accuracy()["mean"] > 0
    numbers = pf.split(pf.load((np.ones((20, 5)), np.arange(20) % 2)), clients=2)
    with pytest.raises(InputError, match="kind='tokens'"):
        pf.run("fedavg", numbers, models=pf.adapt(model, head="1"), rounds=1)
