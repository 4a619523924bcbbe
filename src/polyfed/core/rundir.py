"""The run directory: configuration, history, result and a checkpoint from which a killed run goes on.

`checkpoint/index.json` is the one file that counts: it names the other files of the checkpoint with their checksums
and is replaced last, in one rename. Whatever a crash leaves beside it is ignored and swept away later.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from polyfed.core.checkpoint import (
    Tree,
    added_to,
    digest,
    pack_tree,
    parse_json,
    read_json,
    sweep,
    sync_folder,
    unpack_tree,
    write_atomic,
    write_json,
)
from polyfed.core.errors import PolyfedError, RunDirectoryError
from polyfed.core.lock import Lock

COMPARED = ("comparison.json", "*/seed-*/config.json", "sweep/*/*/seed-*/config.json")  # in that of a comparison
FORMAT = 3  # of the files in a run directory; raise it when their meaning changes

EMPTY = digest(b"")


class RunDirectory:
    """Reads and writes the files of one run."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.files: dict[str, str] = {}  # files of the current checkpoint -> checksum
        self.history_lines = 0
        self.lock = Lock(path)

    @property
    def checkpoints(self) -> Path:
        """The folder of the checkpoint."""
        return self.path / "checkpoint"

    @staticmethod
    def create(path: Path, config: Mapping[str, Any]) -> RunDirectory:
        """Start a new run directory; an existing run is never overwritten."""
        RunDirectory._check_empty(path)
        directory = RunDirectory(path)
        directory.lock.acquire()
        try:
            RunDirectory._check_empty(path)  # somebody else may have been quicker
            sweep(path)
            write_json(path / "config.json", {"format": FORMAT, **config})
        except BaseException:
            directory.close()
            raise
        return directory

    @staticmethod
    def open(path: Path) -> RunDirectory:
        """Open an existing run directory to go on with it; nobody else can until it is closed."""
        RunDirectory.read_config(path)
        directory = RunDirectory(path)
        directory.lock.acquire()
        for folder in (path, directory.checkpoints, path / "models"):
            sweep(folder)
        return directory

    @staticmethod
    def read_config(path: Path) -> dict[str, Any]:
        """Return the configuration of an existing run directory."""
        if not (path / "config.json").is_file():
            if path.is_dir() and all(item.name.startswith(".") for item in path.iterdir()):
                raise RunDirectoryError(f"Nothing was begun in {path}: start the run with the same command as before.")
            if any(any(path.glob(file)) for file in COMPARED):  # it may have been stopped before its first table
                raise RunDirectoryError(
                    f"{path} is a comparison, not one run: the same 'polyfed compare ...' command goes on with it, and "
                    "its runs are in the folders seed-0, seed-1, ... in it."
                )
            raise RunDirectoryError(
                f"{path} is not a run directory (no config.json): name the --out of an earlier run."
            )
        config = parse_json(path / "config.json")
        if not isinstance(config, dict) or config.get("format") != FORMAT:
            found = config.get("format") if isinstance(config, dict) else None
            raise RunDirectoryError(
                f"{path} was written by another version of polyfed (format {found}, this one reads {FORMAT}): "
                "use that version, or start the run again."
            )
        sound: dict[str, Any] = read_json(path / "config.json", sealed=True)
        return sound

    def rewrite_config(self, config: Mapping[str, Any]) -> None:
        """Replace the configuration of a run that goes on with more rounds."""
        write_json(self.path / "config.json", {**RunDirectory.read_config(self.path), **config})

    def close(self) -> None:
        """Let others use the directory."""
        self.lock.release()

    @staticmethod
    def _check_empty(path: Path) -> None:
        # Hidden files are what a process that was killed before its first line leaves behind: they hold nothing.
        if path.exists() and (not path.is_dir() or any(not item.name.startswith(".") for item in path.iterdir())):
            raise RunDirectoryError(
                f"{path} already exists and is not empty: choose another --out, remove it, "
                f"or continue that run with 'polyfed resume {path}'."
            )

    def append(self, line: Mapping[str, Any]) -> None:
        """Add a line to the history and flush it."""
        try:
            with added_to(self.path / "history.jsonl") as file:
                file.write(json.dumps(line, sort_keys=True) + "\n")
        except OSError as error:
            raise PolyfedError(f"Cannot write {self.path / 'history.jsonl'} ({error.strerror}).") from error
        self.history_lines += 1

    def save(self, progress: Mapping[str, Any], server: Tree, clients: Mapping[int, Tree]) -> None:
        """Write a checkpoint: the server, the clients that changed, then the index that makes it valid."""
        files = dict(self.files)
        known = {file.partition(".")[0]: file for file in files}
        tag = progress["round"], progress["phase"]
        for name, tree in [("server", server), *((f"client-{c}", t) for c, t in clients.items())]:
            blob = pack_tree(tree)
            files.pop(known.get(name, ""), None)
            file = f"{name}.{tag[0]}-{tag[1]}.safetensors"
            write_atomic(self.checkpoints / file, blob, synced=False)
            files[file] = digest(blob)
        sync_folder(self.checkpoints)
        lines = self._flushed_history()
        index = {**progress, "files": files, "history_lines": self.history_lines, "history": digest(lines)}
        write_json(self.checkpoints / "index.json", index)
        self.files = files
        for found in self.checkpoints.iterdir():  # what the new index does not name is no longer needed
            if found.name != "index.json" and found.name not in files:
                found.unlink()

    def load(self) -> tuple[dict[str, Any], Tree, dict[int, Tree]] | None:
        """Return progress, server and clients of the checkpoint (None: there is none), and cut the history to it."""
        if not (self.checkpoints / "index.json").is_file():
            self._cut_history(0)
            return None
        index = read_json(self.checkpoints / "index.json", sealed=True)
        trees: dict[str, Tree] = {}
        for file, checksum in index["files"].items():
            path = self.checkpoints / file
            try:
                blob = path.read_bytes()
            except OSError as error:
                raise RunDirectoryError(f"Cannot read {path} ({error.strerror}): start the run again.") from error
            if digest(blob) != checksum:
                raise RunDirectoryError(f"{path} is damaged (wrong checksum): start the run again.")
            trees[file.split(".")[0]] = unpack_tree(blob, str(path))
        self.files = index["files"]
        self._cut_history(index["history_lines"], index["history"])
        server = trees.pop("server")
        return index, server, {int(name.removeprefix("client-")): tree for name, tree in trees.items()}

    def history(self) -> list[dict[str, Any]]:
        """Return the lines of the history; those that the checkpoint counts are checked."""
        content = self._history_bytes()
        if (self.checkpoints / "index.json").is_file():
            index = read_json(self.checkpoints / "index.json", sealed=True)
            self._first_lines(content, index["history_lines"], index["history"])
        try:
            return [json.loads(line) for line in content.splitlines()]
        except ValueError as error:
            raise RunDirectoryError(f"{self.path / 'history.jsonl'} is damaged: {error}.") from error

    def _history_bytes(self) -> bytes:
        path = self.path / "history.jsonl"
        try:
            return path.read_bytes() if path.is_file() else b""
        except OSError as error:
            raise RunDirectoryError(f"Cannot read {path} ({error.strerror}).") from error

    def _flushed_history(self) -> bytes:
        """Bring the history to the disk before a checkpoint counts on it; return it."""
        path = self.path / "history.jsonl"
        if not path.is_file():
            return b""
        with open(path, "rb+") as file:
            os.fsync(file.fileno())
            return file.read()

    def _first_lines(self, content: bytes, lines: int, checksum: str) -> bytes:
        """Return the lines that belong to the checkpoint, once it is sure that they are those."""
        kept = b"".join(content.splitlines(keepends=True)[:lines])
        if digest(kept) != checksum:
            raise RunDirectoryError(
                f"{self.path / 'history.jsonl'} is damaged (wrong checksum): restore it or start the run again."
            )
        return kept

    def _cut_history(self, lines: int, checksum: str = EMPTY) -> None:
        """Forget lines after the checkpoint (they are computed again), and a half-written last one."""
        kept = self._first_lines(self._history_bytes(), lines, checksum)
        if (self.path / "history.jsonl").is_file():
            write_atomic(self.path / "history.jsonl", kept)
        self.history_lines = lines
