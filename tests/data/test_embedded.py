"""The small real sets that are part of the package: their sizes, kinds and groups are what the catalog says."""

from __future__ import annotations

import pytest

import polyfed as pf
from polyfed.data.catalog import EMBEDDED, KNOWN


@pytest.mark.parametrize("name", ["opt", "watch", "mail"])
def test_the_catalog_tells_what_is_there(name, tmp_path):
    known, data = KNOWN[name], pf.load(name, cache=tmp_path)
    assert (len(data.train), len(data.test)) == known.rows
    assert data.input_shape == known.shape and data.input_shape.kind == known.kind
    assert data.num_classes == known.classes and known.license
    clients = pf.split(data, by=f"column:{known.group}")
    assert len(clients) == known.groups == len(set(clients.names)) and known.group not in data.features


def test_they_stay_small():
    sizes = {file.name: file.stat().st_size for file in EMBEDDED.glob("*.parquet")}
    assert len(sizes) == 4 and max(sizes.values()) < 1_000_000


def test_nothing_after_treatment_is_a_feature():
    features = pf.load("opt").features
    assert "clinic" not in features and "bmi" in features
    assert not any(
        word in name for name in features for word in ("birthweight", "apgar", "v3", "v5", "outcome", "preg_ended")
    )


@pytest.mark.long
def test_ten_people_learn_exercises_from_their_watches():
    clients = pf.split("watch", by="column:person")
    training = pf.Training(optimizer="adam", lr=0.003, epochs=3)
    result = pf.run("fedavg", clients, models="cnn1d:2x32", rounds=3, training=training, evaluate="end")
    assert result.accuracy()["mean"] > 0.6  # chance is a seventh


def test_three_looks_of_digits_from_sets_of_this_shape(tmp_path, monkeypatch):
    import numpy as np

    from polyfed.data import named

    real = named.by_name

    def small(name, *rest):
        if name == "digits":
            return real(name, *rest)
        shape = (20, 28, 28) if name == "mnist" else (20, 3, 32, 32)
        x = np.full(shape, 255 if name == "mnist" else 128, dtype=np.uint8)
        return pf.load((x, np.arange(20) % 10), test=(x, np.arange(20) % 10))

    monkeypatch.setattr(named, "by_name", small)
    data = named.domains(("digits", "mnist", "svhn"), {}, 0, named.Store(None))
    assert data.input_shape == (1, 16, 16) and len(data.train) == 60 and data.columns["domain"][20] == "mnist"
    assert int(data.train.x[20:40].min()) == 255 and int(data.train.x[40:].max()) == 128
    assert int(data.train.x[:20].max()) == 255  # 16 of digits
    assert pf.split(data, by="column:domain").names == ("digits", "mnist", "svhn")
