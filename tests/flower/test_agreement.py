"""What sites must have in common, and what a run or a site must keep: told before anything is trained."""

from __future__ import annotations

import csv
import json

import pytest
from typer.testing import CliRunner

from polyfed.cli import app
from polyfed.cli.federation import _left_out
from polyfed.config import Config, Data
from polyfed.core.errors import InputError
from polyfed.core.settings import Training
from polyfed.data import load
from polyfed.data.agree import agree as agree_on_form
from polyfed.data.agree import tell
from polyfed.flower.agree import agree
from polyfed.flower.describe import introduce, make_own_blueprint
from polyfed.flower.serve import run_head, start_directory
from polyfed.flower.sitedata import read_data
from polyfed.flower.sitefolder import SiteFolder
from polyfed.methods import make

METHOD = make("fedavg")
RUN = run_head(METHOD, Config(METHOD, "fedavg").settings(), Config(METHOD, "fedavg").models, "0" * 16)


def table(path, columns, words=("f", "m"), scale=1.0):
    """Write forty rows; the columns in the given order, `sex` from the given words, numbers times a scale."""
    with path.open("w", newline="") as file:
        out = csv.writer(file)
        out.writerow([*columns, "outcome"])
        for row in range(40):
            ill = row % 2
            made = {"sex": words[row // 2 % 2], "age": scale * (40 + row), "pulse": 60 + 10 * ill + row % 7}
            out.writerow([*(made.get(column, made["age"]) for column in columns), ("well", "ill")[ill]])
    return path


def head_of(path, agreed=None):
    data = read_data(Data(str(path), label="outcome"), None, agreed)
    return introduce(METHOD, "mlp:1x8", data, make_own_blueprint(METHOD, "mlp:1x8", data, RUN))[0]


def agreed_form(*paths):
    return agree_on_form({path.stem: tell(load(path, label="outcome")) for path in paths})


def test_tables_that_mean_the_same_agree(tmp_path):
    north = table(tmp_path / "north.csv", ["age", "sex", "pulse"])
    south = table(tmp_path / "south.csv", ["age", "sex", "pulse"], scale=2.0)  # each scales by its own rows
    agree({"north": head_of(north), "south": head_of(south)}, None, False)
    form = agreed_form(north, south)
    agree({"north": head_of(north, form), "south": head_of(south, form)}, None, False)


@pytest.mark.parametrize(
    ("columns", "words", "told"),
    [
        (["pulse", "sex", "age"], ("f", "m"), "site south are .*pulse, sex, age.*, in another order than site north"),
        (["years", "sex", "pulse"], ("f", "m"), r"site south are \[years, sex, pulse\], but \[age, sex, pulse\]"),
        (["age", "sex", "pulse"], ("f", "w"), "Column 'sex' of site south has other words"),
    ],
    ids=["order", "names", "words"],
)
def test_tables_that_mean_something_else_are_refused(tmp_path, columns, words, told):
    north = head_of(table(tmp_path / "north.csv", ["age", "sex", "pulse"]))
    south = head_of(table(tmp_path / "south.csv", columns, words))
    with pytest.raises(InputError, match=told + ".*polyfed form agree"):
        agree({"north": north, "south": south}, None, False)


def test_another_form_or_none_at_one_site_is_refused(tmp_path):
    north = table(tmp_path / "north.csv", ["age", "sex", "pulse"])
    south = table(tmp_path / "south.csv", ["age", "sex", "pulse"], scale=3.0)
    both, one = agreed_form(north, south), agreed_form(north)
    for other in (one, None):
        with pytest.raises(InputError, match="Column 'age' of site south is scaled otherwise than at site north"):
            agree({"north": head_of(north, both), "south": head_of(south, other)}, None, False)


def test_a_site_returns_with_its_network_and_its_data(tmp_path):
    folder, head = SiteFolder("north", tmp_path), {"run": {"federation": "0123456789abcdef"}}
    folder.home(head).mkdir(parents=True)
    folder.stay(head, 72, {"head.weight": [3, 8]})
    folder.stay(head, 72, {"head.weight": [3, 8]})
    with pytest.raises(InputError, match=r"another network: 'head.weight' was of shape \[3, 8\] and is of shape"):
        folder.stay(head, 72, {"head.weight": [3, 16]})
    with pytest.raises(InputError, match=r"'body.weight' was not there and is of shape \[8\]"):
        folder.stay(head, 72, {"head.weight": [3, 8], "body.weight": [8]})
    with pytest.raises(InputError, match="with 72 training samples and now has 59"):
        folder.stay(head, 59, {"head.weight": [3, 8]})


def said(*words):
    done = CliRunner().invoke(app, list(words))
    return done.exit_code, " ".join((done.output + done.stderr).split())


@pytest.fixture
def stopped(tmp_path):
    """A federation's directory, as a server leaves it."""
    out = tmp_path / "run"
    config = Config(METHOD, "fedavg", rounds=3, training=Training(lr=0.05))
    start_directory(config, out, ["north"], False, 18193)[0].close()
    return out


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--lr", "5"], "training.lr is 0.05 in"),
        (["--epsilon", "2"], "privacy.epsilon is None in"),
        (["--set", "training.epochs=9"], "training.epochs is 1 in"),
        (["--set", "method.weighting=uniform"], "method.weighting is samples in"),
        (["--method", "fedproto"], "runs fedavg, not fedproto"),
    ],
    ids=lambda value: value[-1] if isinstance(value, list) else "",
)
def test_a_resumed_run_is_not_given_other_settings(stopped, words, told):
    code, output = said("serve", "--resume", "--insecure", "--sites", "north", "--out", str(stopped), *words)
    assert (code, told in output) == (2, True), output


def test_a_resumed_run_listens_where_it_did(stopped, monkeypatch):
    asked = []

    def serve(config, out, hosting, **more):
        asked.append((hosting.port, config.rounds))
        raise InputError("Enough.")

    monkeypatch.setattr("polyfed.flower.serve.serve", serve)
    same = ["--method", "fedavg", "--lr", "0.05"]
    said("serve", "--resume", "--insecure", "--sites", "north", "--out", str(stopped), "--rounds", "5", *same)
    said("serve", "--resume", "--insecure", "--sites", "north", "--out", str(stopped), "--port", "18194")
    assert asked == [(18193, 5), (18194, 5)]
    start_directory(Config(METHOD, "fedavg", rounds=5, training=Training(lr=0.05)), stopped, ["north"], True, 18194)
    assert json.loads((stopped / "config.json").read_text())["port"] == 18194


def test_what_is_the_others_to_say_is_refused(tmp_path):
    code, output = said("serve", "--insecure", "--sites", "a", "--out", str(tmp_path / "run"))
    assert code == 2 and "--method NAME" in output
    joining = ["join", "--insecure", "--name", "a", "--server", "127.0.0.1:1", "--model", "mlp", "--data", "digits"]
    code, output = said(*joining, "--set", "lr=5")
    assert code == 2 and "'training.lr' is not for a site" in output


def test_who_was_left_out_is_named_at_the_end():
    history = [
        {"phase": "before", "missing": {"1": "away"}},
        {"phase": "round"},
        {"phase": "round", "missing": {"1": "south is not connected"}},
        {"phase": "round", "missing": {"1": "the work failed"}},
    ]
    told = list(_left_out(history, ["north", "south"]))
    assert told == ["2 of 3 rounds went on without south; the last time: the work failed"]
