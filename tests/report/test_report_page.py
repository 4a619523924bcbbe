"""The page as a file: small, the same each time, whole in itself; what is left out is named."""

from __future__ import annotations

import html
import re

import pytest
from report_runs import make_run

from polyfed import report
from polyfed.core.errors import InputError
from polyfed.report import statistics
from polyfed.report.runs import Run, Study, study

pytestmark = pytest.mark.xdist_group("report")  # one comparison

LIMIT = 5_000_000


@pytest.fixture(scope="module")
def page_file(comparison):
    return report.write_report(comparison)


def test_it_is_written_beside_the_runs_and_small(page_file, comparison):
    assert page_file == comparison / "report.html"
    assert page_file.stat().st_size < LIMIT


def test_the_same_runs_give_the_same_page(comparison, tmp_path, page_file):
    assert report.write_report(comparison, tmp_path / "again.html").read_bytes() == page_file.read_bytes()


def test_it_names_nothing_outside_itself(page_file):
    text = page_file.read_text()
    text = re.sub(r'<script type="text/plain".*?</script>', "", text, flags=re.S)
    assert not re.findall(r"""(?:src|href)=["'](?!#|data:)[^"']+""", text)
    assert "@import" not in text and "url(" not in text


def test_ten_thousand_clients_stay_below_the_limit(tmp_path):
    number = 10_000
    kinds = {"architectures": ["small", "large"] * (number // 2), "parameters": [10, 99] * (number // 2)}
    runs = {}
    for label in ("local", "alpha", "beta"):
        values = [[(n % 97) / 97 for n in range(number)]]
        made = make_run(label, 0, values, **kinds, up=100, down=100)
        made.summary["label_counts"] = [[1] * 10] * number
        made.summary["samples"] = [10] * number
        runs[label] = [made]
    points = sum(len(trace.x) for trace in report.figure(Study(runs), "gains").data)
    assert points <= 2 * 1000 + 2  # of two methods, and their means
    path = report.write_report(Study(runs), tmp_path / "large.html")
    assert path.stat().st_size < LIMIT
    assert "The first 100 of 10000 clients" in path.read_text()


def test_results_in_memory_have_a_page_too(tmp_path):
    import polyfed as pf

    clients = pf.split(pf.load("digits", limit=(60, 30)), 2, seed=0)
    results = [pf.run(name, clients, ["mlp:1x8"], rounds=1) for name in ("local", "fedavg")]
    path = report.write_report(results, tmp_path / "memory.html")
    text = html.unescape(path.read_text())
    assert "fedavg reached a mean accuracy" in text


def test_unfinished_runs_are_left_out_and_named(comparison, tmp_path):
    import shutil

    copy = tmp_path / "copy"
    shutil.copytree(comparison, copy)
    (copy / "fedavg" / "seed-1" / "result.json").unlink()
    found = study(copy)
    assert len(found.runs["fedavg"]) == 1
    assert any("seed-1 is not finished" in note for note in found.notes)
    assert any("Not all methods" in note for note in found.notes)


def test_nothing_to_report_is_an_error_for_people(tmp_path):
    with pytest.raises(InputError, match="No finished run"):
        report.write_report(tmp_path)
    with pytest.raises(InputError, match="There is no"):
        report.write_report(tmp_path / "nowhere")


def test_two_runs_of_one_method_are_two_rows(two_methods):
    run = two_methods.runs["alpha"][0]
    twin = Run("alpha", run.seed, run.summary, run.history, run.config)
    assert len(Study({"a": [run]}).all) == 1
    from polyfed.report.runs import _group

    assert len(_group([run, twin], [], None, []).labels) == 2


def test_networks_told_apart_by_a_number_are_one_kind(two_methods):
    run = two_methods.runs["alpha"][0]
    run.summary["cost"]["kinds"] = {"m/down/params/0": 30, "m/down/params/12": 60, "m/down/params/candidate-3": 3}
    found = {kind: size for _, _, kind, size in statistics.wire(Study({"alpha": [run]}), "alpha")}
    assert (found["params/other clients"], found["params/candidate"]) == (30, 1)
