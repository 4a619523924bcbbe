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

import problem
import pytest

from polyfed.backends.flower.keys import create_keys, read_server_keys
from polyfed.backends.flower.link import Address, ServerLink, free_port
from polyfed.backends.flower.post import Post

FLOWER = [sys.executable, "-m", "polyfed.backends.flower"]


class Processes:
    """The processes of one test."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.running: list[subprocess.Popen[bytes]] = []

    def start(self, name: str, command: list[str], **environment: str) -> subprocess.Popen[bytes]:
        paths = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
        inherited = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", "PYTHONPATH": paths}
        with (self.folder / f"{name}.log").open("ab") as log:
            process = subprocess.Popen(
                command,
                stdout=log,
                stderr=log,
                stdin=subprocess.DEVNULL,
                cwd=self.folder,
                env={**inherited, **environment},
            )
        self.running.append(process)
        return process

    def log(self, name: str) -> str:
        path = self.folder / f"{name}.log"
        return path.read_text(errors="replace") if path.is_file() else ""

    def stop(self) -> None:
        for process in self.running:
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
        for process in self.running:
            try:
                process.wait(15)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait(15)


class Town(Processes):
    """A federation of real commands: keys, a server, sites."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.port = free_port()
        self.keys = folder / "keys"
        create_keys(self.keys, "127.0.0.1", problem.SITES)

    def serve(self, *options: str, name: str = "serve", **environment: str) -> subprocess.Popen[bytes]:
        common = ["--keys", "keys", "--out", "run", "--host", "127.0.0.1", "--port", str(self.port)]
        return self.start(name, [*FLOWER, "serve", *common, *options], **environment)

    def join(self, site: str, *options: str, name: str = "", model: str = "mlp:1x16", **environment: str) -> Any:
        common = ["--server", f"127.0.0.1:{self.port}", "--model", model, "--data", f"problem:{site}"]
        common += ["--state", f"state-{site}"]
        if "--keys" not in options and "--insecure" not in options:
            common += ["--keys", f"keys/site-{site}"]
        return self.start(name or site, [*FLOWER, "join", *common, *options], **environment)

    def history(self) -> list[dict[str, Any]]:
        path = self.folder / "run" / "history.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []

    def result(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.folder / "run" / "result.json").read_text())
        return found

    def until(self, condition: Any, seconds: float = 60.0, what: str = "") -> None:
        end = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < end, f"{what or condition} did not come in {seconds} s\n" + self.logs()
            time.sleep(0.05)

    def finish(self, process: subprocess.Popen[bytes], seconds: float = 120.0) -> int:
        try:
            return process.wait(seconds)
        except subprocess.TimeoutExpired:
            pytest.fail(f"still running after {seconds} s\n" + self.logs())

    def logs(self) -> str:
        return "\n".join(
            f"--- {path.name}\n{path.read_text(errors='replace')[-3000:]}" for path in self.folder.glob("*.log")
        )


class House(Processes):
    """One server connection in this process and three sites that stay: many federations, one start."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        create_keys(folder / "keys", "127.0.0.1", problem.SITES)
        self.models = folder / "models.json"
        self.port = free_port()
        self.link = ServerLink(
            Address("127.0.0.1", self.port), read_server_keys(folder / "keys"), folder / "link", 1 << 28
        ).open()
        for site in problem.SITES:
            command = [sys.executable, str(Path(__file__).parent / "stay.py"), f"127.0.0.1:{self.port}"]
            self.start(site, [*command, f"keys/site-{site}", f"state-{site}", str(self.models)])

    def post(self, min_sites: int = 3, deadline: float = 60.0) -> Post:
        return Post(
            grid=self.link.grid,
            nodes=self.link.nodes,
            seats={problem.SITES.index(name): node for node, name in self.link.names.items()},
            names=dict(enumerate(problem.SITES)),
            deadline=deadline,
            min_sites=min_sites,
            wait=120.0,
            say=lambda text: print(f"{time.monotonic():.1f} {text}"),
        )
