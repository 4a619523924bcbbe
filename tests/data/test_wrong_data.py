"""Whatever is handed to `load`, `split` and `Clients.from_parts` by mistake, the answer is a sentence."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from polyfed.core.errors import InputError
from polyfed.data import ByColumn, Clients, Dirichlet, LabelSets, Quantity, Shards, load, split
from polyfed.data.decode import decode_images

X = np.arange(48, dtype=np.float32).reshape(12, 4)
Y = np.arange(12) % 3
HOLES = np.where(X > 40, np.nan, X)


def frame():
    import pandas

    return pandas.DataFrame({"age": X[:, 0], "label": Y})


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (None, "Data of type NoneType"),
        (3, "Data of type int"),
        ({"x": X, "y": Y}, r"Data of type dict .* a pair of arrays \(inputs, labels\)"),
        (b"digits", "Data of type bytes"),
        (Path("nowhere"), "no file or folder nowhere"),
        ("nowhere/patients.csv", "no file or folder nowhere/patients.csv"),
        (X, r"Data of type ndarray .* a pair of arrays"),
        (torch.zeros(4, 2), r"Data of type Tensor .* a pair of arrays"),
        ((X, None), "The labels of the training set of 'own data' are missing"),
        ((None, Y), r"input array of the training set .* must be numbers"),
        ((X, Y, X), r"pair of arrays \(inputs, labels\)"),
        (([[1, 2], [1]], [0, 1]), r"input array of the training set .* rows of different lengths"),
        ((X, Y[:5]), "12 inputs but 5 labels"),
        ((X[:0], Y[:0]), "training set of 'own data' is empty"),
        ((HOLES, Y), r"Row 10 of the training set of 'own data' holds a value that is NaN or infinite \(2 such rows\)"),
    ],
)
def test_load(source, message):
    with pytest.raises(InputError, match=message):
        load(source)


def test_a_data_frame_is_a_table():
    data = load(frame(), test=frame())
    assert data.features == ("age",) and data.num_classes == 3 and data.train.x[:, 0].tolist() == X[:, 0].tolist()
    data = load((frame()[["age"]], frame()["label"]))  # its parts are arrays
    assert data.input_shape == (1,) and data.num_classes == 3


def test_string_labels_are_class_names():
    data = load((X, np.array(["well", "ill", "well"] * 4)))
    assert data.class_names == ("ill", "well")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"limit": "5"}, "limit='5' is not possible"),
        ({"limit": 1.5}, "limit=1.5 is not possible"),
        ({"limit": (1, 2, 3)}, r"limit=\(1, 2, 3\) is not possible"),
        ({"limit": True}, "limit=True is not possible"),
        ({"cache": 3}, "cache=3 is not a folder"),
        ({"test": "nowhere"}, "Data of type str cannot be loaded as the test set"),
        ({"test": 5}, "Data of type int cannot be loaded as the test set"),
        ({"test": (X, None)}, "The labels of the test set of 'own data' are missing"),
    ],
)
def test_options_of_load(options, message):
    with pytest.raises(InputError, match=message):
        load((X, Y), **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"data": None}, "Data of type NoneType"),
        ({"clients": 0}, "clients=0 is not possible"),
        ({"clients": "3"}, "clients='3' is not possible: give a whole number of at least 1"),
        ({"clients": 2.0}, "clients=2.0 is not possible"),
        ({"clients": True}, "clients=True is not possible"),
        ({"by": 0.5}, "by=0.5 is not a partitioner"),
        ({"by": None}, "by=None is not a partitioner"),
        ({"by": ByColumn(3)}, "no column '3'"),
        ({"validation": 1.5}, "validation=1.5"),
        ({"validation": "0.1"}, "validation='0.1'"),
        ({"validation": None}, "validation=None"),
        ({"validation": True}, "validation=True"),
        ({"min_size": "2"}, "min_size='2'"),
        ({"min_size": 1.5}, "min_size=1.5"),
        ({"public": {"x": X}}, "Data of type dict cannot be loaded as the public set"),
        ({"public": X[:0]}, "The public set is empty"),
        ({"public": np.array(3.5)}, r"public set has shape \(\)"),
        ({"public": HOLES}, r"Row 10 of the public set .*2 such rows"),
        ({"public": Path("nowhere.parquet")}, "no file or folder nowhere.parquet"),
    ],
)
def test_split(options, message):
    with pytest.raises(InputError, match=message):
        split(**{"data": load((X, Y)), "clients": 3, **options})


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Dirichlet("0.5"), "alpha='0.5' is not possible"),
        (lambda: Dirichlet(True), "alpha=True is not possible"),
        (lambda: Dirichlet(0.5, min_size="1"), "min_size='1'"),
        (lambda: Quantity("a"), "alpha='a'"),
        (lambda: Quantity(ratio="a"), "ratio='a'"),
        (lambda: LabelSets("1", "2"), "labels:1-2 is not possible"),
        (lambda: LabelSets(1.5, 2), "labels:1.5-2 is not possible"),
        (lambda: Shards("2"), "shards:2 is not possible"),
        (lambda: Shards(1.5), "shards:1.5 is not possible"),
    ],
)
def test_partitioners(make, message):
    with pytest.raises(InputError, match=message):
        make()


def test_numbers_of_numpy_are_numbers():
    data = load((X, Y), test=(X, Y), limit=(np.int64(10), None), num_classes=np.int64(3))
    clients = split(data, np.int64(2), by=Shards(np.int64(2)), validation=np.float64(0.2), public=np.int64(2))
    assert len(clients) == 2 and len(clients.public) == 2
    assert clients.recipe["public"] == 2 and type(clients.recipe["public"]) is int


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        (None, "There are no clients"),
        ([], "There are no clients"),
        (3, "parts of type int"),
        ({1, 2}, "parts of type set: give a list"),
        ("digits", "parts of type str"),
        (X, "parts of type ndarray"),
        ((X, Y), r"ndarray cannot be loaded as client 0"),
        ([None], "Data of type NoneType cannot be loaded as client 0"),
        ([(X, Y), "digits"], "There is no file digits for client 1"),
        ([(X, Y), (X, Y[:3])], "Client 1 has 12 inputs but 3 labels"),
        ([(X, Y), (HOLES, Y)], r"Row 10 of client 1 .*2 such rows"),
        ([(X, Y), (X, np.eye(12))], "The labels of client 1 have shape"),
        ([(X, Y), (X, ["a"] * 12)], r"labels of client 1 are names, but those of client 0 are numbers"),
    ],
)
def test_from_parts(parts, message):
    with pytest.raises(InputError, match=message):
        Clients.from_parts(parts, test=(X, Y))


def test_test_set_of_parts():
    with pytest.raises(InputError, match="There is no test set: give test="):
        Clients.from_parts([(X, Y)], test=None)
    with pytest.raises(InputError, match="labels of the test set are names, but those of client 0 are numbers"):
        Clients.from_parts([(X, Y)], test=(X, ["a"] * 12))
    with pytest.raises(InputError, match="validation='a'"):
        Clients.from_parts([(X, Y)], test=(X, Y), validation="a")


def test_an_image_that_claims_to_be_endless_is_a_sentence(tmp_path):
    import struct
    import zlib

    def chunk(kind, content):
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    head = struct.pack(">IIBBBBB", 100_000, 100_000, 8, 0, 0, 0, 0)
    bomb = b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(bytes(9))) + chunk(b"IEND", b"")
    (tmp_path / "bomb.png").write_bytes(bomb)
    with pytest.raises(InputError, match=r"bomb.png is not a readable image .*remove or replace it"):
        decode_images([tmp_path / "bomb.png"], "images")
