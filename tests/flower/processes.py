"""Federations of real processes on loopback, and how to end every one of them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import nursery
import problem
import pytest

from forked import POLYFED, Forked, Forks
from polyfed.flower.child import Address, free_port
from polyfed.flower.keys import create_keys, read_server_keys
from polyfed.flower.link import ServerLink
from polyfed.flower.mailbox import Mailbox

FLOWER = [sys.executable, "-m", POLYFED]
IMPORTED = ["polyfed.cli.commands", "polyfed.flower.serve", "polyfed.flower.join", "polyfed.flower.grid"]
IMPORTED += ["polyfed.api", "polyfed.report.page", "polyfed.terminal.live", "flwr.cli.build", *nursery.IMPORTED]
Process = subprocess.Popen[bytes] | Forked


def environment() -> dict[str, str]:
    """Return the environment of the commands."""
    paths = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", "PYTHONPATH": paths}


class Processes:
    """The processes of one test: forked ones, or without `forks` such that do all their imports."""

    def __init__(self, folder: Path, forks: Forks | None) -> None:
        self.folder = folder
        self.forks = forks
        self.running: list[Process] = []

    def start(
        self, name: str, words: list[str], module: str = POLYFED, group: int | None = None, **variables: str
    ) -> Process:
        """Start a command, `polyfed` or another module; its words go to a file."""
        path = self.folder / f"{name}.log"
        if self.forks is not None:
            process: Process = self.forks.start(words, self.folder, path, module, group, True, **variables)
        else:
            with path.open("ab") as log:
                process = subprocess.Popen(
                    [sys.executable, "-m", module, *words],
                    stdout=log,
                    stderr=log,
                    stdin=subprocess.DEVNULL,
                    cwd=self.folder,
                    env={**environment(), **variables},
                    process_group=group,
                )
        self.running.append(process)
        return process

    def log(self, name: str) -> str:
        path = self.folder / f"{name}.log"
        return path.read_text(errors="replace") if path.is_file() else ""

    def stop(self) -> None:
        """End what still runs; nothing may be left, also not Flower's processes of a command that was killed."""
        for process in self.running:
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
        for process in self.running:
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait(30)
        end = time.monotonic() + 30
        while left := [flower for process in self.running for flower in flowers(process.pid)]:
            assert time.monotonic() < end, f"left behind: {left}"
            time.sleep(0.05)


def flowers(parent: int) -> list[int]:
    """Return Flower's processes that a command started, also those that outlived it (Linux only)."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes().split(b"\0")
            name = (path.parent / "comm").read_text().strip()
        except OSError:
            continue  # it has just ended
        started = b"--parent" in words and words[words.index(b"--parent") + 1] == str(parent).encode()
        if started or name == nursery.name_for(parent):
            found.append(int(path.parent.name))
    return found


class FederationProcesses(Processes):
    """A federation of real commands: keys, a server, sites."""

    def __init__(self, folder: Path, forks: Forks | None) -> None:
        super().__init__(folder, forks)
        self.port = free_port()
        self.gates = folder / "gates"
        self.gates.mkdir()
        create_keys(folder / "keys", "127.0.0.1", problem.SITES)

    def serve(self, *options: str, name: str = "serve", group: int | None = None) -> Process:
        """Start the server; `group=0` gives it a group of processes of its own, as a terminal does."""
        common = ["--out", "run", "--host", "127.0.0.1", "--port", str(self.port)]
        if "--insecure" not in options:
            common += ["--keys", "keys"]
        return self.start(name, ["serve", *common, *options], group=group)

    def join(self, site: str, *options: str, name: str = "", model: str = "gated:net") -> Process:
        common = ["--server", f"127.0.0.1:{self.port}", "--model", model, "--data", f"problem:{site}"]
        common += ["--state", f"state-{site}"]
        if "--insecure" not in options:
            common += ["--keys", f"keys/site-{site}"]
        return self.start(name or site, ["join", *common, *options], "gated", POLYFED_TEST_GATES=str(self.gates))

    def close(self, *gates: str) -> None:
        """Close gates: a site that comes there stops."""
        for gate in gates:
            (self.gates / gate).touch()

    def open(self, gate: str) -> None:
        (self.gates / gate).unlink()

    def reaches(self, gate: str) -> None:
        """Wait until a site stands before its closed gate."""
        self.until((self.gates / f"{gate}.there").is_file, what=gate)

    def has_worked(self, site: str, number: int) -> None:
        """Wait until a site has written its state after a round."""
        folder = self.folder / f"state-{site}"
        self.until(lambda: list(folder.glob(f"*/state-1-{number}-0.safetensors")), what=f"{site}'s state {number}")

    def has_history(self, lines: int) -> None:
        self.until(lambda: len(self.history()) >= lines, what=f"round {lines}")

    def history(self) -> list[dict[str, Any]]:
        path = self.folder / "run" / "history.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []

    def result(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.folder / "run" / "result.json").read_text())
        return found

    def until(self, condition: Any, seconds: float = 240.0, what: str = "") -> None:
        end = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < end, f"{what or condition} did not come in {seconds} s\n" + self.logs()
            time.sleep(0.05)

    def finish(self, process: Process, seconds: float = 480.0) -> int:
        try:
            return process.wait(seconds)
        except subprocess.TimeoutExpired:
            pytest.fail(f"still running after {seconds} s\n" + self.logs())

    def logs(self) -> str:
        return "\n".join(
            f"--- {path.name}\n{path.read_text(errors='replace')[-3000:]}" for path in self.folder.glob("*.log")
        )


class LocalFederation(Processes):
    """One server connection in this process and three sites that stay: many federations, one start."""

    def __init__(self, folder: Path, forks: Forks | None) -> None:
        super().__init__(folder, forks)
        create_keys(folder / "keys", "127.0.0.1", problem.SITES)
        self.models = folder / "models.json"
        self.port = free_port()
        self.link = ServerLink(
            Address("127.0.0.1", self.port), read_server_keys(folder / "keys"), folder / "link", 1 << 28
        ).open()
        for site in problem.SITES:
            words = [f"127.0.0.1:{self.port}", f"keys/site-{site}", f"state-{site}", str(self.models)]
            self.start(site, words, "stay")

    def post(self, min_sites: int = 3, deadline: float = 60.0) -> Mailbox:
        return Mailbox(
            grid=self.link.grid,
            nodes=self.link.nodes,
            node_ids={problem.SITES.index(name): node for node, name in self.link.names.items()},
            names=dict(enumerate(problem.SITES)),
            deadline=deadline,
            min_sites=min_sites,
            wait=120.0,
            say=lambda text: print(f"{time.monotonic():.1f} {text}"),
        )
