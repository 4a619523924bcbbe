"""Peak memory and time of a real federation on loopback: `python -m benchmarks.flower_memory [--mb 50] [--rounds 3]`.

A server and two sites with FedAvg move a network of the given size; each process's own high-water mark is read from
the kernel (Linux only). `--mb 0` moves next to nothing: it shows what the processes weigh without a network, and how
long a phase takes when there is no work in it.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from polyfed.flower.link import free_port

COMMAND = [sys.executable, "-m", "polyfed.cli"]
SITES = ("a", "b")


def data() -> dict[str, object]:
    """Return a site's data: a handful of samples, so that the network is all there is."""
    rng = np.random.default_rng(0)
    part = rng.normal(size=(16, 1, 8, 8)).astype(np.float32), rng.integers(0, 3, 16)
    return {"train": part, "test": part, "num_classes": 3}


def peak(process: int) -> float:
    """Return the largest memory that a process has had so far, in megabytes."""
    try:
        status = Path(f"/proc/{process}/status").read_text()
    except OSError:
        return 0.0
    found = [int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM")]
    return found[0] / 1000 if found else 0.0


def children(process: int) -> list[int]:
    """Return the child processes of a process."""
    try:
        return [int(child) for child in Path(f"/proc/{process}/task/{process}/children").read_text().split()]
    except OSError:
        return []


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mb", type=float, default=50.0, help="size of the network")
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    width = max(4, round((34**2 + given.mb * 1e6 / 4) ** 0.5 - 34))  # two layers: width * (width + 64 + 2 + 3) numbers
    paths = os.pathsep.join([str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": paths}
    peaks: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as folder:
        port = free_port()

        def start(*command: str) -> subprocess.Popen[bytes]:
            log = (Path(folder) / f"{len(list(Path(folder).glob('*.log')))}.log").open("wb")
            return subprocess.Popen([*COMMAND, *command], cwd=folder, env=environment, stdout=log, stderr=log)

        keys = start("keys", "init", "keys", "--server", "localhost", "--sites", ",".join(SITES))
        assert keys.wait(60) == 0
        serve = ["serve", "--method", "fedavg", "--rounds", str(given.rounds), "--keys", "keys", "--out", "run"]
        started = {"serve": start(*serve, "--host", "127.0.0.1", "--port", str(port))}
        for site in SITES:
            join = ["join", "--server", f"127.0.0.1:{port}", "--keys", f"keys/site-{site}", "--state", site]
            join += ["--model", f"mlp:2x{width}", "--data", "benchmarks.flower_memory:data"]
            started[f"join {site}"] = start(*join)
        try:
            while started["serve"].poll() is None:
                for name, process in started.items():
                    peaks[name] = peak(process.pid) or peaks.get(name, 0.0)
                    for child in children(process.pid):  # the last value: at first a child still is its parent's copy
                        inner = f"{name}: Flower's process"
                        peaks[inner] = peak(child) or peaks.get(inner, 0.0)
                time.sleep(0.05)
        finally:
            for process in started.values():
                process.terminate() if process.poll() is None else None
                process.wait(30)
        lines = [json.loads(line) for line in (Path(folder) / "run" / "history.jsonl").read_text().splitlines()]
    for name, value in sorted(peaks.items()):
        print(f"{value:8.0f} MB  {name}")
    seconds = [line["seconds"]["total"] for line in lines]
    print("rounds of two phases (work, measure): " + ", ".join(f"{value:.2f} s" for value in seconds))


if __name__ == "__main__":
    main()
