"""How much longer the first round takes than later ones: `python -m benchmarks.first [W3 W5] [--save]`.

Processor seconds of training, fusing and measuring with the default engine on one worker, in a fresh process.
"""

from __future__ import annotations

import argparse
import json
import time
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.run import RESULTS, machine
from benchmarks.workloads import WORKLOADS, Workload

ROUNDS = 6


def measure(workload: Workload) -> dict[str, Any]:
    """Return the seconds of each round."""
    federation = workload.federation("auto", workload.data(), workers=1)
    federation.rounds = ROUNDS
    moments = [time.process_time()]
    federation.observers = [lambda line: moments.append(time.process_time())]
    federation.run()
    seconds = [after - before for before, after in pairwise(moments)]
    return {
        "workload": workload.name,
        "seconds": [round(value, 3) for value in seconds],
        "ratio": round(seconds[0] / median(seconds[1:]), 2),
    }


def main() -> None:
    """Measure and perhaps save."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", default=["W3", "W5"])
    parser.add_argument("--save", action="store_true")
    arguments = parser.parse_args()
    lines = [measure(workload) for workload in WORKLOADS if workload.name in arguments.names]
    for line in lines:
        print(line)
    if arguments.save:
        content = {"machine": machine(), "workloads": lines}
        Path(RESULTS / "first.json").write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
