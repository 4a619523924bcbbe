"""Public data goes through the clients' scaling, whatever kind of data it came as."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
import torch
from image_tables import image_table

from polyfed.core.errors import InputError
from polyfed.core.samples import Samples
from polyfed.data import Clients, load, split

LABELS = np.arange(12) % 3


def features(seed=0):
    return np.random.default_rng(seed).normal(5, 3, (12, 4)).astype(np.float32)


def images(seed=0, size=(12, 4, 4)):
    return np.random.default_rng(seed).integers(0, 256, size).astype(np.uint8)


@pytest.mark.parametrize("kind", ["array", "pair", "samples", "data set", "tensor"])
def test_features_without_normalization_stay_as_they_are(kind):
    shared = features(1)
    pair = (shared, LABELS)
    public = {
        "array": shared,
        "pair": pair,
        "samples": Samples(torch.from_numpy(shared), torch.from_numpy(LABELS)),
        "data set": load(pair, test=pair),
        "tensor": torch.from_numpy(shared),
    }[kind]
    clients = split(load((features(), LABELS), normalize=False), clients=2, public=public)
    assert np.array_equal(clients.public.inputs().numpy(), shared)
    parts = Clients.from_parts([(features(), LABELS)], test=pair, public=public, normalize=False)
    assert np.array_equal(parts.public.inputs().numpy(), shared)


def test_features_are_normalized_by_the_clients_mean_and_deviation():
    private, shared = features(), features(1)
    clients = split(load((private, LABELS), test=(private, LABELS)), clients=2, public=shared)
    expected = (shared - private.mean(0)) / private.std(0)
    assert np.allclose(clients.public.inputs().numpy(), expected, atol=1e-5)


def test_whole_number_features_are_in_the_clients_unit():
    """Ages as uint8 and ages as float are the same ages."""
    private, shared = features().round(), images(1, (12, 4))
    clients = split(load((private, LABELS), normalize=False), clients=2, public=shared)
    assert np.array_equal(clients.public.inputs().numpy(), shared.astype(np.float32))


@pytest.mark.parametrize("normalize", [True, False])
def test_bytes_and_floats_of_one_image_become_the_same_input(normalize):
    whole = images()
    floats = whole.astype(np.float32) / 255
    for private, shared in [(whole, floats), (floats, whole), (floats, floats), (whole, whole)]:
        data = load((private, LABELS), test=(private, LABELS), normalize=normalize)
        public = split(data, clients=2, public=shared).public
        assert torch.allclose(public.inputs(), data.train.inputs(), atol=1e-5), (private.dtype, shared.dtype)


@pytest.mark.parametrize("normalize", [True, False])
def test_a_public_set_by_name_for_float_images(normalize):
    """Digits go from 0 to 16; as public data they go from 0 to 1, as the clients' images do."""
    floats = images(size=(12, 8, 8)).astype(np.float32) / 255
    data = load((floats, LABELS), test=(floats, LABELS), normalize=normalize)
    public = split(data, clients=2, public="digits:40").public
    scaling = data.train.scaling
    plain = public.inputs() * scaling.std[0] + scaling.mean[0]
    assert torch.allclose(plain, public.x[public.rows()].float() / 16, atol=1e-5)


def test_a_public_file_of_images_for_clients_without_normalization(tmp_path):
    table, pictures = image_table(12, size=(4, 4))
    table.to_parquet(tmp_path / "shared.parquet")
    data = load((images(), LABELS), normalize=False)
    for source in (str(tmp_path / "shared.parquet"), tmp_path / "shared.parquet"):
        public = split(data, clients=2, public=source).public
        rows = {tuple(row) for row in (pictures.reshape(12, -1) / 255).round(4)}
        assert all(tuple(row) in rows for row in public.inputs().flatten(1).double().numpy().round(4))


@pytest.mark.parametrize(
    ("private", "shared"),
    [
        (images().astype(np.float32), images()),  # floats from 0 to 255 and bytes
        (images() / 128 - 1, images()),  # normalized already
        (images(), images().astype(np.float32)),
        (images(), images() / 128 - 1),
    ],
)
def test_images_in_different_units_are_refused(private, shared):
    data = load((private, LABELS), test=(private, LABELS))
    with pytest.raises(InputError, match=r"floats from .* to .*bytes.*from 0 to 1"):
        split(data, clients=2, public=shared)


def test_features_of_another_number_are_refused():
    with pytest.raises(InputError, match=r"The public set has samples of shape \(3,\).*\(4,\)"):
        split(load((features(), LABELS)), clients=2, public=features()[:, :3])


def test_training_and_test_images_in_different_units_are_refused():
    whole = images()
    floats = whole.astype(np.float32) / 255
    for train, test in [(whole, floats), (floats, whole)]:
        with pytest.raises(InputError, match=r"test set of 'own data' .* bytes"):
            load((train, LABELS), test=(test, LABELS))
        with pytest.raises(InputError, match=r"test set of 'own data' .* bytes"):
            Clients.from_parts([(train, LABELS)], test=(test, LABELS))
    counts = whole.astype(np.int64)
    counts[0, 0, 0] = 300  # whole numbers are the same unit, though these do not fit into bytes
    data = load((counts, LABELS), test=(whole, LABELS), normalize=False)
    assert torch.equal(data.test.inputs(), torch.from_numpy(whole[:, None]).float())


def test_parts_with_a_divisor_of_their_own():
    """Digits keep their 0 to 16 as clients, too; two sets with different units are refused."""
    digits = load("digits", limit=30)
    clients = Clients.from_parts([digits.train, digits], test=digits.test, num_classes=10, normalize=False)
    assert torch.equal(clients.train[0].inputs(), digits.train.inputs())
    assert torch.equal(clients.test.inputs(), digits.test.inputs())
    other = Samples(digits.train.x, digits.train.y)  # bytes, of which nothing is known
    with pytest.raises(InputError, match=r"inputs of client 1 are divided by 255, but those of client 0 by 16"):
        Clients.from_parts([digits.train, other], test=digits.test, num_classes=10)
    with pytest.raises(InputError, match=r"inputs of the test set are divided by 255, but those of client 0 by 16"):
        Clients.from_parts([digits.train], test=other, num_classes=10)


def test_all_rows_of_a_public_file_are_public_in_a_simulation_and_at_a_site(tmp_path):
    """A fifth was held out for a test that public samples do not have, and a site took half of the rest."""
    pytest.importorskip("flwr")
    from polyfed.flower.sitedata import read_public

    file = tmp_path / "shared.csv"
    pd.DataFrame({"a": range(50), "b": range(50, 0, -1), "label": [0, 1] * 25}).to_csv(file, index=False)
    own = tmp_path / "own.csv"
    pd.DataFrame({"a": [1, 2, 3, 4] * 5, "b": [4, 3, 2, 1] * 5, "label": [0, 1] * 10}).to_csv(own, index=False)
    for samples in (read_public(str(file)), read_public(f"{file}:50"), split(load(own), clients=2, public=file).public):
        assert sorted(samples.x[samples.rows()][:, 0].tolist()) == list(range(50))
    some = read_public(f"{file}:20")
    assert len(some) == 20 and some.scaling == read_public(str(file)).scaling  # not that of the rows left over
    with pytest.raises(InputError, match="1 to 50 rows"):
        read_public(f"{file}:60")
