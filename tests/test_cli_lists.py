"""Lists, shares and sweeps on the command line: what nobody can have meant is a sentence, never a silent choice."""

import json
import re

import pytest
from tests.test_cli import SMALL, polyfed, refused

import polyfed as pf
from polyfed.compare import compare
from polyfed.experiment import experiment, read_experiment
from polyfed.specs import split_models

ONE_ROUND = [*SMALL, "--rounds", "1", "--seeds", "1", "--quiet"]


def test_a_comma_too_many_names_no_method_and_no_model():
    words = ["compare", *ONE_ROUND, "--methods", "fedavg, ,", "--models", "mlp:1x8,,"]
    assert [row["method"] for row in json.loads(polyfed(*words, "--json").stdout)] == ["local", "fedavg"]
    assert split_models("mlp:1x8, ,cnn:4,") == ["mlp:1x8", "cnn:4"]
    assert experiment(columns="age,dose,").base.data.columns == ("age", "dose")


@pytest.mark.parametrize("nothing", [",", "", " , "])
def test_a_list_of_nothing_is_refused(nothing):
    refused("compare", *ONE_ROUND, "--methods", nothing, says="--methods names no method: write a,b,c.")
    refused("run", *SMALL, "--models", nothing, says="models is empty: name at least one, for instance mlp:2.")


def test_a_method_without_a_name_is_refused_in_files_and_in_python():
    with pytest.raises(pf.InputError, match="Unknown method ''"):
        compare(experiment(compare=["fedavg", ""]))
    with pytest.raises(pf.InputError, match="Unknown method ''"):
        compare(experiment(), [""])


@pytest.mark.parametrize(
    ("sweep", "says"),
    [
        (["lr=0.01,0.1", "lr=0.5,1"], "--sweep lr is given twice: name all of its values in one, --sweep lr=a,b,c."),
        (["lr=0.01,0.1", "training.lr=1"], "--sweep training.lr is given twice"),
        (["lr=0.1,0.1"], "sweep.training.lr names 0.1 twice: name each value once."),
        (["lr=,"], "--sweep takes key=a,b,c"),
    ],
)
def test_a_sweep_that_would_lose_values_is_refused(sweep, says):
    with pytest.raises(pf.InputError) as error:
        read_experiment(sweep=sweep)
    assert says in str(error.value)


def test_a_sweep_forgives_a_comma_too_many():
    assert read_experiment(sweep=["lr=0.1,0.2,"]).sweep == {"training.lr": (0.1, 0.2)}


def test_methods_as_a_list_in_a_file_are_told_the_right_word(tmp_path):
    (tmp_path / "e.toml").write_text('methods = ["fedavg", "fedproto"]\n')
    says = "which methods to compare is said by compare = ['fedavg', 'fedproto']"
    refused("compare", tmp_path / "e.toml", says=says)


def test_a_target_is_a_share(tmp_path):
    polyfed("run", *SMALL, "--quiet", "--out", tmp_path / "run")
    for target in ("5", "-0.1", "nan"):
        says = f"A target is an accuracy from 0 to 1, such as 0.8, not {target}."
        refused("report", tmp_path / "run", "--target", target, "--out", tmp_path / "page.html", says=says)
        assert not (tmp_path / "page.html").exists()


def test_one_round_is_one_round():
    printed = polyfed("compare", *ONE_ROUND, "--methods", "fedavg").stdout
    assert re.search(r"dirichlet:0.5, 1 round\s", printed), printed


def test_errors_name_the_option_of_the_command_line_too(tmp_path):
    refused(
        *["run", *SMALL, "--method", "fedproto", "--models", "mlp:1x8,mlp:1x16"],
        says="set feature_dim (--feature-dim N) to give all models features of one size",
    )
    rows = "".join(f"{number},{number % 2}\n" for number in range(20))
    (tmp_path / "a.csv").write_text(f"age,dose\n{rows}")
    refused("run", "--data", tmp_path / "a.csv", says="pass label='...' (--label NAME) with the right one")
