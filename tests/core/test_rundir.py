import json
import os

import pytest
import torch

from polyfed.core.checkpoint import pack_tree, unpack_tree, write_atomic
from polyfed.core.errors import PolyfedError, RunDirectoryError
from polyfed.core.rundir import RunDirectory

TREE = {"a": torch.arange(3.0), "b": [1, 2.5, "word", None, True], "c": {"d": torch.zeros(0, 2), "e": []}}
PROGRESS = {"round": 1, "phase": "round", "cost": {}}


def test_a_tree_of_tensors_and_values_survives():
    again = unpack_tree(pack_tree(TREE), "test")
    assert torch.equal(again["a"], TREE["a"])
    assert again["b"] == TREE["b"]
    assert again["c"]["d"].shape == (0, 2)


def test_what_cannot_be_saved_is_named():
    with pytest.raises(TypeError, match="cannot checkpoint a set"):
        pack_tree({"a": {1}})


def test_a_failing_write_leaves_the_old_content_and_no_rubbish(tmp_path, monkeypatch):
    path = tmp_path / "file"
    write_atomic(path, b"old")

    def full(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(PolyfedError, match=r"Cannot write .*file \(No space left on device\).*intact"):
        write_atomic(path, b"new content")
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["file"]


def test_an_existing_run_is_never_overwritten(tmp_path):
    RunDirectory.create(tmp_path / "a", {})
    with pytest.raises(RunDirectoryError, match="already exists and is not empty"):
        RunDirectory.create(tmp_path / "a", {})


def test_a_read_only_place_gives_one_sentence(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(PolyfedError, match="Cannot write"):
        RunDirectory.create(tmp_path / "file" / "below", {})


def test_a_directory_of_another_version_is_refused(tmp_path):
    RunDirectory.create(tmp_path / "a", {})
    (tmp_path / "a" / "config.json").write_text(json.dumps({"format": 99}))
    with pytest.raises(RunDirectoryError, match=r"another version of polyfed \(format 99, this one reads 3\)"):
        RunDirectory.open(tmp_path / "a")
    with pytest.raises(RunDirectoryError, match="not a run directory"):
        RunDirectory.open(tmp_path)


@pytest.mark.parametrize("file", ["comparison.json", "fedavg/seed-0/config.json", "sweep/fedavg/a/seed-0/config.json"])
def test_the_directory_of_a_comparison_goes_on_with_its_command_finished_or_not(tmp_path, file):
    (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / file).write_text("{}")
    with pytest.raises(RunDirectoryError, match=r"is a comparison, .*same 'polyfed compare \.\.\.' command goes on"):
        RunDirectory.read_config(tmp_path)


def test_where_nothing_was_begun_the_same_command_is_the_way_on(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / ".config.json.abcd1234").write_text("{")
    with pytest.raises(RunDirectoryError, match="start the run with the same command"):
        RunDirectory.open(tmp_path / "a")
    RunDirectory.create(tmp_path / "a", {}).close()
    assert sorted(os.listdir(tmp_path / "a")) == ["config.json"]


def finished(path):
    run = RunDirectory.create(path, {"method": {"name": "fedavg"}, "rounds": 12})
    run.append({"round": 1, "loss": 0.25})
    run.save(PROGRESS, TREE, {0: TREE})
    run.close()
    return run


def read_again(path):
    RunDirectory.read_config(path)
    run = RunDirectory.open(path)
    try:
        return run.load(), run.history()
    finally:
        run.close()


@pytest.mark.parametrize(
    "name", ["config.json", "history.jsonl", "checkpoint/index.json", "checkpoint/server.1-round.safetensors"]
)
def test_every_flipped_bit_is_found_and_its_file_named(name, tmp_path):
    finished(tmp_path / "a")
    file = tmp_path / "a" / name
    sound = file.read_bytes()
    for place in range(0, len(sound), 7):
        damaged = bytearray(sound)
        damaged[place] ^= 1 << place % 8
        file.write_bytes(damaged)
        with pytest.raises(RunDirectoryError) as found:
            read_again(tmp_path / "a")
        assert file.name in str(found.value) or "another version" in str(found.value), place
    file.write_bytes(sound)
    assert read_again(tmp_path / "a")[1] == [{"round": 1, "loss": 0.25}]


@pytest.mark.parametrize("name", ["config.json", "history.jsonl", "checkpoint/index.json"])
def test_every_truncated_file_is_found(name, tmp_path):
    finished(tmp_path / "a")
    file = tmp_path / "a" / name
    sound = file.read_bytes()
    for length in range(0, len(sound) - 1, 5):
        file.write_bytes(sound[:length])
        with pytest.raises(RunDirectoryError):
            read_again(tmp_path / "a")


def test_the_history_is_on_the_disk_before_a_checkpoint_counts_on_it(tmp_path, monkeypatch):
    run = RunDirectory.create(tmp_path / "a", {})
    run.append({"round": 1})
    flushed, sync = [], os.fsync

    def watched(descriptor):
        flushed.append(os.path.basename(os.readlink(f"/proc/self/fd/{descriptor}")))
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", watched)
    run.save(PROGRESS, TREE, {})
    assert flushed.index("history.jsonl") < next(k for k, name in enumerate(flushed) if "index.json" in name)


def test_what_a_killed_write_left_is_swept_away_and_nothing_else(tmp_path):
    finished(tmp_path / "a")
    for name in (".history.jsonl.ab_cd123", "checkpoint/.index.json.12345678", ".mine", "notes.txt"):
        (tmp_path / "a" / name).write_text("half")
    RunDirectory.open(tmp_path / "a").close()
    assert not (tmp_path / "a" / ".history.jsonl.ab_cd123").exists()
    assert not (tmp_path / "a" / "checkpoint" / ".index.json.12345678").exists()
    assert (tmp_path / "a" / ".mine").exists() and (tmp_path / "a" / "notes.txt").exists()


def test_a_private_file_is_for_its_owner_only(tmp_path):
    write_atomic(tmp_path / "state", b"x", private=True)
    write_atomic(tmp_path / "report", b"x")
    assert [(tmp_path / name).stat().st_mode & 0o777 for name in ("state", "report")] == [0o600, 0o644]


def test_only_changed_clients_are_written_again_and_old_files_go(tmp_path):
    run = RunDirectory.create(tmp_path / "a", {})
    run.save(PROGRESS, TREE, {0: TREE, 1: TREE})
    run.save({**PROGRESS, "round": 2}, TREE, {1: {"x": torch.ones(1)}})
    files = sorted(os.listdir(run.checkpoints))
    assert files == [
        "client-0.1-round.safetensors",
        "client-1.2-round.safetensors",
        "index.json",
        "server.2-round.safetensors",
    ]
    _, _, clients = run.load()
    assert torch.equal(clients[0]["a"], TREE["a"])
    assert torch.equal(clients[1]["x"], torch.ones(1))


def test_all_files_of_a_checkpoint_are_on_the_disk_before_its_index_counts_on_them(tmp_path, monkeypatch):
    run = RunDirectory.create(tmp_path / "a", {})
    events, replace = [], os.replace
    monkeypatch.setattr(os, "replace", lambda source, target: (events.append(target.name), replace(source, target)))
    monkeypatch.setattr("polyfed.core.rundir.sync_folder", lambda folder: events.append(f"{folder.name} is synced"))
    run.save(PROGRESS, TREE, {0: TREE, 1: TREE})
    names = ["server.1-round.safetensors", "client-0.1-round.safetensors", "client-1.1-round.safetensors"]
    assert events == [*names, "checkpoint is synced", "index.json"]


def test_a_crash_between_the_files_leaves_the_earlier_checkpoint_valid(tmp_path, monkeypatch):
    run = RunDirectory.create(tmp_path / "a", {})
    run.append({"round": 1})
    run.save(PROGRESS, TREE, {0: TREE})
    run.append({"round": 2})
    replace = os.replace

    def crash(source, target):
        if str(target).endswith("index.json"):
            raise KeyboardInterrupt
        replace(source, target)

    monkeypatch.setattr(os, "replace", crash)
    with pytest.raises(KeyboardInterrupt):
        run.save({**PROGRESS, "round": 2}, {}, {0: {}})
    run.close()  # as the end of its process does
    again = RunDirectory.open(tmp_path / "a")
    progress, server, clients = again.load()
    assert progress["round"] == 1
    assert torch.equal(server["a"], TREE["a"])
    assert torch.equal(clients[0]["a"], TREE["a"])
    assert again.history() == [{"round": 1}]


def test_a_damaged_checkpoint_is_named(tmp_path):
    run = RunDirectory.create(tmp_path / "a", {})
    run.save(PROGRESS, TREE, {})
    file = run.checkpoints / "server.1-round.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"x")
    with pytest.raises(RunDirectoryError, match=r"server.1-round.safetensors is damaged \(wrong checksum\)"):
        run.load()


def test_a_half_written_history_line_is_cut(tmp_path):
    run = RunDirectory.create(tmp_path / "a", {})
    run.append({"round": 1})
    run.save(PROGRESS, TREE, {})
    with open(run.path / "history.jsonl", "a") as file:
        file.write('{"round": 2, "par')
    run.load()
    assert run.history() == [{"round": 1}]


@pytest.mark.parametrize("name", [".lock", "history.jsonl"])
def test_a_link_in_the_directory_leads_nowhere(name, tmp_path):
    """Somebody who can write where we write must not have us empty or fill a file of ours elsewhere."""
    precious, out = tmp_path / "precious", tmp_path / "run"
    precious.write_text("mine")
    out.mkdir()
    (out / name).symlink_to(precious)
    with pytest.raises(PolyfedError, match=rf"{name} \(Too many levels of symbolic links\)"):
        directory = RunDirectory(out)
        directory.lock.acquire()
        directory.append({"round": 1})
    assert precious.read_text() == "mine"
