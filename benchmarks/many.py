"""What registered clients cost that are not active, and many rounds: `python -m benchmarks.many [--save]`.

FedAvg on a perceptron, 1,000 active clients a round, 10^3 to 10^6 registered ones whose data a function makes. Each
number of clients has a process of its own. Then the most of them with a directory: what is written when the run ends.
Then 1,000 rounds of a small run with a directory: its first and its last hundred. Processor seconds and peak memory:
they hold on a busy machine. `--save` writes all of it, with the slopes, to `results/bench/many.json`. It takes about
four minutes on an idle machine and 2.5 GB of memory.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

import polyfed as pf
from benchmarks.run import RESULTS, machine
from polyfed.api import prepare
from polyfed.core.cost import peak_memory
from polyfed.core.settings import Evaluation, Execution, Participation, Settings, Training

ACTIVE, SAMPLES, ROUNDS = 1000, 20, 5
NUMBERS = (1_000, 10_000, 100_000, 1_000_000)
LONG = 1000  # rounds of the small run


def samples_of(client: int) -> tuple[np.ndarray, np.ndarray]:
    """Make the images of a client."""
    rng = np.random.default_rng(client)
    return rng.integers(0, 256, (SAMPLES, 28, 28)).astype(np.uint8), rng.integers(0, 10, SAMPLES)


def run(clients: int) -> dict[str, Any]:
    """Start, run a few rounds, and say what it took."""
    before = peak_memory()
    begin = time.process_time()
    data = pf.Clients.from_function(samples_of, clients, SAMPLES, test=samples_of(-1 % 2**31), num_classes=10)
    settings = Settings(
        ROUNDS,
        0,
        Training(batch_size=10),
        Participation(min(1.0, ACTIVE / clients)),
        Evaluation(1, clients=100),
        Execution(workers=1),
    )
    federation = prepare(pf.methods.make("fedavg", {}), data, ["mlp:1x32"], settings)
    start = time.process_time() - begin
    moments = [time.process_time()]
    federation.observers.append(lambda line: moments.append(time.process_time()))
    federation.run()
    rounds = [after - earlier for earlier, after in pairwise(moments)]
    return {
        "clients": clients,
        "start_seconds": round(start, 3),
        "first_round_seconds": round(rounds[0], 3),
        "round_seconds": round(median(rounds[1:-1]), 3),
        "last_round_seconds": round(rounds[-1], 3),  # all clients are measured
        "peak_gigabytes": round(peak_memory() / 1e9, 3),
        "before_gigabytes": round(before / 1e9, 3),
    }


def long_run(rounds: int) -> dict[str, Any]:
    """Run many rounds; return what a round takes at the beginning and at the end, and the memory."""
    moments, memory = [time.process_time()], []

    def note(line: dict[str, Any]) -> None:
        moments.append(time.process_time())
        memory.append(resident())

    with tempfile.TemporaryDirectory() as folder:
        clients = pf.split("digits", clients=10)
        pf.run("fedavg", clients, "mlp:1x32", rounds, out=Path(folder) / "run", observers=[note], workers=1)
    seconds = [after - earlier for earlier, after in pairwise(moments)]
    few = max(1, rounds // 10)
    first = few // 10  # rounds that are left out: they build things
    return {
        "rounds": rounds,
        "early_round_seconds": round(median(seconds[first : first + few]), 4),
        "late_round_seconds": round(median(seconds[-few - 1 : -1]), 4),  # the last one also saves
        "early_gigabytes": round(memory[first + few - 1] / 1e9, 4),
        "late_gigabytes": round(memory[-2] / 1e9, 4),
    }


def kept_run(clients: int) -> dict[str, Any]:
    """Run two rounds with a directory; return what comes after the last of them: models, result, checkpoint."""
    moments = []
    data = pf.Clients.from_function(samples_of, clients, SAMPLES, test=samples_of(-1 % 2**31), num_classes=10)
    share = min(1.0, ACTIVE / clients)
    how: dict[str, Any] = {"participation": share, "training": pf.Training(batch_size=10), "workers": 1}
    with tempfile.TemporaryDirectory() as folder:
        note = [lambda line: moments.append(time.process_time())]
        pf.run("fedavg", data, "mlp:1x32", 2, out=Path(folder) / "run", observers=note, evaluate="end", **how)
        seconds = time.process_time() - moments[-1]
        files = [file for file in Path(folder).rglob("*") if file.is_file()]
        size = round(sum(file.stat().st_size for file in files) / 1e6, 1)
    return {"clients": clients, "end_seconds": round(seconds, 3), "files": len(files), "megabytes": size}


def slopes(lines: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return what each further registered client costs, between the least and the most of them."""
    least, most = lines[0], lines[-1]
    more = most["clients"] - least["clients"]
    named = {"start_microseconds": ("start_seconds", 1e6), "round_microseconds": ("round_seconds", 1e6)}
    named |= {"last_round_microseconds": ("last_round_seconds", 1e6), "bytes": ("peak_gigabytes", 1e9)}
    return {name: round((most[key] - least[key]) / more * unit, 3) for name, (key, unit) in named.items()}


def resident() -> int:
    """Return the bytes of memory that this process holds now."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def in_a_process(*words: str) -> dict[str, Any]:
    """Measure one thing in a process of its own, and show it."""
    command = [sys.executable, "-m", "benchmarks.many", *words]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    print(found, flush=True)
    return found


def everything(numbers: Sequence[int], rounds: int) -> dict[str, Any]:
    """Measure each number of clients, and many rounds: all that the file holds."""
    before = machine()
    lines = [in_a_process("--clients", str(number)) for number in numbers]
    slope = slopes(lines)
    print("each further registered client:", slope, flush=True)
    return {
        "machine": before,
        "active": ACTIVE,
        "clients": lines,
        "slope": slope,
        "kept": in_a_process("--kept", str(max(numbers))),
        "rounds": in_a_process("--rounds", str(rounds)),
    }


def main() -> None:
    """Measure, and write the file if asked to."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--save", action="store_true", help="write results/bench/many.json")
    parser.add_argument("--clients", type=int, help="only so many, in this process")
    parser.add_argument("--kept", type=int, help="only so many with a directory, in this process")
    parser.add_argument("--rounds", type=int, help="only so many rounds of the small run, in this process")
    arguments = parser.parse_args()
    if arguments.clients:
        print(json.dumps(run(arguments.clients)))
    elif arguments.kept:
        print(json.dumps(kept_run(arguments.kept)))
    elif arguments.rounds:
        print(json.dumps(long_run(arguments.rounds)))
    else:
        found = everything(NUMBERS, LONG)
        if arguments.save:
            (RESULTS / "many.json").write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
