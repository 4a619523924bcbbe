"""Tables of results where not everybody was measured at the end."""

from __future__ import annotations

from polyfed.core.cost import CostMeter
from polyfed.result import Result


def test_a_site_that_was_away_does_not_take_anothers_place():
    accuracy = {"mean": 0.6, "std": 0.1, "worst": 0.5, "loss": 1.0, "per_client": [0.5, 0.7], "global": None}
    line = {"round": 1, "phase": "round", "accuracy": {**accuracy, "clients": [0, 2]}}
    cost = CostMeter({"up": {2: 1500}, "down": {2: 40}})
    result = Result("local", 0, 1, [line], cost, ["a", "b", "c"], [10, 20, 30])
    frame = result.frame()
    assert frame["accuracy"][0] == 0.5 and frame["accuracy"].isna()[1] and frame["accuracy"][2] == 0.7
    rows = [text.split() for text in str(result.table()).splitlines()]
    assert ["0", "a", "10", "50.0", "0", "B", "0", "B"] in rows
    assert ["2", "c", "30", "70.0", "1.5", "kB", "40", "B"] in rows  # sent, then received
    assert not any(row[:1] == ["1"] for row in rows)
