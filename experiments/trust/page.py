"""Write the figures of results/trust into the pages about robustness, privacy and damage, between their marks."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import fmean
from typing import Any

from pictures import heat, lines

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "results" / "trust"
START, END = "<!-- figures -->", "<!-- end of figures -->"
NOTHING = "not measured"
CHOSEN_ON = (0, 1)  # seeds that the number of the rule `distance` was chosen on
SEEDS, BAR = 5, 3.0  # wanted; and how many points one bad client of ten may cost
RULES = ["none", "median", "trimmed", "geometric", "krum", "multikrum", "norm", "distance", "cosine"]


def lines_of(name: str) -> list[dict[str, Any]]:
    """Return the finished runs of a file."""
    path = RESULTS / f"{name}.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []


def table(heads: list[str], rows: list[list[str]]) -> str:
    """Return a Markdown table."""
    marks = ["---"] + ["--:"] * (len(heads) - 1)
    return "\n".join("| " + " | ".join(row) + " |" for row in [heads, marks, *rows])


def percent(values: list[float]) -> str:
    """Return the mean in per cent, with the number of seeds where it is not all of them."""
    if not values:
        return NOTHING
    return f"{100 * fmean(values):.1f}" + (f" ({len(values)})" if len(values) < SEEDS else "")


def base(rule: str | None) -> str:
    """Return a rule without its number."""
    return (rule or "none").partition(":")[0]


class Runs:
    """The finished runs, by what they are."""

    def __init__(self, lines: list[dict[str, Any]]) -> None:
        self.lines = lines
        self.methods = list(dict.fromkeys(line["method"] for line in lines))
        self.clean = {(x["method"], x["seed"]): x for x in self.of(None, "none") if "per_client" in x}

    def of(self, attack: str | None, rule: str, method: str | None = None) -> list[dict[str, Any]]:
        """Return the runs of an attack and a rule."""
        some = [line for line in self.lines if line["attack"] == attack and base(line["robust"]) == rule]
        return [line for line in some if method in (None, line["method"])]

    def before(self, line: dict[str, Any]) -> float | None:
        """Return what the honest clients of an attacked run have without attack and without rule."""
        clean = self.clean.get((line["method"], line["seed"]))
        if clean is None:
            return None
        honest = [value for client, value in enumerate(clean["per_client"]) if client not in line["malicious"]]
        return fmean(honest)

    def cell(self, attack: str | None, rule: str, method: str, value: Any) -> str:
        """Return one cell: the mean of a value over seeds, or why there is none."""
        some = self.of(attack, rule, method)
        if any("refused" in line for line in some):
            return "-"
        if any("error" in line for line in some):
            return "no run"
        found = [value(line) for line in some if "mean" in line]
        return percent([v for v in found if v is not None])

    def table(self, attack: str | None, value: Any) -> str:
        """Return methods by rules."""
        return table(["method", *RULES], [[m, *(self.cell(attack, r, m, value) for r in RULES)] for m in self.methods])

    def kept(self, line: dict[str, Any]) -> float | None:
        """Return the share of clean accuracy that honest clients keep."""
        before = self.before(line)
        return None if not before else line["mean"] / before

    def lost(self, rule: str, method: str, attacks: list[str]) -> list[float]:
        """Return the loss in points for each attack that was measured, in the mean over seeds."""
        found = []
        for attack in attacks:
            some = [line for line in self.of(attack, rule, method) if "mean" in line and self.before(line) is not None]
            if some:
                found.append(100 * fmean((self.before(line) or 0.0) - line["mean"] for line in some))
        return found

    def loss(self, rule: str, method: str, attacks: list[str]) -> str:
        """Return the largest loss in points over attacks."""
        lost = self.lost(rule, method, attacks)
        if any("refused" in line for line in self.of(attacks[0], rule, method)):
            return "-"
        if not lost:
            return NOTHING
        text = f"{max(lost):.1f}" + (f" ({len(lost)} of {len(attacks)})" if len(lost) < len(attacks) else "")
        return f"**{text}**" if max(lost) <= BAR else text


def unseen(runs: Runs, attacks: list[str]) -> str:
    """Return what `distance` costs on seeds that its number was not chosen on."""
    others = Runs([line for line in runs.lines if line["seed"] not in CHOSEN_ON])
    lost = {m: max(found) for m in others.methods if (found := others.lost("distance", m, attacks))}
    alone = [Runs([line for line in others.lines if line["seed"] == seed]) for seed in range(SEEDS)]
    worst = {m: max(max(one.lost("distance", m, attacks), default=0.0) for one in alone) for m in lost}
    if not lost:
        return ""
    first, second = max(lost, key=lost.__getitem__), max(worst, key=worst.__getitem__)
    return (
        f"The 2 of `distance` was chosen on seeds {' and '.join(map(str, CHOSEN_ON))}. On the others alone it loses at "
        f"most {lost[first]:.1f} points ({first}), and {worst[second]:.1f} in the worst single seed ({second})."
    )


def robustness() -> str:
    """Return what honest clients keep, and what a rule costs when nobody attacks."""
    runs = Runs(lines_of("robustness"))
    if not runs.lines:
        return NOTHING + "."
    planned = {0.1: ["signflip:0.1", "scale:0.1:-10", "scale:0.1:1000", "random:0.1", "alie:0.1"]}
    planned |= {share: [f"signflip:{share}", f"alie:{share}"] for share in (0.2, 0.4)}
    few = planned[0.1]
    cells = {(m, r): max(lost) for m in runs.methods for r in RULES if (lost := runs.lost(r, m, few))}
    shown = [rule for rule in RULES if any((method, rule) in cells for method in runs.methods)]
    parts = []
    if cells:
        heat("robustness", runs.methods, shown, cells, "Points lost, one bad client of ten")
        parts += ["![Points lost to one bad client of ten, by method and rule](../assets/trust-robustness.svg)"]
    parts += [f"Means over {SEEDS} seeds; where there are fewer, their number is in brackets."]
    parts += ["**Nobody attacks: mean accuracy in per cent**", runs.table(None, lambda line: line["mean"])]
    parts += [
        "**Nobody attacks: accuracy of the worst client in per cent**",
        runs.table(None, lambda line: line["worst"]),
        f"**One bad client of ten: points lost under the worst of the attacks measured.** Bold: at most {BAR:g}. "
        "In brackets: over so many of the attacks",
        table(["method", *RULES], [[m, *(runs.loss(r, m, planned[0.1]) for r in RULES)] for m in runs.methods]),
        unseen(runs, few),
    ]
    for attacks in planned.values():
        for attack in attacks:
            if not any(line["attack"] == attack for line in runs.lines):
                parts.append(f"`--attack {attack}`: {NOTHING}.")
                continue
            parts += [f"**`--attack {attack}`: share of clean accuracy that honest clients keep, in per cent**"]
            parts += [runs.table(attack, runs.kept)]
    return "\n\n".join(parts)


def privacy() -> str:
    """Return accuracy against epsilon, and what membership inference finds."""
    found, inferred = lines_of("privacy"), lines_of("membership")
    epsilons = [1.0, 2.0, 4.0, 8.0, None]
    heads = ["method", *(f"epsilon {e:g}" if e else "no privacy" for e in epsilons)]
    methods = list(dict.fromkeys(line["method"] for line in found))
    parts = ["**Mean accuracy in per cent**"]
    if found:
        rows = [
            [
                m,
                *(
                    percent([x["mean"] for x in found if x["method"] == m and x["epsilon"] == e and "mean" in x])
                    for e in epsilons
                ),
            ]
            for m in methods
        ]
        series = {
            m: {
                f"{e:g}" if e else "none": 100 * fmean(x["mean"] for x in some)
                for e in epsilons
                if (some := [x for x in found if x["method"] == m and x["epsilon"] == e and "mean" in x])
            }
            for m in methods
        }
        lines("privacy", series, ["1", "2", "4", "8", "none"], "epsilon", "mean accuracy in per cent")
        parts += ["![Mean accuracy against epsilon](../assets/trust-privacy.svg)"]
        parts += [f"Means over {SEEDS} seeds; where there are fewer, their number is in brackets.", table(heads, rows)]
    else:
        parts.append(NOTHING + ".")
    parts.append("**Members found at 1 % false alarms (LiRA), in per cent**; 1.0 is guessing")
    if inferred:
        shown = [e for e in reversed(epsilons) if any(line["epsilon"] == e for line in inferred)]
        heads = ["method", *(f"epsilon {e:g}" if e else "no privacy" for e in shown)]
        for title, name in (
            ("", "found"),
            ("Unseen samples to whose label they give more than half of the probability, in per cent:", "held_out"),
        ):
            rows = [
                [m, *(percent([x[name] for x in inferred if (x["method"], x["epsilon"]) == (m, e)]) for e in shown)]
                for m in dict.fromkeys(line["method"] for line in inferred)
            ]
            parts += [*filter(None, [title]), table(heads, rows)]
    else:
        parts.append(NOTHING + ".")
    return "\n\n".join(parts)


def damage() -> str:
    """Return what killed commands, damaged files and changed messages did."""
    path = RESULTS / "storm.json"
    found = json.loads(path.read_text()) if path.is_file() else {}
    rows = []
    for part, what in PARTS.items():
        figures = found.get(part)
        if figures is None:
            rows.append([what, *[NOTHING] + [""] * (len(ZEROS) + 1)])
            continue
        zeros = [
            sum(figures.get(name, 0) for name in names) if names & figures.keys() else "" for names in ZEROS.values()
        ]
        tried = figures.get("tried", figures.get("kills"))
        rows.append([what, f"{tried:,}", *map(str, zeros), f"{figures['peak_memory_mb']:,} MB"])
    return table(["what", "how often", *ZEROS, "memory at most"], rows)


PARTS = {
    "messages": "changed messages of sites",
    "files: run directories": "bytes flipped or files cut in run directories",
    "files: keys and data": "damaged keys, images and tables",
    "commands": "kills of `run` and `compare`",
    "federations": "kills of `serve`",
}
ZEROS = {
    "lost rounds": {"lost_rounds"},
    "silently different results": {"silently_different"},
    "tracebacks": {"tracebacks", "escapes"},
    "hangs": {"hangs", "stuck"},
}


def write(name: str, figures: str) -> None:
    """Put figures between the marks of a page."""
    path = ROOT / "docs" / "explanation" / f"{name}.md"
    text = path.read_text()
    before, _, rest = text.partition(START)
    _, _, after = rest.partition(END)
    path.write_text(f"{before}{START}\n\n{figures}\n\n{END}{after}")


if __name__ == "__main__":
    write("robustness", robustness())
    write("privacy", privacy())
    write("damage", damage())
