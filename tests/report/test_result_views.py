"""A result in Python and in a notebook."""

from __future__ import annotations

import pytest

import polyfed as pf
from polyfed.core.errors import InputError
from polyfed.tables import amount


@pytest.fixture(scope="module")
def result():
    clients = pf.split(pf.load("digits", limit=(80, 40)), 3, "dirichlet:0.5", seed=0)
    return pf.run("fedavg", clients, ["mlp:1x8", "mlp:1x16"], rounds=2)


def test_frame(result):
    frame = result.frame()
    assert list(frame.columns) == ["client", "model", "samples", "accuracy", "bytes_up", "bytes_down"]
    assert frame["accuracy"].mean() == pytest.approx(result.accuracy()["mean"])
    assert frame["bytes_up"].sum() == result.summary()["cost"]["bytes_up"]
    assert frame["samples"].sum() == 80


def test_label_counts_and_parameters_are_kept(result):
    summary = result.summary()
    assert [sum(row) for row in summary["label_counts"]] == summary["samples"]
    assert summary["parameters"][0] == 64 * 8 + 8 + 8 * 10 + 10
    assert len(summary["class_names"]) == 10


def test_the_table_prints_every_client(result, capsys):
    print(result.table())
    lines = capsys.readouterr().out.splitlines()
    accuracy, sent = result.accuracy(), result.summary()["cost"]["per_client"]
    assert lines[0].strip() == "fedavg, 2 rounds, seed 0"
    rows = [line.split() for line in lines if "mlp:" in line]
    for client, model in enumerate(("mlp:1x8", "mlp:1x16", "mlp:1x8")):
        percent = f"{100 * accuracy['per_client'][client]:.1f}"
        bytes_of = [word for way in ("up", "down") for word in amount(sent[way][str(client)]).split()]
        assert rows[client] == [str(client), model, str(result.samples[client]), percent, *bytes_of]
    assert len(rows) == 3
    assert f"worst client {100 * min(accuracy['per_client']):.1f} %" in lines[-1]


def test_plot_returns_a_figure(result):
    figure = result.plot()
    assert list(figure.data[0].x) == [1, 2]
    assert result.plot("split").data
    with pytest.raises(InputError, match="need runs of 'local'"):
        result.plot("gains")


def test_notebook(result):
    text = result._repr_html_()
    assert text.count("<tr") == 4
    assert "mean accuracy" in text
    result.method = "<b>evil</b>"
    assert "<b>evil" not in result._repr_html_()
