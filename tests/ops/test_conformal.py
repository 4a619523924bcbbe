"""Conformal prediction sets: hand-computed sets, coverage, agreement and the ranking loss."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from polyfed.ops.conformal import agreement, calibrate, label_scores, prediction_sets, ranking_loss, threshold
from polyfed.ops.selection import fit_temperature

LOGITS = torch.tensor([[0.5, 0.3, 0.15, 0.05], [0.1, 0.2, 0.3, 0.4]]).log()  # their softmax are these numbers


def sets_of(*rows):
    return torch.tensor([[letter == "x" for letter in row] for row in rows])


def test_scores_by_hand():
    labels = torch.tensor([1, 1])  # at rank 2 and at rank 3
    plain = label_scores(LOGITS, labels, 1.0, 0.0, 5)
    assert plain.tolist() == pytest.approx([0.8, 0.9])
    half = label_scores(LOGITS, labels, 1.0, 0.0, 5, torch.tensor([0.5, 0.0]))
    assert half.tolist() == pytest.approx([0.65, 0.7])
    penalised = label_scores(LOGITS, labels, 1.0, 0.5, 1)
    assert penalised.tolist() == pytest.approx([0.8 + 0.5, 0.9 + 1.0])
    assert label_scores(LOGITS, labels, 1.0, 0.5, 4).tolist() == plain.tolist()  # no more classes than k_reg


def test_a_temperature_flattens():
    logits = torch.tensor([[2 * math.log(3.0), 0.0]])
    assert label_scores(logits, torch.tensor([0]), 2.0, 0.0, 5).tolist() == pytest.approx([0.75])


def test_the_quantile_is_taken_high_and_never_beyond_the_largest():
    scores = torch.arange(1.0, 11.0)
    assert threshold(scores, 0.25) == 8  # 0.75 of nine steps is 6.75: the eighth
    assert threshold(scores, 0.0) == 10
    assert threshold(torch.tensor([0.3]), 0.1) == pytest.approx(0.3)


@pytest.mark.parametrize(
    ("q", "expected"),
    [(0.1, ["x---", "---x"]), (0.5, ["xx--", "--xx"]), (0.85, ["xxx-", "-xxx"]), (2.0, ["xxxx", "xxxx"])],
)
def test_sets_are_the_shortest_beginnings_that_exceed_the_quantile(q, expected):
    assert torch.equal(prediction_sets(LOGITS, 1.0, q + 1e-6, 0.0, 5), sets_of(*expected))


def test_a_penalty_keeps_sets_small():
    # Scores of the first sample: 0.5, 0.8 + 0.1, 0.95 + 0.2, 1 + 0.3; without a penalty 0.95 would be within.
    assert torch.equal(prediction_sets(LOGITS[:1], 1.0, 0.97, 0.1, 1), sets_of("xxx-"))
    assert torch.equal(prediction_sets(LOGITS[:1], 1.0, 0.97, 0.0, 1), sets_of("xxxx"))


def test_with_draws_the_last_label_is_in_by_its_own_score():
    for u, expected in ((0.1, "xx--"), (0.9, "x---")):  # the second label scores 0.53 or 0.77
        drawn = prediction_sets(LOGITS[:1], 1.0, 0.6, 0.0, 5, torch.tensor([u]))
        assert torch.equal(drawn, sets_of(expected))
    assert torch.equal(
        prediction_sets(LOGITS[:1], 1.0, 0.0, 0.0, 5, torch.tensor([0.9])), sets_of("x---")
    )  # never none


@given(
    st.integers(1, 60),
    st.integers(2, 8),
    st.floats(0.0, 0.9),
    st.floats(0.0, 1.0),
    st.integers(0, 9),
    st.integers(0, 99),
)
@settings(max_examples=60, deadline=None)
def test_the_true_label_is_in_often_enough(n, classes, alpha, lam, k_reg, seed):
    rng = torch.Generator().manual_seed(seed)
    logits = 3 * torch.randn(n, classes, generator=rng, dtype=torch.float64)
    labels = torch.randint(0, classes, (n,), generator=rng)
    q = threshold(label_scores(logits, labels, 1.3, lam, k_reg), alpha)
    sets = prediction_sets(logits, 1.3, q, lam, k_reg)
    assert sets[torch.arange(n), labels].double().mean() >= 1 - alpha - 1e-12
    assert sets.any(1).all()
    u = torch.rand(n, generator=rng, dtype=torch.float64)
    q = threshold(label_scores(logits, labels, 1.3, lam, k_reg, u), alpha)
    drawn = prediction_sets(logits, 1.3, q, lam, k_reg, u)
    assert drawn[torch.arange(n), labels].double().mean() >= 1 - alpha - 1e-12


def test_agreement_by_hand():
    private = sets_of("xx--", "xxx-", "x---", "x---", "xxxx")
    proxy = sets_of("xx--", "-xxx", "-x--", "xx--", "xx--")
    # equal; two of four; nothing; one of two; more than the proxy's: both of its two
    assert agreement(private, proxy).tolist() == [1.0, 0.5, 0.0, 0.5, 1.0]
    assert agreement(sets_of("xxx-"), sets_of("--xx")).tolist() == [
        0.5
    ]  # the larger private set: one of the proxy's two


def test_agreement_lies_between_zero_and_one_and_is_one_for_equal_sets():
    """All pairs of sets of four labels that are not empty."""
    every = torch.tensor([[number >> place & 1 for place in range(4)] for number in range(1, 16)], dtype=torch.bool)
    private, proxy = every.repeat_interleave(15, 0), every.repeat(15, 1)
    found = agreement(private, proxy)
    assert found.min() == 0 and found.max() == 1
    equal, apart = (private == proxy).all(1), ~(private & proxy).any(1)
    assert (found[equal] == 1).all() and torch.equal(found == 0, apart)


def test_the_ranking_loss_by_hand():
    z = torch.tensor([[1.0, 4.0, 2.0, 3.0]])
    # S = {0, 3}: pairs (1,0): 3, (2,0): 1, (1,3): 1, (2,3): 0 of 2 x 2
    assert ranking_loss(z, sets_of("x--x")) == pytest.approx(5 / 4)
    assert ranking_loss(z, sets_of("-x-x")) == 0  # S ranks above the rest
    assert ranking_loss(z, sets_of("xxxx")) == 0
    both = ranking_loss(torch.cat([z, z]), sets_of("x--x", "-x-x"))
    assert both == pytest.approx(5 / 8)


@given(st.integers(0, 500))
@settings(max_examples=40, deadline=None)
def test_the_ranking_loss_is_zero_exactly_where_the_set_ranks_first(seed):
    rng = torch.Generator().manual_seed(seed)
    z, sets = torch.randn(1, 5, generator=rng), torch.rand(1, 5, generator=rng) < 0.5
    above = not sets.any() or sets.all() or z[sets].min() >= z[~sets].max()
    assert (ranking_loss(z, sets) == 0) == bool(above)


def test_a_network_is_calibrated_at_its_own_temperature():
    logits, labels = 3 * LOGITS.repeat(3, 1), torch.tensor([0, 3, 1, 2, 0, 3])
    u = torch.linspace(0, 1, 6)
    temperature, q = calibrate(logits, labels, 0.25, 0.5, 1, u)
    assert temperature.item() == pytest.approx(fit_temperature(logits, labels)) and temperature.item() > 1
    assert torch.equal(q, threshold(label_scores(logits, labels, temperature, 0.5, 1, u), 0.25))
