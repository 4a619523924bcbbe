"""A result in Python and in a notebook."""

from __future__ import annotations

import pytest

import polyfed as pf
from polyfed.core.errors import InputError
from polyfed.terminal.tables import amount


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


def test_the_table_prints_every_client(result):
    title, _, headings, *rows = (line.split() for line in str(result.table()).splitlines())
    assert title == ["fedavg,", "2", "rounds,", "seed", "0"]
    assert headings == ["client", "model", "samples", "acc.", "%", "sent", "received"]
    summary = result.summary()
    for client, row in enumerate(rows[1:4]):
        accuracy = f"{100 * summary['accuracy']['per_client'][client]:.1f}"
        sent = amount(summary["cost"]["per_client"]["up"][str(client)]).split()
        assert row[:4] == [str(client), summary["architectures"][client], str(summary["samples"][client]), accuracy]
        assert row[4:6] == sent
    caption = " ".join(word for row in rows[4:] for word in row)
    assert caption.startswith(f"mean {100 * summary['accuracy']['mean']:.1f} %, worst client")


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
