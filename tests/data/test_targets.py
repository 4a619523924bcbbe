"""Targets of other tasks than classification, and each client's own test data."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import polyfed as pf
from polyfed.core.errors import InputError
from polyfed.data import Clients, from_recipe
from polyfed.data.cache import Store
from polyfed.data.targets import evenly

RNG = np.random.default_rng(0)
X = RNG.normal(size=(60, 4)).astype(np.float32)
VALUES = 100 + 10 * X[:, 0]
LABELS = (X[:, :3] > 0).astype(int)
CLASSES = np.arange(60) % 3


def test_values_keep_their_unit_and_the_task_knows_the_scale():
    data = pf.load((X, VALUES), test=(X[:9], VALUES[:9]), task="regression")
    assert data.train.labels().shape == (60, 1) and data.train.labels().dtype == torch.float32
    assert data.train.labels()[:, 0].tolist() == pytest.approx(VALUES.tolist(), rel=1e-6)
    assert data.task.center[0] == pytest.approx(VALUES.mean(), rel=1e-6)
    assert data.task.spread[0] == pytest.approx(VALUES.std(), rel=1e-5)
    assert data.num_classes == 1
    assert pf.load((X, VALUES), task="regression", normalize=False).task == pf.Regression()
    given = pf.Regression(center=(1.0,), spread=(2.0,))
    assert pf.load((X, VALUES), task=given).task == given


def test_several_values_and_labels():
    assert pf.load((X, X[:, :2]), task="regression").num_classes == 2
    data = pf.load((X, LABELS), task="multilabel", class_names=["a", "b", "c"])
    assert data.class_names == ("a", "b", "c") and data.train.labels().shape[1] == 3
    clients = pf.split(data, 2, by="iid")
    assert clients.label_counts().sum(0).tolist() == data.train.labels().sum(0).tolist()


@pytest.mark.parametrize(
    ("labels", "task", "words"),
    [
        (LABELS, None, r"shape \(60, 3\).*task='multilabel' for zeros and ones, task='regression' for values"),
        (VALUES, None, "not a class number: give whole numbers, or say task='regression'"),
        (np.where(X[:, :2] > 9, 1, 2), "multilabel", "Row 0 of .* has 2 as label 0: task='multilabel' needs 0 or 1"),
        (np.where(np.arange(60) == 7, np.nan, VALUES), "regression", "Row 7 of .* has nan as target 0"),
        (np.array(["a"] * 60), "regression", "are words, but task='regression' needs numbers"),
        (LABELS, "segmentation", "not one for every pixel"),
    ],
)
def test_what_a_task_cannot_learn_is_refused(labels, task, words):
    with pytest.raises(InputError, match=words):
        pf.load((X, labels), test=(X, labels), task=task)


def test_partitions_by_class_need_classes():
    data = pf.load((X, VALUES), task="regression")
    for by in ("dirichlet:0.5", "labels:1-1", "shards:2"):
        with pytest.raises(InputError, match="deals by class, but regression has none: take iid"):
            pf.split(data, 2, by=by)
    assert len(pf.split(data, 3, by="quantity:1.0")) == 3
    with pytest.raises(InputError, match="do not vary, so R² does not exist"):
        pf.split(pf.load((X, VALUES), test=(X[:1], VALUES[:1]), task="regression"), 2)


def test_public_data_of_a_regression():
    data = pf.load((X, VALUES), task="regression")
    assert pf.split(data, 2, public=10).public.is_labeled()
    alone = pf.split(data, 2, public=X[:5])
    assert not alone.public.is_labeled() and alone.public.labels().shape == (5, 1)
    assert alone.own_public_classes() is None
    pair = pf.split(data, 2, public=(X[:5], VALUES[:5] - 200))  # negative values are labels, too
    assert pair.public.is_labeled()


def test_the_cache_keeps_the_task(tmp_path):
    data = pf.load((X, VALUES), task="regression")
    store = Store(tmp_path)
    store.write(data, "values", "key")
    again = store.read("values", "key")
    assert again.task == data.task and again.fingerprint == data.fingerprint


# --- own test data ---


@given(st.lists(st.integers(0, 4), min_size=2, max_size=60), st.floats(0.01, 0.99), st.integers(0, 9))
def test_an_even_share(kinds, share, seed):
    kinds = np.array(kinds)
    rows = evenly(kinds, share, np.random.default_rng(seed))
    assert len(rows) == len(set(rows.tolist())) == min(max(1, round(share * len(kinds))), len(kinds) - 1)
    for kind in np.unique(kinds):
        exact = len(rows) * (kinds == kind).mean()
        assert abs((kinds[rows] == kind).sum() - exact) < 1 + 1e-9


def rows_of(samples):
    return set() if samples is None else set(samples.index.tolist())


def test_own_test_data_is_a_share_of_each_client_and_of_its_classes():
    data = pf.load((X, CLASSES), test=(X[:9], CLASSES[:9]))
    clients = pf.split(data, 3, by="iid", test=0.3, validation=0.25)
    assert [len(own) for own in clients.own_test] == [6, 6, 6]  # of 20
    assert [len(held) for held in clients.validation] == [4, 4, 4]  # of the 14 that are left, 3.5
    seen = set()
    for number in range(3):
        parts = [rows_of(s) for s in (clients.train[number], clients.validation[number], clients.own_test[number])]
        assert sum(map(len, parts)) == len(set.union(*parts)) == 20
        assert not seen & set.union(*parts)
        seen |= set.union(*parts)
    assert len(clients.test) == 9
    assert pf.split(data, 3, by="iid", test="own").recipe["test"] == 0.2
    again = pf.split(data, 3, by="iid", test=0.3, validation=0.25)
    assert again.fingerprint == clients.fingerprint != pf.split(data, 3, by="iid", validation=0.25).fingerprint


def test_without_own_test_data_nothing_changed():
    data = pf.load("digits", limit=(80, 20))
    plain = pf.split(data, 3, seed=1)
    assert plain.own_test == () and plain.own_tests(0) == {}
    assert plain.fingerprint == pf.split(data, 3, seed=1, test=None).fingerprint


def test_a_recipe_makes_the_same_own_test_data_again():
    clients = pf.split(pf.load("digits", limit=(80, 20)), 3, by="iid", test=0.25)
    again = from_recipe(clients.recipe)
    assert again.fingerprint == clients.fingerprint
    assert [rows_of(own) for own in again.own_test] == [rows_of(own) for own in clients.own_test]


def test_a_client_with_one_row_has_no_own_test_data():
    clients = Clients.from_parts([(X[:1], CLASSES[:1]), (X, CLASSES)], test=(X, CLASSES), own_test="own")
    assert clients.own_test[0] is None and len(clients.own_test[1]) == 12
    assert len(clients.train[0]) == 1
    assert [row["own test"] for row in clients.rows()] == [0, 12]


def test_given_own_test_sets_beside_a_common_one_and_instead():
    parts, own = [(X[:20], CLASSES[:20]), (X[20:], CLASSES[20:])], [(X[:5], CLASSES[:5]), None]
    both = Clients.from_parts(parts, test=(X[50:], CLASSES[50:]), own_test=own)
    assert len(both.test) == 10 and both.own_test[1] is None
    assert torch.equal(both.own_test[0].inputs(), both.train[0].inputs()[:5])
    assert both.own_test[0].labels().tolist() == CLASSES[:5].tolist()
    assert torch.equal(both.test.labels(), torch.from_numpy(CLASSES[50:]))
    only = Clients.from_parts(parts, test=[(X[:5], CLASSES[:5]), (X[5:9], CLASSES[5:9])])
    assert len(only.test) == 9 and [len(part) for part in only.own_test] == [5, 4]
    assert only.test.labels().tolist() == CLASSES[:9].tolist()


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"test": (X, CLASSES), "own_test": [(X, CLASSES)]}, "own_test has 1 parts for 2 clients"),
        ({"test": (X, CLASSES), "own_test": [(X[:, :2], CLASSES), None]}, "own test set of client 0 have shape"),
        ({"test": (X, CLASSES), "own_test": 1.5}, "test=1.5 is not possible"),
        ({"test": [None, None]}, "There is no test set"),
        ({"test": (X, CLASSES), "own_test": [(X, ["a"] * 60), None]}, "different kinds of inputs or labels"),
    ],
)
def test_own_test_data_that_does_not_fit_is_refused(more, words):
    with pytest.raises(InputError, match=words):
        Clients.from_parts([(X, CLASSES), (X, CLASSES)], **more)


def test_shares_that_are_none_are_refused():
    for share in ("mine", -0.1, 1.0, True):
        with pytest.raises(InputError, match="give 'own', or a share of at least 0 and below 1"):
            pf.split(pf.load((X, CLASSES)), 2, test=share)


def test_own_test_sets_belong_to_clients_and_not_to_a_data_set(tmp_path):
    import pandas

    frame = pandas.DataFrame({"a": range(20), "label": [0, 1] * 10})
    frame.to_csv(tmp_path / "a.csv", index=False)
    file = tmp_path / "a.csv"
    part = (X[:9], CLASSES[:9])
    for source, test in (
        ((X, CLASSES), [part, part]),
        ((X, CLASSES), {"north": part, "south": part}),
        (frame, [frame, frame]),
        (file, [file, str(file)]),
        ("digits", [file, None]),
    ):
        with pytest.raises(InputError, match=r"test holds 2 parts, .*Clients\.from_parts\(parts, test=\[\.\.\.\]\)"):
            pf.load(source, test=test)
    assert len(pf.load((X, CLASSES), test=[X[:9], CLASSES[:9]]).test) == 9
    items = [(x, int(label)) for x, label in zip(X[:9], CLASSES[:9], strict=True)]
    assert len(pf.load((X, CLASSES), test=items).test) == 9
    for pairs in ([part, part], [list(part), list(part)]):
        own = Clients.from_parts([(X, CLASSES), (X, CLASSES)], test=pairs)
        assert [len(samples) for samples in own.own_test] == [9, 9]
