"""`make storm`: kills, flipped bytes and hostile messages, with the figures that must be zero. `--short` for CI."""

from __future__ import annotations

import argparse
import resource
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import files
import kills
import messages

LONG = {"messages": 98_000, "small": 2_000, "directories": 500, "commands": 180, "federations": 20, "per_run": 6}
SHORT = {"messages": 1_000, "small": 150, "directories": 25, "commands": 4, "federations": 1, "per_run": 2}


def main() -> int:
    """Run the storm and print the figures; the exit code tells whether all that must be zero are."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--short", action="store_true")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", choices=("messages", "files", "commands", "federations"))
    asked = parser.parse_args()
    size = SHORT if asked.short else LONG
    bad: list[str] = []
    killed = kills.Killed()

    with tempfile.TemporaryDirectory(prefix="polyfed-storm-") as place:
        folder = Path(place)
        if asked.only in (None, "messages"):
            begin = time.monotonic()
            found = messages.campaign(size["messages"], asked.seed, folder / "messages")
            tell("messages", begin, tried=found.tried, used=found.used, refused=found.refused)
            tell("", None, escapes=len(found.escapes), hangs=len(found.slow), unclean_sentences=len(found.unclean))
            bad += found.escapes + found.slow + found.unclean
        if asked.only in (None, "files"):
            for name, campaign, count in (
                ("run directories", files.run_directories, size["directories"]),
                ("keys and data files", files.small_files, size["small"]),
            ):
                begin = time.monotonic()
                (folder / name).mkdir()
                damage = campaign(count, asked.seed, folder / name)
                tell(name, begin, damaged=damage.tried, refused=damage.refused, same_result=damage.same)
                tell("", None, silently_different=len(damage.different), tracebacks=len(damage.tracebacks))
                bad += damage.different + damage.tracebacks
        for name, count in (("commands", size["commands"]), ("federations", size["federations"])):
            if asked.only not in (None, name):
                continue
            begin = time.monotonic()
            (folder / name).mkdir()
            killed = kills.Killed()
            if name == "commands":
                kills.commands(count, size["per_run"], asked.seed, folder / name, killed)
            else:
                kills.federations(count, asked.seed, folder / name, killed)
            tell(f"killed {name}", begin, kills=killed.kills, finished=killed.runs, lost_rounds=killed.lost_rounds)
            tell("", None, silently_different=len(killed.different), tracebacks=len(killed.tracebacks))
            tell("", None, hangs=len(killed.hangs), stuck=len(killed.stuck))
            bad += [*killed.different, *killed.tracebacks, *killed.hangs, *killed.stuck]
            bad += ["rounds were lost"] * killed.lost_rounds
    own, children = (
        resource.getrusage(who).ru_maxrss >> 10 for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    )
    print(f"peak memory: {own} MB here, {children} MB in the largest command")
    for line in bad[:20]:
        print(f"--- {line}", file=sys.stderr)
    return 1 if bad else 0


def tell(name: str, begin: float | None, **figures: Any) -> None:
    """Print one line of figures."""
    words = ", ".join(f"{key.replace('_', ' ')} {value:,}" for key, value in figures.items())
    seconds = f" ({time.monotonic() - begin:.0f} s)" if begin is not None else ""
    print(f"{name + ':' if name else '':22} {words}{seconds}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
