"""Flower's processes as children of ours: where they listen, how they start and end, and what their logs say."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from polyfed.core.errors import PolyfedError
from polyfed.flower import QUIET


def free_port() -> int:
    """Return a port of this machine that nobody uses now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def last_line(text: str) -> str:
    """Return the last line of a log that says anything."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else "it said nothing."


class LinkError(PolyfedError):
    """A Flower process did not start, ended, or refused us."""


@dataclass(frozen=True)
class Address:
    """Where the server listens."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


class Child:
    """A Flower process that writes to a log file and dies with us."""

    def __init__(self, module: str, arguments: list[str], log: Path) -> None:
        self.log = log
        environment = {**os.environ, **QUIET, "FLWR_HOME": str(log.parent / "home")}
        command = [sys.executable, "-m", f"polyfed.flower.{module}", "--parent", str(os.getpid())]
        with log.open("ab") as file:
            self.process = subprocess.Popen(
                [*command, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                env=environment,
                process_group=0,  # Ctrl-C is for us: it must not reach this process before the round is done
            )

    def alive(self) -> bool:
        """Tell whether the process runs."""
        return self.process.poll() is None

    def words(self) -> str:
        """Return the end of its log, to find out why it ended."""
        with self.log.open("rb") as file:
            file.seek(max(0, self.log.stat().st_size - 8192))
            return file.read().decode(errors="replace")

    def stop(self) -> None:
        """End it: asked first, then forced."""
        if self.alive():
            self.process.terminate()
            try:
                self.process.wait(10)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait(10)
