"""The benchmark notices when a ratio falls."""

from __future__ import annotations

from benchmarks.run import regressions


def test_a_ratio_that_fell_by_more_than_a_fifth_is_told() -> None:
    stored = {"W3": {"ratios": {"auto": 8.0, "threads": 1.0}}, "overhead": {"milliseconds": 0.01}}
    assert regressions({"W3": {"ratios": {"auto": 6.3, "threads": 0.9}}}, stored) == ["W3 auto: 6.30, was 8.00"]
    assert regressions({"W3": {"ratios": {"auto": 6.4}}, "W9": {"ratios": {"auto": 0.1}}}, stored) == []
