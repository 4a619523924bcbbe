"""Labels of any kind become classes 0..C-1 that are the same in every part, and keep what they were as names."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from image_tables import image_table

from polyfed.core.errors import InputError
from polyfed.core.samples import Samples
from polyfed.data import Clients, load, split

X = np.arange(24, dtype=np.float32).reshape(12, 2)


def pair(*labels):
    return X[: len(labels)], np.array(labels)


def test_labels_from_one_are_as_many_classes_as_there_are():
    data = load(pair(1, 2, 3, 1, 2, 3), test=pair(3, 1))
    assert data.num_classes == 3 and data.class_names == ("1", "2", "3")
    assert data.train.y.tolist() == [0, 1, 2, 0, 1, 2] and data.test.y.tolist() == [2, 0]
    assert "labels 1 to 3 are the classes 0 to 2" in repr(data)
    assert "labels 1 to 3 are the classes 0 to 2" in split(data, clients=2).describe()


def test_labels_from_zero_are_left_alone():
    data = load(pair(0, 1, 2, 0, 1, 2), test=pair(0, 1))
    assert data.class_names == ("0", "1", "2") and data.train.y.tolist() == [0, 1, 2, 0, 1, 2] and data.notes == ()


def test_gaps_are_closed_in_all_parts_alike():
    data = load(pair(3, 7, 20, 3, 7, 20, 3, 3), test=pair(20, 20))
    assert data.class_names == ("3", "7", "20")
    assert data.train.y.tolist() == [0, 1, 2, 0, 1, 2, 0, 0] and data.test.y.tolist() == [2, 2]
    assert "labels 3, 7, 20 are the classes 0 to 2" in repr(data)
    clients = Clients.from_parts([pair(1, 1, 2), pair(2, 2, 4), pair(4, 4)], test=pair(4, 2))
    assert clients.class_names == ("1", "2", "4")
    assert clients.label_counts().tolist() == [[2, 1, 0], [0, 2, 1], [0, 0, 2]]
    assert clients.test.labels().tolist() == [2, 1]


def test_a_cached_set_keeps_its_names_and_what_was_said(tmp_path):
    import datasets

    content = {"age": [1.0, 2, 3, 4, 5, 6], "label": [1, 2, 1, 2, 1, 2]}
    datasets.Dataset.from_dict(content).to_parquet(tmp_path / "train.parquet")
    first, again = (load(tmp_path / "train.parquet", test=tmp_path / "train.parquet") for _ in range(2))
    assert first.class_names == again.class_names == ("1", "2")
    assert first.notes == again.notes != ()


def test_declared_classes_stay_when_some_do_not_occur():
    data = load(pair(2, 4, 2, 4), test=pair(2, 1), num_classes=5)
    assert data.num_classes == 5 and data.train.y.tolist() == [2, 4, 2, 4] and data.test.y.tolist() == [2, 1]
    table, _ = image_table(8, classes=6)
    few = table.filter(lambda row: row["label"] in (1, 4))
    data = load(few, test=few)
    assert data.num_classes == 6 and set(data.train.y.tolist()) == {1, 4}
    assert load("digits", limit=3).num_classes == 10
    named = Clients.from_parts([pair(2, 1)], test=pair(1, 2), class_names=["a", "b", "c"])
    assert named.train[0].labels().tolist() == [2, 1]


def test_declared_classes_numbered_from_one():
    data = load(pair(1, 3, 5, 1), test=pair(1, 3), num_classes=5)
    assert data.class_names == ("1", "2", "3", "4", "5") and data.train.y.tolist() == [0, 2, 4, 0]
    clients = Clients.from_parts([pair(1, 3), pair(3, 3)], test=pair(3, 1), class_names=["a", "b", "c"])
    assert clients.class_names == ("a", "b", "c") and clients.train[1].labels().tolist() == [2, 2]


def test_names_of_the_classes_may_be_given_to_load():
    data = load((X[:4], ["well", "ill", "well", "ill"]), test=(X[:1], ["dead"]), class_names=["dead", "ill", "well"])
    assert data.train.y.tolist() == [2, 1, 2, 1] and data.test.y.tolist() == [0]
    with pytest.raises(
        InputError, match=r"'odd' in row 1 of the training set .* not one of the classes dead, ill, well"
    ):
        load((X[:2], ["ill", "odd"]), test=(X[:1], ["ill"]), class_names=["dead", "ill", "well"])


@pytest.mark.parametrize(
    ("labels", "test", "message"),
    [
        ([0, 1, 0, 1], [0, 2], r"Label 2 in row 1 of the test set .* never occurs in its training set"),
        ([1, 2, 1, 2], [1, 0], r"Label 0 in row 1 of the test set .* never occurs"),
        (["ill", "well"], ["ill", "Ill"], r"Label 'Ill' in row 1 of the test set .* never occurs"),
        ([0, -1, 0, 1], [0], r"Label -1 in row 1 of the training set .* negative"),
        ([0, 1, 0, 1], [0, -2], r"Label -2 in row 1 of the test set .* negative"),
        ([0, 1.5, 0, 1], [0], r"Label 1.5 in row 1 of the training set .* whole numbers"),
        ([0, np.nan, 0, 1], [0], r"Row 1 of .* has no label"),
        ([101.0, 230.0, 77.0, 230.0, 12.0], [77.0], r"4 different numbers in 5 rows"),
        (["ill", None, "well"], ["ill"], r"Row 1 of the training set .* has no label"),
        ([0, None, 1], [0], r"Row 1 of the training set .* has no label"),
        ([[0], [1, 2]], [0], r"labels of the training set .* one class number per row"),
        ([np.datetime64("2020-01-01")] * 2, [0], "datetime64"),
    ],
)
def test_labels_that_cannot_be_used(labels, test, message):
    with pytest.raises(InputError, match=message):
        load((X[: len(labels)], labels), test=(X[: len(test)], test))


def test_a_class_whose_only_row_is_held_out_for_the_test_stays_a_class():
    data = load(pair(1, 2))
    assert data.class_names == ("1", "2") and sorted([*data.train.y.tolist(), *data.test.y.tolist()]) == [0, 1]


def test_missing_labels_are_refused_also_when_the_test_part_is_held_out():
    for labels in (["a", "b", None], [0, 1, None]):
        with pytest.raises(InputError, match="Row 2 of the training set of 'own data' has no label"):
            load((X, labels * 4))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_classes": 0}, "num_classes=0 is not possible"),
        ({"num_classes": "3"}, "num_classes='3' is not possible"),
        ({"num_classes": 2.5}, "num_classes=2.5 is not possible"),
        ({"class_names": "abc"}, "class_names='abc' is one text"),
        ({"class_names": ["a", "a", "b"]}, "class_names has 'a' twice"),
        ({"class_names": ["a", "b", "c"], "num_classes": 2}, "3 class names but num_classes=2"),
        ({"class_names": ["a", "b"]}, r"Label 2 in row 2 of the training set of 'own data' is outside 0\.\.1"),
    ],
)
def test_declarations_that_make_no_sense(options, message):
    whole = pair(0, 1, 2)
    with pytest.raises(InputError, match=message):
        Clients.from_parts([whole], test=whole, **options)
    with pytest.raises(InputError, match=message):
        load(whole, test=whole, **options)


def test_numbers_kept_as_objects_are_numbers():
    data = load((X[:4], np.array([10, 2, 10, 2], dtype=object)), test=pair(2, 10))
    assert data.class_names == ("2", "10") and data.train.y.tolist() == [1, 0, 1, 0]


def test_parts_with_names_are_joined_by_name():
    """Each hospital's own list says what its numbers mean: 0 is 'benign' here and 'malign' there."""
    north = load((X[:4], ["benign", "malign"] * 2), test=(X[:1], ["benign"]))
    south = load((X[:4], ["malign", "unclear"] * 2), test=(X[:1], ["malign"]))
    clients = Clients.from_parts([north, south], test=(X[:3], ["malign", "unclear", "benign"]))
    assert clients.class_names == ("benign", "malign", "unclear")
    assert clients.train[0].labels().tolist() == [0, 1, 0, 1] and clients.train[1].labels().tolist() == [1, 2, 1, 2]
    assert clients.test.labels().tolist() == [1, 2, 0]
    low, high = load(pair(1, 2, 1, 2), test=pair(1)), load(pair(0, 2, 0, 2), test=pair(0))
    joined = Clients.from_parts([low, high], test=pair(0, 1, 2))
    assert joined.class_names == ("0", "1", "2")
    assert [part.labels().tolist() for part in joined.train] == [[1, 2, 1, 2], [0, 2, 0, 2]]
    same = Clients.from_parts([north, north.train], test=north.test)
    assert same.class_names == ("benign", "malign") and same.train[1].labels().tolist() == [0, 1, 0, 1]


def test_a_test_table_with_its_classes_in_another_order():
    import datasets

    train, _ = image_table(4)
    test = train.cast_column("label", datasets.ClassLabel(names=["class 1", "class 0"]))  # numbers stay, names change
    data = load(train, test=test)
    assert data.train.y.tolist() == [0, 1, 0, 1] and data.test.y.tolist() == [1, 0, 1, 0]


def test_public_labels():
    data = load(pair(*[0, 1] * 6))
    assert split(data, clients=2, public=pair(1, 2, 3, 1)).public_classes == 3
    for unlabeled in (pair(-1, -1), Samples(torch.zeros(2, 2), torch.tensor([-1, -1]))):
        clients = split(data, clients=2, public=unlabeled)
        assert clients.public_classes is None and clients.public.labels().tolist() == [-1, -1]
    with pytest.raises(InputError, match=r"Label -1 in row 1 of the public set .* negative"):
        split(data, clients=2, public=pair(0, -1))


def test_numbers_that_are_names_mean_those_classes_also_where_some_do_not_occur():
    data = load(pair(1, 2, 1, 2, 1, 2), test=pair(2, 1), class_names=["1", "2", "3"])
    assert data.train.labels().tolist() == [0, 1, 0, 1, 0, 1] and data.class_names == ("1", "2", "3")
    assert load(pair(0, 2, 1), test=pair(2, 1), class_names=["1", "2", "3"]).train.labels().tolist() == [0, 2, 1]


def test_own_test_sets_that_do_not_fit_the_clients_are_named():
    parts = [pair(0, 1, 0, 1)] * 3
    with pytest.raises(InputError, match="test has 2 parts for 3 clients"):
        Clients.from_parts(parts, test=parts[:2])
    other = (np.zeros((4, 3, 5), dtype=np.float32), np.array([0, 1, 0, 1]))
    with pytest.raises(InputError, match="different shapes"):
        Clients.from_parts([parts[0], other], test="own")
