"""Sites agree on scaling, words and classes without showing a row: what comes out is that of all rows together."""

import json

import numpy as np
import pandas as pd
import pytest
from typer.testing import CliRunner

import polyfed as pf
from polyfed.cli import app
from polyfed.core.errors import InputError
from polyfed.data.agree import agree, read_agreed, tell, write_agreed
from polyfed.flower.sitedata import read_data


def rows(seed, number, words, missing=()):
    rng = np.random.default_rng(seed)
    age = rng.normal(50 + 10 * seed, 5 + seed, number)
    age[list(missing)] = np.nan
    return pd.DataFrame(
        {
            "age": age,
            "ward": rng.choice(words, number),
            "smoker": rng.random(number) > 0.5,
            "outcome": np.where(rng.random(number) > 0.5, "ill", "well"),
        }
    )


@pytest.fixture
def sites():
    return {"north": rows(1, 40, ["a", "b"]), "south": rows(2, 70, ["b", "c"], missing=(3, 8))}


def test_mean_and_deviation_are_those_of_all_rows_together(sites):
    told = {name: tell(pf.load(frame, test=frame, label="outcome")) for name, frame in sites.items()}
    agreed = agree(told)
    age, ward, smoker = agreed.form.columns
    together = pd.concat(sites.values())["age"]
    assert age.center == pytest.approx(together.mean()) and age.spread == pytest.approx(together.std(ddof=0))
    assert age.gaps and age.fill == age.center
    assert ward.values == ("a", "b", "c") and smoker.kind == "flag" and agreed.class_names == ("ill", "well")


def test_no_row_is_in_what_a_site_tells(sites):
    told = json.dumps(tell(pf.load(sites["south"], test=sites["south"], label="outcome")))
    assert not any(f"{value:.4f}"[:6] in told for value in sites["south"]["age"].dropna())


def test_all_sites_then_have_inputs_of_one_form_and_scaling(sites, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run = CliRunner()
    for name, frame in sites.items():
        frame.to_csv(f"{name}.csv", index=False)
        done = run.invoke(app, ["form", "tell", f"{name}.csv", "--label", "outcome", "--out", f"{name}.json"])
        assert done.exit_code == 0, done.output
    assert run.invoke(app, ["form", "agree", "north.json", "south.json", "--out", "all.json"]).exit_code == 0
    agreed = read_agreed(tmp_path / "all.json")
    from polyfed.config import Data

    found = [read_data(Data(f"{name}.csv", label="outcome", validation=0.2), None, agreed) for name in sites]
    assert found[0].train.scaling == found[1].train.scaling and found[0].train.scaling.std[0] > 5
    assert found[0].input_shape == found[1].input_shape and found[0].input_shape.groups == (3,)
    assert found[0].classes == found[1].classes and found[0].validation is not None
    assert found[0].own_test is found[0].test


def test_targets_of_a_regression_get_units_that_all_share(tmp_path):
    parts = {name: rows(seed, 50, ["a", "b"]).drop(columns="outcome") for seed, name in enumerate(["north", "south"])}
    told = {name: tell(pf.load(frame, test=frame, label="age", task="regression")) for name, frame in parts.items()}
    write_agreed(agree(told), tmp_path / "all.json")
    agreed = read_agreed(tmp_path / "all.json")
    together = pd.concat(parts.values())["age"]
    assert agreed.task.center == pytest.approx((together.mean(),))
    assert agreed.task.spread == pytest.approx((together.std(ddof=0),))
    assert pf.load(parts["north"], label="age", **agreed.options()).task == agreed.task


@pytest.mark.parametrize("change", [lambda f: f.drop(columns="ward"), lambda f: f.assign(ward=1.0)])
def test_sites_with_other_columns_are_named(sites, change):
    told = {name: tell(pf.load(frame, test=frame, label="outcome")) for name, frame in sites.items()}
    other = change(sites["south"])
    told["south"] = tell(pf.load(other, test=other, label="outcome"))
    with pytest.raises(InputError, match=r"south has the columns age .* but north has"):
        agree(told)


def test_what_is_no_table_and_what_is_no_such_file_is_a_sentence(tmp_path):
    with pytest.raises(InputError, match="is no table with named columns"):
        tell(pf.load("digits"))
    (tmp_path / "x.json").write_text("{}")
    with pytest.raises(InputError, match="is not the form of all sites"):
        read_agreed(tmp_path / "x.json")
