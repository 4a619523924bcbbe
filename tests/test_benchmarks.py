"""The benchmark notices when a ratio falls."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from benchmarks import many, page
from benchmarks.run import compare, regressions
from benchmarks.workloads import WORKLOADS, Workload


def test_a_ratio_that_fell_by_more_than_a_fifth_is_told() -> None:
    stored = {"W3": {"ratios": {"auto": 8.0, "threads": 1.0}}, "overhead": {"milliseconds": 0.01}}
    assert regressions({"W3": {"ratios": {"auto": 6.3, "threads": 0.9}}}, stored) == ["W3 auto: 6.30, was 8.00"]
    assert regressions({"W3": {"ratios": {"auto": 6.4}}, "W9": {"ratios": {"auto": 0.1}}}, stored) == []


def test_the_slope_is_what_a_further_client_costs() -> None:
    first = {"clients": 1000, "start_seconds": 1.0, "round_seconds": 0.5, "last_round_seconds": 1, "peak_gigabytes": 1}
    last = {"clients": 2000, "start_seconds": 1.5, "round_seconds": 0.5, "last_round_seconds": 3, "peak_gigabytes": 1.1}
    found = many.slopes([first, {"clients": 1500}, last])
    assert found == {
        "start_microseconds": 500,
        "round_microseconds": 0,
        "last_round_microseconds": 2000,
        "bytes": 100_000,
    }


@pytest.mark.long  # ResNets of real width
@pytest.mark.parametrize("workload", WORKLOADS, ids=lambda workload: workload.name)
def test_every_workload_runs_beside_its_reference(workload: Workload) -> None:
    small = replace(workload, clients=len(workload.models), samples=12, batch=6, test=10, public=workload.public and 12)
    small = replace(small, options={**small.options, **({"subset": 12} if small.public else {})})
    data = small.data()
    found = compare({"reference": small.loop(data).round, "auto": small.contestant("auto", data)}, 1, small.target)
    assert found["ratios"].keys() == {"auto"}


@pytest.mark.long  # three processes
def test_one_command_writes_all_that_is_known_of_many_clients(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(many, "RESULTS", tmp_path)
    monkeypatch.setattr(many, "NUMBERS", (20, 60))
    monkeypatch.setattr(many, "LONG", 20)
    monkeypatch.setattr(sys, "argv", ["many", "--save"])
    many.main()
    found = json.loads((tmp_path / "many.json").read_text())
    stored = json.loads((Path(__file__).parents[1] / "results/bench/many.json").read_text())
    assert stored.keys() <= found.keys() and {"slope", "active"} <= found.keys()
    assert [line.keys() for line in found["clients"]] == [stored["clients"][0].keys()] * 2
    assert found["rounds"].keys() == stored["rounds"].keys() and found["rounds"]["rounds"] == 20


def test_the_page_about_speed_says_what_was_measured() -> None:
    assert page.written(page.PAGE.read_text()) == page.PAGE.read_text()
