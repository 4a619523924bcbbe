"""Sweeps: the same number of tries for all, chosen on validation data, reported on test data, every run kept."""

import json
from itertools import islice

import pytest

from polyfed import report
from polyfed.compare import compare
from polyfed.core.errors import InputError
from polyfed.experiment import experiment, read_experiment
from polyfed.report import again
from polyfed.sweep import best, between, tries

pytestmark = pytest.mark.xdist_group("sweep")  # whose tests share a comparison
SMALL = {"limit": 150, "clients": 3, "rounds": 1, "models": ["mlp:1x8"], "validation": 0.2, "seeds": 2}
BOTH = {"lr": [0.01, 0.1], "method.mu": [0.1, 1]}


def values(label, made):
    return [one.values for one in tries(made, ["local", "fedprox"]) if one.label == label]


def test_the_grid_of_a_method_is_the_product_of_what_it_has():
    made = experiment(sweep=BOTH)
    assert values("fedprox", made) == [
        {"method.mu": 0.1, "training.lr": 0.01},
        {"method.mu": 1, "training.lr": 0.01},
        {"method.mu": 0.1, "training.lr": 0.1},
        {"method.mu": 1, "training.lr": 0.1},
    ]


def test_a_method_without_an_option_has_as_many_tries_of_the_rest():
    """Local training has no mu: the learning rates between the given ones make up for it."""
    found = [one["training.lr"] for one in values("local", experiment(sweep=BOTH))]
    assert found == [0.01, 0.1, 0.03162, 0.01778]


def test_values_between():
    assert list(islice(between([1.0, 100.0]), 3)) == [10.0, 3.162, 31.62]
    assert list(islice(between([0.0, 1.0]), 3)) == [0.5, 0.25, 0.75]
    assert list(between([1, 2, 4])) == [3]  # whole numbers stay whole, and end


def test_values_of_one_label_go_before_those_of_all():
    made = experiment(sweep={**BOTH, "fedprox.mu": [7, 8]})
    assert {one["method.mu"] for one in values("fedprox", made)} == {7, 8}


def test_the_best_on_validation_and_of_equal_ones_the_first():
    assert best({"a": [[0.1, 0.5], [0.4, 0.4], [0.4, 0.4]], "b": [[0.3]]}) == {"a": 1, "b": 0}


@pytest.mark.parametrize(
    ("sweep", "words"),
    [
        ({"rounds": [1, 2]}, "more than the method"),
        ({"data.clients": [1, 2]}, "more than the method"),
        ({"lrr": [1]}, "lr"),
        ({"training.lrr": [1]}, "lr"),
        ({"lr": 0.1}, "list of values"),
        ({"lr": []}, "list of values"),
        ("lr", "table of lists"),
    ],
)
def test_what_cannot_be_swept_is_refused_at_once(sweep, words):
    with pytest.raises(InputError, match=words):
        experiment(sweep=sweep)


@pytest.mark.parametrize(
    ("sweep", "words"),
    [
        ({"method.mu": [0.1, 1]}, "local has 1 where the largest grid has 2"),
        ({"method.muu": [1]}, "did you mean 'mu'"),
        ({"fedprx.mu": [1]}, "did you mean 'fedprox'"),
        ({"lr": [0.1, -1]}, "above 0"),
        ({"epochs": [1, 2], "method.mu": [1, 2, 3]}, "local has 2 where the largest grid has 6"),
    ],
)
def test_a_sweep_that_is_not_fair_or_not_possible_is_refused_before_training(sweep, words):
    with pytest.raises(InputError, match=words):
        compare(experiment(sweep=sweep, **SMALL), ["fedprox"])


def test_choosing_needs_validation_data():
    with pytest.raises(InputError, match="--validation"):
        compare(experiment(sweep={"lr": [0.1, 0.2]}, **{**SMALL, "validation": 0.0}), ["fedprox"])
    with pytest.raises(InputError, match="fused network"):
        compare(experiment(sweep={"lr": [0.1, 0.2]}, **SMALL), ["ams"])


def test_options_and_files_say_the_same(tmp_path):
    (tmp_path / "e.toml").write_text("[sweep]\nlr = [0.01, 0.1]\n[sweep.method]\nmu = [0.1, 1]\n")
    file = read_experiment(tmp_path / "e.toml")
    options = read_experiment(sweep=["lr=0.01,0.1", "method.mu=[0.1, 1]"])
    assert file.sweep == options.sweep == {"training.lr": (0.01, 0.1), "method.mu": (0.1, 1)}
    assert read_experiment(tmp_path / "e.toml", sweep=["training.lr=1"]).sweep["training.lr"] == (1,)


@pytest.fixture(scope="module")
def swept(tmp_path_factory):
    out = tmp_path_factory.mktemp("sweep")
    return out, compare(experiment(sweep=BOTH, **SMALL), ["fedprox"], out=out)


def test_the_row_is_the_try_that_validation_data_chose(swept):
    out, rows = swept
    content = json.loads((out / "comparison.json").read_text())
    assert [row.tries for row in rows] == [4, 4]
    for row in rows:
        mine = [one for one in content["sweep"] if one["method"] == row.method]
        assert len(mine) == 4
        chosen = next(one for one in mine if one["chosen"])
        assert sum(chosen["validation"]) == max(sum(one["validation"]) for one in mine)
        assert (row.accuracy, row.differs) == (chosen["accuracy"], chosen["values"])
        run = json.loads((out / chosen["folder"] / "seed-1" / "config.json").read_text())
        assert run["training"]["lr"] == chosen["values"]["training.lr"]
        summary = json.loads((out / chosen["folder"] / "seed-1" / "result.json").read_text())
        assert summary["accuracy"]["validation"]["mean"] == chosen["validation"][1]


def test_every_run_is_kept_and_not_run_again(swept):
    out, rows = swept
    assert len(list(out.glob("sweep/*/*/seed-*/result.json"))) == 2 * 4 * 2
    started = []
    again = compare(
        experiment(sweep=BOTH, **SMALL), ["fedprox"], out=out, started=lambda config, place: started.append(place) or ()
    )
    assert again == rows and not started
    victim = next(out.glob("sweep/fedprox/*/seed-1/result.json"))
    victim.unlink()
    assert (
        compare(
            experiment(sweep=BOTH, **SMALL),
            ["fedprox"],
            out=out,
            started=lambda config, place: started.append(place) or (),
        )[1].accuracy
        == rows[1].accuracy
    )
    assert len(started) == 1 and started[0].total == 16 and "lr=" in started[0].what


def test_the_report_tells_every_try_and_how_many_there_were(swept):
    out, rows = swept
    study = report.study(out)
    assert {label: len(runs) for label, runs in study.runs.items()} == {"local": 2, "fedprox": 2}
    page = report.write_report(out).read_text()
    assert "Every method had 4 tries" in page and "out of 4 tries for each method" in page
    table = report.table(out, "sweep")
    assert len(table) == 8 and list(table["chosen"]).count("yes") == 2
    assert report.table(out)["accuracy %"].tolist() == pytest.approx(
        [100 * sum(row.accuracy) / 2 for row in rows], abs=1e-9
    )
    line = again.commands(study)[0]
    assert "--sweep 'method.mu=[0.1, 1]' --sweep 'training.lr=[0.01, 0.1]'" in line and "--validation 0.2" in line


def test_the_report_says_where_the_choice_was_made_between_equal_tries(swept, tmp_path):
    study = report.study(swept[0])
    for place, one in enumerate(study.sweep):
        one["validation"] = [0.5, 0.7] if one["method"] == "fedprox" else [0.1 * place, 0.0]
    page = report.write_report(study, tmp_path / "page.html").read_text()
    assert "fedprox: 4 tries were equal on validation data; the first was taken." in page
    assert page.count("tries were equal") == 1
