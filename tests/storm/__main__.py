"""`make storm`: kills, flipped bytes and hostile messages, with the figures that must be zero. `--short` for CI."""

from __future__ import annotations

import argparse
import json
import math
import resource
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parent))

import files
import kills
import messages

LONG = {"messages": 98_000, "small": 2_000, "directories": 500, "commands": 180, "federations": 20, "per_run": 6}
WRITTEN = Path(__file__).parents[2] / "results" / "trust" / "storm.json"  # by the long form
SHORT = {"messages": 1_000, "small": 150, "directories": 25, "commands": 6, "federations": 0, "per_run": 2}


def main() -> int:
    """Run the storm and print the figures; the exit code tells whether all that must be zero are."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--short", action="store_true")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", choices=("messages", "files", "commands", "federations"))
    parser.add_argument("--part", type=float, default=1.0, help="how much of the long form: 0.1 is a tenth")
    asked = parser.parse_args()
    size = SHORT if asked.short else {name: math.ceil(asked.part * count) for name, count in LONG.items()}
    size["per_run"] = (SHORT if asked.short else LONG)["per_run"]
    bad: list[str] = []
    figures: dict[str, dict[str, Any]] = {}

    with tempfile.TemporaryDirectory(prefix="polyfed-storm-") as place:
        folder = Path(place)
        for part, campaign in PARTS.items():
            if asked.only not in (None, part.partition(":")[0]) or not size[COUNTS[part]]:
                continue
            begin = time.monotonic()
            (folder / part).mkdir()
            found, wrong = campaign(size, asked.seed, folder / part)
            bad += wrong
            figures[part] = {**found, "seconds": round(time.monotonic() - begin), "seed": asked.seed}
            words = ", ".join(f"{key.replace('_', ' ')} {value:,}" for key, value in figures[part].items())
            print(f"{part}: {words}", flush=True)
            own, children = (
                resource.getrusage(who).ru_maxrss >> 10 for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
            )
            figures[part]["peak_memory_mb"] = max(own, children)
    print(f"peak memory: {own} MB here, {children} MB in the largest command")
    for line in bad[:20]:
        print(f"--- {line}", file=sys.stderr)
    if not asked.short:
        before = json.loads(WRITTEN.read_text()) if WRITTEN.is_file() else {}
        WRITTEN.write_text(json.dumps({**before, **figures}, indent=2) + "\n")
    return 1 if bad else 0


Found = tuple[dict[str, int], list[str]]


def sent(size: dict[str, int], seed: int, folder: Path) -> Found:
    """Send changed messages."""
    found = messages.campaign(size["messages"], seed, folder)
    figures = {"tried": found.tried, "used": found.used, "refused": found.refused}
    zeros = {"escapes": len(found.escapes), "hangs": len(found.slow), "unclean_sentences": len(found.unclean)}
    zeros["longest_ms"] = round(1000 * found.longest)
    return figures | zeros, found.escapes + found.slow + found.unclean


def damaged(found: files.Damage) -> Found:
    """Return the figures of damaged files."""
    figures = {"tried": found.tried, "refused": found.refused, "same_result": found.same}
    zeros = {"silently_different": len(found.different), "tracebacks": len(found.tracebacks)}
    return figures | zeros, found.different + found.tracebacks


def killed(found: kills.Killed) -> Found:
    """Return the figures of killed commands."""
    figures = {"kills": found.kills, "finished": found.runs, "lost_rounds": found.lost_rounds}
    figures |= {"silently_different": len(found.different), "tracebacks": len(found.tracebacks)}
    figures |= {"hangs": len(found.hangs), "stuck": len(found.stuck)}
    bad = [*found.different, *found.tracebacks, *found.hangs, *found.stuck]
    return figures, bad + ["rounds were lost"] * found.lost_rounds


def kill_commands(size: dict[str, int], seed: int, folder: Path) -> Found:
    """Kill `run` and `compare`."""
    kills.commands(size["commands"], size["per_run"], seed, folder, found := kills.Killed())
    return killed(found)


def kill_servers(size: dict[str, int], seed: int, folder: Path) -> Found:
    """Kill `serve`."""
    kills.federations(size["federations"], seed, folder, found := kills.Killed())
    return killed(found)


# How often each is done; the short form kills no servers: tests/flower/test_faults.py does.
COUNTS = {
    "messages": "messages",
    "files: run directories": "directories",
    "files: keys and data": "small",
    "commands": "commands",
    "federations": "federations",
}
PARTS: dict[str, Callable[[dict[str, int], int, Path], Found]] = {
    "messages": sent,
    "files: run directories": lambda size, seed, at: damaged(files.run_directories(size["directories"], seed, at)),
    "files: keys and data": lambda size, seed, at: damaged(files.small_files(size["small"], seed, at)),
    "commands": kill_commands,
    "federations": kill_servers,
}


if __name__ == "__main__":
    sys.exit(main())
