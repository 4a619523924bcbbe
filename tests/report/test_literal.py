"""What people typed is printed letter by letter: square brackets are no markup, colons no emoji."""

from __future__ import annotations

import io
import re
import sys
from contextlib import redirect_stderr, redirect_stdout

import pytest
from hypothesis import given
from hypothesis import strategies as st
from report_runs import make_run
from rich.console import Console
from typer.testing import CliRunner

from polyfed import report
from polyfed.cli import app, main
from polyfed.core.errors import InputError
from polyfed.report import static
from polyfed.report.runs import Study
from polyfed.rows import summarize
from polyfed.terminal.live import LiveProgress, View
from polyfed.terminal.progress import PlainProgress
from polyfed.terminal.tables import client_table, comparison_table, say

NAMES = ["runs[/x]", "a[red]b", "[/]", "[bold]", "polyfed[flower]", "a:smile:b", "\\[x]"]
LINE = {"round": 1, "phase": "round", "bytes_up": 1, "bytes_down": 2}
ACCURACY = {"mean": 0.5, "worst": 0.4, "per_client": [0.6, 0.4], "global": None}
COST = {"bytes_up": 10, "bytes_down": 20, "wire_up": 12, "wire_down": 24, "per_client": {"up": {}, "down": {}}}


def summary(name: str) -> dict:
    return {
        "method": name,
        "seed": 0,
        "rounds": 1,
        "samples": [1, 2],
        "architectures": [name, "mlp:1"],
        "accuracy": ACCURACY,
        "cost": {**COST, "seconds": {"total": 1.0}},
    }


def printed(show) -> str:
    """Return what reaches a wide terminal without colors, in a console that reads markup as rich does by default."""
    out = io.StringIO()
    show(Console(file=out, width=200, color_system=None))
    return out.getvalue()


def command(*words: object) -> tuple[int, str]:
    """Run a command; return its exit code and all that it printed."""
    out = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(out), redirect_stderr(out):
        patch.setattr(sys, "argv", ["polyfed", *map(str, words)])
        try:
            main()
            code = 0
        except SystemExit as end:
            code = int(end.code or 0)
    return code, out.getvalue()


PIECES = ["[", "]", "/", "[/]", "[red]", "red", ":", ":smile:", "\\", "@click", "a", "1.5", " "]


@given(st.lists(st.sampled_from(PIECES)).map("".join))
def test_a_line_is_printed_as_it_is(text):
    assert printed(lambda console: say(console, text)) == f"{text}\n"


@pytest.mark.parametrize("name", NAMES)
def test_tables_show_names_as_they_are(name):
    clients = printed(lambda console: console.print(client_table(summary(name))))
    assert clients.count(name) == 2  # the method in the title, the network in its row
    found = summary(name)
    found["accuracy"] = {**ACCURACY, "took_part": {"mean": 0.6, "clients": [0]}}
    rows = summarize({name: [found]})
    shown = printed(lambda console: console.print(comparison_table(rows, f"title {name}")))
    assert shown.count(name) == 3  # in the title, in its row, and in the caption about those who took part
    assert str(comparison_table(rows, f"title {name}")).count(name) == 3


@pytest.mark.parametrize("name", NAMES)
def test_progress_shows_names_as_they_are(name):
    assert name in printed(lambda console: PlainProgress(console, 2, name)(dict(LINE)))
    assert name in printed(lambda console: LiveProgress(console, 2, name)(dict(LINE)))
    view = View(2, name, names=["north", name])
    view.add({**LINE, "accuracy": ACCURACY})
    shown = printed(lambda console: console.print(view))
    assert name in shown.splitlines()[0]
    assert f"worst 40.0 % ({name})" in shown


@pytest.mark.parametrize("name", NAMES)
def test_errors_show_what_was_typed(name, monkeypatch):
    code, text = command("report", name)
    assert (code, text.startswith(f"Error: There is no {name}: ")) == (2, True), text

    def fail(*_):
        raise InputError(f"pip install '{name}'")

    monkeypatch.setattr("polyfed.analysis.command.analyze", fail)
    assert command("analyze", "cka", "x") == (2, f"Error: pip install '{name}'\n")


def test_the_word_error_stands_out_on_a_terminal(monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    _, text = command("report", "a[red]b")
    assert text.startswith("\x1b[1;31mError:\x1b[0m There is no a[red]b: ")


def test_paths_are_printed_as_they_are(tmp_path, monkeypatch):
    name = "runs[x][red]a:smile:b"
    monkeypatch.chdir(tmp_path)
    small = ("--data", "digits", "--limit", "60", "--clients", "2", "--rounds", "1", "--models", "mlp:1x4")
    code, text = command("run", "--method", "local", *small, "--out", name)
    assert code == 0, text
    assert f"Report: {name}/report.html\n" in text
    assert f"Everything is in {name}\n" in text
    assert command("report", name) == (0, f"Wrote {name}/report.html\n")
    code, text = command("compare", "--methods", "local", "--seeds", "1", *small, "--out", f"c{name}")
    assert f"Everything is in c{name}\n" in text


def test_listings_print_cells_as_they_are(monkeypatch):
    rows = [{"name": "a[red]b", "inputs": "image", "example": "mlp[:DEPTH][/x]", "summary": "x" * 300}]
    monkeypatch.setattr("polyfed.models.describe", lambda: rows)
    code, text = command("models")
    assert code == 0
    assert "a[red]b" in text and "mlp[:DEPTH][/x]" in text
    assert text.count("x") == 300 + 2  # of the cell, of the heading and of the path


def test_help_texts_keep_their_brackets():
    text = CliRunner().invoke(app, ["run", "--help"], env={"COLUMNS": "160"}).output
    assert "[scales.NAME]" in re.sub(r"\s+", " ", text)


@pytest.mark.parametrize("kind", ["curves", "curves-bytes", "frontier", "tiers"])
def test_dollar_signs_in_a_figure_are_no_formula(kind, tmp_path):
    pytest.importorskip("matplotlib")
    name = r"$\frac$"
    runs = {label: [make_run(label, 0, [[0.5] * 3], (name,) * 3, up=3, down=3)] for label in ("other", name)}
    static.save(report.figure(Study(runs), kind, "matplotlib"), tmp_path / "figure.svg")  # drawn only when saved
    assert (tmp_path / "figure.svg").stat().st_size > 0
