"""The report says who was malicious, who was left out or missing, and what everybody has spent."""

import pytest
from report_runs import make_run

import polyfed as pf
from polyfed.report import page, table, tables
from polyfed.report.cells import NOTHING
from polyfed.report.runs import Study
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


@pytest.mark.long
def test_a_run_tells_who_was_left_out():
    pytest.importorskip("dp_accounting")
    data = synthetic(6, 20, public=False)
    given = {"attack": "scale:0.2:100", "robust": "multikrum:0.2", "privacy": pf.Privacy(epsilon=8.0)}
    result = pf.run("fedavg", data, ["mlp:1x8"], 2, pf.Training(epochs=1, batch_size=8), progress=False, **given)
    bad = result.history[-1]["malicious"]
    assert len(bad) == 1 and all(bad[0] in line["left_out"] for line in result.history)
    frame = table(result, "trust")
    assert len(frame) == 6 and list(frame["unit"]) == ["sample"] * 6  # everybody has spent something


def attacked(label, values, seed=0, malicious=(), **trust):
    run = make_run(label, seed, [values])
    trust = {"attack": None, "robust": None, **trust}
    run.config.update(label=label, method={"name": "fedavg"}, trust=trust)
    run.history[-1]["malicious"] = list(malicious)
    return run


def test_what_honest_clients_keep_is_told_beside_the_same_clients_without_attack():
    clean = [attacked("clean", [0.8, 0.4, 0.6]), attacked("clean", [0.5, 0.5, 0.5], seed=1)]
    bad = [
        attacked("bad", [0.4, 0.9, 0.3], malicious=[1], attack="signflip:0.3"),  # 0.35 of 0.7
        attacked("bad", [0.9, 0.4, 0.2], seed=1, malicious=[0], attack="signflip:0.3"),  # 0.3 of 0.5
    ]
    rule = [attacked("rule", [0.8, 0.2, 0.8], robust="median")]
    found = tables.kept(Study({"clean": clean, "bad": bad, "rule": rule}))
    by_label = {row[0].text: row for row in found.rows}
    assert list(by_label) == ["bad", "rule"]
    assert [cell.value for cell in by_label["bad"][1:3]] == ["signflip:0.3", None]
    assert [cell.value for cell in by_label["bad"][3:]] == pytest.approx([32.5, 60.0, 55.0, 45.0])
    assert [cell.value for cell in by_label["rule"][3:]] == pytest.approx([60.0, 60.0, 100.0, 50.0])  # a minority pays
    assert "What honest clients keep" in page.render(Study({"clean": clean, "bad": bad}))


def test_without_the_clean_run_nobody_knows_what_was_kept():
    bad = [attacked("bad", [0.4, 0.9, 0.3], malicious=[1], attack="signflip:0.3")]
    other = attacked("clean", [0.8, 0.4, 0.6])
    other.config["method"] = {"name": "fedprox"}
    assert tables.kept(Study({"bad": bad, "clean": [other]})).rows == []
    assert tables.kept(Study({"bad": bad, "clean": [attacked("clean", [0.8] * 3, seed=1)]})).rows == []
