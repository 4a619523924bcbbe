"""`load`: every kind of source, the order in which a name is looked for, and bad data."""

from __future__ import annotations

import subprocess
import sys
import time

import numpy as np
import pytest
import torch
from image_tables import image_table
from PIL import Image

from polyfed.core.errors import InputError
from polyfed.data import describe_sources, hub, load, tables


def test_importing_is_light():
    code = "import sys, polyfed.data; print([m for m in ('datasets', 'sklearn', 'pyarrow', 'PIL') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "[]"


def test_digits():
    data = load("digits")
    assert (len(data.train), len(data.test), data.num_classes, data.input_shape) == (1400, 397, 10, (1, 8, 8))
    assert data.train.x.dtype == torch.uint8 and data.train.x.max() == 16
    inputs = data.train.inputs()
    assert inputs.min() == 0 and inputs.max() == 1
    from sklearn.datasets import load_digits

    content = load_digits()
    total = data.train.x.long().sum() + data.test.x.long().sum()
    assert total == int(content.data.sum()) and torch.bincount(torch.cat([data.train.y, data.test.y])).tolist() == (
        np.bincount(content.target).tolist()
    )


def test_limit_is_a_seeded_subset():
    whole, first, again, other = load("digits"), *(load("digits", limit=(100, 30), seed=s) for s in (0, 0, 1))
    assert (len(first.train), len(first.test)) == (100, 30) and first.train.index is None
    assert first.fingerprint == again.fingerprint != other.fingerprint != whole.fingerprint
    assert len(load("digits", limit=50).test) == 50
    assert len(load("digits", limit=(None, 5)).train) == 1400
    assert load("digits", limit=10**6).fingerprint == whole.fingerprint
    with pytest.raises(InputError, match="limit=0"):
        load("digits", limit=0)


def test_parquet_folder(parquet_folder):
    folder, images = parquet_folder
    data = load(folder)
    assert data.name == "chest" and data.input_shape == (1, 6, 5)
    assert np.array_equal(data.train.x[:, 0].numpy(), images)
    assert data.class_names == ("class 0", "class 1") and data.train.y.tolist() == [0, 1] * 10
    assert data.columns["hospital"].tolist() == ["north", "south", "west", "east"] * 5
    inputs = data.train.inputs()
    assert abs(inputs.mean()) < 1e-5 and abs(inputs.std(unbiased=False) - 1) < 1e-5
    assert load(folder, normalize=False).train.inputs().max() == images.max() / 255
    limited = load(folder, limit=7)
    assert len(limited.columns["hospital"]) == 7


def test_parquet_in_pieces(tmp_path):
    table, images = image_table(10)
    for piece in range(2):
        table.select(range(piece * 5, piece * 5 + 5)).to_parquet(tmp_path / f"train-0000{piece}-of-00002.parquet")
    table.to_parquet(tmp_path / "validation.parquet")
    data = load(tmp_path)
    assert np.array_equal(data.train.x[:, 0].numpy(), images) and len(data.test) == 10


def test_single_parquet_file_is_held_out_by_class_and_seed(tmp_path):
    table, _ = image_table(20)
    table.to_parquet(tmp_path / "all.parquet")
    data = load(tmp_path / "all.parquet")
    assert data.name == "all" and (len(data.train), len(data.test)) == (16, 4)
    assert data.test.y.tolist().count(0) == 2
    assert load(str(tmp_path / "all.parquet"), seed=1).fingerprint != data.fingerprint
    both = load(tmp_path / "all.parquet", test=tmp_path / "all.parquet")
    assert (len(both.train), len(both.test)) == (20, 20)


def test_string_labels_and_feature_table(tmp_path):
    import datasets

    content = {"age": [1.0, 2, 3, 4], "dose": [5, 6, 7, 8], "site": [1, 1, 2, 2], "outcome": ["well", "ill"] * 2}
    datasets.Dataset.from_dict(content).to_parquet(tmp_path / "train.parquet")
    with pytest.raises(InputError, match=r"columns are age, dose, site, outcome: pass label='...'"):
        load(tmp_path)
    with pytest.raises(InputError, match="no column 'result'"):
        load(tmp_path, label="result")
    data = load(tmp_path, label="outcome", columns=["site"], test=tmp_path / "train.parquet")
    assert data.input_shape == (2,) and data.class_names == ("ill", "well")
    assert data.train.y.tolist() == [1, 0, 1, 0] and data.columns["site"].tolist() == [1, 1, 2, 2]
    assert torch.allclose(data.train.inputs().mean(0), torch.zeros(2), atol=1e-6)


def test_truncated_parquet_is_named(parquet_folder):
    folder, _ = parquet_folder
    file = folder / "train.parquet"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(InputError, match=r"chest/train.parquet cannot be read as a parquet file"):
        load(folder)
    file.write_bytes(b"")
    with pytest.raises(InputError, match=r"train.parquet cannot be read"):
        load(folder)


def test_damaged_image_is_named(tmp_path):
    import pyarrow as pa
    import pyarrow.parquet as pq

    table, _ = image_table(3)
    blobs = [item["bytes"] for item in table.with_format("arrow")[:]["image"].to_pylist()]
    pq.write_table(pa.table({"image": [blobs[0], blobs[1][:40], blobs[2]], "label": [0, 1, 0]}), tmp_path / "a.parquet")
    with pytest.raises(InputError, match=r"row 1 of .*a.parquet is not a readable image"):
        load(tmp_path / "a.parquet")


def make_images(folder, sizes=((6, 5),) * 4, modes=("L",) * 4):
    for group in ("cat", "dog"):
        (folder / group).mkdir(parents=True)
        for number, ((height, width), mode) in enumerate(zip(sizes, modes, strict=True)):
            Image.new(mode, (width, height), color=number * 40).save(folder / group / f"{number}.png")


def test_image_folder(tmp_path):
    make_images(tmp_path / "pets" / "train")
    make_images(tmp_path / "pets" / "test")
    data = load(tmp_path / "pets")
    assert data.class_names == ("cat", "dog") and data.train.y.tolist() == [0] * 4 + [1] * 4
    assert data.input_shape == (1, 6, 5) and data.train.x[:4, 0, 0, 0].tolist() == [0, 40, 80, 120]


def test_image_folder_without_a_test_part(tmp_path):
    make_images(tmp_path / "pets", sizes=((6, 5),) * 5, modes=("L",) * 5)
    data = load(tmp_path / "pets")
    assert (len(data.train), len(data.test)) == (8, 2) and data.test.y.tolist() == [0, 1]


def test_mixed_colours_become_rgb(tmp_path):
    make_images(tmp_path, modes=("L", "RGB", "RGBA", "1"))
    data = load(tmp_path)
    assert data.input_shape == (3, 6, 5)


def test_sixteen_bit_grey_is_scaled_not_clipped(tmp_path):
    for group in ("a", "b"):
        (tmp_path / group).mkdir()
        for number in range(2):
            Image.fromarray(np.full((4, 4), 256 * 100, dtype=np.uint16)).save(tmp_path / group / f"{number}.png")
    assert load(tmp_path).train.x.unique().tolist() == [100]


def test_different_sizes_are_refused_unless_resized(tmp_path):
    make_images(tmp_path, sizes=((6, 5), (6, 5), (8, 8), (6, 5)))
    with pytest.raises(InputError, match=r"6x5 \(6 images\), 8x8 \(2 images\): pass resize"):
        load(tmp_path)
    assert load(tmp_path, resize=(4, 3)).input_shape == (1, 4, 3)
    assert load(tmp_path, resize=4).input_shape == (1, 4, 4)


@pytest.mark.parametrize("resize", [0, (3,), (2.5, 2), (-1, 2)])
def test_impossible_sizes(resize):
    with pytest.raises(InputError, match="is not a size"):
        load("digits", resize=resize)


def test_halving_is_the_mean_of_the_pixels(parquet_folder, tmp_path):
    table, images = image_table(4, size=(4, 6))
    expected = np.floor(images.reshape(4, 2, 2, 3, 2).mean((2, 4)) + 0.5)
    from_images = load(table, test=table, resize=(2, 3)).train.x[:, 0].numpy()
    from_array = load((images.astype(np.uint8), [0, 1, 0, 1]), resize=(2, 3), test=(images, [0] * 4)).train.x[:, 0]
    assert np.array_equal(from_images, expected) and np.array_equal(from_array.numpy(), expected)
    assert load("digits", resize=4).input_shape == (1, 4, 4)


@pytest.mark.parametrize("kind", ["numpy", "torch"])
@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        ((9, 5, 6, 3), (3, 5, 6)),
        ((9, 3, 5, 6), (3, 5, 6)),
        ((9, 5, 6), (1, 5, 6)),
        ((9, 1, 5, 6), (1, 5, 6)),
        ((9, 7), (7,)),
    ],
)
def test_array_layouts(kind, shape, expected):
    x = np.random.default_rng(0).integers(0, 256, shape).astype(np.uint8)
    data = load((x if kind == "numpy" else torch.from_numpy(x), np.arange(9) % 3), test=(x, np.arange(9) % 3))
    assert data.input_shape == expected and data.train.x.dtype == torch.uint8 and data.train.scaling.divisor == 255
    if shape == (9, 5, 6, 3):
        assert data.train.x[2, 1, 3, 4] == x[2, 3, 4, 1]


def test_number_types():
    y = [0, 1, 0, 1]
    assert load((np.zeros((4, 2, 2), dtype=np.int64) + 200, y)).train.x.dtype == torch.uint8
    assert load((np.zeros((4, 2, 2), dtype=np.int64) + 300, y)).train.x.dtype == torch.float32
    assert load((np.zeros((4, 2)), y)).train.x.dtype == torch.float32
    constant = load((np.full((4, 2), 7.0), y)).train
    assert constant.inputs().abs().max() == 0


def test_float_mean_and_deviation_are_of_the_training_part():
    rng = np.random.default_rng(0)
    x = rng.normal(5, 3, (50, 2, 4, 4))
    data = load((x, np.arange(50) % 2), test=(x * 0, np.arange(50) % 2))
    inputs = data.train.inputs()
    assert torch.allclose(inputs.mean((0, 2, 3)), torch.zeros(2), atol=1e-5)
    assert torch.allclose(inputs.std((0, 2, 3), unbiased=False), torch.ones(2), atol=1e-4)


class Items(torch.utils.data.Dataset):
    def __init__(self, items):
        self.items, self.reads = items, 0

    def __len__(self):
        return len(self.items)

    def __getitem__(self, row):
        self.reads += 1
        return self.items[row]


def test_torch_dataset_is_read_once():
    source = Items([(torch.full((1, 2, 2), float(row)), row % 2) for row in range(6)])
    data = load(source, test=Items([(torch.zeros(1, 2, 2), 0)]), name="mine")
    assert source.reads == 6 and data.name == "mine" and data.train.x[:, 0, 0, 0].tolist() == [0, 1, 2, 3, 4, 5]
    assert data.recipe == {"source": None}
    pictures = Items([(Image.new(mode, (4, 4)), 0) for mode in ("L", "RGB")])
    assert load(pictures, test=pictures).input_shape == (3, 4, 4)
    tensors = torch.utils.data.TensorDataset(torch.zeros(4, 3), torch.tensor([0, 1, 0, 1]))
    assert load(tensors).input_shape == (3,)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (Items([]), "no items"),
        (Items([1, 2]), "Item 0 .* is not a pair"),
        (Items([(torch.zeros(2), 0), (torch.zeros(3), 0)]), "Item 1 .* has shape"),
        (Items([(Image.new("L", (2, 2)), 0), (Image.new("L", (3, 2)), 0)]), "resize"),
        (3, "type int cannot be loaded"),
        ({"x": 1}, "type dict cannot be loaded"),
        ((np.array([1j, 2j]), [0, 1]), "must be numbers"),
        ((np.zeros(3), [0, 1, 0]), "one row per sample"),
        ((np.zeros((3, 2)), [0, 1]), "3 inputs but 2 labels"),
        ((np.zeros((0, 2)), []), "training set of 'own data' is empty"),
        ((np.zeros((1, 2)), [0]), "no test part"),
        ((np.zeros((4, 2)), np.eye(4)), "argmax of one-hot"),
        ((np.zeros((4, 2)), [0, 1, -1, 0]), "Label -1 in row"),
        ((np.zeros((4, 2)), [0, 1, 0.5, 0]), "Label 0.5 in row"),
        ((np.zeros((4, 2)), [0, 1, 900, 0]), "3 different numbers in 4 rows, up to 900"),
    ],
)
def test_bad_objects(source, message):
    with pytest.raises(InputError, match=message):
        load(source)


def test_bad_values_name_the_first_row():
    x = np.zeros((6, 1, 2, 2))
    x[3, 0, 1, 1], x[5] = np.inf, np.nan
    with pytest.raises(InputError, match=r"Row 3 of the training set .* NaN or infinite \(2 such rows\)"):
        load((x, np.zeros(6)), test=(x[:1], [0]))
    with pytest.raises(InputError, match="Row 0 of the test set"):
        load((x[:2], [0, 0]), test=(x[5:], [0]))
    huge = np.full((2, 2), 1e300)
    with pytest.raises(InputError, match=r"Row 0 .* infinite"):
        load((huge, [0, 0]), test=(huge, [0, 0]))


def test_labels_outside_the_classes():
    x = np.zeros((4, 2))
    with pytest.raises(InputError, match=r"Label 3 in row 3 of the training set of 'own data' is outside 0\.\.2"):
        load((x, [0, 1, 2, 3]), test=(x, [0] * 4), num_classes=3)
    with pytest.raises(InputError, match="row 1 of the test set"):
        load((x, [0, 1, 2, 2]), test=(x[:2], [0, 5]), num_classes=3)
    assert load((x, [0, 1, 2, 900]), test=(x, [0] * 4), num_classes=1000).num_classes == 1000
    assert load((x, ["b", "a", "b", "a"]), test=(x, ["a"] * 4)).train.y.tolist() == [1, 0, 1, 0]
    assert load((x, np.array([[0], [1], [0], [1]])), test=(x, [0] * 4)).num_classes == 2


def test_empty_test_part_and_shapes():
    x = np.zeros((4, 2))
    with pytest.raises(InputError, match="test set of 'own data' is empty"):
        load((x, [0] * 4), test=(x[:0], []))
    with pytest.raises(InputError, match=r"shape \(2,\) in the training set but \(3,\)"):
        load((x, [0] * 4), test=(np.zeros((4, 3)), [0] * 4))
    with pytest.raises(InputError, match="does not hold images"):
        load((x, [0] * 4), resize=3)


def test_unknown_names_and_paths(tmp_path):
    for source, message in [
        ("mnst", "did you mean 'mnist'"),
        ("./nowhere", "no file or folder ./nowhere"),
        ("nowhere/x.parquet", "no file or folder"),
        (tmp_path / "nowhere", "no file or folder"),
        (tmp_path, "neither train.parquet nor class folders"),
    ]:
        with pytest.raises(InputError, match=message):
            load(source)
    with pytest.raises(InputError, match="brings its own test part"):
        load("digits", test="x")


@pytest.mark.parametrize("offline", [True, False])
@pytest.mark.parametrize("name", ["cifar100", "owner/some-set"])
def test_missing_set_gives_one_sentence_quickly(monkeypatch, name, offline):
    if not offline:
        monkeypatch.delenv("HF_HUB_OFFLINE")
        monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")  # nobody listens there
    start = time.perf_counter()
    with pytest.raises(InputError) as caught:
        load(name)
    assert time.perf_counter() - start < 3
    message = str(caught.value)
    assert message.count(". ") == 0 and message.endswith(".")
    for way in (name, "POLYFED_DATA", "path of such a folder", "Hugging Face Hub"):
        assert way in message
    assert ("HF_HUB_OFFLINE is set" if offline else "cannot be reached") in message


def known_folder(root, value, name="mnist", split="test"):
    import datasets

    folder = root / name
    folder.mkdir(parents=True)
    table, _ = image_table(10, classes=10)
    table = table.map(lambda row: {"image": Image.new("L", (28, 28), value)}, features=table.features)
    assert isinstance(table, datasets.Dataset)
    table.to_parquet(folder / "train.parquet")
    table.to_parquet(folder / f"{split}.parquet")
    return folder


def test_lookup_order(tmp_path, monkeypatch):
    """Explicit path, POLYFED_DATA, our cache, the Hub's cache, the Hub."""
    import datasets

    given = known_folder(tmp_path / "given", 1)
    known_folder(tmp_path / "root", 2)
    calls = []

    def from_library(name, config, revision):
        calls.append((name, datasets.config.HF_HUB_OFFLINE))
        table, _ = image_table(10, classes=10, size=(28, 28))
        value = 4 if datasets.config.HF_HUB_OFFLINE else 5
        if value == 4 and not there:
            raise ConnectionError
        table = table.map(lambda row: {"image": Image.new("L", (28, 28), value)}, features=table.features)
        return {"train": table, "test": table}

    monkeypatch.setattr(hub, "_load", from_library)
    monkeypatch.setattr(hub, "why_unreachable", lambda: None)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)
    there = False
    assert load("mnist").train.x[0, 0, 0, 0] == 5 and calls == [("ylecun/mnist", False)]  # no Hub cache: the Hub
    assert load("mnist").train.x[0, 0, 0, 0] == 5 and len(calls) == 1  # our cache
    (tmp_path / "hf" / "datasets" / "ylecun___mnist" / "mnist").mkdir(parents=True)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    there = True
    assert load("mnist", cache=False).train.x[0, 0, 0, 0] == 4 and calls[1:] == [("ylecun/mnist", True)]
    assert datasets.config.HF_HUB_OFFLINE is False
    assert load("mnist").train.x[0, 0, 0, 0] == 5
    monkeypatch.setenv("POLYFED_DATA", str(tmp_path / "root"))
    assert load("mnist").train.x[0, 0, 0, 0] == 2
    assert load("mnist", path=given).train.x[0, 0, 0, 0] == 1
    assert load("mnist").train.scaling.mean == (0.1307,)


def test_hub_id(monkeypatch):
    table, _ = image_table(10, hospital=["a", "b"] * 5)
    monkeypatch.setattr(hub, "_load", lambda name, config, revision: {"train": table})
    monkeypatch.setattr(hub, "why_unreachable", lambda: None)
    data = load("owner/some-set")
    assert data.name == "owner/some-set" and (len(data.train), len(data.test)) == (8, 2)
    monkeypatch.setattr(hub, "_load", lambda *_: pytest.fail("asked the Hub again"))
    assert load("owner/some-set").columns["hospital"].tolist() == data.columns["hospital"].tolist()


def test_hub_failures_are_sentences(monkeypatch):
    def refuse(*_):
        raise RuntimeError("gated.\nlong text")

    monkeypatch.setattr(hub, "why_unreachable", lambda: None)
    monkeypatch.setattr(hub, "_load", refuse)
    with pytest.raises(InputError, match=r"\(the Hub answered: RuntimeError: gated\)"):
        load("owner/some-set")
    monkeypatch.setattr(hub, "_load", lambda *_: {"extra": None})
    with pytest.raises(InputError, match="no split 'train', only extra"):
        load("owner/some-set")


def test_cifar100_coarse_labels(monkeypatch):
    import datasets

    table, _ = image_table(10, size=(32, 32), color=True, column="img")
    table = table.rename_column("label", "fine_label").add_column("coarse_label", [0, 3] * 5)
    table = table.cast_column("coarse_label", datasets.ClassLabel(names=[f"kind {k}" for k in range(20)]))
    monkeypatch.setattr(hub, "_load", lambda *_: {"train": table, "test": table})
    monkeypatch.setattr(hub, "why_unreachable", lambda: None)
    fine, coarse = load("cifar100"), load("cifar100:coarse")
    assert (fine.num_classes, coarse.num_classes) == (100, 20)
    assert coarse.train.y.tolist() == [0, 3] * 5 and fine.columns["coarse_label"][1] == "kind 3"


def test_known_set_without_its_test_file(tmp_path, monkeypatch):
    folder = known_folder(tmp_path, 1)
    (folder / "test.parquet").unlink()
    monkeypatch.setenv("POLYFED_DATA", str(tmp_path))
    with pytest.raises(InputError, match=r"mnist has no test.parquet"):
        load("mnist")


def test_describe_sources(tmp_path, monkeypatch):
    found = {row["name"]: row["found"] for row in describe_sources()}
    assert found["digits"] == "embedded" and found["svhn"] == "not here" and len(found) == 13
    known_folder(tmp_path, 1)
    monkeypatch.setenv("POLYFED_DATA", str(tmp_path))
    assert {row["name"]: row["found"] for row in describe_sources()}["mnist"] == "POLYFED_DATA"
    monkeypatch.delenv("POLYFED_DATA")
    table, _ = image_table(10)
    monkeypatch.setattr(hub, "_load", lambda *_: {"train": table, "test": table})
    monkeypatch.setattr(hub, "why_unreachable", lambda: None)
    load("pneumoniamnist")
    assert {row["name"]: row["found"] for row in describe_sources()}["pneumoniamnist"] == "cache"


def test_table_of_a_hub_set_is_not_decoded_twice(monkeypatch):
    table, _ = image_table(4)
    monkeypatch.setattr(type(table.features["image"]), "decode_example", lambda *_: pytest.fail("decoded"))
    assert tables.table_of(table, "x").rows.num_rows == 4


@pytest.mark.parametrize(
    ("name", "rows", "classes", "shape"),
    [
        ("pneumoniamnist", (4708, 624), 2, (1, 28, 28)),
        pytest.param("mnist", (60000, 10000), 10, (1, 28, 28), marks=pytest.mark.long),  # seconds of decoding
    ],
)
def test_real_sets(real_root, monkeypatch, name, rows, classes, shape):
    monkeypatch.setenv("POLYFED_DATA", str(real_root))
    data = load(name)
    assert (len(data.train), len(data.test)) == rows and data.num_classes == classes and data.input_shape == shape
    start = time.perf_counter()
    again = load(name)
    assert time.perf_counter() - start < 0.6 and again.fingerprint == data.fingerprint
    inputs = again.train.inputs()
    assert abs(inputs.mean()) < 1e-3 and abs(inputs.std() - 1) < 1e-3
