"""`split` and `Clients`: what each party gets, what is kept apart, and what is refused."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from image_tables import image_table

from polyfed.core.errors import InputError
from polyfed.core.samples import Samples
from polyfed.data import IID, ByColumn, Clients, Dirichlet, LabelSets, from_recipe, load, split


def toy(count=40, classes=4, seed=0, **options):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(count, 3)).astype(np.float32)
    return load((x, np.arange(count) % classes), test=(x[:8], np.arange(len(x[:8])) % classes), **options)


def rows_of(samples):
    return [] if samples is None else samples.index.tolist()


def test_every_row_goes_to_one_place():
    clients = split(toy(), clients=5, validation=0.25, public=6, seed=3)
    places = [rows_of(s) for s in (*clients.train, *clients.validation, clients.public)]
    assert sorted(row for place in places for row in place) == list(range(40))
    assert [len(place) for place in places] == [5] * 4 + [4] + [2] * 5 + [6]  # 34 rows: 7, 7, 7, 7, 6
    assert len(clients) == 5 and len(clients.test) == 8 and len(clients.public) == 6


def test_storage_is_shared():
    data = toy()
    clients = split(data, clients=4)
    assert all(samples.x is data.train.x for samples in clients.train)
    assert clients.test is data.test


def test_same_seed_same_split_other_seed_other_split():
    first, again, other = (split(toy(), clients=4, by="dirichlet:0.5", seed=seed) for seed in (1, 1, 2))
    assert first.fingerprint == again.fingerprint != other.fingerprint
    assert [rows_of(s) for s in first.train] == [rows_of(s) for s in again.train]


def test_fingerprint_sees_data_validation_and_public():
    base = split(toy(), clients=4).fingerprint
    prints = {
        split(toy(seed=1), clients=4).fingerprint,
        split(toy(), clients=4, validation=0.2).fingerprint,
        split(toy(), clients=4, public=4).fingerprint,
        split(toy(), clients=4, public=np.zeros((5, 3), dtype=np.float32)).fingerprint,
    }
    assert len(prints) == 4 and base not in prints


def test_validation_does_not_depend_on_other_clients():
    """Client 0 keeps its validation rows when the number of its neighbours' rows changes nothing for it."""
    parts = [(np.ones((6, 2)) * c, np.zeros(6)) for c in range(3)]
    three = Clients.from_parts(parts, test=parts[0], validation=0.5)
    one = Clients.from_parts(parts[:1], test=parts[0], validation=0.5)
    assert rows_of(three.validation[0]) == rows_of(one.validation[0])


@pytest.mark.parametrize("share", [-0.5, 1.0, 7.0])
def test_separate_parts_refuse_an_impossible_share_for_validation(share):
    part = np.zeros((4, 2), np.float32), np.array([0, 1, 0, 1])
    with pytest.raises(InputError, match=f"validation={share}"):
        Clients.from_parts([part], test=part, validation=share)


def test_a_client_always_keeps_a_training_sample():
    clients = split(toy(10), clients=10, validation=0.9)
    assert all(len(samples) == 1 for samples in clients.train)
    assert clients.validation == (None,) * 10


def test_label_counts_and_table():
    data = toy(12, classes=3)
    clients = split(data, clients=2, by=LabelSets(1, 1), seed=0)
    counts = clients.label_counts()
    assert counts.shape == (2, 3) and (counts.sum(1) == 4).all() and ((counts > 0).sum(1) == 1).all()
    text = clients.describe()
    assert "100%" in text and "own data: 2 clients, 8 training samples, 8 for test" in text
    assert "and 1 more" in clients.describe(most=1)
    assert clients.rows()[0]["classes"] == 1
    assert clients.client(1) == (clients.train[1], None)
    with pytest.raises(InputError, match="no client 2"):
        clients.client(2)


def test_one_class_and_one_sample_are_allowed():
    clients = split(toy(5, classes=1, num_classes=3), clients=5)
    assert clients.label_counts().tolist() == [[1, 0, 0]] * 5


def test_ten_clients_unless_the_groups_say_otherwise(parquet_folder):
    folder, _ = parquet_folder
    assert len(split(toy())) == 10
    assert len(split(str(folder), by=ByColumn("hospital"))) == 4
    assert len(split(str(folder), clients=2, by="column:hospital")) == 2


def test_min_size_reaches_the_partitioner():
    clients = split(toy(), clients=5, by=Dirichlet(0.01), min_size=6)
    assert min(len(samples) for samples in clients.train) >= 6
    assert clients.recipe["by"] == "dirichlet:0.01,min=6"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"clients": 41}, r"more clients \(41\) than samples \(40\)"),
        ({"clients": 0}, "clients=0"),
        ({"clients": 8, "min_size": 6}, "lower min_size to 5 or clients to 6"),
        ({"clients": 3, "by": "labels:1-1", "min_size": 11}, "Client 0 would get only 10 samples"),
        ({"by": "dirichlet:0"}, "alpha=0.0"),
        ({"by": "column:ward"}, "no column 'ward'"),
        ({"validation": 1.0}, "validation=1.0"),
        ({"validation": -0.1}, "validation=-0.1"),
        ({"public": 40}, "leave some to the clients"),
        ({"public": 0}, "at least 1"),
        ({"public": 1.5}, "fraction between 0 and 1"),
        ({"public": True}, "fraction between 0 and 1"),
        ({"public": "digits:5000"}, "only 1400 rows"),
        ({"public": "digits:10"}, "cannot be turned into"),
        ({"public": "digit:10"}, "did you mean 'digits'"),
        ({"public": 35, "clients": 6}, r"more clients \(6\) than samples \(5\)"),
    ],
)
def test_refusals(options, message):
    with pytest.raises(InputError, match=message):
        split(toy(), **{"clients": 4, **options})


def test_public_fraction_and_text():
    assert len(split(toy(), clients=4, public=0.25).public) == 10
    assert len(split(toy(), clients=4, public="7").public) == 7
    assert len(split(toy(), clients=4, public="0.25").public) == 10


def test_public_set_is_brought_to_shape_and_colour(parquet_folder):
    """Grey digits of 8x8 serve RGB clients of 4x4, normalized as the clients are."""
    table, _ = image_table(12, size=(4, 4), color=True)
    data = load(table, test=table)
    clients = split(data, clients=2, public="digits:50")
    assert clients.public.x.shape == (50, 3, 4, 4) and clients.public.x.dtype == torch.uint8
    assert clients.public_classes == 10
    digits = load("digits")
    picked = split(data, clients=2, public=digits).public
    mean = torch.nn.functional.avg_pool2d(digits.train.x[:1].float(), 2) + 0.5
    assert torch.equal(picked.x[0, 2], mean.to(torch.uint8)[0, 0])
    scaling = data.train.scaling
    assert picked.scaling.mean == scaling.mean and picked.scaling.divisor == 16.0


def test_public_colour_images_become_grey_for_digits():
    table, images = image_table(6, size=(8, 8), color=True)
    clients = split("digits", clients=2, public=load(table, test=table))
    grey = (images[0] * np.array([0.299, 0.587, 0.114])).sum(-1)
    assert np.abs(clients.public.x[0, 0].numpy() - grey).max() <= 0.51
    assert clients.public.inputs().min() >= 0 and clients.public.inputs().max() <= 1


def test_public_objects():
    x = np.ones((5, 3), dtype=np.float32)
    assert split(toy(), clients=4, public=x).public_classes is None
    assert split(toy(), clients=4, public=(x, [0, 1, 2, 3, 4])).public_classes == 5
    samples = Samples(torch.ones(5, 3), torch.zeros(5, dtype=torch.int64))
    assert len(split(toy(), clients=4, public=samples).public) == 5


def test_public_from_the_clients_own_set_is_refused():
    with pytest.raises(InputError, match="give public=N"):
        split("digits", clients=4, public="digits:10")


def test_recipe_builds_the_same_clients():
    data = load("digits", limit=(200, 50), seed=4)
    clients = split(data, clients=6, by="dirichlet:0.3,min=2", seed=5, validation=0.1, public=20)
    recipe = json.loads(json.dumps(clients.recipe))
    assert recipe == clients.recipe
    assert from_recipe(recipe).fingerprint == clients.fingerprint


def test_recipe_of_objects_says_so():
    clients = split(toy(), clients=4, by=IID())
    assert clients.recipe["repeatable"] is False
    with pytest.raises(InputError, match="objects in memory"):
        from_recipe(clients.recipe)


def test_from_parts():
    parts = [(np.full((3, 2), 0.0), [0, 0, 1]), (torch.full((2, 2), 10.0), torch.tensor([2, 2]))]
    clients = Clients.from_parts(parts, test=(np.zeros((2, 2)), [0, 1]), num_classes=4, name="wards")
    assert clients.label_counts().tolist() == [[2, 1, 0, 0], [0, 0, 2, 0]]
    assert clients.num_classes == 4 and clients.input_shape == (2,) and clients.name == "wards"
    everything = torch.cat([samples.inputs() for samples in clients.train])
    assert torch.allclose(everything.mean(0), torch.zeros(2), atol=1e-6)


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ([], "no clients"),
        ([(np.zeros((1, 2)), [0]), (np.zeros((0, 2)), [])], "Client 1 has no samples"),
        ([(np.zeros((1, 2)), [0]), (np.zeros((1, 3)), [0])], "Client 1 has samples of shape"),
        ([(np.zeros((2, 2)), [0])], "Client 0 has 2 inputs but 1 labels"),
        ([(np.full((1, 2), np.nan), [0])], "NaN"),
        ([(np.zeros((1, 2)), [7])], r"outside 0\.\.1"),
    ],
)
def test_from_parts_refusals(parts, message):
    with pytest.raises(InputError, match=message):
        Clients.from_parts(parts, test=(np.zeros((1, 2)), [0]), num_classes=2)


def test_from_parts_has_no_rows_to_hold_out():
    part = (np.zeros((4, 2)), [0, 1, 0, 1])
    with pytest.raises(InputError, match="no common rows"):
        Clients.from_parts([part], test=part, public=2)
