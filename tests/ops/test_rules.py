"""The rules of `--robust` against numbers computed by hand, and their textbook properties."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from polyfed.ops.robust import (
    cosines,
    held_mean,
    held_median,
    held_trimmed_mean,
    krum_scores,
    majority_distances,
    squared_distances,
)

VALUES = torch.tensor([[1.0, 10.0], [2.0, 20.0], [3.0, 30.0], [4.0, 40.0], [1000.0, -5000.0]])


def test_median_and_trimmed_mean_by_hand():
    assert held_median(VALUES).tolist() == [3.0, 20.0]
    # A fifth of five senders: one at either end.
    assert held_trimmed_mean(VALUES, 0.2).tolist() == [3.0, 20.0]
    assert held_trimmed_mean(VALUES[:4], 0.25).tolist() == [2.5, 25.0]
    assert held_median(VALUES[:4]).tolist() == [2.5, 25.0]


def test_entries_count_for_their_holders_only():
    held = torch.tensor([[True, True], [True, False], [True, False], [False, False], [True, True]])
    assert held_median(VALUES, held).tolist() == [2.5, (10 - 5000) / 2]
    # Four holders, a quarter cut: one at either end of the first; two holders keep both.
    assert held_trimmed_mean(VALUES, 0.25, held).tolist() == [2.5, (10 - 5000) / 2]
    assert held_mean(VALUES, torch.tensor([1.0, 3.0, 0, 0, 0]), held).tolist() == [(1 + 6) / 4, 10.0]
    nobody = torch.zeros_like(held)
    assert held_median(VALUES, nobody).tolist() == [0.0, 0.0]
    assert held_trimmed_mean(VALUES, 0.2, nobody).tolist() == [0.0, 0.0]


def test_the_cut_is_the_share_rounded_up_and_never_everybody():
    many = torch.arange(100.0).unsqueeze(1)
    # 0.07 times 100 is 7.000000000000001 in floating point: seven, not eight.
    kept = torch.arange(7.0, 93.0)
    assert held_trimmed_mean(many, 0.07).tolist() == [float(kept.mean())]
    assert held_trimmed_mean(torch.tensor([[7.0], [9.0]]), 0.4).tolist() == [8.0]


def test_distances_over_what_is_common():
    values = torch.tensor([[0.0, 0.0, 5.0], [3.0, 4.0, 0.0], [1.0, 1.0, 1.0]])
    held = torch.tensor([[True, True, False], [True, True, True], [False, False, True]])
    squares, common = squared_distances(values, held)
    assert squares[0, 1] == 25 and common[0, 1] == 2
    assert squares[1, 2] == 1 and common[1, 2] == 1
    assert common[0, 2] == 0
    whole, entries = squared_distances(values)
    assert whole[0, 1] == 9 + 16 + 25 and entries[0, 1] == 3


def test_krum_by_hand():
    # Five points on a line and one bad sender expected: each sums its 5 - 1 - 2 = 2 smallest squared distances.
    points = torch.tensor([[0.0], [1.0], [2.0], [4.0], [100.0]])
    squares, _ = squared_distances(points)
    assert krum_scores(squares, 1).tolist() == [1 + 4, 1 + 1, 1 + 4, 4 + 9, 96**2 + 98**2]


def test_a_sender_that_nobody_can_be_compared_with_scores_last():
    squares = torch.tensor([[0.0, 1.0, math.inf], [1.0, 0.0, math.inf], [math.inf, math.inf, 0.0]]).double()
    scores = krum_scores(squares, 0)
    assert scores[2] == math.inf and scores[0] == scores[1] < math.inf


def test_the_distance_to_a_majority_by_hand():
    # Of five, a client and two others are a majority. Two that agree with each other only do not come near one.
    points = torch.tensor([[0.0], [1.0], [3.0], [50.0], [50.0]])
    squares, _ = squared_distances(points)
    assert majority_distances(squares).tolist() == [3, 2, 3, 47, 47]
    alone = torch.tensor([[0.0, 4.0, math.inf], [4.0, 0.0, math.inf], [math.inf, math.inf, 0.0]]).double()
    assert majority_distances(alone).tolist() == [2, 2, math.inf]


def test_cosines_by_hand():
    values = torch.tensor([[1.0, 0.0], [0.0, 2.0], [-3.0, 0.0], [0.0, 0.0]])
    assert cosines(values, torch.tensor([2.0, 0.0])).tolist() == [1.0, 0.0, -1.0, 1.0]


@given(st.lists(st.floats(-100, 100, width=32), min_size=3, max_size=9), st.floats(-1e6, 1e6, width=32))
def test_one_false_value_stays_inside_the_honest_range(honest, false):
    values = torch.tensor([*honest, false], dtype=torch.float64).unsqueeze(1)
    for found in (held_median(values), held_trimmed_mean(values, 1 / len(values))):
        assert min(honest) - 1e-6 <= float(found) <= max(honest) + 1e-6


@given(st.permutations(range(5)))
def test_the_order_of_senders_does_not_matter(order):
    assert torch.equal(held_median(VALUES[list(order)]), held_median(VALUES))
    assert held_trimmed_mean(VALUES[list(order)], 0.2).tolist() == pytest.approx([3.0, 20.0])
