"""Fixtures for the data tests: a cache and an environment of their own, small files, and the real sets if here."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from image_tables import image_table

REAL = Path(__file__).resolve().parents[3] / "shared" / "data"


@pytest.fixture(autouse=True)
def own_environment(tmp_path_factory, monkeypatch):
    """No test sees the user's cache, data folder or network."""
    monkeypatch.setenv("POLYFED_CACHE", str(tmp_path_factory.mktemp("cache")))
    monkeypatch.setenv("HF_HOME", str(tmp_path_factory.mktemp("hub")))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.delenv("HF_DATASETS_CACHE", raising=False)
    monkeypatch.delenv("POLYFED_DATA", raising=False)


@pytest.fixture(scope="session")
def real_root():
    """The folder of real image sets."""
    for root in (os.environ.get("POLYFED_DATA"), REAL):
        if root and Path(root).is_dir():
            return Path(root)
    pytest.skip("real image sets are neither in POLYFED_DATA nor in ../shared/data")


@pytest.fixture
def cache_folder():
    return Path(os.environ["POLYFED_CACHE"])


@pytest.fixture
def parquet_folder(tmp_path):
    """A folder with train.parquet (20 rows with a hospital) and test.parquet (8 rows)."""
    folder = tmp_path / "chest"
    folder.mkdir()
    train, images = image_table(20, hospital=["north", "south", "west", "east"] * 5)
    train.to_parquet(folder / "train.parquet")
    test, _ = image_table(8, seed=1, hospital=["north"] * 8)
    test.to_parquet(folder / "test.parquet")
    return folder, images
