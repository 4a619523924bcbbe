"""The numbers of the report against values computed by hand."""

from __future__ import annotations

import math

import pytest
from report_runs import make_run

from polyfed.report import charts, fairness, statistics
from polyfed.report.data_charts import entropy
from polyfed.report.runs import Run, Study


def test_interval_is_students_t_over_seeds():
    found = statistics.estimate([0.1, 0.2, 0.6])
    assert found.mean == pytest.approx(0.3)
    # s = sqrt((0.04 + 0.01 + 0.09) / 2) = 0.264575; t(0.975, 2) = 4.302653
    assert found.half == pytest.approx(4.302653 * 0.2645751 / math.sqrt(3), rel=1e-6)


def test_a_single_seed_has_no_interval():
    assert statistics.estimate([0.4]) == statistics.Estimate(0.4, None, 1)
    assert not statistics.estimate([0.4]).clear
    assert statistics.estimate([]) is None


def test_gain_is_paired_by_seed_so_a_constant_difference_has_no_spread(two_methods):
    # the levels of the seeds differ wildly, the difference does not: unpaired, the interval would be huge
    runs = {
        "local": [make_run("local", seed, [[0.1 * seed] * 3]) for seed in range(3)],
        "alpha": [make_run("alpha", seed, [[0.1 * seed + 0.05] * 3]) for seed in reversed(range(3))],
    }
    gain = statistics.difference(Study(runs), "alpha", "local")
    assert gain.mean == pytest.approx(0.05)
    assert gain.half == pytest.approx(0.0, abs=1e-12)


def test_runs_on_other_splits_are_not_paired(two_methods):
    other = make_run("alpha", 0, [[0.9] * 3])
    other = Run(other.label, 0, other.summary, other.history, {**other.config, "fingerprint": "elsewhere"})
    study = Study({"local": two_methods.runs["local"], "alpha": [other]})
    assert statistics.difference(study, "alpha", "local") is None


def test_leaderboard_by_hand(two_methods):
    local, alpha, _ = statistics.leaderboard(two_methods)
    assert local.gain is None
    assert alpha.accuracy.mean == pytest.approx(0.54)
    assert alpha.gain.mean == pytest.approx(0.04)
    assert alpha.gain.clear is False  # 0.04 ± 4.303 · 0.02 / √3 = 0.0497
    assert alpha.worst.mean == pytest.approx(0.44)
    assert (alpha.up, alpha.down) == (200, 400)  # a client's, over two rounds
    assert alpha.seconds == pytest.approx(6.0)


@pytest.mark.parametrize(("clients", "expected"), [(3, 0.0), (10, 0.0), (11, 0.5), (20, 0.5), (21, 1.0)])
def test_worst_decile_is_the_mean_of_the_worst_tenth(clients, expected):
    assert statistics.worst_decile([float(n) for n in reversed(range(clients))]) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("values", "expected"), [([0.5] * 4, 1.0), ([1.0, 0, 0, 0], 0.25), ([1.0, 3.0], 0.8), ([0, 0], 1)]
)
def test_jain_index(values, expected):
    assert fairness.jain(values) == pytest.approx(expected)


def test_fairness_by_hand(two_methods):
    found = fairness.fairness(two_methods, "beta")
    # per seed: gains are (-gain, -0.1, +0.01): two of three clients lost in every seed
    assert found.lost == pytest.approx(2 / 3)
    assert found.worst_loss == pytest.approx(-0.1)
    assert found.worst_tier == "small"
    assert found.worst_tier_accuracy == pytest.approx((0.36 + 0.4) / 2)
    assert found.spread == pytest.approx(0.61 - 0.38)


def test_architectures_are_ordered_by_size(two_methods):
    assert fairness.architectures(two_methods) == ["small", "large"]
    assert [tier.parameters for tier in fairness.tiers(two_methods, "alpha")] == [10, 99]


def test_rounds_to_a_target_and_speed():
    runs = {
        "fedavg": [make_run("fedavg", 0, [[0.1] * 3, [0.2] * 3, [0.3] * 3, [0.5] * 3], up=30, down=60)],
        "quick": [make_run("quick", 0, [[0.3] * 3, [0.5] * 3, [0.5] * 3, [0.5] * 3], up=3, down=3)],
        "never": [make_run("never", 0, [[0.1] * 3] * 4)],
    }
    fedavg, quick, never = statistics.rounds_to(Study(runs), 0.5)
    assert (fedavg.rounds, fedavg.speed, fedavg.bytes) == (4, 1.0, 4 * 90 / 3)
    assert (quick.rounds, quick.speed, quick.bytes, quick.seconds) == (
        2,
        2.0,
        2 * 6 / 3,
        4.0,
    )  # measuring is not counted
    assert (never.rounds, never.speed, never.reached) == (None, None, 0)


def test_speed_needs_every_seed():
    slow = [make_run("fedavg", 0, [[0.6] * 3]), make_run("fedavg", 1, [[0.1] * 3])]
    (found,) = statistics.rounds_to(Study({"fedavg": slow}), 0.5)
    assert (found.reached, found.seeds, found.speed) == (1, 2, None)


def test_targets_are_round_numbers_that_the_best_method_reached(two_methods):
    assert statistics.targets(two_methods) == [0.3, 0.4, 0.5]


def test_frontier_leaves_out_whoever_is_beaten():
    rows = [
        ("cheap", 1.0, 0.5),
        ("beaten", 2.0, 0.5),
        ("middle", 2.0, 0.6),
        ("no better", 3.0, 0.6),
        ("dear", 9.0, 0.7),
        ("awful", 10.0, 0.1),
    ]
    assert statistics.frontier(rows) == ["cheap", "middle", "dear"]


@pytest.mark.parametrize(("counts", "expected"), [([5, 5], 1.0), ([7, 0], 0.0), ([1, 3], 0.8112781), ([0, 0], 0.0)])
def test_entropy(counts, expected):
    assert entropy(counts) == pytest.approx(expected)


def test_curve_adds_up_bytes_and_gives_pooled_values_to_every_client():
    pooled = make_run("centralized", 0, [[0.2, 0.2, 0.8]])
    line = {**pooled.history[0], "accuracy": {"per_client": [0.2, 0.8]}}  # one value per architecture
    run = Run("centralized", 0, pooled.summary, [line, line], {})
    first, *_ = run.curve()
    assert first.accuracy == pytest.approx((0.2 + 0.2 + 0.8) / 3)
    costly = make_run("alpha", 0, [[0.1] * 3] * 3, up=30, down=60).curve()
    assert [point.bytes for point in costly] == [30, 60, 90]
    assert [point.seconds for point in costly] == [2, 4, 6]


def test_clients_that_were_away_keep_their_last_accuracy():
    run = make_run("alpha", 0, [[0.1, 0.2, 0.3], [0.4, 0.5, 0.6]])
    run.history[1]["accuracy"] = {"per_client": [0.4, 0.6], "clients": [0, 2]}
    run.summary["accuracy"]["per_client"] = [0.4, 0.6]
    assert run.per_client == [0.4, 0.2, 0.6]
    assert run.curve()[1].accuracy == pytest.approx(0.5)


def test_gains_and_prices_are_those_of_the_same_networks():
    """Rows of one comparison may have other networks: these are measured by their own training alone, or not at all."""
    wide = {"architectures": ["wide"] * 3}
    runs = {
        "local": [make_run("local", 0, [[0.4, 0.5, 0.6]])],
        "fedmd": [make_run("fedmd", 0, [[0.5, 0.6, 0.7]], up=100)],
        "local-wide": [make_run("local-wide", 0, [[0.6, 0.7, 0.8]], **wide)],
        "heterofl": [make_run("heterofl", 0, [[0.7, 0.7, 0.7]], up=10, **wide)],
        "fedin": [make_run("fedin", 0, [[0.9, 0.9, 0.9]], up=1, architectures=["deep"] * 3)],
    }
    runs["local-wide"][0].config["method"] = {"name": "local"}
    study = Study(runs)
    gains = {row.method: row.gain and round(row.gain.mean, 6) for row in statistics.leaderboard(study)}
    assert gains == {"local": None, "fedmd": 0.1, "local-wide": None, "heterofl": 0.0, "fedin": None}
    assert [round(gain, 6) for _, _, gain in fairness.client_gains(study, "heterofl")] == [0.1, 0.0, -0.1]
    assert fairness.client_gains(study, "fedin") == []
    groups = statistics.by_networks(study, study.labels)
    assert groups == [["local", "fedmd"], ["local-wide", "heterofl"], ["fedin"]]
    lines = [one for one in charts.chart(study, "frontier").series if one.name == "frontier"]
    assert lines == []  # fedin is cheaper and better, and beats nobody: its networks are others
