"""A result in Python and in a notebook."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

import polyfed as pf
from polyfed.core.errors import InputError
from polyfed.rows import Row
from polyfed.terminal.tables import amount, client_table, comparison_table


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


LONG = ["hf:distilbert,dim=16,n_layers=1,n_heads=2,hidden_dim=16>64", "sklearn:RandomForestClassifier,n_estimators=100"]


def summary_of(names, metrics):
    each = {name: {"per_client": [0.625, 0.375], "mean": 0.5} for name in metrics}
    personal = {"mean": 0.5, "per_client": [0.75, 0.25]}
    cost = {f"{kind}_{way}": 1000 for kind in ("bytes", "wire") for way in ("up", "down")}
    return {
        "method": "fedmd",
        "rounds": 2,
        "seed": 0,
        "names": names,
        "architectures": LONG,
        "samples": [1234, 5678],
        "accuracy": {"mean": 0.5, "worst": 0.25, "global": None, "per_client": [0.875, 0.125], "metrics": each,
                     "personal": personal},
        "cost": {"per_client": {"up": {"0": 123456}, "down": {"1": 654321}}, **cost},
    }  # fmt: skip


@pytest.mark.parametrize("metrics", [(), ("auroc", "macro_f1"), ("auroc", "macro_f1", "log_loss", "calibration_error")])
@pytest.mark.parametrize("names", [[], ["university hospital north", "south"]])
def test_long_names_do_not_squeeze_the_numbers_of_a_narrow_terminal(names, metrics):
    console = Console(width=80, file=io.StringIO(), record=True)
    console.print(client_table(summary_of(names, metrics)))
    text = console.export_text()
    assert max(map(len, text.splitlines())) <= 80 and "…" not in text
    for number in ("1234", "5678", "87.5", "12.5", "75.0", "25.0", "123.5 kB", "654.3 kB", *["0.625"] * bool(metrics)):
        assert number in text, text
    for heading in ("samples", "acc. %", "own %", "sent", "received", *metrics):
        assert heading in text
    # A name goes on below itself: all of its letters are there, in order, in one column.
    column = next(line.index("model") for line in text.splitlines() if " model " in line)
    width = next(line.index("samples") for line in text.splitlines() if " model " in line) - column
    found = "".join(line[column : column + width].strip() for line in text.splitlines())
    assert all(name in found for name in LONG), found


def test_long_labels_do_not_squeeze_the_numbers_of_a_comparison():
    row = Row("fedmd with twenty public samples", [0.815, 0.825], [0.7, 0.71], [0.8, 0.81], [0.01, 0.02], 1e6, 2e6,
              1e6, 2e6, 12.0, [], personal=[0.8, 0.81], metrics={"auroc": [0.9], "log_loss": [0.3]})  # fmt: skip
    console = Console(width=80, file=io.StringIO(), record=True)
    console.print(comparison_table([row, row], "digits"))
    text = console.export_text()
    assert max(map(len, text.splitlines())) <= 80 and "…" not in text
    assert all(word in text for word in ("82.0 ± 6.4", "+1.5 ± 6.4", "log_loss", "2.0 MB", "twenty"))
