"""Images that a table names, and clients whose data is a folder of images each."""

from __future__ import annotations

import numpy as np
import pandas
import pytest
import torch
from PIL import Image

import polyfed as pf
from polyfed.core.errors import InputError

RNG = np.random.default_rng(0)


def save(file, *shape, value=None):
    file.parent.mkdir(parents=True, exist_ok=True)
    array = RNG.integers(0, 255, shape, dtype=np.uint8) if value is None else np.full(shape, value, np.uint8)
    Image.fromarray(array).save(file)
    return array


@pytest.fixture
def scans(tmp_path):
    """A CSV file that names 20 images, which lie beside it."""
    arrays = [save(tmp_path / "png" / f"{row}.png", 8, 8) for row in range(20)]
    table = pandas.DataFrame({"file": [f"png/{row}.png" for row in range(20)], "hospital": ["n", "s"] * 10})
    table.assign(finding=["ill", "ill", "well", "well"] * 5).to_csv(tmp_path / "scans.csv", index=False)
    return tmp_path / "scans.csv", np.stack(arrays)


def test_a_table_of_image_files_is_a_set_of_images(scans):
    file, arrays = scans
    data = pf.load(file, label="finding")
    assert data.input_shape == (1, 8, 8) and data.form.kind == "image" and set(data.columns) == {"hospital"}
    together = torch.cat([data.train.x, data.test.x]).sum((1, 2, 3)).sort().values
    assert together.tolist() == sorted(arrays.reshape(20, -1).sum(1).tolist())
    clients = pf.split(data, by=pf.ByColumn("hospital"))
    assert clients.names == ("n", "s")


def test_a_frame_names_images_from_the_current_folder(scans, monkeypatch):
    file, _ = scans
    monkeypatch.chdir(file.parent)
    assert pf.load(pandas.read_csv(file), label="finding").input_shape == (1, 8, 8)


def test_an_image_that_is_not_there_or_missing_is_named(scans):
    file, _ = scans
    table = pandas.read_csv(file)
    table.assign(file=["png/none.png", *table.file[1:]]).to_csv(file, index=False)
    with pytest.raises(InputError, match=r"Row 0 of .*scans.csv names the image png/none.png, which is not there"):
        pf.load(file, label="finding")
    table.assign(file=[*table.file[:-1], None]).to_csv(file, index=False)
    with pytest.raises(InputError, match=r"Row 19 of .*scans.csv has no image in column 'file'"):
        pf.load(file, label="finding")


def test_the_cache_sees_that_an_image_has_changed(scans):
    file, _ = scans
    before = pf.load(file, label="finding").fingerprint
    assert pf.load(file, label="finding").fingerprint == before
    save(file.parent / "png" / "3.png", 8, 8, value=7)
    assert pf.load(file, label="finding").fingerprint != before


def test_files_of_images_can_still_be_read_as_texts(scans):
    file, _ = scans
    assert pf.load(file, label="finding", inputs="file", kind="text").form.kind == "text"


# --- a folder each ---


def test_clients_whose_data_is_a_folder_of_images_each(tmp_path):
    for site, classes in (("north", ["ill", "well"]), ("south", ["well", "other"])):
        for name in classes:
            for row in range(10):
                save(tmp_path / site / name / f"{row}.png", 9 + row % 2, 9)
    parts = {"north": tmp_path / "north", "south": str(tmp_path / "south")}
    clients = pf.Clients.from_parts(parts, test="own", resize=8)
    assert clients.names == ("north", "south") and clients.input_shape == (1, 8, 8) and clients.form.resize
    assert clients.class_names == ("ill", "well", "other")
    assert [sorted(set(part.labels().tolist())) for part in clients.train] == [[0, 1], [1, 2]]
    with pytest.raises(InputError, match=r"different sizes.*pass resize="):
        pf.Clients.from_parts(parts, test="own")
    (tmp_path / "west").mkdir()
    with pytest.raises(InputError, match="west of client 1 has no folders with images, one for each class"):
        pf.Clients.from_parts([tmp_path / "north", tmp_path / "west"], test="own", resize=8)


def test_arrays_of_clients_are_resized_and_grey_is_made_color_and_said():
    grey, color = (RNG.integers(0, 255, shape, dtype=np.uint8) for shape in ((20, 8, 8), (20, 12, 12, 3)))
    parts = [(grey, [0, 1] * 10), (color, [0, 1] * 10)]
    clients = pf.Clients.from_parts(parts, test="own", resize=(8, 8), kind="image")
    assert clients.input_shape == (3, 8, 8)
    assert any("grey images of client 0 are beside others in color" in note for note in clients.notes)
    first = clients.train[0].x[clients.train[0].rows()][0]
    assert torch.equal(first[0], first[2])


@pytest.mark.parametrize("behind", [False, True])
def test_images_of_many_channels_and_unequal_size(behind, tmp_path):
    shapes = [(12 + row % 3, 10 + row % 2) for row in range(20)]
    images = [RNG.integers(0, 255, (*shape, 5) if behind else (5, *shape), dtype=np.uint8) for shape in shapes]
    data = pf.load((images, [0, 1] * 10), resize=(8, 8))
    assert data.input_shape == (5, 8, 8)
    pf.run("local", pf.split(data, clients=2), "mlp:1x8", rounds=1, out=tmp_path / "run")
    assert len(pf.load_model(tmp_path / "run", 0).predict(images[:3])) == 3


def test_square_images_of_many_channels_have_them_behind():
    images = RNG.integers(0, 255, (20, 8, 8, 5), dtype=np.uint8)
    assert pf.load((images, [0, 1] * 10)).input_shape == (5, 8, 8)
    assert pf.load((images.transpose(0, 3, 1, 2), [0, 1] * 10)).input_shape == (5, 8, 8)


def test_items_with_inputs_of_another_name():
    items = [{"scan": RNG.integers(0, 255, (8, 8), dtype=np.uint8), "label": row % 2} for row in range(20)]
    clients = pf.Clients.from_parts([items, items], test="own", inputs="scan")
    assert clients.input_shape == (1, 8, 8)
