"""Every experiment file is valid, and every method in it exists and takes its options."""

import json
import runpy
import tomllib
from pathlib import Path

import pytest

import polyfed as pf
from polyfed import methods
from polyfed.compare import compare
from polyfed.core.errors import InputError, TrainingError
from polyfed.experiment import experiment, read_experiment
from polyfed.report.runs import study
from polyfed.report.words import answer
from polyfed.terminal.tables import comparison_table

FILES = sorted((Path(__file__).parents[1] / "experiments").rglob("*.toml"))


@pytest.mark.parametrize("file", FILES, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_experiment_file(file):
    described, used = set(), set()
    for scale in (None, *tomllib.loads(file.read_text()).get("scales", {})):
        told = read_experiment(file, scale=scale)
        for label in told.compare:
            assert told.config(label).label == label
        described |= set(told.methods)
        used |= {*told.compare, told.base.label}
    assert described <= used  # a variant that no scale compares is a slip of the pen


def test_the_field_has_every_method():
    told = read_experiment(Path(__file__).parents[1] / "experiments" / "field.toml")
    assert {told.config(label).method.name for label in told.compare} == set(methods.registry())


def test_the_page_of_the_field_is_written_from_what_was_measured():
    root = Path(__file__).parents[1]
    page = runpy.run_path(str(root / "experiments" / "field.py"))
    rows = json.loads((root / "results" / "field" / "comparison.json").read_text())["rows"]
    told = read_experiment(root / "experiments" / "field.toml")
    assert [row["method"] for row in rows] == list(told.compare)
    assert page["figures"](rows) in (root / "docs" / "explanation" / "the-field.md").read_text()


def test_a_method_with_rounds_of_its_own_takes_those():
    told = experiment(method="fedavg", rounds=7)
    assert (told.config().planned_rounds(), told.config("ams").planned_rounds()) == (7, 1)


def test_one_label_may_be_attacked():
    """As the page about robustness shows it."""
    page = (Path(__file__).parents[1] / "docs" / "explanation" / "robustness.md").read_text()
    told = experiment(**tomllib.loads(page.partition("```toml\n")[2].partition("```")[0]))
    trust = {label: (told.config(label).trust.attack, told.config(label).trust.robust) for label in told.compare}
    assert trust == {
        "fedavg": (None, None),
        "attacked": ("signflip:0.2", None),
        "defended": ("signflip:0.2", "distance"),
    }


def test_one_label_may_have_networks_and_training_of_its_own():
    made = experiment(
        models=["mlp:1x8"],
        lr=0.1,
        compare=["fedavg", "fedrolex"],
        methods={"fedrolex": {"stride": 2, "settings": {"models": ["mlp:1x8@1", "mlp:1x8@0.5"], "lr": 0.01}}},
    )
    own, plain = made.config("fedrolex"), made.config("fedavg")
    assert (own.models.names, own.training.lr, own.method.stride) == (("mlp:1x8@1", "mlp:1x8@0.5"), 0.01, 2)
    assert (plain.models.names, plain.training.lr) == (("mlp:1x8",), 0.1)
    assert own.data == plain.data and own.rounds == plain.rounds
    assert made.settings == {"fedrolex": {"models.names": ["mlp:1x8@1", "mlp:1x8@0.5"], "training.lr": 0.01}}
    again = read_experiment(None, {"compare": '["fedrolex"]'}, ["fedrolex.settings.lr=0.5", "fedrolex.stride=3"])
    assert again.config("fedrolex").training.lr == 0.5 and again.config("fedrolex").method.stride == 3


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"clients": 3}, "same for all methods"),
        ({"seed": 1}, "same for all methods"),
        ({"lrr": 1}, "lr"),
        ({"training.lrr": 1}, "lr"),
        ({"lr": -1}, "above 0"),
        (3, "table of settings"),
    ],
)
def test_what_all_labels_share_or_nobody_has_is_refused(settings, words):
    with pytest.raises(InputError, match=words):
        experiment(methods={"fedprox": {"settings": settings}})


def test_the_table_tells_what_a_row_has_of_its_own(tmp_path):
    made = experiment(
        rounds=1,
        limit=100,
        clients=3,
        models=["mlp:1x8"],
        methods={"narrow": {"method": "heterofl", "settings": {"models": ["mlp:1x8@0.5"]}}},
    )
    rows = compare(made, ["narrow"], seeds=1, out=tmp_path)
    assert [row.differs for row in rows] == [{}, {"models.names": ["mlp:1x8@0.5"]}]
    assert "narrow with models.names mlp:1x8@0.5" in str(comparison_table(rows, "").caption)
    assert json.loads((tmp_path / "comparison.json").read_text())["rows"][1]["differs"]
    assert rows[1].bytes_up < 2 * rows[1].bytes_down < 6000  # the narrow network travelled


def test_a_setting_of_a_row_that_is_the_common_one_is_not_told(tmp_path):
    made = experiment(
        rounds=1,
        limit=100,
        clients=3,
        models=["mlp:1x8"],
        lr=0.1,
        methods={"same": {"method": "fedavg", "settings": {"models": ["mlp:1x8"], "lr": 0.1, "rounds": 2}}},
    )
    rows = compare(made, ["same"], seeds=1, out=tmp_path)
    assert [row.differs for row in rows] == [{}, {"rounds": 2}]
    told = [caution for caution in answer(study(tmp_path)).cautions if "of their own" in caution]
    assert told == ["Settings of their own: same with rounds 2."]


def test_widths_of_one_network_stay_a_family_with_features_of_one_size():
    clients = pf.split(pf.load("digits", limit=(60, 30)), clients=2, by="iid")
    models = ["mlp:1x8@1", "mlp:1x8@0.5"]  # the first has eight features already
    result = pf.run("fedrolex", clients, models, 1, feature_dim=8)
    assert {"projection.weight", "head.weight"} <= result.models[0].state_dict().keys()
    assert [result.models[k].state_dict()["projection.weight"].shape[1] for k in (0, 1)] == [8, 4]


def test_a_run_that_diverges_does_not_hold_up_the_others(tmp_path):
    made = experiment(
        data="digits",
        limit=60,
        clients=2,
        models=["mlp:1x8"],
        rounds=2,
        methods={"wild": {"method": "fedavg", "settings": {"lr": 1e30}}},
    )
    with pytest.raises(TrainingError, match=r"1 of 3 runs failed.* wild with seed 0 \(The loss of client 0 became"):
        compare(made, ["local", "wild", "fedavg"], seeds=1, out=tmp_path)
    assert sorted(path.parent.parent.name for path in tmp_path.rglob("result.json")) == ["fedavg", "local"]
