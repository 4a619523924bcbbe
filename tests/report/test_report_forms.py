"""Tables as frames, Markdown and LaTeX; figures as plotly and matplotlib objects; the command to run it again."""

from __future__ import annotations

import json
import re
import shlex

import pytest
from report_runs import make_run
from typer.testing import CliRunner

from polyfed import report
from polyfed.core.errors import InputError
from polyfed.report import again, cells, charts, forms, tables
from polyfed.report.page import render
from polyfed.report.runs import Study, study
from polyfed.report.words import answer

pytestmark = pytest.mark.xdist_group("report")  # one comparison


def test_frame_has_numbers(two_methods):
    frame = report.table(two_methods).set_index("method")
    assert frame.loc["alpha", "accuracy %"] == pytest.approx(54.0)
    assert frame.loc["alpha", "vs. local"] == pytest.approx(4.0)
    assert frame.loc["alpha", "vs. local ±"] == pytest.approx(4.968, abs=1e-3)
    assert frame.loc["beta", "sent"] == 2000
    assert "vs. centralized" not in frame  # nobody ran it


def test_the_mean_over_those_who_took_part_has_a_column_where_somebody_did_not(two_methods):
    assert "took part %" not in report.table(two_methods)
    for run in two_methods.runs["alpha"]:
        run.summary["accuracy"]["took_part"] = {"mean": run.per_client[2], "clients": [2]}
    frame = report.table(two_methods).set_index("method")
    assert frame.loc["alpha", "took part %"] == pytest.approx(64.0)
    assert frame.loc["alpha", "accuracy %"] == pytest.approx(54.0)
    assert frame["took part %"].isna()["beta"]  # there everybody took part


def test_payload_and_what_is_on_the_wire_are_told_apart(two_methods):
    frame = report.table(two_methods).set_index("method")
    assert tuple(frame.loc["alpha", ["sent", "received", "on the wire"]]) == (200, 400, 1200)
    lines = report.table(two_methods, "wire").set_index("method").loc["alpha"]
    assert sorted(zip(lines["direction"], lines["what"], lines["bytes a client"], strict=True)) == [
        ("received", "framing", 400),
        ("received", "parameters", 400),
        ("sent", "framing", 200),
        ("sent", "parameters", 200),
    ]


def test_a_method_that_exchanges_nothing_has_nothing_on_the_wire(two_methods):
    for run in two_methods.runs["local"]:
        run.summary["cost"] |= {"wire_up": 54, "wire_down": 54}  # empty messages
    assert report.table(two_methods).set_index("method").loc["local", "on the wire"] == 0
    assert "local" not in set(report.table(two_methods, "wire")["method"])


def test_few_rounds_have_a_tick_each():
    few, many = (Study({"a": [make_run("a", 0, [[0.5] * 3] * rounds)]}) for rounds in (2, 40))
    assert report.figure(few, "curves").layout.xaxis.dtick == 1
    assert report.figure(many, "curves").layout.xaxis.dtick is None
    pytest.importorskip("matplotlib")
    axes = report.figure(few, "curves", "matplotlib").axes[0]
    assert set(axes.get_xticks()) <= {0, 1, 2, 3}


def test_markdown(two_methods):
    head, rule, _, alpha, _ = report.to_markdown(two_methods).splitlines()
    assert head.startswith("| method | accuracy % |")
    assert rule.startswith("|---|---:|")
    assert alpha.startswith("| alpha | 54.0 ± 5.0 |")


def methods(**accuracy):
    """Return a study of methods whose clients all have the same accuracy, by seed."""
    return Study({n: [make_run(n, s, [[v] * 3]) for s, v in enumerate(values)] for n, values in accuracy.items()})


def bold(study):
    """Return the methods that LaTeX prints in bold by their accuracy, and those of the page."""
    rows = [line.split(" & ") for line in report.to_latex(study).splitlines() if " & " in line]
    place = rows[0].index(r"accuracy \%")
    tex = [row[0] for row in rows[1:] if row[place].startswith(r"\textbf{")]
    html = re.findall(r'<tr>\s*<th[^>]*>([^<]*)</th>\s*<td class="number best"', render(study))
    return tex, html


def test_latex_is_escaped_and_marks_the_best():
    runs = {n: [make_run(n, s, [[v] * 3]) for s in (0, 1)] for n, v in (("a_b&c", 0.5), ("d", 0.4))}
    text = report.to_latex(Study(runs))
    assert r"a\_b\&c & \textbf{50.0 $\pm$ 0.0}" in text
    assert r"accuracy \%" in text
    columns = len(text.splitlines()[0].removeprefix(r"\begin{tabular}{").removesuffix("}"))
    assert all(line.replace(r"\&", "").count("&") == columns - 1 for line in text.splitlines() if "&" in line)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a_b&c%d#e$f{g}", r"a\_b\&c\%d\#e\$f\{g\}"),
        (f"{cells.MINUS}1.5 and 2.0{cells.TIMES}", r"$-$1.5 and 2.0$\times$"),
        (cells.NOTHING, "--"),
        ("a<b>c", "a$<$b$>$c"),
    ],
)
def test_latex_of_a_heading_and_a_cell(text, expected):
    column = cells.Column(text, group="50 % accuracy")
    made = cells.Table("t", "T", [column], [[cells.Cell(text, half="0.1")]])
    lines = [rf"{expected}, 50 \% accuracy \\", r"\midrule", rf"{expected} $\pm$ 0.1 \\"]
    assert forms.to_latex(made).splitlines() == [
        r"\begin{tabular}{r}",
        r"\toprule",
        *lines,
        r"\bottomrule",
        r"\end{tabular}",
    ]


def test_latex_of_a_table_without_rows():
    text = forms.to_latex(cells.Table("t", "T", [cells.Column("method", number=False)], []))
    assert text.splitlines()[0] == r"\begin{tabular}{l}" and r"method \\" in text


@pytest.mark.parametrize(
    ("accuracy", "expected"),
    [
        ({"a": [0.50, 0.60, 0.70], "b": [0.45, 0.54, 0.66]}, ["a"]),  # paired: 5 ± 2.5 points
        ({"a": [0.50, 0.60, 0.70], "b": [0.45, 0.62, 0.60]}, []),  # paired: 4.3 ± 15 points, which is open
        ({"a": [0.9], "b": [0.1]}, []),  # one seed shows nothing
        ({"a": [0.5, 0.5], "b": [0.5, 0.5]}, []),  # equal
        ({"a": [0.5, 0.6], "b": [0.4, 0.5], "c": [0.5, 0.6]}, []),  # ahead of one, equal to another
        ({"a": [0.5, 0.6]}, []),  # of what should it be the best?
        ({"a": [0.5, 0.6], "local": [0.4, 0.5], "centralized": [0.9, 0.9]}, []),  # references do not compete
    ],
)
def test_bold_is_what_the_page_calls_best(accuracy, expected):
    found = methods(**accuracy)
    said = [label for label in accuracy if answer(found).sentences[0].startswith(f"{label} was best")]
    assert (*bold(found), said) == (expected, expected, expected)


def test_every_column_has_its_own_best(two_methods):
    text = report.to_latex(methods(a=[0.5, 0.6], b=[0.4, 0.5]))
    assert text.count(r"\textbf") == 3  # accuracy, worst client, worst decile
    for run in two_methods.runs["beta"]:
        run.summary["accuracy"]["global"] = 0.4 + 0.01 * run.seed
    table = tables.leaderboard(two_methods)
    assert {(table.rows[row][0].text, title) for row, title in table.best} >= {("alpha", "accuracy %")}
    assert "global %" not in {title for _, title in table.best}  # the only one that has a global model


@pytest.mark.parametrize("kind", charts.KINDS)
def test_every_chart_has_a_plotly_and_a_matplotlib_form(two_methods, kind, tmp_path):
    figure = report.figure(two_methods, kind)
    assert type(figure).__module__.startswith("plotly.")
    assert len(figure.data) > 0
    pytest.importorskip("matplotlib")
    drawn = report.figure(two_methods, kind, backend="matplotlib")
    assert drawn.axes[0].has_data()


def test_curves_hold_the_means_and_the_band(two_methods):
    figure = report.figure(two_methods, "curves")
    alpha = next(trace for trace in figure.data if trace.name == "alpha" and trace.mode == "lines+markers")
    assert list(alpha.x) == [1, 2]
    assert list(alpha.y) == pytest.approx([50.0, 54.0])
    band = next(trace for trace in figure.data if trace.legendgroup == "alpha" and trace.fill == "toself")
    assert list(band.y) == pytest.approx([50.0, 56.0, 52.0, 50.0])  # up along the highest seed, back along the lowest


def test_names_are_shown_letter_by_letter():
    figure = report.figure(Study({"<b>a</b>": [make_run("<b>a</b>", 0, [[0.5] * 3])]}), "curves")
    assert figure.data[0].name == "&lt;b&gt;a&lt;/b&gt;"
    assert figure.data[0].hovertext[0].startswith("&lt;b&gt;a&lt;/b&gt;, round 1: 50.0 %<br>")


def test_methods_without_messages_are_a_level_in_curves_by_bytes(two_methods):
    chart = charts.curves(two_methods, "bytes")
    assert [level.name for level in chart.levels] == ["local (sends nothing)"]
    assert [series.name for series in chart.series] == ["alpha", "beta"]


def test_stages_are_those_that_a_method_names_then_the_end_then_the_global_model():
    runs = [make_run("alpha", seed, [[0.5, 0.7, 0.6]]) for seed in (0, 1)]
    for run, gain in zip(runs, (0.0, 0.2), strict=True):
        run.history.insert(0, {**run.history[0], "round": 0, "phase": "before", "stages": {"initial": {"mean": 0.1}}})
        run.history[-1]["stages"] = {"distilled": {"mean": 0.4 + gain}}
        run.summary["accuracy"]["global"] = 0.3
    figure = charts.stages(Study({"alpha": runs, "local": [make_run("local", 0, [[0.5, 0.7, 0.6]])]}))
    (series,) = figure.series  # training alone has no stages
    assert figure.x.ticks == ("initial", "distilled", "at the end", "global model")
    assert series.x == [0, 1, 2, 3] and series.y == pytest.approx([10, 50, 60, 30])
    assert series.error_y == pytest.approx([0, 12.706 * 10, 0, 0], rel=1e-3)  # 12.7: t with one degree of freedom


def test_runs_without_stages_have_no_such_chart():
    with pytest.raises(InputError, match="at stages"):
        report.figure(Study({"alpha": [make_run("alpha", 0, [[0.5] * 3])]}), "stages")


def test_gains_need_local():
    with pytest.raises(InputError, match="need runs of 'local'"):
        report.figure(Study({"alpha": [make_run("alpha", 0, [[0.5] * 3])]}), "gains")


def test_unknown_names_are_refused_with_a_hint(two_methods):
    with pytest.raises(InputError, match="did you mean 'curves'"):
        report.figure(two_methods, "curve")
    with pytest.raises(InputError, match="did you mean 'leaderboard'"):
        report.table(two_methods, "leaderbord")
    with pytest.raises(InputError, match="Unknown backend"):
        report.figure(two_methods, "curves", backend="ascii")


@pytest.mark.long
def test_export_writes_every_form_and_twice_the_same(two_methods, tmp_path):
    pytest.importorskip("matplotlib")
    first = report.export(two_methods, tmp_path / "a", ["svg"])
    second = report.export(two_methods, tmp_path / "b", ["svg"])
    names = {path.name for path in first}
    assert {"curves.svg", "frontier.svg", "split.svg", "leaderboard.tex", "leaderboard.md", "fairness.csv"} <= names
    assert [a.read_bytes() for a in first] == [b.read_bytes() for b in second]


@pytest.mark.parametrize(("ending", "magic"), [("png", b"\x89PNG"), ("pdf", b"%PDF"), ("svg", b"<?xml")])
def test_static_formats(two_methods, tmp_path, ending, magic):
    pytest.importorskip("matplotlib")
    from polyfed.report.static import save

    path = save(report.figure(two_methods, "frontier", "matplotlib"), tmp_path / f"f.{ending}")
    assert path.read_bytes().startswith(magic)


def test_other_endings_are_refused(two_methods, tmp_path):
    pytest.importorskip("matplotlib")
    from polyfed.report.static import save

    with pytest.raises(InputError, match="png, svg, pdf"):
        save(report.figure(two_methods, "frontier", "matplotlib"), tmp_path / "f.bmp")


# --- running it again ---


def test_the_command_of_a_comparison_makes_the_same_runs(comparison, tmp_path):
    from polyfed.cli import app

    (line,) = again.commands(study(comparison))
    words = shlex.split(line)
    assert words[:2] == ["polyfed", "compare"]
    outcome = CliRunner().invoke(app, [*words[1:], "--quiet", "--out", str(tmp_path / "again")])
    assert outcome.exit_code == 0, outcome.output
    for method in ("local", "fedavg", "fedproto", "centralized"):
        for seed in (0, 1):
            one, two = (
                json.loads((folder / method / f"seed-{seed}" / "result.json").read_text())
                for folder in (comparison, tmp_path / "again")
            )
            assert one["accuracy"] == two["accuracy"]


def test_the_command_of_a_run_makes_the_same_configuration(comparison, tmp_path):
    from polyfed.cli import app

    (line,) = again.commands(study(comparison / "fedproto" / "seed-1"))
    outcome = CliRunner().invoke(app, [*shlex.split(line)[1:], "--quiet", "--out", str(tmp_path / "again")])
    assert outcome.exit_code == 0, outcome.output
    one, two = (
        json.loads((folder / "config.json").read_text())
        for folder in (comparison / "fedproto" / "seed-1", tmp_path / "again")
    )
    assert one == two


def test_several_seeds_become_a_loop(comparison):
    lines = again.commands(study([comparison / "fedavg" / "seed-0", comparison / "fedavg" / "seed-1"]))
    assert len(lines) == 1
    assert lines[0].startswith("for seed in 0 1; do polyfed run --method fedavg")
    assert lines[0].endswith("--seed $seed; done")


def test_runs_from_a_script_have_no_command(two_methods):
    assert again.commands(two_methods) == []
