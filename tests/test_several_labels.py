"""Several label columns of a table: labels that hold or not, or several values, from file to prediction."""

import json

import numpy as np
import pandas
import pytest
from typer.testing import CliRunner

import polyfed as pf
from polyfed.cli.commands import app
from polyfed.config import Data
from polyfed.core.errors import InputError
from polyfed.data import Clients
from polyfed.data.agree import agree, tell
from polyfed.flower.sitedata import read_data

RNG = np.random.default_rng(0)


def frame(rows=120):
    x = RNG.normal(size=(rows, 3))
    return pandas.DataFrame(
        {
            "age": x[:, 0],
            "dose": x[:, 1],
            "site": np.where(np.arange(rows) % 2, "north", "south"),
            "fever": (x[:, 0] > 0).astype(int),
            "cough": x[:, 1] > 0,
            "days": 5 + 2 * x[:, 0],
            "cost": 100 - 30 * x[:, 1],
        }
    )


@pytest.fixture
def csv(tmp_path):
    frame().to_csv(tmp_path / "patients.csv", index=False)
    return tmp_path / "patients.csv"


LEFT = {"drop": ["days", "cost"], "columns": ["site"], "task": "multilabel"}


@pytest.mark.parametrize("label", [["fever", "cough"], ("fever", "cough"), "fever,cough", "fever, cough"])
def test_labels_are_named_as_a_list_or_in_one_text(csv, label):
    data = pf.load(csv, label=label, **LEFT)
    assert data.class_names == ("fever", "cough") and data.features == ("age", "dose")
    assert data.train.labels().shape == (96, 2) and set(data.train.labels().flatten().tolist()) == {0.0, 1.0}
    assert list(data.columns) == ["site"]


def test_all_forms_of_a_table_give_the_same(csv, tmp_path):
    table = pandas.read_csv(csv)
    table.to_parquet(tmp_path / "patients.parquet")
    how = {"label": ["fever", "cough"], **LEFT}
    found = [pf.load(source, **how) for source in (csv, tmp_path / "patients.parquet", table)]
    assert len({data.fingerprint for data in found}) == 1
    rows = [
        {"image": np.ones((1, 4, 4), np.float32) * i, "fever": i % 2, "cough": i % 3 == 0, "site": "a"}
        for i in range(40)
    ]
    items = pf.load(rows, label=["fever", "cough"], task="multilabel")
    assert items.train.labels().shape == (32, 2) and list(items.columns) == ["site"]
    parts = Clients.from_parts({"north": csv, "south": table}, test="own", **how)
    assert parts.class_names == ("fever", "cough") and parts.num_classes == 2


def test_several_values_and_a_single_one_have_the_names_of_their_columns(csv):
    both = pf.load(csv, label=["days", "cost"], drop=["fever", "cough", "site"], task="regression")
    assert both.class_names == ("days", "cost") and len(both.task.center) == 2
    one = pf.load(csv, label="days", drop=["fever", "cough", "site", "cost"], task="regression")
    assert one.class_names == ("days",)


@pytest.mark.parametrize(
    ("label", "words"),
    [
        ("fever,pulse", "has no column 'pulse'"),
        (["fever", "fever"], "'fever' is named twice"),
        (["fever", "site"], "The label column 'site' of .* holds no single numbers"),
    ],
)
def test_label_columns_that_cannot_be(csv, label, words):
    with pytest.raises(InputError, match=words):
        pf.load(csv, label=label, task="multilabel")


def test_several_labels_without_a_task_say_which(csv):
    with pytest.raises(InputError, match="task='multilabel' for zeros and ones, task='regression' for values"):
        pf.load(csv, label="fever,cough")


def test_a_name_with_a_comma_is_one_name(csv):
    table = pandas.read_csv(csv).rename(columns={"fever": "fever, high"})
    assert pf.load(table, label="fever, high", drop=["cough"]).num_classes == 2


def polyfed(*words):
    done = CliRunner().invoke(app, [str(word) for word in words])
    assert done.exit_code == 0, (done.output, done.exception)
    return done.output


def test_run_file_and_options_are_one_and_the_model_predicts_by_name(csv, tmp_path):
    shared = ("--models", "tabular:1x8", "--rounds", "2", "--method", "fedavg")
    out = tmp_path / "run"
    words = ("--label", "fever,cough", "--task", "multilabel", "--drop-columns", "days,cost")
    polyfed("run", "--data", csv, *words, "--partition", "column:site", *shared, "--out", out)
    polyfed("predict", out, csv, "--client", "north", "--out", tmp_path / "said.csv")
    said = pandas.read_csv(tmp_path / "said.csv", keep_default_na=False)
    assert list(said.columns) == ["row", "prediction", "fever", "cough"] and len(said) == 120
    (tmp_path / "run.toml").write_text(
        'method = "fedavg"\nrounds = 2\nmodels = ["tabular:1x8"]\n[data]\n'
        f'source = "{csv}"\nlabel = ["fever", "cough"]\ntask = "multilabel"\ndrop = ["days", "cost"]\n'
        'partition = "column:site"\n'
    )
    told = json.loads(polyfed("run", tmp_path / "run.toml", "--json", "--quiet"))
    assert told["accuracy"]["mean"] == json.loads((out / "result.json").read_text())["accuracy"]["mean"]
    text = polyfed("compare", tmp_path / "run.toml", "--methods", "fedavg", "--seeds", "1", "--jobs", "1", "--quiet")
    assert "fedavg" in text and "local" in text


def test_sites_read_and_agree_on_several_labels(csv):
    data = Data(str(csv), label=("days", "cost"), drop=("fever", "cough", "site"), task="regression")
    told = {name: tell(data.whole(0)) for name in ("north", "south")}
    agreed = agree(told)
    assert agreed.class_names == ("days", "cost") and len(agreed.task.center) == 2
    site = read_data(data, None, agreed)
    assert site.classes == ("days", "cost") and site.train.labels().shape[1] == 2
    told["south"]["class_names"] = ["cost", "days"]
    with pytest.raises(InputError, match="south has the targets cost, days, but north has days, cost"):
        agree(told)


@pytest.mark.parametrize("method", ["average", "ensemble"])
def test_networks_of_several_labels_are_fused_and_measured_by_their_task(csv, tmp_path, method):
    words = ("--data", csv, "--label", "days,cost", "--task", "regression", "--drop-columns", "fever,cough,site")
    polyfed("run", *words, "--models", "tabular:1x16", "--rounds", "12", "--clients", "2", "--partition", "iid",
            "--method", "fedavg", "--lr", "0.1", "--out", tmp_path / "run", "--quiet")  # fmt: skip
    files = sorted((tmp_path / "run" / "models").glob("client-*.safetensors"))
    text = polyfed("fuse", *files, *words, "--models", "tabular:1x16", "--out", tmp_path / "fused", "--method", method)
    measured = float(text.split(": R² ")[1].split(" %")[0])
    assert 50 < measured <= 100, text
    refused = CliRunner().invoke(
        app, [str(w) for w in ("fuse", *files, *words, "--models", "tabular:1x16", "--out", tmp_path / "no")]
    )
    assert "average, ensemble" in str(refused.exception or refused.output)
