"""What scales inputs and targets comes from the rows that train, not from those that were kept apart."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
import torch

from polyfed.core.task import Regression
from polyfed.data import ByColumn, Clients, load, split
from polyfed.data.dataset import measure

APART = [{"test": 0.5}, {"validation": 0.4}, {"public": 0.3}, {"test": "own", "validation": 0.2, "public": 20}]


def patients(count=200):
    v = np.arange(count, dtype=float) ** 2
    empty = np.where(np.arange(count) % 5 == 0, np.nan, v)
    frame = {"h": ["n", "s"] * (count // 2), "v": v, "e": empty, "w": ["a", "b", "b", "c"] * (count // 4)}
    return pd.DataFrame({**frame, "y": np.sqrt(v), "c": ["ill", "well", "well", "ill"] * (count // 4)})


def rows_of(clients):
    return torch.cat([part.index for part in clients.train])


@pytest.mark.parametrize("apart", APART, ids=str)
def test_a_table_is_scaled_and_filled_by_the_rows_that_train(apart):
    data = load(patients().drop(columns="y"), label="c")
    clients = split(data, by=ByColumn("h"), **apart)
    inputs = torch.cat([part.inputs() for part in clients.train])
    assert inputs[:, :2].mean(0).abs().max() < 1e-5
    assert (inputs[:, :2].std(0, unbiased=False) - 1).abs().max() < 1e-5
    value, mark = clients.form.places("e").tolist()
    stored = torch.cat([part.x[part.index] for part in clients.train])
    mean = stored[stored[:, mark] == 0, value].double().mean()
    parts = [*clients.train, *clients.validation, *clients.own_test, clients.test, clients.public]
    for part in (part for part in parts if part is not None):
        assert part.scaling == clients.train[0].scaling
        x = part.x[part.rows()]
        assert torch.allclose(x[x[:, mark] > 0, value].double(), mean)
    (column,) = (column for column in clients.form.columns if column.name == "e")
    assert column.fill == pytest.approx(float(mean))
    assert all(part.x is clients.train[0].x for part in (*clients.train, *clients.own_test) if part is not None)


@pytest.mark.parametrize("apart", APART, ids=str)
def test_targets_of_a_regression_are_in_units_of_the_rows_that_train(apart):
    data = load(patients().drop(columns="c"), label="y", task="regression")
    clients = split(data, by=ByColumn("h"), **apart)
    values = torch.cat([part.labels() for part in clients.train]).double()
    assert clients.task.center == pytest.approx([float(values.mean())])
    assert clients.task.spread == pytest.approx([float(values.std(unbiased=False))])


def test_parts_that_keep_rows_apart_are_scaled_by_the_rest_too():
    rng = np.random.default_rng(0)
    parts = [(rng.normal(size=(20, 3)).astype("f") * k, np.arange(20) % 2) for k in (1, 5)]
    clients = Clients.from_parts(parts, test=parts[0], validation=0.3, own_test=0.3)
    expected = measure(clients.train[0].x[rows_of(clients)])
    assert {part.scaling for part in (*clients.train, clients.test, *clients.validation)} == {expected}


def test_what_was_given_stays():
    data = load(patients().drop(columns="c"), label="y", task=Regression((1.0,), (2.0,)))
    assert split(data, by=ByColumn("h"), test="own").task == Regression((1.0,), (2.0,))
    plain = load(patients().drop(columns="c"), label="y", task="regression", normalize=False)
    clients = split(plain, by=ByColumn("h"), test="own")
    assert clients.task == Regression() and clients.test.scaling == plain.test.scaling


def test_sets_without_rows_apart_and_images_are_what_they_were():
    data = load(patients().drop(columns="y"), label="c")
    clients = split(data, clients=4)
    assert clients.test is data.test and clients.form is data.form
    images = load((np.random.default_rng(0).integers(0, 255, (40, 8, 8)).astype("uint8"), np.arange(40) % 2))
    assert split(images, clients=2, test="own").train[0].scaling == images.train.scaling


def test_a_set_from_the_cache_is_scaled_alike(tmp_path):
    patients().drop(columns="c").to_csv(tmp_path / "p.csv", index=False)
    made = [load(tmp_path / "p.csv", label="y", task="regression", cache=tmp_path / "cache") for _ in range(2)]
    first, again = (split(data, by=ByColumn("h"), test="own") for data in made)
    assert first.task == again.task != made[0].task and first.fingerprint == again.fingerprint
