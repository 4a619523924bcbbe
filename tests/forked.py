"""Commands without the seconds that an import of torch takes: one process has imported everything and forks them.

A forked command is a process like any other: it has words, a folder and a group of its own, and can be killed. What it
does not show is that its imports work, so some tests start theirs as people do.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

# It only imports: a process that has computed something could not be forked safely.
TEMPLATE = """
import importlib, json, os, signal, sys, threading
for name in sys.argv[1:]:
    importlib.import_module(name)
import polyfed.methods
polyfed.methods.registry()
assert threading.active_count() == 1, threading.enumerate()  # a fork loses the others, and what they hold
print("ready", flush=True)
running = set()
for line in sys.stdin:
    asked = json.loads(line)
    if "ended" in asked:
        child, status = os.waitpid(asked["ended"], os.WNOHANG)
        running.discard(child)
        print(os.waitstatus_to_exitcode(status) if child else "not yet", flush=True)
        continue
    child = os.fork()
    if child == 0:
        if asked["group"] is not None:
            os.setpgid(0, asked["group"])
        log = os.open(asked["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        for number, place in ((0, os.open(os.devnull, os.O_RDONLY)), (1, log), (2, log)):
            os.dup2(place, number)
        sys.stdout.reconfigure(write_through=True)
        os.chdir(asked["folder"])
        os.environ.update(asked["environment"])
        if asked["flower"]:
            import nursery
            nursery.open_nursery()
        sys.argv = [asked["module"], *asked["words"]]
        importlib.import_module(asked["module"]).main()
        sys.exit(0)
    running.add(child)
    print(child, flush=True)
for child in running:  # whoever asked for them is gone
    os.kill(child, signal.SIGKILL)
"""
POLYFED = "polyfed.cli"  # `polyfed`
IMPORTED = ["sklearn.datasets", "polyfed.api", "polyfed.cli.commands", "polyfed.compare", "polyfed.engines"]


class Forks:
    """The process that forks commands; `modules` are imported there, beside what every command needs."""

    def __init__(self, environment: Mapping[str, str], modules: Sequence[str] = IMPORTED) -> None:
        command = [sys.executable, "-c", TEMPLATE, *modules]
        self.process = subprocess.Popen(
            command, env=dict(environment), stdin=subprocess.PIPE, stdout=subprocess.PIPE, process_group=0
        )
        assert self._told() == "ready"

    def start(
        self,
        words: Sequence[str],
        folder: Path,
        log: Path,
        module: str = POLYFED,
        group: int | None = None,
        flower: bool = False,
        **environment: str,
    ) -> Forked:
        """Start a command: `main` of a module, with what stands after its name on the command line.

        With `flower` the processes of Flower that it starts are forks too (see `nursery.py`).
        """
        asked = {"module": module, "words": list(words), "folder": str(folder), "log": str(log), "flower": flower}
        return Forked(self, int(self.ask({**asked, "group": group, "environment": environment})))

    def ask(self, what: Any) -> str:
        """Tell the process what to do, and return what it says."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(what).encode() + b"\n")
        self.process.stdin.flush()
        return self._told()

    def _told(self, within: float = 240.0) -> str:
        assert self.process.stdout is not None
        if not select.select([self.process.stdout], [], [], within)[0]:
            raise subprocess.TimeoutExpired("the process that forks commands", within)
        return self.process.stdout.readline().decode().strip()

    def close(self) -> None:
        """End it."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(30)


class Forked:
    """One command, with those parts of `subprocess.Popen` that are needed here."""

    def __init__(self, forks: Forks, pid: int) -> None:
        self.forks, self.pid = forks, pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """Return its exit code, if it has ended."""
        if self.returncode is None and (told := self.forks.ask({"ended": self.pid})) != "not yet":
            self.returncode = int(told)
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Send a signal; a command that has ended keeps its number until somebody has asked for its exit code."""
        if self.returncode is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        """Ask it to end."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Kill it."""
        self.send_signal(signal.SIGKILL)

    def wait(self, within: float) -> int:
        """Return its exit code when it has ended."""
        end = time.monotonic() + within
        while (code := self.poll()) is None:
            if time.monotonic() > end:
                raise subprocess.TimeoutExpired(f"process {self.pid}", within)
            time.sleep(0.02)
        return code
