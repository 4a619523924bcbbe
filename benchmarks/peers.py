"""Other libraries on the same work: each in its own environment, on the same samples, network and settings.

The scripts that run there are in the folder `peers`; they import nothing of polyfed.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import venv
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from benchmarks.workloads import Workload

ROOT = Path(__file__).parents[1]
SCRIPTS = Path(__file__).parent / "peers"
PLACE = ROOT / ".venv-peers"
TORCH = next(line for line in (ROOT / "constraints.txt").read_text().split() if line.startswith("torch=="))
WORKLOADS = ("W1", "W3")  # FedAvg of one architecture: what the peers can do as well
QUIET = {"FLWR_TELEMETRY_ENABLED": "0", "RAY_USAGE_STATS_ENABLED": "0", "RAY_DEDUP_LOGS": "0"}
LIMIT = 1800  # seconds


@dataclass(frozen=True)
class Peer:
    """Another library, and the ways in which its documentation starts a simulation; the fastest one counts."""

    name: str
    requirement: str
    script: str
    ways: dict[str, tuple[str, ...]]  # name of the way -> what goes between the interpreter and the script
    constrained: bool = True  # install the versions of constraints.txt


PEERS = (
    Peer(
        "pfl",
        "pfl[pytorch]==0.6.0",
        "pfl_fedavg.py",
        {
            "one process": (),
            "a process for each core": (
                "-m",
                "torch.distributed.run",
                "--standalone",
                f"--nproc_per_node={os.cpu_count()}",
            ),
        },
        constrained=False,  # it asks for older versions of absl and attrs
    ),
    Peer("flwr", "flwr[simulation]==1.41.0", "flwr_fedavg.py", {"ray": ()}),
)


class PeerError(Exception):
    """A peer cannot be installed or run; the message is one sentence."""


def measure(peer: Peer, workload: Workload, rounds: int) -> dict[str, Any]:
    """Return the seconds of a peer's round (median; the first round apart), by way and of the fastest way.

    Raises
    ------
    PeerError
        With the reason, when it cannot be installed or run.
    """
    python = installed(peer)
    found, failed = {}, ""
    with tempfile.TemporaryDirectory() as folder:
        data = write(workload, Path(folder))
        for way, start in peer.ways.items():
            try:
                found[way] = run(peer, [str(python), *start], workload, data, rounds)
            except PeerError as error:
                failed = str(error)
    if not found:
        raise PeerError(failed)
    best = min(found, key=lambda way: found[way]["seconds"])
    return {**found[best], "way": best, "ways": {way: result["seconds"] for way, result in found.items()}}


def installed(peer: Peer) -> Path:
    """Return the interpreter of a peer's environment, which is made on first use."""
    place = PLACE / peer.name
    python, stamp = place / "bin" / "python", place / ".installed"
    wanted = f"{peer.requirement} {TORCH}"
    if stamp.is_file() and stamp.read_text() == wanted:
        return python
    print(f"installing {peer.requirement} into {place.relative_to(ROOT)} (minutes, once) ...", flush=True)
    venv.create(place, with_pip=True)
    command = [str(python), "-m", "pip", "install", "-qq", "--disable-pip-version-check", peer.requirement, TORCH]
    command += ["-c", str(ROOT / "constraints.txt")] if peer.constrained else []
    result = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT)
    if result.returncode:
        raise PeerError(f"it cannot be installed: {last_line(result.stderr)}")
    stamp.write_text(wanted)
    return python


def write(workload: Workload, folder: Path) -> Path:
    """Write the scaled inputs and the labels of all clients, the same that polyfed trains on."""
    data = workload.data()
    parts = [data.client(number)[0] for number in range(workload.clients)]
    file = folder / "samples.npz"
    x = np.stack([part.inputs().numpy() for part in parts])
    np.savez(file, x=x, y=np.stack([part.labels().numpy() for part in parts]))
    return file


def run(peer: Peer, start: list[str], workload: Workload, data: Path, rounds: int) -> dict[str, Any]:
    """Run a peer's script in its environment."""
    out = data.with_name(f"{peer.name}.json")
    out.unlink(missing_ok=True)
    told = {"data": data, "network": workload.models[0], "rounds": rounds + 1, "batch": workload.batch, "lr": 0.01}
    command = [*start, str(SCRIPTS / peer.script), f"--out={out}", *(f"--{key}={value}" for key, value in told.items())]
    environment = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "OMP_NUM_THREADS")} | QUIET
    try:
        result = subprocess.run(
            command, capture_output=True, text=True, timeout=LIMIT, env=environment, cwd=data.parent
        )
    except subprocess.TimeoutExpired as error:
        raise PeerError(f"it did not finish within {LIMIT} s") from error
    if result.returncode or not out.is_file():
        raise PeerError(f"it failed: {last_line(result.stderr)}")
    told_back = json.loads(out.read_text())
    first, *others = told_back["seconds"]
    return {"seconds": median(others), "first": first, "rounds": len(others), "loss": told_back["loss"]}


def last_line(text: str) -> str:
    """Return the last line of an error output that says something."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    errors = [line for line in lines if "error" in line.lower()]
    return (errors or lines or ["no message"])[-1][:300]


def compare(workload: Workload, rounds: int, ours: float | None) -> dict[str, Any]:
    """Measure all peers on a workload and print one line for each."""
    results: dict[str, Any] = {}
    for peer in PEERS:
        try:
            results[peer.name] = found = measure(peer, workload, rounds)
        except (PeerError, OSError, subprocess.SubprocessError) as error:
            print(f"{workload.name:16} {peer.name}: {error}", file=sys.stderr, flush=True)
            results[peer.name] = {"error": str(error)}
            continue
        line = f"{peer.name} {found['seconds']:.2f} s a round ({found['way']})"
        if ours is not None:
            found["times_polyfed"] = found["seconds"] / ours
            line += f", {found['times_polyfed']:.1f}x the time of polyfed auto"
        print(f"{workload.name:16} {line}", flush=True)
    return results
