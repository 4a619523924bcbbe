"""The report says who was malicious, who was left out or missing, and what everybody has spent."""

import pytest
from report_runs import make_run

import polyfed as pf
from polyfed.report import page, table, tables
from polyfed.report.runs import Study
from polyfed.report.tables import NOTHING
from polyfed.testing.setting import synthetic


def study():
    run = make_run("alpha", 0, [[0.3] * 3, [0.4] * 3], privacy={"delta": 1e-5, "unit": "client", "epsilon": {"0": 2.5}})
    run.config["trust"] = {"attack": "signflip:0.3"}
    for line in run.history:
        line |= {"malicious": [1], "left_out": [1]}
    run.history[-1] |= {"left_out": [0, 1], "missing": {"2": "Client 2 stops."}}
    return Study({"alpha": [run], "local": [make_run("local", 0, [[0.3] * 3])]})


def test_one_row_for_everybody_of_whom_there_is_something():
    found = tables.trust(study())
    assert [column.title for column in found.columns] == [
        "method",
        "client",
        "malicious",
        "left out",
        "missing",
        "epsilon",
        "unit",
    ]
    texts = [[cell.text for cell in row] for row in found.rows]
    assert texts == [
        ["alpha", "0", NOTHING, "1", NOTHING, "2.5", "client"],
        ["alpha", "1", "signflip:0.3", "2", NOTHING, NOTHING, NOTHING],
        ["alpha", "2", NOTHING, NOTHING, "1", NOTHING, NOTHING],
    ]


def test_the_page_has_it_only_where_there_is_something():
    assert "signflip:0.3" in page.render(study()) and "Malicious clients count" in page.render(study())
    assert "Malicious clients count" not in page.render(Study({"local": [make_run("local", 0, [[0.3] * 3])]}))


def test_a_run_tells_who_was_left_out():
    pytest.importorskip("dp_accounting")
    data = synthetic(6, 20, public=False)
    given = {"attack": "scale:0.2:100", "robust": "multikrum:0.2", "privacy": pf.Privacy(epsilon=8.0)}
    result = pf.run("fedavg", data, ["mlp:1x8"], 2, pf.Training(epochs=1, batch_size=8), progress=False, **given)
    bad = result.history[-1]["malicious"]
    assert len(bad) == 1 and all(bad[0] in line["left_out"] for line in result.history)
    frame = table(result, "trust")
    assert len(frame) == 6 and list(frame["unit"]) == ["sample"] * 6  # everybody has spent something
