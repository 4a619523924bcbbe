"""The run directory: configuration, history, result and a checkpoint from which a killed run goes on.

`checkpoint/index.json` is the one file that counts: it names the other files of the checkpoint with their checksums
and is replaced last, in one rename. Whatever a crash leaves beside it is ignored and swept away later.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from polyfed.core.checkpoint import Tree, digest, pack_tree, read_json, unpack_tree, write_atomic, write_json
from polyfed.core.errors import PolyfedError, RunDirectoryError
from polyfed.core.lock import Lock

FORMAT = 2  # of the files in a run directory; raise it when their meaning changes


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
        return directory

    @staticmethod
    def read_config(path: Path) -> dict[str, Any]:
        """Return the configuration of an existing run directory."""
        if not (path / "config.json").is_file():
            raise RunDirectoryError(
                f"{path} is not a run directory (no config.json): name the --out of an earlier run."
            )
        config = read_json(path / "config.json")
        if not isinstance(config, dict) or config.get("format") != FORMAT:
            found = config.get("format") if isinstance(config, dict) else None
            raise RunDirectoryError(
                f"{path} was written by another version of polyfed (format {found}, this one reads {FORMAT}): "
                "use that version, or start the run again."
            )
        return config

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
            with open(self.path / "history.jsonl", "a") as file:
                file.write(json.dumps(line, sort_keys=True) + "\n")
        except OSError as error:
            raise PolyfedError(f"Cannot write {self.path / 'history.jsonl'} ({error.strerror}).") from error
        self.history_lines += 1

    def save(self, progress: Mapping[str, Any], server: Tree, clients: Mapping[int, Tree]) -> None:
        """Write a checkpoint: the server, the clients that changed, then the index that makes it valid."""
        files = dict(self.files)
        tag = progress["round"], progress["phase"]
        for name, tree in [("server", server), *((f"client-{c}", t) for c, t in clients.items())]:
            blob = pack_tree(tree)
            for old in [f for f in files if f.startswith(f"{name}.")]:
                del files[old]
            file = f"{name}.{tag[0]}-{tag[1]}.safetensors"
            write_atomic(self.checkpoints / file, blob)
            files[file] = digest(blob)
        index = {**progress, "files": files, "history_lines": self.history_lines}
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
        index = read_json(self.checkpoints / "index.json")
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
        self._cut_history(index["history_lines"])
        server = trees.pop("server")
        return index, server, {int(name.removeprefix("client-")): tree for name, tree in trees.items()}

    def history(self) -> list[dict[str, Any]]:
        """Return the lines of the history."""
        path = self.path / "history.jsonl"
        if not path.is_file():
            return []
        try:
            return [json.loads(line) for line in path.read_text().splitlines()]
        except ValueError as error:
            raise RunDirectoryError(f"{path} is damaged: {error}.") from error

    def _cut_history(self, lines: int) -> None:
        """Forget lines after the checkpoint (they are computed again), and a half-written last one."""
        path = self.path / "history.jsonl"
        kept = path.read_text().split("\n")[:lines] if path.is_file() else []
        if path.is_file():
            write_atomic(path, "".join(line + "\n" for line in kept).encode())
        self.history_lines = len(kept)
