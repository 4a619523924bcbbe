"""Write the figures of results/trust into docs/explanation/robustness.md and privacy.md, between their marks."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import fmean
from typing import Any

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "results" / "trust"
START, END = "<!-- figures -->", "<!-- end of figures -->"
NOTHING = "not measured"


def lines_of(name: str) -> list[dict[str, Any]]:
    """Return the finished runs of a file."""
    path = RESULTS / f"{name}.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []


def table(heads: list[str], rows: list[list[str]]) -> str:
    """Return a Markdown table."""
    marks = ["---"] + ["--:"] * (len(heads) - 1)
    return "\n".join("| " + " | ".join(row) + " |" for row in [heads, marks, *rows])


def percent(values: list[float]) -> str:
    """Return the mean in per cent, with the number of seeds."""
    return f"{100 * fmean(values):.1f}" if values else NOTHING


def base(rule: str | None) -> str:
    """Return a rule without its number."""
    return (rule or "none").partition(":")[0]


def robustness() -> str:
    """Return what honest clients keep, and what a rule costs when nobody attacks."""
    found = lines_of("robustness")
    if not found:
        return NOTHING + "."
    methods = list(dict.fromkeys(line["method"] for line in found))
    rules = ["none", "median", "trimmed", "geometric", "krum", "multikrum", "norm", "cosine"]
    seeds = len({line["seed"] for line in found})

    def cell(part: str, **wanted: Any) -> str:
        some = [line for line in found if all(line[k] == v for k, v in wanted.items() if k != "rule")]
        some = [line for line in some if base(line["robust"]) == wanted["rule"]]
        if any("refused" in line for line in some):
            return "-"
        if any("error" in line for line in some):
            return "no run"
        return percent([line[part] for line in some if part in line])

    parts = [f"Seeds measured so far: {seeds} (of five)."]
    for part, words in (("mean", "mean accuracy"), ("worst", "accuracy of the worst client")):
        rows = [[m, *(cell(part, method=m, share=0.0, attack=None, rule=r) for r in rules)] for m in methods]
        parts += [f"**Nobody attacks: {words} in per cent**", table(["method", *rules], rows)]
    for share in sorted({line["share"] for line in found if line["share"]}):
        for attack in dict.fromkeys(line["attack"] for line in found if line["share"] == share):
            rows = [[m, *(cell("mean", method=m, share=share, attack=attack, rule=r) for r in rules)] for m in methods]
            parts += [f"**`--attack {attack}`: mean accuracy of honest clients in per cent**"]
            parts += [table(["method", *rules], rows)]
    for share in (0.1, 0.2, 0.4):
        if not any(line["share"] == share for line in found):
            parts.append(f"Share {share:.0%} of malicious clients: {NOTHING}.")
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
        parts += [f"Seeds measured so far: {len({line['seed'] for line in found})} (of five).", table(heads, rows)]
    else:
        parts.append(NOTHING + ".")
    parts.append("**Members found at 1 % false alarms (LiRA), in per cent**; 1.0 is guessing")
    if inferred:
        shown = [e for e in epsilons if any(line["epsilon"] == e for line in inferred)]
        rows = [
            [
                f"epsilon {e:g}" if e else "no privacy",
                percent([line["found"] for line in inferred if line["epsilon"] == e]),
                percent([line["held_out"] for line in inferred if line["epsilon"] == e]),
            ]
            for e in shown
        ]
        parts += [
            f"Seeds measured so far: {len({line['seed'] for line in inferred})} (of five).",
            table(["training", "members found", "accuracy on samples not seen"], rows),
        ]
    else:
        parts.append(NOTHING + ".")
    return "\n\n".join(parts)


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
