"""Tables of results: what they print, also where not everybody was measured or took part."""

from __future__ import annotations

import io
import json
from statistics import fmean

import pytest
from rich.console import Console

import polyfed as pf
from polyfed.core.cost import CostMeter
from polyfed.result import Result
from polyfed.rows import summarize
from polyfed.terminal.tables import amount, comparison_table, marked
from polyfed.testing import synthetic


def printed(table) -> str:
    """Return what a wide terminal shows, without the breaks of lines."""
    out = io.StringIO()
    Console(file=out, width=200, color_system=None).print(table)
    return " ".join(out.getvalue().split())


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


# --- clients that never took part ---


def result_of(participants, per_client, architectures=None, pooled=False, **more):
    """Return a result of rounds with these participants; the last one measures."""
    lines = [{"round": n, "phase": "round", "participants": who} for n, who in enumerate(participants, 1)]
    accuracy = {"mean": fmean(per_client), "std": 0.0, "worst": min(per_client), "per_client": per_client}
    lines[-1] |= {"accuracy": {**accuracy, "global": None}, **more}
    names = architectures or ["a"] * len(per_client)
    return Result("fedavg", 0, len(lines), lines, CostMeter(), names, [10] * len(names), pooled=pooled)


def test_the_mean_over_those_who_took_part_is_given_beside_the_mean_over_all():
    result = result_of([[0], [0, 2]], [0.25, 0.05, 0.45, 0.05])
    found = result.accuracy()
    assert found["mean"] == pytest.approx(0.2)
    assert found["took_part"] == {"mean": pytest.approx(0.35), "clients": [0, 2]}
    assert "mean 20.0 % (35.0 % without the 2 of 4 clients of which no reply counted in any round)" in printed(
        result.table()
    )


def test_nothing_is_said_where_everybody_took_part():
    result = result_of([[0], [1]], [0.25, 0.05])
    assert "took_part" not in result.accuracy()
    assert "took part" not in printed(result.table())


def test_a_client_that_was_selected_and_went_missing_did_not_take_part():
    result = result_of([[0, 1]], [0.25, 0.05], missing={"1": "no answer"})
    assert result.accuracy()["took_part"]["clients"] == [0]


def test_exchanges_with_everybody_outside_the_rounds_are_no_rounds():
    result = result_of([[0]], [0.25, 0.05])
    before = {"round": 0, "phase": "before", "participants": [0, 1]}
    result.history.insert(0, before)
    assert result.accuracy()["took_part"]["clients"] == [0]


def test_of_pooled_data_a_client_takes_part_with_its_architecture():
    result = result_of([[1]], [0.25, 0.5], architectures=["a", "b", "a", "b"], pooled=True)
    assert result.accuracy()["per_client"] == [0.25, 0.5, 0.25, 0.5]
    assert result.accuracy()["took_part"] == {"mean": 0.5, "clients": [1, 3]}


def test_a_comparison_gives_both_means():
    results = {
        "local": [result_of([[0, 1]], [0.2, 0.2]).summary(), result_of([[0]], [0.4, 0.2]).summary()],
        "fedavg": [result_of([[0, 1]], [0.4, 0.2]).summary(), result_of([[1]], [0.4, 0.2]).summary()],
    }
    rows = summarize(results)
    assert [row.took_part for row in rows] == [pytest.approx([0.2, 0.4]), pytest.approx([0.3, 0.2])]
    text = printed(comparison_table(rows, "both"))
    assert "local 25.0 ± 63.5" in text and "fedavg 30.0 ± 0.0" in text
    apart = "accuracy counts clients of which no reply counted in any round, without them it is:"
    assert text.endswith(f"{apart} local 30.0 ± 127.1, fedavg 25.0 ± 63.5")


def test_a_comparison_in_which_all_took_part_has_one_mean():
    rows = summarize({"local": [result_of([[0, 1]], [0.2, 0.2]).summary()]})
    assert rows[0].took_part == []
    assert "took part" not in printed(comparison_table(rows, "one"))


def test_a_row_of_a_reconstruction_is_marked_and_the_file_keeps_its_label(tmp_path):
    clients = synthetic(3)
    rows = pf.compare({"theirs": "msfkd"}, clients=clients, models="mlp:1x8", rounds=1, seeds=1, out=tmp_path)
    lines = [line.split() for line in str(rows.table()).splitlines()]
    assert any(line[:2] == ["theirs", "(reconstruction)"] for line in lines)
    assert not any(line[:2] == ["local", "(reconstruction)"] for line in lines)
    stored = json.loads((tmp_path / "comparison.json").read_text())
    assert [row["method"] for row in stored["rows"]] == ["local", "theirs"]
    assert marked("msfkd (reconstruction)", True) == "msfkd (reconstruction)"  # a label may say it already


def test_a_run_with_few_participants_says_so():
    clients = pf.split(pf.load("digits", limit=(120, 60)), 6, "iid", seed=0)
    result = pf.run("local", clients, ["mlp:1x4"], rounds=1, participation=0.5, seed=0)
    trained = result.history[0]["participants"]
    found = result.summary()["accuracy"]
    assert len(trained) == 3 and found["took_part"]["clients"] == trained
    assert found["took_part"]["mean"] == pytest.approx(fmean(found["per_client"][client] for client in trained))


# --- whose gain ---


def test_a_gain_is_over_local_training_of_the_same_networks():
    def runs(accuracy, network):
        return [result_of([[0, 1]], [accuracy] * 2, architectures=[network] * 2).summary()]

    results = {
        "local": runs(0.3, "small"),
        "local_again": runs(0.9, "small"),  # of the reference's networks: the reference counts
        "local_deep": runs(0.5, "deep"),
        "fedavg": runs(0.4, "small"),
        "fedin": runs(0.6, "deep"),
        "fedfd": runs(0.6, "wide"),
    }
    rows = {row.method: row.gain for row in summarize(results, ["local", "local_again", "local_deep"])}
    assert rows["fedavg"] == pytest.approx([0.1]) and rows["fedin"] == pytest.approx([0.1])
    assert rows["fedfd"] == rows["local"] == rows["local_again"] == []


# --- which bytes ---


def test_tables_say_that_they_show_payload_and_what_is_on_the_wire():
    clients = pf.split(pf.load("digits", limit=(120, 60)), 3, "iid", seed=0)
    result = pf.run("fedproto", clients, ["mlp:1x4"], rounds=1)
    cost = result.summary()["cost"]
    payload, wire = cost["bytes_up"] + cost["bytes_down"], cost["wire_up"] + cost["wire_down"]
    assert wire > payload > 0
    shown = f"sent and received: payload, {amount(payload)} of all ({amount(wire)} on the wire)"
    assert shown in printed(result.table())
    (row,) = summarize({"fedproto": [result.summary()]})
    assert (row.wire_up, row.wire_down) == (cost["wire_up"] / 3, cost["wire_down"] / 3)
    more = f"(on the wire, with framing, up to {100 * wire / payload - 100:.0f} % more)"
    assert f"sent and received: payload of a client in all {more}" in printed(comparison_table([row], "bytes"))


def test_a_method_that_sends_nothing_has_nothing_on_the_wire():
    result = result_of([[0]], [0.5])
    assert "wire" not in printed(result.table())
    assert "wire" not in printed(comparison_table(summarize({"local": [result.summary()]}), "nothing"))
