"""Flower's processes without the seconds of their imports, in commands that are forks themselves (see `forked.py`).

Before a command begins, and has threads that a fork would lose, it forks a process that only waits to be forked again.
`polyfed.flower.child` then starts SuperLink and SuperNode there. They become children of the command, as they are when
people start it: the one between ends at once, and Linux gives its orphans to the command, which has asked for them.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

IMPORTED = ["flwr.superlink.cli.flower_superlink", "flwr.supernode.cli.flower_supernode"]
PR_SET_CHILD_SUBREAPER = 36


def open_nursery() -> None:
    """Let this process, a command that has not begun, start its Flower processes as forks."""
    here, there = socket.socketpair()
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    if os.fork() == 0:
        here.close()
        wait_to_be_forked(there)
    there.close()
    lines = here.makefile("rw")

    def popen(words: list[str], stdout: Any, env: Mapping[str, str], **_: Any) -> Born:
        asked = {"words": words, "log": stdout.name, "environment": dict(env)}
        lines.write(json.dumps(asked) + "\n")
        lines.flush()
        return Born(int(lines.readline()))

    child = importlib.import_module("polyfed.flower.child")
    child.subprocess = SimpleNamespace(**{**vars(subprocess), "Popen": popen})  # type: ignore[attr-defined]


def wait_to_be_forked(there: socket.socket) -> NoReturn:
    """Fork a process for each line that comes, until the command has ended."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.setpgid(0, 0)  # what ends the command's group is not for the one that waits
    lines = there.makefile("rw")
    for line in lines:
        told, tell = os.pipe()
        between = os.fork()
        if between == 0:
            between = os.getpid()
            born = os.fork()
            if born == 0:
                while os.getppid() == between:
                    time.sleep(0.001)
                for place in (there.detach(), told, tell):
                    os.close(place)
                be_flower(json.loads(line))
            os.write(tell, str(born).encode())
            os._exit(0)
        os.waitpid(between, 0)  # from here on the command is the parent
        lines.write(f"{os.read(told, 20).decode()}\n")
        lines.flush()
        os.close(told)
        os.close(tell)
    os._exit(0)


def be_flower(asked: dict[str, Any]) -> NoReturn:
    """Become the process that `polyfed.flower.child` asked for: `python -m MODULE --parent NUMBER ...`."""
    _, _, module, *words = asked["words"]
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.setpgid(0, 0)
    log = os.open(asked["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for number, place in ((0, os.open(os.devnull, os.O_RDONLY)), (1, log), (2, log)):
        os.dup2(place, number)
    os.environ.update(asked["environment"])
    Path("/proc/self/comm").write_text(name_for(int(words[words.index("--parent") + 1])))
    if module.endswith("superlink"):
        os.umask(0o077)
    sys.argv = [module, *words]
    importlib.import_module(module).main()
    sys.exit(0)


def name_for(parent: int) -> str:
    """Return the name by which a Flower process of a command is found (it has no command line of its own)."""
    return f"flower {parent}"


class Born:
    """A forked Flower process, with those parts of `subprocess.Popen` that are needed here."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """Return its exit code, if it has ended."""
        if self.returncode is None:
            child, status = os.waitpid(self.pid, os.WNOHANG)
            self.returncode = os.waitstatus_to_exitcode(status) if child else None
        return self.returncode

    def terminate(self) -> None:
        """Ask it to end."""
        self._send(signal.SIGTERM)

    def kill(self) -> None:
        """Kill it."""
        self._send(signal.SIGKILL)

    def _send(self, number: int) -> None:
        if self.poll() is None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def wait(self, timeout: float) -> int:
        """Return its exit code when it has ended."""
        end = time.monotonic() + timeout
        while (code := self.poll()) is None:
            if time.monotonic() > end:
                raise subprocess.TimeoutExpired(f"process {self.pid}", timeout)
            time.sleep(0.01)
        return code
