"""Raw inputs of a trained model: every form of them is read, or refused with a sentence; none gives silent nonsense."""

from __future__ import annotations

import json

import numpy as np
import pandas
import pytest
import torch
from typer.testing import CliRunner

import polyfed as pf
from polyfed.cli import app
from polyfed.core.errors import InputError

TRAINING = pf.Training(optimizer="adam", lr=0.05, epochs=10)
NEW = ["a good day", "bad", "good food"]
ANSWERS = ["yes", "no", "yes"]


def texts_run(folder, source, **options):
    clients = pf.split(pf.load(source, **options), clients=2)
    pf.run("fedavg", clients, models="cnn1d:1x8", rounds=2, training=TRAINING, out=folder / "run")
    return pf.load_model(folder / "run", 0)


@pytest.fixture
def reviews(tmp_path):
    """A model of texts from a file in which they are called 'opinion'."""
    texts = [f"{['good', 'bad'][row % 2]} thing" for row in range(40)]
    frame = pandas.DataFrame({"opinion": texts, "label": ["yes", "no"] * 20, "site": ["a", "b"] * 20})
    frame.to_csv(tmp_path / "reviews.csv", index=False)
    return texts_run(tmp_path, tmp_path / "reviews.csv", inputs="opinion", kind="text")


@pytest.fixture
def patients(tmp_path):
    rows = [(30.0 + row % 40, "fm"[row % 3 == 0], "ill" if row % 3 == 0 else "well") for row in range(120)]
    data = pf.load(pandas.DataFrame(rows, columns=["age", "sex", "outcome"]), label="outcome")
    pf.run("fedavg", pf.split(data, clients=2), models="tabular:1x8", rounds=1, out=tmp_path / "run")
    return tmp_path / "run"


# --- texts ---


@pytest.mark.parametrize(
    "of", ["csv", "path", "parquet", "frame", "dictionaries", "columns", "list", "series", "array"]
)
def test_texts_are_read_from_everything_that_holds_them(reviews, tmp_path, of):
    frame = pandas.DataFrame({"site": ["a", "b", "c"], "opinion": NEW})
    frame.to_csv(tmp_path / "new.csv", index=False)
    frame.to_parquet(tmp_path / "new.parquet")
    raw = {
        "csv": str(tmp_path / "new.csv"),
        "path": tmp_path / "new.csv",
        "parquet": str(tmp_path / "new.parquet"),
        "frame": frame,
        "dictionaries": frame.to_dict("records"),
        "columns": {"opinion": NEW},
        "list": NEW,
        "series": frame["opinion"],
        "array": np.array(NEW),
    }[of]
    assert reviews.predict(raw) == ANSWERS


def test_one_text_is_one_row(reviews):
    assert reviews.predict("a good day") == ["yes"]


def test_what_holds_no_such_texts_is_refused(reviews, tmp_path):
    with pytest.raises(InputError, match=r"There is no file nothere.csv"):
        reviews.predict("nothere.csv")
    with pytest.raises(InputError, match=r"There is no file .*nothere.parquet"):
        reviews.predict(tmp_path / "nothere.parquet")
    with pytest.raises(InputError, match="no column 'opinion', which the network needs"):
        reviews.predict(pandas.DataFrame({"body": NEW}))
    with pytest.raises(InputError, match="Row 1 of the given data is no text but of type int"):
        reviews.predict(["good", 3])
    with pytest.raises(InputError, match="Column 'opinion' of the given data holds no texts"):
        reviews.predict(pandas.DataFrame({"opinion": [1, 2]}))


@pytest.mark.parametrize("earlier", [False, True])
def test_without_a_name_the_only_column_of_words_is_taken(tmp_path, earlier):
    """A list of texts has no name, nor have files that were written before names were kept."""
    model = texts_run(tmp_path, ([f"{['good', 'bad'][row % 2]} thing" for row in range(40)], ["yes", "no"] * 20))
    if earlier:
        file = tmp_path / "run" / "models" / "inputs.json"
        use = json.loads(file.read_text())
        assert use["form"].pop("column") == "" and use["form"].pop("resize") is False
        use.pop("checksum")
        file.write_text(json.dumps(use))
        model = pf.load_model(tmp_path / "run", 0)
    assert model.predict(pandas.DataFrame({"number": [1, 2, 3], "opinion": NEW})) == ANSWERS
    with pytest.raises(InputError, match="The given data has 2 columns of words"):
        model.predict(pandas.DataFrame({"site": ["a", "b", "c"], "opinion": NEW}))


def test_the_command_reads_the_column_that_training_had(reviews, tmp_path):
    pandas.DataFrame({"text": ["x"] * 3, "opinion": NEW}).to_csv(tmp_path / "new.csv", index=False)
    done = predicted(tmp_path / "run", tmp_path / "new.csv", tmp_path / "p.csv")
    assert done.exit_code == 0, done.output
    assert pandas.read_csv(tmp_path / "p.csv")["prediction"].tolist() == ANSWERS


# --- the command ---


@pytest.mark.parametrize("name", ["nothere.csv", "nothere.npy"])
def test_a_file_that_is_not_there_is_called_that(patients, tmp_path, name):
    done = predicted(patients, tmp_path / name, tmp_path / "p.csv")
    assert done.exit_code and isinstance(done.exception, InputError), done.output
    assert str(done.exception) == f"There is no file {tmp_path / name}: correct its name."


def test_a_network_of_ones_own_is_asked_for_as_the_command_takes_it(tmp_path):
    def own():
        return pf.adapt(torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 10)), head="1")

    pf.run("fedavg", pf.split(pf.load("digits", limit=(60, 40)), clients=2), own, rounds=1, out=tmp_path / "run")
    done = predicted(tmp_path / "run", tmp_path / "new.npy", tmp_path / "p.csv")
    assert "--model package.module:function" in str(done.exception)


def predicted(run, data, out, *more):
    return CliRunner().invoke(app, ["predict", str(run), str(data), "--client", "0", "--out", str(out), *more])
