"""Commands without the seconds that an import of torch takes: one process has imported everything and forks them."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

# It only imports: a process that has computed something could not be forked safely.
TEMPLATE = """
import json, os, sys
import sklearn.datasets, torch
import polyfed.api, polyfed.cli.commands, polyfed.compare, polyfed.engines, polyfed.methods, polyfed.result
from polyfed.cli import main
polyfed.methods.registry()
print("ready", flush=True)
for line in sys.stdin:
    asked = json.loads(line)
    if isinstance(asked, int):
        print(os.waitstatus_to_exitcode(os.waitpid(asked, 0)[1]), flush=True)
        continue
    child = os.fork()
    if child == 0:
        log = os.open(asked["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        for number, place in ((0, os.open(os.devnull, os.O_RDONLY)), (1, log), (2, log)):
            os.dup2(place, number)
        os.chdir(asked["folder"])
        sys.argv = ["polyfed", *asked["command"]]
        main()
        sys.exit(0)
    print(child, flush=True)
"""


class Forks:
    """The process that forks commands."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", TEMPLATE], env=dict(environment), stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        assert self.told(120.0) == "ready"

    def start(self, command: Sequence[str], folder: Path, log: Path) -> Forked:
        """Start a command."""
        self.ask({"command": list(command), "folder": str(folder), "log": str(log)})
        return Forked(self, int(self.told(60.0)))

    def ask(self, what: Any) -> None:
        """Tell the process what to do."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(what).encode() + b"\n")
        self.process.stdin.flush()

    def told(self, within: float) -> str:
        """Return the next line that it says."""
        assert self.process.stdout is not None
        if not select.select([self.process.stdout], [], [], within)[0]:
            raise subprocess.TimeoutExpired("a forked command", within)
        return self.process.stdout.readline().decode().strip()

    def close(self) -> None:
        """End it."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(30)


class Forked:
    """One command, with those parts of `subprocess.Popen` that are needed here."""

    def __init__(self, forks: Forks, pid: int) -> None:
        self.forks, self.pid, self.asked = forks, pid, False

    def send_signal(self, number: int) -> None:
        """Send a signal; a command that has ended keeps its number until somebody waits for it."""
        os.kill(self.pid, number)

    def kill(self) -> None:
        """Kill it."""
        self.send_signal(signal.SIGKILL)

    def wait(self, within: float) -> int:
        """Return its exit code."""
        if not self.asked:
            self.forks.ask(self.pid)
            self.asked = True
        return int(self.forks.told(within))
