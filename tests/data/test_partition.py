"""Partitioners: properties over random data, and small cases checked by hand."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from polyfed.core.errors import InputError
from polyfed.data import IID, ByColumn, Dirichlet, LabelSets, Quantity, Shards, as_partitioner, parse_partition
from polyfed.data.dealing import apportion, draw_shares, lift

FEW = settings(max_examples=60, deadline=None)


@st.composite
def problems(draw, max_samples=200, max_clients=40):
    """Labels (often uneven, with gaps), a number of clients that fits, and a seed."""
    classes = draw(st.integers(1, 8))
    labels = draw(st.lists(st.integers(0, classes - 1), min_size=1, max_size=max_samples))
    clients = draw(st.integers(1, min(len(labels), max_clients)))
    return np.array(labels), clients, draw(st.integers(0, 1000))


def deal(partitioner, labels, clients, seed=0, columns=None):
    return partitioner.assign(labels, clients, np.random.default_rng(seed), columns)


def assert_exact(parts, labels, clients, min_size=1):
    assert len(parts) == clients
    assert np.array_equal(np.sort(np.concatenate(parts)), np.arange(len(labels))), "a row is lost or doubled"
    assert min(map(len, parts)) >= min_size


def assert_same_seed(partitioner, labels, clients, seed, parts):
    again = deal(partitioner, labels, clients, seed)
    assert all(np.array_equal(a, b) for a, b in zip(parts, again, strict=True))


@FEW
@given(problems())
def test_iid_is_exact_and_even(problem):
    labels, clients, seed = problem
    parts = deal(IID(), labels, clients, seed)
    assert_exact(parts, labels, clients)
    assert max(map(len, parts)) - min(map(len, parts)) <= 1
    assert_same_seed(IID(), labels, clients, seed, parts)


@FEW
@given(problems(), st.floats(1e-3, 100), st.integers(1, 5))
@example((np.zeros(200, dtype=int), 40, 0), 1e-3, 5)
@example((np.arange(200) % 10, 40, 1), 1e-300, 5)
@example((np.arange(200) % 10, 40, 1), 1e300, 5)
def test_dirichlet_is_exact_and_honours_min_size_or_says_why(problem, alpha, min_size):
    labels, clients, seed = problem
    partitioner = Dirichlet(alpha, min_size)
    if clients * min_size > len(labels):
        with pytest.raises(InputError, match="lower min_size to"):
            deal(partitioner, labels, clients, seed)
        return
    parts = deal(partitioner, labels, clients, seed)
    assert_exact(parts, labels, clients, min_size)
    assert_same_seed(partitioner, labels, clients, seed, parts)


@FEW
@given(problems(), st.one_of(st.floats(1e-3, 100), st.none()), st.floats(1, 1000), st.integers(1, 5))
def test_quantity_is_exact_and_honours_min_size_or_says_why(problem, alpha, ratio, min_size):
    labels, clients, seed = problem
    partitioner = Quantity(alpha, None if alpha is not None else ratio, min_size)
    if clients * min_size > len(labels):
        with pytest.raises(InputError, match="lower min_size to"):
            deal(partitioner, labels, clients, seed)
        return
    parts = deal(partitioner, labels, clients, seed)
    assert_exact(parts, labels, clients, min_size)
    assert_same_seed(partitioner, labels, clients, seed, parts)


@FEW
@given(problems(), st.integers(1, 6))
def test_shards_are_exact_or_refused(problem, per_client):
    labels, clients, seed = problem
    if clients * per_client > len(labels):
        with pytest.raises(InputError, match="shards per client"):
            deal(Shards(per_client), labels, clients, seed)
        return
    parts = deal(Shards(per_client), labels, clients, seed)
    assert_exact(parts, labels, clients)
    assert_same_seed(Shards(per_client), labels, clients, seed, parts)


@FEW
@given(problems(), st.integers(1, 8), st.integers(0, 4), st.booleans(), st.booleans())
def test_label_sets(problem, low, more, share, cover):
    labels, clients, seed = problem
    present = len(np.unique(labels))
    partitioner = LabelSets(low, low + more, share, cover)
    try:
        parts = deal(partitioner, labels, clients, seed)
    except InputError as error:
        too_many = low + more > present
        uncovered = clients * (low + more) < present
        assert too_many or uncovered or (not share and "fewer samples than holders" in str(error))
        return
    assert_same_seed(partitioner, labels, clients, seed, parts)
    held = [np.unique(labels[part]) for part in parts]
    if share:
        for part, kinds in zip(parts, held, strict=True):
            assert low <= len(kinds) <= low + more
            assert np.array_equal(part, np.flatnonzero(np.isin(labels, kinds))), "a client has all samples of a label"
        if cover:
            assert np.array_equal(np.unique(np.concatenate(held)), np.unique(labels))
    else:
        assert_exact(parts, labels, clients)
        assert max(map(len, held)) <= low + more


@FEW
@given(problems(), st.integers(1, 10))
def test_by_column_keeps_groups_together(problem, groups):
    labels, clients, seed = problem
    column = np.array([f"g{value % groups}" for value in range(len(labels))])
    there = len(np.unique(column))
    if clients > there:
        with pytest.raises(InputError, match=f"has {there} groups"):
            deal(ByColumn("ward"), labels, clients, seed, {"ward": column})
        return
    parts = deal(ByColumn("ward"), labels, clients, seed, {"ward": column})
    assert_exact(parts, labels, clients)
    owners = [{column[row] for row in part} for part in parts]
    assert sum(map(len, owners)) == there, "a group is at one client only"
    assert max(map(len, owners)) - min(map(len, owners)) <= 1
    again = deal(ByColumn("ward"), labels, clients, seed, {"ward": column})
    assert all(np.array_equal(a, b) for a, b in zip(parts, again, strict=True))


@pytest.mark.parametrize("text", ["iid", "dirichlet:0.5", "labels:2-4", "shards:2", "quantity:0.5", "quantity:ratio=9"])
def test_another_seed_is_another_split(text):
    labels = np.arange(200) % 10
    first, second = (deal(parse_partition(text), labels, 8, seed) for seed in (0, 1))
    assert any(not np.array_equal(a, b) for a, b in zip(first, second, strict=True))


def test_dirichlet_with_a_tiny_alpha_and_many_clients_ends_quickly():
    labels = np.arange(20000) % 200
    parts = deal(Dirichlet(1e-3, 10), labels, 1000)
    assert_exact(parts, labels, 1000, 10)


def test_dirichlet_follows_alpha():
    labels = np.arange(10000) % 10
    even, uneven = (deal(Dirichlet(alpha), labels, 10) for alpha in (1000.0, 0.05))
    share = lambda parts: np.mean([np.bincount(labels[part]).max() / len(part) for part in parts])  # noqa: E731
    assert share(even) < 0.15 < 0.5 < share(uneven)


def test_dirichlet_shares_are_per_class_over_clients():
    """With one class the sizes are the apportioned shares of one draw."""
    labels = np.zeros(100, dtype=int)
    parts = deal(Dirichlet(0.7), labels, 4, seed=3)
    shares = draw_shares(np.random.default_rng(3), 0.7, 4, 1)[0]
    assert [len(part) for part in parts] == apportion(shares, 100).tolist()


def test_apportion_by_hand():
    assert apportion(np.array([0.5, 0.25, 0.25]), 10).tolist() == [5, 3, 2]  # running sums 5, 7.5 -> 8, 10
    assert apportion(np.array([1 / 3, 1 / 3, 1 / 3]), 10).tolist() == [3, 4, 3]
    assert apportion(np.array([0.0, 1.0, 0.0]), 7).tolist() == [0, 7, 0]


def test_lift_takes_from_the_largest():
    parts = lift([np.arange(10), np.array([10, 11, 12]), np.empty(0, dtype=np.int64)], 2, np.random.default_rng(0))
    assert [len(part) for part in parts] == [8, 3, 2]
    assert set(parts[2]) <= set(range(10))


def test_shards_by_hand():
    labels = np.array([0, 1, 0, 1, 2, 2, 3, 3])
    parts = deal(Shards(2), labels, 2)
    kinds = [set(labels[part].tolist()) for part in parts]
    assert all(len(kind) == 2 for kind in kinds) and kinds[0] | kinds[1] == {0, 1, 2, 3}


def test_quantity_ratio_by_hand():
    sizes = sorted(len(part) for part in deal(Quantity(ratio=4), np.zeros(70, dtype=int), 3))
    assert sizes == [10, 20, 40]


def test_quantity_keeps_the_labels_even():
    labels = np.arange(5000) % 5
    parts = deal(Quantity(ratio=10), labels, 5)
    for part in parts:
        assert np.bincount(labels[part], minlength=5).max() / len(part) < 0.3


def test_label_sets_cover_swaps_within_the_bounds():
    labels = np.arange(60) % 6
    parts = deal(LabelSets(2, 2, cover=True), labels, 3, seed=5)
    kinds = [set(labels[part].tolist()) for part in parts]
    assert [len(kind) for kind in kinds] == [2, 2, 2]
    assert set.union(*kinds) == set(range(6))


def test_by_column_without_a_number_is_one_client_a_group():
    column = np.array(["b", "a", "b", "c"])
    assert ByColumn("ward").natural_clients(np.zeros(4), {"ward": column}) == 3
    parts = deal(ByColumn("ward"), np.zeros(4, dtype=int), 3, columns={"ward": column})
    assert [part.tolist() for part in parts] == [[1], [0, 2], [3]]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("iid", IID()),
        ("dirichlet:0.5", Dirichlet(0.5)),
        ("Dirichlet:0.5,min=10", Dirichlet(0.5, 10)),
        ("labels:3-6", LabelSets(3, 6)),
        ("labels:2", LabelSets(2, 2)),
        ("labels:3-6,share=no,cover=yes", LabelSets(3, 6, False, True)),
        ("shards:2", Shards(2)),
        ("quantity:0.3", Quantity(0.3)),
        ("quantity:ratio=8,min=2", Quantity(ratio=8, min_size=2)),
        ("column:hospital", ByColumn("hospital")),
    ],
)
def test_text_and_back(text, expected):
    assert parse_partition(text) == expected
    assert parse_partition(str(expected)) == expected


def test_text_keeps_every_digit():
    assert parse_partition(str(Dirichlet(0.1234567890123))) == Dirichlet(0.1234567890123)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("dirichlt:0.5", "did you mean 'dirichlet'"),
        ("dirichlet:0", "alpha=0.0 is not possible"),
        ("dirichlet:-1", "alpha=-1.0 is not possible"),
        ("dirichlet:nan", "is not possible"),
        ("dirichlet", "write dirichlet:ALPHA"),
        ("dirichlet:a", "write dirichlet:ALPHA"),
        ("dirichlet:0.5,mini=3", "write dirichlet:ALPHA"),
        ("dirichlet:0.5,min=0", "min_size=0"),
        ("labels:6-3", "1 <= low <= high"),
        ("labels:x", "write labels:LOW-HIGH"),
        ("shards:0", "at least 1 shard"),
        ("shards:1.5", "write shards:N"),
        ("quantity:", "either alpha or ratio"),
        ("quantity:ratio=0.5", "at least 1"),
        ("column:", "write column:NAME"),
        ("iid:3", "write iid"),
    ],
)
def test_text_that_cannot_be_read(text, message):
    with pytest.raises(InputError, match=message):
        parse_partition(text)


@pytest.mark.parametrize("by", [IID, 3, None])
def test_not_a_partitioner(by):
    with pytest.raises(InputError, match=r"IID"):
        as_partitioner(by)


@pytest.mark.parametrize("text", ["iid", "dirichlet:1", "labels:1-2", "shards:1", "quantity:1"])
def test_more_clients_than_samples(text):
    with pytest.raises(InputError, match=r"more clients \(5\) than samples \(3\)"):
        deal(parse_partition(text), np.array([0, 1, 1]), 5)


def test_column_problems():
    labels = np.zeros(3, dtype=int)
    with pytest.raises(InputError, match="no column 'ward' to group by: it has hospital"):
        deal(ByColumn("ward"), labels, 1, columns={"hospital": np.array(["a", "b", "c"])})
    with pytest.raises(InputError, match="no columns besides the label"):
        deal(ByColumn("ward"), labels, 1)
    with pytest.raises(InputError, match="Row 1 has no value"):
        deal(ByColumn("ward"), labels, 1, columns={"ward": np.array(["a", "", "c"])})


class EveryOther:
    """A stand-in with the interface of `flwr_datasets` partitioners."""

    def __init__(self, parts):
        self._num_partitions = parts
        self._dataset = None

    @property
    def dataset(self):
        return self._dataset

    @dataset.setter
    def dataset(self, value):
        if self._dataset is not None:
            raise ValueError("assigned twice")
        self._dataset = value

    @property
    def num_partitions(self):
        return self._num_partitions

    def load_partition(self, number):
        return self._dataset.shard(self._num_partitions, number, contiguous=False)


def test_flower_stand_in():
    partitioner = as_partitioner(EveryOther(2))
    labels = np.arange(5)
    assert partitioner.natural_clients(labels, {}) == 2
    for _ in range(2):  # the object that was given is not used up
        assert [part.tolist() for part in deal(partitioner, labels, 2)] == [[0, 2, 4], [1, 3]]
    with pytest.raises(InputError, match="makes 2 parts, not 3"):
        deal(partitioner, labels, 3)


def test_flower_failure_is_a_sentence():
    class Broken(EveryOther):
        def load_partition(self, number):
            raise ValueError("alpha too small.\nmore")

    with pytest.raises(InputError, match=r"^flwr:Broken could not divide the data: alpha too small\.$"):
        deal(as_partitioner(Broken(2)), np.arange(5), 2)


def test_flower_itself():
    flower = pytest.importorskip("flwr_datasets.partitioner", reason="flwr_datasets is not installed")
    labels = np.arange(300) % 3
    for original in (
        flower.IidPartitioner(num_partitions=3),
        flower.DirichletPartitioner(num_partitions=3, partition_by="label", alpha=0.5, seed=1),
        flower.NaturalIdPartitioner(partition_by="ward"),
    ):
        columns = {"ward": np.array(["a", "b", "c"])[labels]}
        partitioner = as_partitioner(original)
        assert partitioner.natural_clients(labels, columns) == 3
        assert_exact(deal(partitioner, labels, 3, columns=columns), labels, 3)
