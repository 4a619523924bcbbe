"""What a comparison gains from several runs at once: `python -m benchmarks.together [--rounds 20] [--save]`.

Six methods, three seeds, twenty clients with small convolutional networks on 8x8 digits: one run after the other, then
as many at once as there are cores.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.run import RESULTS, machine
from polyfed.compare import compare
from polyfed.experiment import experiment

METHODS = ("local", "fedavg", "fedprox", "fedproto", "scaffold", "lg_fedavg")
SEEDS = 3


def timed(rounds: int, jobs: int, methods: tuple[str, ...], seeds: int) -> tuple[float, Any]:
    """Return the seconds of a comparison, and its accuracies."""
    made = experiment(clients=20, models=["cnn:8-16"], rounds=rounds, epochs=1, feature_dim=64)
    start = time.perf_counter()
    rows = compare(made, list(methods), seeds, jobs=jobs, started=lambda config, place: ())
    return time.perf_counter() - start, {row.method: row.accuracy for row in rows}


def main() -> None:
    """Measure both, check that the results are equal, and perhaps save."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--methods", default=",".join(METHODS))
    parser.add_argument("--seeds", type=int, default=SEEDS)
    parser.add_argument("--save", action="store_true")
    arguments = parser.parse_args()
    methods = tuple(arguments.methods.split(","))
    found, jobs = {}, torch.get_num_threads()
    for number in (1, jobs):
        found[number] = timed(arguments.rounds, number, methods, arguments.seeds)
        print(f"{number} at once: {found[number][0]:.1f} s", flush=True)
    assert found[1][1] == found[jobs][1], "the results differ"
    content = {
        "machine": machine(),
        "methods": methods,
        "seeds": arguments.seeds,
        "rounds": arguments.rounds,
        "jobs": jobs,
        "seconds_one_after_the_other": round(found[1][0], 1),
        "seconds_together": round(found[jobs][0], 1),
    }
    print(f"{found[1][0] / found[jobs][0]:.2f} times as fast")
    if arguments.save:
        Path(RESULTS / "together.json").write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
