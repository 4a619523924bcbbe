"""Images for a trained model, in every form that people have them in, and in the unit of training or refused."""

from __future__ import annotations

import io

import numpy as np
import pandas
import pytest
import torch
from PIL import Image
from torch.utils.data import Subset
from typer.testing import CliRunner

import polyfed as pf
from polyfed.cli import app
from polyfed.core.errors import InputError

pytestmark = pytest.mark.xdist_group("raw images")  # which share a trained model
NAMES = ["a.png", "below/b.png", "below/c.png"]


def picture(row, height=20, width=18):
    """Return a color image; the upper half of every second is bright."""
    image = np.random.default_rng(row).integers(0, 60, (height, width, 3)).astype(np.uint8)
    image[: height // 2] += 150 * np.uint8(row % 2)
    return image


@pytest.fixture(scope="module")
def trained_in(tmp_path_factory):
    """Where the run of the model is: tests look at it only."""
    return tmp_path_factory.mktemp("trained")


@pytest.fixture(scope="module")
def model(trained_in):
    folder = trained_in / "scans"
    for row in range(24):
        place = folder / ["ill", "well"][row % 2]
        place.mkdir(parents=True, exist_ok=True)
        Image.fromarray(picture(row, 20 + row % 3, 18 + row % 4)).save(place / f"{row}.png")
    clients = pf.split(pf.load(folder, resize=(16, 16), cache=False), clients=2)
    training = pf.Training(optimizer="adam", lr=0.02, epochs=5)
    pf.run("fedavg", clients, "mlp:1x8", rounds=2, training=training, out=trained_in / "run")
    return pf.load_model(trained_in / "run", 0)


@pytest.fixture
def new(tmp_path):
    """New images as files, in a folder with one below it and files that are none."""
    folder = tmp_path / "new"
    (folder / "below").mkdir(parents=True)
    arrays = [picture(row) for row in (101, 102, 103)]
    for name, array in zip(NAMES, arrays, strict=True):
        Image.fromarray(array).save(folder / name)
    (folder / "notes.txt").write_text("not an image")
    return folder, arrays


def encoded(array):
    content = io.BytesIO()
    Image.fromarray(array).save(content, format="PNG")
    return content.getvalue()


@pytest.mark.parametrize(
    "of",
    ["folder", "words", "files", "names", "pil", "bytes", "dictionaries", "named", "columns", "frame", "series",
     "items", "pairs", "parquet", "csv", "huggingface"],
)  # fmt: skip
def test_images_are_read_from_everything_that_holds_them(model, new, tmp_path, of):
    folder, arrays = new
    files = [folder / name for name in NAMES]
    images = [Image.open(file) for file in files]
    kept = [{"bytes": encoded(array), "path": None} for array in arrays]
    pandas.DataFrame({"number": [1, 2, 3], "image": kept}).to_parquet(tmp_path / "new.parquet")
    pandas.DataFrame({"scan": NAMES, "site": ["a", "b", "c"]}).to_csv(folder / "new.csv", index=False)
    raw = {
        "folder": lambda: folder,
        "words": lambda: str(folder),
        "files": lambda: files,
        "names": lambda: [str(file) for file in files],
        "pil": lambda: images,
        "bytes": lambda: [encoded(array) for array in arrays],
        "dictionaries": lambda: [{"image": image, "label": 0} for image in images],
        "named": lambda: [{"scan": array, "site": "north", "age": np.float64(4)} for array in arrays],
        "columns": lambda: {"image": files},
        "frame": lambda: pandas.DataFrame({"image": images, "age": [1, 2, 3]}),
        "series": lambda: pandas.Series([str(file) for file in files], index=[7, 8, 9]),
        "items": lambda: Subset([{"image": image} for image in images], range(len(images))),  # has no iterator
        "pairs": lambda: Subset([(image, 1) for image in images], range(len(images))),
        "parquet": lambda: tmp_path / "new.parquet",
        "csv": lambda: folder / "new.csv",
        "huggingface": lambda: pytest.importorskip("datasets").Dataset.from_dict(
            {"image": kept}, features=pytest.importorskip("datasets").Features(image=datasets_image())
        ),
    }[of]()
    exact = of in ("named",)  # arrays are brought to their size by torch, files and images by PIL
    expected = model.probabilities(images)
    assert torch.allclose(model.probabilities(raw), expected, atol=0.03 if exact else 1e-6)
    assert model.predict(raw) == ["well", "ill", "well"]


def datasets_image():
    import datasets

    return datasets.Image()


def test_one_image_is_one_row(model, new):
    folder, arrays = new
    for raw in (folder / "a.png", str(folder / "a.png"), Image.fromarray(arrays[0]), {"image": arrays[0]}):
        assert model.predict(raw) == ["well"]


def test_what_holds_no_such_images_is_refused(model, new, tmp_path):
    folder, arrays = new
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError, match=r"There are no images in the folder .*empty: their files end with .png"):
        model.predict(tmp_path / "empty")
    with pytest.raises(InputError, match=r"There is no file or folder nothere.png"):
        model.predict("nothere.png")
    with pytest.raises(InputError, match=r"There is no file nothere.png \(row 1 of the given data\)"):
        model.predict([folder / "a.png", "nothere.png"])
    with pytest.raises(InputError, match=r"Row 0 of the given data has before, after, .* which is the image: call it"):
        model.predict([{"before": arrays[0], "after": arrays[1]}])
    (folder / "a.png").write_bytes(b"nonsense")
    with pytest.raises(InputError, match=r"a.png is not a readable image"):
        model.predict(folder)


# --- the command ---


def predicted(run, data, out):
    return CliRunner().invoke(app, ["predict", str(run), str(data), "--client", "0", "--out", str(out)])


def test_the_command_takes_a_folder_and_an_image_and_names_the_files(model, trained_in, new, tmp_path):
    folder, _ = new
    done = predicted(trained_in / "run", folder, tmp_path / "p.csv")
    assert done.exit_code == 0, done.output
    table = pandas.read_csv(tmp_path / "p.csv")
    assert table.columns.tolist() == ["file", "prediction", "ill", "well"] and table["file"].tolist() == NAMES
    assert table["prediction"].tolist() == ["well", "ill", "well"]
    assert predicted(trained_in / "run", folder / "a.png", tmp_path / "one.csv").exit_code == 0
    assert pandas.read_csv(tmp_path / "one.csv")[["file", "prediction"]].values.tolist() == [["a.png", "well"]]


def test_a_folder_for_a_model_of_tables_is_refused(tmp_path):
    table = pandas.DataFrame({"age": range(40), "label": ["a", "b"] * 20})
    pf.run("local", pf.split(pf.load(table), clients=2), "mlp:1x8", rounds=1, out=tmp_path / "run")
    done = predicted(tmp_path / "run", tmp_path, tmp_path / "p.csv")
    assert "is a folder, but the network takes table, not images" in str(done.exception)


# --- units ---


def trained(folder, images):
    clients = pf.split(pf.load((images, ["ill", "well"] * 12)), clients=2)
    pf.run("fedavg", clients, "mlp:1x8", rounds=1, out=folder)
    return pf.load_model(folder, 0)


PICTURES = np.stack([picture(row) for row in range(24)])


def test_bytes_for_a_model_of_floats_from_0_to_1_are_divided_and_that_is_said(tmp_path):
    model = trained(tmp_path / "run", PICTURES.astype(np.float32) / 255)
    assert model.form.white == 1.0
    with pytest.warns(UserWarning, match="bytes are divided by 255, as training had floats from 0 to 1"):
        found = model.probabilities(PICTURES)
    assert torch.allclose(found, model.probabilities(PICTURES.astype(np.float32) / 255), atol=1e-6)
    with pytest.raises(InputError, match=r"floats up to 2.., but the network was trained on floats from 0 to 1"):
        model.predict(PICTURES.astype(np.float32))


def test_bytes_for_a_model_of_whole_floats_are_in_its_unit(tmp_path):
    model = trained(tmp_path / "run", PICTURES.astype(np.float32))
    assert model.form.white == 255.0
    assert torch.equal(model.probabilities(PICTURES), model.probabilities(PICTURES.astype(np.float32)))
    with pytest.raises(InputError, match="the values of training go to 255: give them in that unit"):
        model.predict(PICTURES.astype(np.float32) / 255)


def test_bytes_for_a_model_of_floats_in_an_unknown_unit_are_refused(tmp_path):
    model = trained(tmp_path / "run", (PICTURES.astype(np.float32) - 100) / 40)
    with pytest.raises(InputError, match=r"holds bytes up to 2.., but .* floats in another unit \(mean -?\d"):
        model.predict(PICTURES)


def test_an_image_of_255_for_a_model_of_digits_which_go_to_16_is_refused(tmp_path):
    clients = pf.split(pf.load("digits", limit=(60, 40)), clients=2)
    pf.run("fedavg", clients, "mlp:1x8", rounds=1, out=tmp_path / "run")
    model = pf.load_model(tmp_path / "run", 0)
    assert len(model.predict(clients.test.x[:3])) == 3
    with pytest.raises(InputError, match="bytes up to 200, but the values of training go to 16"):
        model.predict(np.full((1, 8, 8), 200, np.uint8))


def test_a_cached_set_of_floats_knows_its_unit(tmp_path, monkeypatch):
    """Also one that was written before units were kept."""
    import json

    from safetensors import safe_open
    from safetensors.torch import save_file

    monkeypatch.setenv("POLYFED_CACHE", str(tmp_path / "cache"))
    rows = [image.tolist() for image in (PICTURES[:, :4, :4, 0] / 255.0).astype(np.float32)]
    pandas.DataFrame({"image": rows, "label": [0, 1] * 12}).to_parquet(tmp_path / "s.parquet")
    assert pf.load(tmp_path / "s.parquet").form.white == 1.0
    (file,) = (tmp_path / "cache").iterdir()
    with safe_open(file, "pt") as content:
        about = json.loads(content.metadata()["polyfed"])
        tensors = {name: content.get_tensor(name).clone() for name in content.keys()}  # noqa: SIM118
    assert about["form"].pop("white") == 1.0
    save_file(tensors, file, {"polyfed": json.dumps(about)})
    assert pf.load(tmp_path / "s.parquet").form.white == 1.0


# --- token ids and signals ---


@pytest.mark.parametrize("of", ["array", "lists", "dictionaries", "columns"])
def test_token_ids_are_read_from_everything_that_holds_them(tmp_path, of):
    ids = [[2 + row % 2, 4, 5][: 2 + row % 2] for row in range(24)]
    clients = pf.split(pf.load((ids, ["even", "odd"] * 12), kind="tokens"), clients=2)
    training = pf.Training(optimizer="adam", lr=0.05, epochs=10)
    pf.run("fedavg", clients, "cnn1d:1x8", rounds=2, training=training, out=tmp_path / "run")
    padded, mask = [[2, 4, 0], [3, 4, 5]], [[1, 1, 0], [1, 1, 1]]
    raw = {
        "array": np.array(padded),
        "lists": [[2, 4], [3, 4, 5]],
        "dictionaries": [{"input_ids": [2, 4, 9], "attention_mask": [1, 1, 0]}, {"input_ids": [3, 4, 5]}],
        "columns": {"input_ids": padded, "attention_mask": mask},
    }[of]
    model = pf.load_model(tmp_path / "run", 0)
    assert model.predict(raw) == ["even", "odd"]
    with pytest.warns(UserWarning, match="1 rows of the given data have ids that training does not know"):
        model.predict([[3, 400]])
    with pytest.warns(UserWarning, match="1 rows of the given data have more than the 3 ids of training and are cut"):
        model.predict([[3, 4, 5, 5]])
    with pytest.raises(InputError, match="Row 0 of the given data is no list of token ids"):
        model.predict([2, 4])


@pytest.mark.parametrize("of", ["array", "list", "dictionaries", "npy", "parquet"])
def test_signals_are_read_from_everything_that_holds_them(tmp_path, of):
    x = np.random.default_rng(0).normal(size=(24, 3, 20)).astype(np.float32)
    pf.run("local", pf.split(pf.load((x, [0, 1] * 12)), clients=2), "cnn1d:1x8", rounds=1, out=tmp_path / "run")
    np.save(tmp_path / "x.npy", x)
    pandas.DataFrame({"signal": [one.tolist() for one in x]}).to_parquet(tmp_path / "x.parquet")
    model = pf.load_model(tmp_path / "run", 0)
    raw = {
        "array": x,
        "list": list(x),
        "dictionaries": [{"signal": one, "person": "a"} for one in x],
        "npy": tmp_path / "x.npy",
        "parquet": tmp_path / "x.parquet",
    }[of]
    assert torch.equal(model.probabilities(raw), model.probabilities(x))
    if of in ("npy", "parquet"):
        assert predicted(tmp_path / "run", raw, tmp_path / "p.csv").exit_code == 0


def test_an_array_file_that_cannot_be_read_is_a_sentence(tmp_path):
    x = np.random.default_rng(0).normal(size=(24, 3, 20)).astype(np.float32)
    pf.run("local", pf.split(pf.load((x, [0, 1] * 12)), clients=2), "cnn1d:1x8", rounds=1, out=tmp_path / "run")
    (tmp_path / "x.npy").write_bytes(b"nonsense")
    model = pf.load_model(tmp_path / "run", 0)
    with pytest.raises(InputError, match=r"x.npy cannot be read as an array .*write it with numpy.save"):
        model.predict(tmp_path / "x.npy")
    with pytest.raises(InputError, match=r"There is no file .*nothere.npy"):
        model.predict(str(tmp_path / "nothere.npy"))
