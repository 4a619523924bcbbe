"""Write the figures of results/bench into docs/explanation/speed.md, between marks: `python -m benchmarks.page`."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.peers import PEERS
from benchmarks.rule import wrong
from benchmarks.workloads import WORKLOADS

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "explanation" / "speed.md"
BLOCK = re.compile(r"<!-- figures: (\w+) -->\n.*?<!-- end of figures -->", re.DOTALL)
WORK = {
    "W1": "FedAvg, 20 clients, 2-conv CNN, 28 x 28",
    "W2": "FedProto, 20 clients, five small CNNs and ResNets",
    "W3": "FedAvg, 100 clients, MLP 784-100-10",
    "W4": "layer-wise FedAvg, 20 clients, ResNet10 to 26, width 16",
    "W5": "layer-wise FedAvg, 100 clients, MLPs of depth 1 to 5",
    "W6-fedin": "FedIN on W4",
    "W6-fedvtc": "FedVTC on W2's networks",
    "W6-fedmd-global": "FedMD+Global on W2's networks",
}


def stored(name: str) -> dict[str, Any]:
    """Return the figures of one file."""
    found: dict[str, Any] = json.loads((ROOT / "results" / "bench" / f"{name}.json").read_text())
    return found


def table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table of words and, after the first column, of numbers."""
    lines = [heads, ["---", *["--:"] * (len(heads) - 1)], *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def short(value: float) -> str:
    """Return a number with three digits, or as many as stand before its point."""
    return f"{value:.0f}" if value >= 100 else f"{value:#.3g}"


def where(machine: dict[str, Any]) -> str:
    """Return what the figures were measured on."""
    load = f"{machine['load'][0]:g} processes wanted to run when it began"
    rate = f"{machine['gemm_gflops']:.0f} GFLOP/s in a large matrix product"
    return (
        f"{machine['threads']} threads of an {machine['processor']} machine ({rate}; {load}), torch {machine['torch']}."
    )


def measured() -> str:
    """Return the workloads: times as fast as the reference loop."""
    found = stored("ratios")
    rows, short_of = [], []
    for workload in WORKLOADS:
        line = found["workloads"][workload.name]
        if line["ratios"]["auto"] < workload.target:
            short_of.append(f"{workload.name[:2]} ({line['ratios']['auto']:.1f} of {workload.target:g})")
        ratios = [
            f"{line['ratios'][name]:.2f}" if name in line["ratios"] else "" for name in ("threads", "batched", "auto")
        ]
        reference = f"{short(line['seconds']['reference'])} s"
        how = [f"{line[key]:g}" if key in line else "" for key in ("gemm_gflops", "load")]
        rows.append([f"{workload.name[:2]}: {WORK[workload.name]}", reference, *ratios, f"{workload.target:g}", *how])
    parts = found["workloads"]
    measuring, averaging = parts["evaluation"], parts["aggregation"]
    words = [
        f"With `auto` these rows are below what we want: {', '.join(short_of) or 'none'}.",
        f"Measuring 20 networks on 10,000 images: {ratios_of(measuring)}.",
        f"Averaging 100 ResNet-18 states: {ratios_of(averaging)}.",
        f"10,000 perceptrons with 1 % active: {scale_of(parts['scale'])}.",
        f"The framework costs {parts['overhead']['milliseconds']:.2f} ms for a client and round.",
    ]
    heads = ["work", "reference", "`threads`", "`batched`", "`auto`", "wanted", "GFLOP/s", "load"]
    return "\n\n".join([where(found["machine"]), table(heads, rows), "\n".join(words)])


def ratios_of(line: dict[str, Any]) -> str:
    """Return how much faster something is than its reference."""
    (name,) = line["ratios"]
    seconds = line["seconds"]
    return (
        f"{short(seconds[name])} s against {short(seconds['reference'])} s ({line['ratios'][name]:.2f} times as fast)"
    )


def scale_of(line: dict[str, Any]) -> str:
    """Return what many clients cost."""
    return ", ".join(f"{key.replace('_', ' ')} {short(value)}" for key, value in line.items())


def others() -> str:
    """Return the rounds of other libraries."""
    found = stored("ratios")
    rows = []
    for workload, by_peer in found["peers"].items():
        ours = next(line["seconds"] / line["times_polyfed"] for line in by_peer.values())
        cells = [
            f"{short(line['seconds'])} s ({line['times_polyfed']:.1f} times as long; {line['way']})"
            for line in (by_peer[peer.name] for peer in PEERS)
        ]
        rows.append([workload, f"{short(ours)} s", *cells])
    return table(["seconds a round", "polyfed `auto`", *(f"`{peer.requirement}`" for peer in PEERS)], rows)


def limits() -> str:
    """Return the parts of a round, before and after."""
    found, rows = stored("limits"), []
    for name, line in found["workloads"].items():
        parts = [
            f"{short(line['before'][part])} → {short(line['after'][part])}"
            for part in ("training", "fusing", "measuring")
        ]
        bounds = [short(line[bound]) if bound in line else "" for bound in ("bare_steps", "arithmetic")]
        rate = f"{line['gflop'] / line['arithmetic']:.0f}" if "arithmetic" in line else ""
        rows.append([name, *parts, short(line["after"]["rest"]), *bounds, rate])
    heads = ["seconds", "training", "fusing", "measuring", "rest", "bare steps", "arithmetic", "GFLOP/s"]
    return table(heads, rows)


def many() -> str:
    """Return what registered clients cost."""
    found = stored("many")
    keys = ("start_seconds", "round_seconds", "last_round_seconds")
    rows = [
        [f"{line['clients']:,}", *(f"{short(line[key])} s" for key in keys), f"{line['peak_gigabytes']:.2f} GB"]
        for line in found["clients"]
    ]
    slope, rounds = found["slope"], found["rounds"]
    before = found["clients"][0]["before_gigabytes"]
    early, late = (f"{rounds[f'{when}_round_seconds']:.4f} s" for when in ("early", "late"))
    held, at_last = (f"{rounds[f'{when}_gigabytes']:.3f}" for when in ("early", "late"))
    words = [
        f"Each further registered client costs {slope['start_microseconds']:.1f} µs at the start,",
        f"{slope['round_microseconds']:.1f} µs a round, {slope['last_round_microseconds']:.0f} µs where all are",
        f"measured, and {slope['bytes'] / 1000:.1f} kB. Torch and polyfed alone hold {before:.2f} GB.",
        f"{rounds['rounds']:,} rounds of a small run with a directory take {early} each at the beginning and {late}",
        f"at the end, with {held} and {at_last} GB: history is appended, not rewritten.",
    ]
    kept = found["kept"]
    words += [
        f"With a directory, a run of two rounds with {kept['clients']:,} registered clients ends",
        f"{short(kept['end_seconds'])} s after its last round, with {kept['files']:,} files of "
        f"{kept['megabytes']:,.0f} MB: models of those who worked.",
    ]
    heads = ["registered", "start", "a round", "last round, all measured", "memory at most"]
    return table(heads, rows) + "\n\n" + "\n".join(words)


def first() -> str:
    """Return the first round beside later ones."""
    rows = [[line["workload"], *map(str, line["seconds"]), str(line["ratio"])] for line in stored("first")["workloads"]]
    rounds = [f"round {number}" for number in range(1, len(rows[0]) - 1)]
    return table(["processor seconds", *rounds, "first to median of later"], rows)


def together() -> str:
    """Return a comparison's minutes, both ways."""
    found = stored("together")
    one, several = found["seconds_one_after_the_other"], found["seconds_together"]
    what = f"{len(found['methods'])} methods, {found['seeds']} seeds, {found['rounds']} rounds, 20 clients"
    ways = f"one after the other {one / 60:.1f} minutes, {found['jobs']} at once {several / 60:.1f} minutes"
    return f"{what}: {ways} ({one / several:.2f} times as fast)."


def rule() -> str:
    """Return where the rule of `auto` is wrong."""
    lines = stored("rule")["grid"]
    off = [line for line in lines if wrong(line)]
    rows = [
        [f"{line['clients']} x {line['images']}, {line['network']}, batch {line['batch']}, "
         f"{line['method']}, {line['optimizer']}",
         "stack" if line["stacked"] else "whole", f"{max(line['gain'], 1 / line['gain']):.2f}"]
        for line in off
    ]  # fmt: skip
    said = f"Of {len(lines)} settings the rule is wrong in {len(off)}:"
    return f"{said}\n\n{table(['setting', 'rule', 'the other way would be times as fast'], rows)}"


def ranks() -> str:
    """Return what a round takes on several processes of one machine."""
    rows = []
    for number, line in sorted(stored("ranks").items()):
        for case, ways in line["cases"].items():
            for way, found in ways.items():
                seconds = [short(found["seconds"]), f"{found['fuse_seconds']:.4f}"]
                rows.append([f"{number}, {case}, {way}", *seconds, short(found["received_megabytes"])])
    return table(["processes, clients, fusing", "seconds a round", "of it fusing", "MB that rank 0 receives"], rows)


def compiled() -> str:
    """Return what `torch.compile` would bring."""
    rows = []
    for line in stored("compiled")["steps"]:
        steps = [short(1000 * line["plain"]), short(1000 * line["compiled"]), f"{line['ratio']:.2f}"]
        rows.append([line["network"], *steps, short(line["first_compiled"])])
    heads = ["network", "plain step, ms", "compiled, ms", "times as fast", "seconds before the first step"]
    return f"{where(stored('compiled')['machine'])}\n\n{table(heads, rows)}"


def kernels() -> str:
    """Return what frequencies bring for large kernels, and where the rule about them is wrong."""
    lines = stored("kernels")["rows"]
    gains = [line["direct"] / line["frequencies"] for line in lines]
    taken = [(line, gain) for line, gain in zip(lines, gains, strict=True) if line["rule"]]
    left = [gain for line, gain in zip(lines, gains, strict=True) if not line["rule"]]
    worst, best = min(gain for _, gain in taken), max(gain for _, gain in taken)
    said = (
        f"Of {len(lines)} settings the rule takes frequencies in {len(taken)}, which are then {worst:.2f} to "
        f"{best:.2f} times as fast, and leaves {sum(gain > 1.25 for gain in left)} in which they would be more than "
        "1.25 times as fast."
    )
    rows = []
    for line, gain in sorted(taken, key=lambda one: -one[1])[:: max(1, len(taken) // 8)]:
        batch, into, channels, size, kernel = line["setting"]
        what = f"{into} to {channels} channels, {size} x {size}, kernel {kernel} x {kernel}, batch {batch}"
        rows.append([what, short(line["direct"]), short(line["frequencies"]), f"{gain:.2f}"])
    return f"{said}\n\n{table(['some of them', 'direct, ms', 'frequencies, ms', 'times as fast'], rows)}"


FIGURES: dict[str, Callable[[], str]] = {
    "measured": measured,
    "peers": others,
    "limits": limits,
    "many": many,
    "first": first,
    "together": together,
    "rule": rule,
    "ranks": ranks,
    "compiled": compiled,
    "kernels": kernels,
}


def written(text: str) -> str:
    """Return a page with its figures."""
    return BLOCK.sub(
        lambda found: f"<!-- figures: {found[1]} -->\n\n{FIGURES[found[1]]()}\n\n<!-- end of figures -->", text
    )


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text()))
