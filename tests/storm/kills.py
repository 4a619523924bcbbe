"""Commands that are killed at random moments and started again: the result is that of an undisturbed run."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from files import outcome
from torch import Tensor

from forked import Forked, Forks

POLYFED = [sys.executable, "-m", "polyfed.cli"]
RUN = [
    *("--data", "digits", "--limit", "200", "--clients", "3", "--models", "mlp:1x16", "--rounds", "6", "--epochs", "1"),
    *("--set", "checkpoint_seconds=0", "--quiet"),
]
HANG = 600.0  # seconds for one command
ROUNDS = 60  # of a federation
WHOLE = 6  # every so many-th kill is one of a process that also imports; the others are forked from one that has
DATA = """
import numpy as np
def part(seed):
    rng = np.random.default_rng(seed)
    y = np.arange(24) % 3
    x = (np.eye(3)[y].repeat(4, 1) + 0.3 * rng.normal(size=(24, 12))).astype(np.float32)
    return {"train": (x, y), "test": (x, y)}
def north(): return part(1)
def south(): return part(2)
"""


@dataclass
class Killed:
    """What became of killed commands."""

    kills: int = 0
    runs: int = 0
    lost_rounds: int = 0
    different: list[str] = field(default_factory=list)
    tracebacks: list[str] = field(default_factory=list)
    hangs: list[str] = field(default_factory=list)
    stuck: list[str] = field(default_factory=list)  # neither goes on nor starts again


Process = subprocess.Popen[bytes] | Forked


def environment(folder: Path) -> dict[str, str]:
    """Return the environment of commands."""
    path = f"{folder}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path}


def start(command: Sequence[str], folder: Path, name: str, forks: Forks | None = None) -> Process:
    """Start a command whose words go to a file."""
    log = folder / f"{name}.log"
    if forks is not None:
        return forks.start(command, folder, log)
    with log.open("ab") as file:
        return subprocess.Popen(
            [*POLYFED, *command],
            cwd=folder,
            env=environment(folder),
            stdout=file,
            stderr=file,
            stdin=subprocess.DEVNULL,
        )


def storm(
    first: list[str],
    again: list[str],
    out: Path,
    whole: Path,
    kills: int,
    rng: random.Random,
    found: Killed,
    spans: tuple[float, float],
    forks: Forks,
) -> None:
    """Kill a command several times, then let it finish, and compare."""
    folder, name = out.parent, out.name
    for _ in range(kills):
        forked = found.kills % WHOLE > 0
        process = start(again if _begun(out) else first, folder, name, forks if forked else None)
        time.sleep(rng.random() * spans[forked])
        process.send_signal(rng.choice((signal.SIGKILL, signal.SIGTERM)))
        found.kills += 1
        _wait(process, name, found)
    for attempt in (again if _begun(out) else first, first):
        code = _wait(start(attempt, folder, name, forks), name, found)
        if code == 0:
            break
    found.runs += 1
    words = (folder / f"{name}.log").read_text(errors="replace")
    if "Traceback (most recent call last)" in words:
        found.tracebacks.append(f"{name}:\n{words[-3000:]}")
    if code != 0:
        found.stuck.append(f"{name}: exit code {code}\n{words[-1000:]}")
        return
    compare(out, whole, name, found)


def compare(out: Path, whole: Path, name: str, found: Killed) -> None:
    """Compare all runs below two folders."""
    for config in sorted(whole.rglob("config.json")):
        here = out / config.parent.relative_to(whole)
        mine, theirs = outcome(here), outcome(config.parent)
        found.lost_rounds += max(0, len(theirs[1]) - len(mine[1]))
        if mine != theirs:
            found.different.append(f"{name}: {here}")


def commands(kills: int, per_run: int, seed: int, folder: Path, found: Killed) -> None:
    """Storm `run` and `compare`, in turn."""
    rng = random.Random(seed)
    kinds = {
        "run": (["run", "--method", "fedavg", *RUN], lambda out: ["resume", str(out), "--quiet"]),
        "compare": (["compare", "--methods", "fedavg,fedproto", "--seeds", "1", *RUN], None),
    }
    wholes: dict[str, Path] = {}
    spans: dict[str, tuple[float, float]] = {}
    forks = Forks(environment(folder))
    for kind, (command, _) in kinds.items():
        seconds = []
        for given in (None, forks):  # as a process of its own, and forked: two lengths, one result
            begin = time.monotonic()
            wholes[kind] = folder / f"whole-{kind}-{len(seconds)}"
            process = start([*command, "--out", str(wholes[kind])], folder, f"whole-{kind}", given)
            assert _wait(process, kind, found) == 0, (folder / f"whole-{kind}.log").read_text()
            seconds.append(time.monotonic() - begin)
        spans[kind] = seconds[0], seconds[1]
    number = 0
    while kills > 0:
        kind = ("run", "run", "compare")[number % 3]
        command, resume = kinds[kind]
        out = folder / f"{kind}-{number}"
        first = [*command, "--out", str(out)]
        again = resume(out) if resume else first
        now = min(per_run, kills)
        storm(first, again, out, wholes[kind], now, rng, found, spans[kind], forks)
        kills -= now
        number += 1
    forks.close()


def federations(kills: int, seed: int, folder: Path, found: Killed) -> None:
    """Storm `serve`: the sites stay and wait for it."""
    from polyfed.flower.child import free_port

    rng = random.Random(seed)
    (folder / "stormdata.py").write_text(DATA)
    results, span = [], 0.0
    for disturbed in (False, True):
        port, out = free_port(), folder / f"federation-{disturbed}"
        where = ["--insecure", "--sites", "north,south", "--port", str(port), "--out", str(out), "--wait", "300"]
        first = ["serve", "--method", "fedavg", "--rounds", str(ROUNDS), "--batch-size", "8", *where]
        again = ["serve", "--resume", *where]
        sites = []
        for site in ("north", "south"):
            told = ["--server", f"127.0.0.1:{port}", "--model", "mlp:1x8", "--data", f"stormdata:{site}"]
            kept = ["--state", f"state-{disturbed}-{site}", "--name", site, "--insecure"]
            sites.append(start(["join", *told, *kept], folder, f"{site}-{disturbed}"))
        begin = time.monotonic()
        try:
            for _ in range(kills if disturbed else 0):
                process = start(again if _begun(out) else first, folder, f"serve-{disturbed}")
                time.sleep(rng.random() * span / 4)  # a fourth: most kills fall before the last round
                process.send_signal(rng.choice((signal.SIGKILL, signal.SIGTERM)))
                found.kills += 1
                _wait(process, "serve", found)
            for attempt in (again if _begun(out) else first, again):
                if _wait(start(attempt, folder, f"serve-{disturbed}"), "serve", found) == 0:
                    break
            else:
                found.stuck.append(f"serve: {(folder / f'serve-{disturbed}.log').read_text(errors='replace')[-2000:]}")
                return
            span = time.monotonic() - begin
            for site in sites:
                _wait(site, "join", found)
        finally:
            for site in sites:
                if site.poll() is None:
                    site.terminate()
                    site.wait(30)
        for name in (f"serve-{disturbed}", f"north-{disturbed}", f"south-{disturbed}"):
            words = (folder / f"{name}.log").read_text(errors="replace")
            if "Traceback (most recent call last)" in words:
                found.tracebacks.append(f"{name}:\n{words[-3000:]}")
        found.runs += 1
        results.append(_said(out))
    found.lost_rounds += max(0, len(results[0][0]) - len(results[1][0]))
    if results[0][1] != results[1][1]:
        found.different.append("serve: the server's last state")
    for one, other in zip(results[0][0], results[1][0], strict=False):
        common = one.keys() & other.keys()  # a measurement that lacks somebody was taken out
        if any(one[key] != other[key] for key in common):
            found.different.append(f"serve: {one} became {other}")


def _said(out: Path) -> tuple[list[dict[str, object]], dict[str, object]]:
    """Return what a federation's rounds say, and the server's last state.

    Who was away meanwhile is named in a line, and so is a measurement that lacks somebody: neither is silent.
    """
    import json

    from files import timeless

    from polyfed.core.checkpoint import unpack_tree

    lines = [timeless(json.loads(line)) for line in (out / "history.jsonl").read_text().splitlines()]
    # A kill between the last index and the sweep leaves an older file beside the one that counts.
    files = json.loads((out / "checkpoint" / "index.json").read_text())["files"]
    server = out / "checkpoint" / next(name for name in files if name.startswith("server."))
    for line in lines:
        line.pop("missing", None)
        if "clients" in line.get("accuracy", {}):
            del line["accuracy"]
    return lines, _numbers(unpack_tree(server.read_bytes(), str(server)))


def _numbers(tree: Any, path: str = "") -> dict[str, object]:
    """Return what a tree holds by its place there: files of equal trees may differ in the order of their tensors."""
    if isinstance(tree, dict):
        return {place: value for key in tree for place, value in _numbers(tree[key], f"{path}/{key}").items()}
    return {path: (str(tree.dtype), tree.tolist()) if isinstance(tree, Tensor) else tree}


def _begun(out: Path) -> bool:
    return (out / "config.json").is_file()


def _wait(process: Process, name: str, found: Killed) -> int:
    try:
        return process.wait(HANG)
    except subprocess.TimeoutExpired:
        found.hangs.append(name)
        process.kill()
        return process.wait(30)
