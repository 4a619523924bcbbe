"""Run the benchmark: `python -m benchmarks.run [W1 W3 ...] [--repeats 5] [--save] [--scale 1.0] [--peers]`.

Reference and engines take turns in one process, and the medians are compared, so the ratios hold on a busy machine.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks import parts, peers
from benchmarks.workloads import WORKLOADS, Workload

RESULTS = Path(__file__).parents[1] / "results" / "bench"
TOLERANCE = 0.8  # a ratio may fall to this share of the stored one


def timed(work: Callable[[], None]) -> float:
    """Return the seconds of one call."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def measure(workload: Workload, repeats: int) -> dict[str, Any]:
    """Time one round of the reference loop and of every engine, in turn."""
    data = workload.data()
    contestants = {"reference": workload.loop(data).round}
    contestants |= {engine: workload.contestant(engine, data) for engine in workload.engines}
    return compare(contestants, repeats, workload.target)


def compare(contestants: dict[str, Callable[[], None]], repeats: int, target: float) -> dict[str, Any]:
    """Let everybody take turns and compare the medians."""
    seconds: dict[str, list[float]] = {name: [] for name in contestants}
    for work in contestants.values():  # the first round builds modules and, for `auto`, makes the choice
        work()
    for _ in range(repeats):
        for name, work in contestants.items():
            seconds[name].append(timed(work))
    middle = {name: median(values) for name, values in seconds.items()}
    ratios = {name: middle["reference"] / value for name, value in middle.items() if name != "reference"}
    return {"seconds": middle, "ratios": ratios, "target": target, "load": round(os.getloadavg()[0], 1)}


def show(name: str, result: dict[str, Any]) -> None:
    """Print one comparison."""
    times = "  ".join(f"{who} {value:.3f} s" for who, value in result["seconds"].items())
    ratios = "  ".join(f"{who} {value:.2f}x" for who, value in result["ratios"].items())
    print(f"{name:16} {times}\n{'':16} {ratios}  (target {result['target']})", flush=True)


def machine() -> dict[str, Any]:
    """Describe where the numbers come from, with the rate of a large matrix product."""
    size = 1024
    a, b = torch.randn(size, size), torch.randn(size, size)
    torch.mm(a, b)
    best = min(timed(lambda: torch.mm(a, b)) for _ in range(5))
    return {
        "processor": platform.processor() or platform.machine(),
        "threads": torch.get_num_threads(),
        "load": [round(value, 1) for value in os.getloadavg()],  # numbers of a busy machine are worth little
        "torch": torch.__version__,
        "python": platform.python_version(),
        "gemm_gflops": round(2 * size**3 / best / 1e9, 1),
    }


def regressions(found: dict[str, Any], stored: dict[str, Any]) -> list[str]:
    """Return the ratios that fell by more than a fifth."""
    lost = []
    for name, result in found.items():
        for engine, ratio in result.get("ratios", {}).items():
            before = stored.get(name, {}).get("ratios", {}).get(engine)
            if before is not None and ratio < TOLERANCE * before:
                lost.append(f"{name} {engine}: {ratio:.2f}, was {before:.2f}")
    return lost


def main() -> int:
    """Run, print, compare with the stored ratios, and save if asked to."""
    parser = argparse.ArgumentParser()
    parser.add_argument("names", nargs="*", help="workloads (all)")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--scale", type=float, default=1.0, help="share of the clients, for a quick look")
    parser.add_argument("--save", action="store_true", help="store the ratios for later comparisons")
    parser.add_argument("--worse", action="store_true", help="with --save: also of workloads that have become slower")
    parser.add_argument("--engines", default="", help="comma-separated")
    parser.add_argument("--peers", action="store_true", help="also run pfl and flwr on W1 and W3 (installs them once)")
    arguments = parser.parse_args()
    file = RESULTS / "ratios.json"
    before = json.loads(file.read_text()) if file.is_file() else {}
    stored = before.get("workloads", {})
    kept, found = dict(stored), dict[str, Any]()
    others: dict[str, Any] = {}

    def note(name: str, result: dict[str, Any]) -> None:
        found[name] = result | {"gemm_gflops": described["gemm_gflops"]}
        better = arguments.worse or not regressions({name: result}, stored)
        if (
            arguments.save and better and arguments.scale == 1.0
        ):  # after each workload: a long run that is stopped keeps what it has
            RESULTS.mkdir(parents=True, exist_ok=True)
            kept.update({name: found[name]})
            content = {"machine": described, "workloads": kept, "peers": {**before.get("peers", {}), **others}}
            file.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n")

    described = machine()
    for workload in WORKLOADS:
        if arguments.names and workload.name not in arguments.names:
            continue
        if arguments.engines:
            workload = replace(workload, engines=tuple(arguments.engines.split(",")))
        workload = replace(workload, clients=max(len(workload.models), round(workload.clients * arguments.scale)))
        result = measure(workload, arguments.repeats)
        show(workload.name, result)
        if arguments.peers and workload.name in peers.WORKLOADS:
            others[workload.name] = peers.compare(workload, arguments.repeats, result["seconds"].get("auto"))
        note(workload.name, result)
    for name, make, target in (("evaluation", parts.evaluation, 2.0), ("aggregation", parts.aggregation, 2.0)):
        if not arguments.names or name in arguments.names:
            note(name, compare(make(), arguments.repeats, target))
            show(name, found[name])
    if not arguments.names or "overhead" in arguments.names:
        note("overhead", {"milliseconds": parts.overhead(), "target": 1.0})
        print(f"{'overhead':16} {found['overhead']['milliseconds']:.2f} ms for a client and round (target below 1)")
    if not arguments.names or "scale" in arguments.names:
        note("scale", parts.scale())
        print(f"{'scale':16} {found['scale']} (target: start below 5 s, below 1.5 GB)")
    lost = regressions(found, stored) if arguments.scale == 1.0 else []
    for line in lost:
        print(f"slower than before: {line}", file=sys.stderr)
    return 1 if lost else 0


if __name__ == "__main__":
    sys.exit(main())
