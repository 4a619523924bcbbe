"""A result in Python and in a notebook."""

from __future__ import annotations

import pytest
from rich.table import Table

import polyfed as pf
from polyfed.core.errors import InputError


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


def test_table_is_printable(result):
    assert isinstance(result.table(), Table)


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
