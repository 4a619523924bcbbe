"""Turn the runs of a comparison into one small file of numbers, and print them as a Markdown table.

python experiments/papers/collect.py RUNS results/papers/NAME.json [--last 3] [--against LABEL]

Every value is a mean over the last measured rounds of a run, then over seeds with its 95 % interval. `A - B` is paired
by seed; `confirmed`: the interval leaves out zero; `direction only`: the mean is larger than its standard error, but
not than its interval; otherwise `not resolved`.
"""

from __future__ import annotations

import argparse
import json
from math import sqrt
from pathlib import Path
from statistics import fmean, pstdev, stdev
from typing import Any

from polyfed.ops.estimate import Estimate, estimate

Values = dict[str, float]  # quantity -> value of one run
Runs = dict[str, dict[str, Values]]  # label -> seed -> values


def values_of(folder: Path, last: int) -> Values:
    """Return the quantities of one run: what clients and the server reach, in the last rounds and at the end."""
    history = [json.loads(line) for line in (folder / "history.jsonl").read_text().splitlines()]
    measured = [line for line in history if "mean" in line.get("accuracy", {})]
    tail = [line for line in measured if line["phase"] == "round"][-last:] or measured[-1:]
    own = [line["accuracy"].get("own", line["accuracy"]) for line in tail]  # one-shot fusion leaves clients as they are
    found = {
        "clients": fmean(accuracy["mean"] for accuracy in own),
        "worst client": fmean(accuracy["worst"] for accuracy in own),
        "best client": fmean(max(accuracy["per_client"]) for accuracy in own),
    }
    served = [line["accuracy"]["global"] for line in tail if line["accuracy"].get("global") is not None]
    if served:
        found["global"] = fmean(served)
        if len(served) > 1:
            found["wobble"] = pstdev(served)
    if any("private" in line["accuracy"] for line in tail):
        found["clients, private classes"] = fmean(line["accuracy"]["private"] for line in tail)
    for line in history:
        if line["phase"] != "round" and "mean" in line.get("accuracy", {}):
            found[f"{line['phase']} the rounds"] = line["accuracy"]["mean"]
    stages: dict[str, list[float]] = {}
    for line in [line for line in history if line["phase"] == "round" and "stages" in line][-last:]:
        for name, part in line["stages"].items():
            stages.setdefault(name, []).append(part["mean"])
    for line in history:
        if line["phase"] != "round":
            stages |= {name: [part["mean"]] for name, part in line.get("stages", {}).items()}
    found |= {f"stage {name}": fmean(values) for name, values in stages.items()}
    result = json.loads((folder / "result.json").read_text())
    found["kB up"] = result["cost"]["bytes_up"] / len(result["architectures"]) / 1000
    found["seconds"] = result["cost"]["seconds"]["total"]
    return {name: round(value, 5) for name, value in found.items()}


def read(folder: Path, last: int) -> Runs:
    """Read all finished runs of a comparison."""
    runs: Runs = {}
    for result in sorted(folder.glob("*/seed-*/result.json")):
        label, seed = result.parts[-3], result.parts[-2].removeprefix("seed-")
        runs.setdefault(label, {})[seed] = values_of(result.parent, last)
    return runs


def table(runs: Runs) -> list[str]:
    """Return a Markdown table of all quantities, accuracies in percent."""
    names = list(dict.fromkeys(name for seeds in runs.values() for values in seeds.values() for name in values))
    lines = ["| | seeds | " + " | ".join(names) + " |", "| --- " * (len(names) + 2) + "|"]
    for label, seeds in runs.items():
        cells = []
        for name in names:
            values = [found[name] for found in seeds.values() if name in found]
            found = estimate(values) or Estimate(0.0)
            mean, half = found.mean, found.half or 0.0
            if name in ("kB up", "seconds"):
                cells.append(f"{mean:.0f}")
            else:
                cells.append(f"{100 * mean:.1f} ± {100 * half:.1f}" if values else "")
        lines.append(f"| {label} | {len(seeds)} | " + " | ".join(cells) + " |")
    return lines


def differences(runs: Runs, against: str, quantity: str) -> list[str]:
    """Return one line for each label: its paired difference, and whether that is a direction."""
    lines = []
    for label, seeds in runs.items():
        common = [s for s in seeds if s in runs[against] and quantity in seeds[s] and quantity in runs[against][s]]
        gaps = [seeds[seed][quantity] - runs[against][seed][quantity] for seed in common]
        if label == against or len(gaps) < 2:
            continue
        found = estimate(gaps)
        assert found is not None and found.half is not None
        mean, half = found.mean, found.half
        error = stdev(gaps) / sqrt(len(gaps))
        word = "not resolved" if abs(mean) <= error else "confirmed" if abs(mean) > half else "direction only"
        lines.append(f"- {label} - {against}, {quantity}: {100 * mean:+.1f} ± {100 * half:.1f} ({word})")
    return lines


def main() -> None:
    """Read, write, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--last", type=int, default=3, help="measured rounds whose mean is taken")
    parser.add_argument("--against", action="append", default=[], help="a label to compare the others with")
    parser.add_argument("--quantity", default="clients")
    arguments = parser.parse_args()
    runs = read(arguments.runs, arguments.last)
    experiment: dict[str, Any] = json.loads((arguments.runs / "comparison.json").read_text())["experiment"]
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    content = {"experiment": experiment, "last": arguments.last, "runs": runs}
    arguments.out.write_text(json.dumps(content, indent=1) + "\n")
    print("\n".join(table(runs)))
    for label in arguments.against:
        print("\n".join(differences(runs, label, arguments.quantity)))


if __name__ == "__main__":
    main()
