"""Raw inputs of a trained model: every form of them is read, or refused with a sentence; none gives silent nonsense."""

from __future__ import annotations

import json

import numpy as np
import pandas
import pytest
import torch
from PIL import Image
from typer.testing import CliRunner

import polyfed as pf
from polyfed.cli import app
from polyfed.core.errors import InputError

pytestmark = pytest.mark.xdist_group("raw inputs")  # which share a trained model
TRAINING = pf.Training(optimizer="adam", lr=0.05, epochs=10)
NEW = ["a good day", "bad", "good food"]
ANSWERS = ["yes", "no", "yes"]


def texts_run(folder, source, **options):
    clients = pf.split(pf.load(source, **options), clients=2)
    pf.run("fedavg", clients, models="cnn1d:1x8", rounds=2, training=TRAINING, out=folder / "run")
    return pf.load_model(folder / "run", 0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Where the file of the reviews and the run with them are: tests look at them only."""
    return tmp_path_factory.mktemp("reviews")


@pytest.fixture(scope="module")
def reviews(folder):
    """A model of texts from a file in which they are called 'opinion'."""
    texts = [f"{['good', 'bad'][row % 2]} thing" for row in range(40)]
    frame = pandas.DataFrame({"opinion": texts, "label": ["yes", "no"] * 20, "site": ["a", "b"] * 20})
    frame.to_csv(folder / "reviews.csv", index=False)
    return texts_run(folder, folder / "reviews.csv", inputs="opinion", kind="text")


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


@pytest.mark.parametrize("dtype", ["object", "string"])
def test_a_missing_text_is_an_empty_one(reviews, dtype):
    with pytest.warns(UserWarning, match="1 rows of the given data are empty"):
        assert len(reviews.predict(pandas.Series(["good", None], dtype=dtype))) == 2


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


def test_the_command_reads_the_column_that_training_had(reviews, folder, tmp_path):
    pandas.DataFrame({"text": ["x"] * 3, "opinion": NEW}).to_csv(tmp_path / "new.csv", index=False)
    done = predicted(folder / "run", tmp_path / "new.csv", tmp_path / "p.csv")
    assert done.exit_code == 0, done.output
    assert pandas.read_csv(tmp_path / "p.csv")["prediction"].tolist() == ANSWERS


# --- numbers ---


@pytest.mark.parametrize("wrong", [np.inf, -np.inf])
def test_an_infinite_number_of_a_table_is_refused_and_a_missing_one_is_filled(patients, wrong):
    model = pf.load_model(patients, 0)
    with pytest.raises(
        InputError,
        match=r"Row 1 of the given data holds a value that is NaN or infinite \(1 such row\), in column 'age'",
    ):
        model.predict([{"age": 40.0, "sex": "m"}, {"age": wrong, "sex": "f"}])
    with pytest.warns(UserWarning, match="1 rows of the given data have no 'age': training's mean stands in"):
        assert np.isfinite(model.probabilities([{"age": 40.0, "sex": "m"}, {"age": None, "sex": "f"}])).all()


def test_nan_in_arrays_is_refused(tmp_path):
    x = np.random.default_rng(0).normal(size=(60, 3, 20)).astype(np.float32)
    pf.run("local", pf.split(pf.load((x, [0, 1] * 30)), clients=2), "cnn1d:1x8", rounds=1, out=tmp_path / "run")
    x[4, 0, 0] = np.nan
    with pytest.raises(InputError, match="Row 4 of the given data holds a value that is NaN or infinite"):
        pf.load_model(tmp_path / "run", 0).predict(x[:6])


# --- words ---


def test_words_that_training_does_not_know_are_said(patients, tmp_path):
    rows = pandas.DataFrame({"age": [40.0, 41.0, 42.0], "sex": ["x", "f", "y"]})
    said = r"2 rows of the given data have a 'sex' that training does not know \(x, y\)"
    with pytest.warns(UserWarning, match=said):
        pf.load_model(patients, 0).predict(rows)
    rows.to_csv(tmp_path / "new.csv", index=False)
    done = predicted(patients, tmp_path / "new.csv", tmp_path / "p.csv")
    assert done.exit_code == 0 and done.output.count("have a 'sex' that training does not know (x, y)") == 1


# --- images ---


def pictures(count=40):
    """Bytes of different sizes, grey and color: the upper half is bright in every second."""
    random = np.random.default_rng(0)
    for row in range(count):
        height, width = 20 + row % 5, 18 + row % 7
        image = random.integers(0, 60, (height, width, 3) if row % 3 else (height, width)).astype(np.uint8)
        image[: height // 2] += 150 * (row % 2)
        yield image


@pytest.fixture
def scans(tmp_path):
    data = pf.load((list(pictures()), ["ill", "well"] * 20), resize=(16, 16))
    result = pf.run("fedavg", clients := pf.split(data, clients=2), "mlp:1x8", rounds=1, out=tmp_path / "run")
    return clients, result


def test_images_are_brought_to_the_size_and_color_of_training(scans, tmp_path):
    model = pf.load_model(tmp_path / "run", 0)
    images = list(pictures())
    asked = pf.load((images[:1] + images, ["ill", *["ill", "well"] * 20]), resize=(16, 16), test=(images, ["ill"] * 40))
    expected = model.probabilities(asked.test.x)  # as `load` makes them
    assert torch.allclose(model.probabilities(images), expected)
    assert torch.allclose(model.probabilities([Image.fromarray(i) for i in images]), expected, atol=0.02)
    assert torch.allclose(model.probabilities(images[:1]), expected[:1])  # grey alone
    assert torch.allclose(model.probabilities(np.stack([images[1]] * 2)), expected[[1, 1]])  # an array
    assert torch.allclose(model.probabilities([i / np.float32(255) for i in images]), expected, atol=0.02)


def test_images_of_another_size_are_refused_where_training_did_not_resize(tmp_path):
    images = np.zeros((40, 16, 16, 3), np.uint8)
    images[::2, :8] = 200
    pf.run("local", pf.split(pf.load((images, [0, 1] * 20)), clients=2), "mlp:1x8", rounds=1, out=tmp_path / "run")
    model = pf.load_model(tmp_path / "run", 0)
    with pytest.raises(InputError, match=r"takes \(3, 16, 16\): bring the images to 16x16\."):
        model.predict([images[0], np.zeros((20, 18, 3), np.uint8)])


def test_floats_in_the_unit_of_bytes_are_refused(scans, tmp_path):
    model = pf.load_model(tmp_path / "run", 0)
    images = np.stack([image[:16, :16] for image in pictures() if image.ndim == 3])
    with pytest.raises(InputError, match=r"trained on bytes.*give bytes, or divide by 255"):
        model.predict(images.astype(np.float32))
    assert torch.allclose(model.probabilities(images / 255), model.probabilities(images), atol=1e-5)


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
