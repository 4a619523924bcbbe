"""Verdicts against numbers worked out by hand, and what must hold for any numbers."""

from statistics import fmean

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polyfed.reproduce.verdict import Compared, chance, decimals, judge, judge_each, judge_number, summary

# Mean 2, standard deviation 1.5811, standard error 0.7071: t(4) = 2.7764 gives 2 ± 1.9632.
FIVE = (0.0, 1.0, 2.0, 3.0, 4.0)


def verdict(differences, gain=None, sign=None, direction_only=False):
    sign = (gain > 0) - (gain < 0) if sign is None else sign
    return judge([Compared(tuple(differences), gain, sign, direction_only)])[0]


def test_the_interval_of_five_seeds():
    found = verdict(FIVE, 1.0)
    assert (found.mean, round(found.half, 3), found.seeds, found.level) == (2.0, 1.963, 5, 0.95)
    assert (round(found.low, 3), round(found.high, 3)) == (0.037, 3.963)
    assert chance(FIVE) == pytest.approx(0.0474, abs=1e-4)  # t = 2.828, four degrees of freedom


@pytest.mark.parametrize(
    ("shift", "gain", "expected"),
    [
        (0.0, 3.9, "reproduced"),  # [0.04, 3.96]
        (0.0, 4.0, "holds"),
        (0.0, -1.0, "refuted"),  # leaves out zero, other side
        (-0.1, 3.0, "not resolved"),  # [-0.06, 3.86] contains zero and the gain
        (-0.1, 7.0, "not resolved"),  # 3.14 away, half of it is 3.5
        (-0.1, 8.0, "refuted"),  # 4.14 away, half of it is 4
        (-4.0, -2.0, "reproduced"),  # [-3.96, -0.04]
        (-4.0, 2.0, "refuted"),
    ],
)
def test_every_rule(shift, gain, expected):
    assert verdict([value + shift for value in FIVE], gain).verdict == expected


def test_other_data_compares_directions_only():
    assert verdict(FIVE, 3.0, direction_only=True).verdict == "holds"
    assert verdict(FIVE, -3.0, direction_only=True).verdict == "refuted"
    assert verdict([value - 0.1 for value in FIVE], 8.0, direction_only=True).verdict == "not resolved"


def test_a_direction_without_a_number_is_at_best_held():
    assert verdict(FIVE, None, 1).verdict == "holds"
    assert verdict(FIVE, None, -1).verdict == "refuted"
    assert verdict(FIVE, 0.0).verdict == "refuted"  # the paper says there is no difference


def test_four_of_five_and_four_alone_are_not_resolved():
    assert verdict((1.0, 1.0, 1.0, 1.0, -1.0), 1.0).verdict == "not resolved"
    few = verdict((9.0, 9.1, 9.2, 9.1), 9.0)
    assert (few.verdict, few.half, few.seeds) == ("not resolved", None, 4) and few.mean == pytest.approx(9.1)
    assert verdict((), 1.0).mean is None


def test_holm_widens_and_stops():
    strong, weak = Compared(tuple(value + 10 for value in FIVE), 12.0, 1), Compared(FIVE, 2.0, 1)
    alone = judge([weak])[0]
    both = judge([weak, strong])
    assert alone.verdict == "reproduced"
    assert [found.level for found in both] == [0.95, 0.975]  # the smaller p value has the stricter level
    assert [found.verdict for found in both] == ["reproduced", "reproduced"]  # 0.0474 <= 0.05 at its rank
    twice = judge([weak, weak, strong])  # 0.0474 > 0.05 / 2: both weak ones stop there
    assert [found.verdict for found in twice] == ["not resolved", "not resolved", "reproduced"]
    assert twice[0].level == twice[1].level == 0.975


def test_claims_that_are_not_measured_yet_count_in_the_correction():
    """Nobody resolves a claim by running it alone: it has the level that it keeps if all others come last."""
    strong, weak = Compared(tuple(value + 10 for value in FIVE), 12.0, 1), Compared(FIVE, 2.0, 1)
    few, none = Compared(FIVE[:4], 2.0, 1), Compared((), 2.0, 1)
    found = judge([weak, few])
    assert [one.level for one in found] == [0.975, None] and found[1].verdict == "not resolved"
    assert found[0].verdict == "not resolved"  # alone: reproduced
    assert [one.level for one in judge([none, strong, weak, none])] == [None, 0.9875, pytest.approx(1 - 0.05 / 3), None]


@pytest.mark.parametrize(
    ("shift", "expected"),
    [(-2.0, "not resolved"), (-0.8, "not resolved"), (-4.0, "refuted"), (0.8, "refuted"), (0.0, "not resolved")],
)
def test_rows_that_the_paper_calls_equal_may_be_as_far_apart_as_there(shift, expected):
    """It prints -2: two rows at -2 or nearer are equal, and at -4 or on the other side they are not."""
    close = tuple(shift + value for value in (-0.1, -0.05, 0.0, 0.05, 0.1))
    assert judge([Compared(close, 0.0, 0, near=-2.0)])[0].verdict == expected
    assert judge([Compared(tuple(-v for v in close), 0.0, 0, near=2.0)])[0].verdict == expected


def test_equal_differences_have_no_width():
    assert verdict((2.0,) * 5, 2.0).verdict == "reproduced"
    assert verdict((0.0,) * 5, 1.0).verdict == "refuted"  # exactly zero, a whole gain away
    assert verdict((0.0,) * 5, 0.0).verdict == "not resolved"


numbers = st.lists(st.floats(-50, 50), min_size=5, max_size=9)


@given(numbers, st.floats(-20, 20).filter(lambda gain: abs(gain) > 1e-3))
def test_mirrored_claims_have_the_same_verdict(values, gain):
    assert verdict(values, gain).verdict == verdict([-value for value in values], -gain).verdict


@given(numbers, numbers, st.floats(0.1, 20))
def test_more_claims_never_narrow_an_interval(values, others, gain):
    alone, among = verdict(values, gain), judge([Compared(tuple(values), gain, 1), Compared(tuple(others), gain, 1)])[0]
    assert among.half >= alone.half and among.mean == alone.mean == fmean(values)
    if among.verdict in ("reproduced", "holds"):
        assert alone.verdict in ("reproduced", "holds")


@given(numbers, st.floats(-20, 20))
def test_a_verdict_that_resolves_leaves_zero_out_or_the_gain(values, gain):
    found = verdict(values, gain)
    if found.verdict in ("reproduced", "holds"):
        assert found.low > 0 or found.high < 0
        assert (found.mean > 0) == (gain > 0)
    if found.verdict == "reproduced":
        assert found.low <= gain <= found.high


def test_numbers_that_are_computed():
    assert judge_number(12.2803, 12.28, 0.005) == "reproduced"
    assert judge_number(12.2851, 12.28, 0.005) == "holds"
    assert judge_number(6.14, 12.28, 0.005) == "holds"
    assert judge_number(6.1, 12.28, 0.005) == judge_number(-12.28, 12.28, 0.005) == "refuted"


@pytest.mark.parametrize(
    ("differences", "sign", "expected"),
    [
        ((83.0, 900.0), 1, "holds"),  # two are enough, and how far apart they are does not matter
        ((83.0, 900.0), -1, "refuted"),
        ((-0.4, -0.4), -1, "holds"),
        ((83.0, -0.4), 1, "not resolved"),
        ((83.0, 0.0), 1, "not resolved"),  # zero has no side
        ((83.0, 900.0), 0, "refuted"),  # the paper says that there is no difference
        ((0.0, 0.0), 0, "not resolved"),
        ((), 1, "not resolved"),
    ],
)
def test_computed_differences_are_judged_by_sign_in_all_of_them(differences, sign, expected):
    found = judge_each(Compared(differences, None, sign))
    assert (found.verdict, found.seeds) == (expected, len(differences))
    assert found.half is None and found.level is None  # nothing is drawn: there is no interval
    assert found.ends == ((min(differences), max(differences)) if differences else None)


def test_the_summary_counts():
    assert summary(["holds", "refuted", "holds"]) == "2 holds, 1 refuted"
    assert summary([]) == "measured, no verdict"


def test_small_differences_are_told_with_digits_that_show_them():
    assert [decimals(half) for half in (None, 0.0, 12.3, 0.21, 0.099, 0.0049, 1e-14)] == [2, 2, 2, 2, 3, 4, 6]
