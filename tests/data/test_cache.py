"""The cache of decoded sets: nothing is decoded twice, damage is noticed, and no half file is ever used."""

from __future__ import annotations

import os
import time

import pytest
import torch

from polyfed.data import cache, columns, load


@pytest.fixture
def forbid_decoding(monkeypatch):
    def forbid():
        monkeypatch.setattr(columns, "decode_images", lambda *_, **__: pytest.fail("decoded again"))

    return forbid


def only_file(folder):
    files = list(folder.iterdir())
    assert len(files) == 1, files
    return files[0]


def same(a, b):
    assert torch.equal(a.train.x, b.train.x) and torch.equal(a.test.y, b.test.y)
    assert a.train.scaling == b.train.scaling and a.class_names == b.class_names and a.fingerprint == b.fingerprint
    assert {key: values.tolist() for key, values in a.columns.items()} == {
        key: values.tolist() for key, values in b.columns.items()
    }


def test_second_call_does_not_decode(parquet_folder, cache_folder, forbid_decoding):
    first = load(parquet_folder[0])
    forbid_decoding()
    same(first, load(parquet_folder[0]))
    assert only_file(cache_folder).suffix == ".safetensors"


def test_options_and_changed_files_are_decoded_anew(parquet_folder, cache_folder):
    folder, _ = parquet_folder
    load(folder)
    assert load(folder, resize=3).input_shape == (1, 3, 3)
    os.utime(folder / "train.parquet", ns=(1, 1))
    load(folder)
    assert len(list(cache_folder.iterdir())) == 3


@pytest.mark.parametrize("damage", ["truncated", "flipped", "empty", "header"])
def test_damaged_file_is_rebuilt(parquet_folder, cache_folder, forbid_decoding, damage):
    first = load(parquet_folder[0])
    file = only_file(cache_folder)
    good = file.read_bytes()
    middle = good.index(first.train.x.numpy().tobytes()) + 5
    bad = {
        "truncated": good[:-7],
        "flipped": good[:middle] + bytes([good[middle] ^ 1]) + good[middle + 1 :],
        "empty": b"",
        "header": good.replace(b"class 0", b"class X", 1),
    }[damage]
    del first
    os.remove(file)  # not written in place: the old file may still be mapped
    file.write_bytes(bad)
    rebuilt = load(parquet_folder[0])
    assert only_file(cache_folder).read_bytes() == good
    assert rebuilt.class_names == ("class 0", "class 1")
    forbid_decoding()
    same(rebuilt, load(parquet_folder[0]))


@pytest.mark.parametrize("moment", ["write", "fsync", "rename"])
def test_crash_in_the_middle_leaves_no_half_file(parquet_folder, cache_folder, monkeypatch, moment):
    import safetensors.torch

    def crash_after_some_bytes(tensors, file, metadata=None):
        with open(file, "wb") as handle:
            handle.write(b"half")
        raise KeyboardInterrupt

    def crash(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        if moment == "write":
            patch.setattr(safetensors.torch, "save_file", crash_after_some_bytes)
        else:
            patch.setattr(cache.os, "fsync" if moment == "fsync" else "replace", crash)
        with pytest.raises(KeyboardInterrupt):
            load(parquet_folder[0])
    assert list(cache_folder.iterdir()) == []
    assert len(load(parquet_folder[0]).train) == 20
    assert only_file(cache_folder).stat().st_size > 100


def test_leftovers_of_a_killed_writer_are_removed(parquet_folder, cache_folder):
    load(parquet_folder[0])
    file = only_file(cache_folder)
    old, young = (file.with_name(f"{file.name}.{name}.tmp") for name in ("old", "young"))
    for leftover in (old, young):
        leftover.write_bytes(b"half")
    os.utime(old, (time.time() - 2 * cache.STALE,) * 2)
    file.unlink()
    load(parquet_folder[0])
    assert not old.exists() and young.exists() and file.exists()


def test_full_disk_is_a_warning_not_an_error(parquet_folder, cache_folder, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(cache.os, "fsync", full)
    with pytest.warns(RuntimeWarning, match="No space left on device"):
        assert len(load(parquet_folder[0]).train) == 20
    assert list(cache_folder.iterdir()) == []


def test_cache_folder_that_is_a_file(parquet_folder, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.warns(RuntimeWarning, match="could not be kept"):
        load(parquet_folder[0], cache=tmp_path / "file")


def test_no_cache_and_own_cache(parquet_folder, cache_folder, tmp_path):
    load(parquet_folder[0], cache=False)
    load(parquet_folder[0], cache=tmp_path / "mine")
    assert list(cache_folder.iterdir()) == [] and only_file(tmp_path / "mine")


def test_changing_loaded_data_does_not_change_the_cache(parquet_folder):
    fingerprint = load(parquet_folder[0]).fingerprint
    data = load(parquet_folder[0])
    data.train.x.zero_()
    again = load(parquet_folder[0])
    assert again.fingerprint == fingerprint and again.train.x.any()
