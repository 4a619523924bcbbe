"""Choosing a round by validation data, and stopping by it: hand-made histories."""

import polyfed as pf
from polyfed.core.selection import Patience, best_line
from polyfed.core.task import CLASSIFICATION


def history(*scores, loss=1.0):
    return [
        {"round": number, "phase": "round", "accuracy": {"mean": 0.9, "validation": {"mean": score, "loss": loss}}}
        for number, score in enumerate(scores, 1)
    ]


def test_the_best_round_is_the_first_of_equal_ones():
    assert best_line(history(0.2, 0.6, 0.6, 0.5), CLASSIFICATION)["round"] == 2
    assert best_line([], CLASSIFICATION) is None
    assert best_line([{"round": 1, "phase": "round", "accuracy": {"mean": 1.0}}], CLASSIFICATION) is None


def test_a_regression_is_chosen_by_its_loss():
    lines = [*history(0.9, loss=2.0), *history(None, loss=1.0)]
    assert best_line(lines, pf.Regression()) is lines[1]


def test_phases_around_the_rounds_are_not_chosen():
    before = {**history(0.9)[0], "phase": "before", "round": 0}
    assert best_line([before, *history(0.1)], CLASSIFICATION)["phase"] == "round"


def test_patience():
    two = Patience(2, CLASSIFICATION)
    assert two.over(history(0.5), 2, {"mean": 0.4, "loss": 1}) is None
    stop = two.over(history(0.5, 0.4), 3, {"mean": 0.5, "loss": 1})  # level is not better
    assert stop == {"reason": "patience", "patience": 2, "best_round": 1}
    assert two.over(history(0.5, 0.4), 3, {"mean": 0.51, "loss": 1}) is None
    assert Patience(None, CLASSIFICATION).over(history(0.5, 0.4, 0.3), 4, {"mean": 0.1, "loss": 1}) is None


def test_patience_counts_rounds_not_measurements():
    measured = [line for line in history(0.5, 0.0, 0.0, 0.4) if line["round"] in (1, 4)]
    assert Patience(3, CLASSIFICATION).over(measured[:1], 4, {"mean": 0.4, "loss": 1}) is not None
