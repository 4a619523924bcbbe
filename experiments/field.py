"""Write the table of the whole field into its page: `python experiments/field.py runs/field`.

Takes the figures of a finished `polyfed compare experiments/field.toml --out runs/field`, keeps them in results/field
and writes docs/explanation/the-field.md from there; without an argument it writes the page from what is kept. A
comparison of some methods (`--methods a,b`) takes the places of their rows: no row depends on the others. Labels after
the directory (`... runs/some a b`) say which rows to take: `local`, which every comparison has, may stay as it was.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from statistics import fmean
from typing import Any

from polyfed.core.checkpoint import write_json
from polyfed.core.method import Method
from polyfed.experiment import read_experiment

ROOT = Path(__file__).parents[1]
KEPT = ROOT / "results" / "field" / "comparison.json"
PAGE = ROOT / "docs" / "explanation" / "the-field.md"
START, END = "<!-- figures -->", "<!-- end of figures -->"


def figures(rows: list[dict[str, Any]]) -> str:
    """Return the tables: one for all methods with the same networks, the best first."""
    told = read_experiment(ROOT / "experiments" / "field.toml")
    groups: dict[tuple[str, ...], list[dict[str, Any]]] = {}
    for row in sorted(rows, key=lambda row: -fmean(row["accuracy"])):
        groups.setdefault(told.config(row["method"]).models.names, []).append(row)
    shown = f"{len(rows)} rows, {len(rows[0]['accuracy'])} seeds."
    parts = [f"{shown} Mean of all clients on the common test set; bytes are those of one client."]
    for networks in sorted(groups, key=lambda names: -len(groups[names])):
        found = {row["method"]: told.config(row["method"]).method for row in groups[networks]}
        alone = next((row for row in groups[networks] if found[row["method"]].name == "local"), None)
        table = ["| method | family | mean % | worst client % | over alone | up in all | down in all |"]
        table.append("|---|---|--:|--:|--:|--:|--:|")
        table += [line(row, found[row["method"]], alone) for row in groups[networks]]
        parts += ["### " + ", ".join(f"`{name}`" for name in networks), "\n".join(table)]
    return "\n\n".join(parts)


def line(row: dict[str, Any], method: Method, alone: dict[str, Any] | None) -> str:
    """Return a row; every seed is compared with the same seed of clients alone."""
    gain, family = "", method.family
    mark = " (reconstruction)" if method.paper.endswith("(reconstruction)") else ""
    if alone is not None and row is not alone:
        pairs = zip(row["accuracy"], alone["accuracy"], strict=True)
        differences = [100 * (mine - theirs) for mine, theirs in pairs]
        gain = f"{fmean(differences):+.1f} ({min(differences):+.1f} to {max(differences):+.1f})"
    mean, worst = (f"{100 * fmean(row[name]):.1f}" for name in ("accuracy", "worst"))
    up, down = (kilobytes(row[name]) for name in ("bytes_up", "bytes_down"))
    return f"| `{row['method']}`{mark} | {family} | {mean} | {worst} | {gain} | {up} | {down} |"


def kilobytes(number: float) -> str:
    """Return bytes in thousands."""
    return f"{number / 1000:,.1f} kB"


def keep(found: dict[str, Any], labels: list[str]) -> None:
    """Keep the figures of a comparison (of some labels: none, all) beside those of methods that it does not have."""
    kept = json.loads(KEPT.read_text())["rows"] if KEPT.exists() else []
    new = [row for row in found["rows"] if not labels or row["method"] in labels]
    rows = {row["method"]: row for row in (*kept, *new)}
    told = found["experiment"]
    KEPT.parent.mkdir(parents=True, exist_ok=True)
    write_json(KEPT, {"experiment": told, "rows": [rows[label] for label in told["compare"] if label in rows]})


def main() -> None:
    """Keep the figures, and write the page."""
    if len(sys.argv) > 1:
        keep(json.loads((Path(sys.argv[1]) / "comparison.json").read_text()), sys.argv[2:])
    text = PAGE.read_text()
    before, after = text.partition(START)[0], text.partition(END)[2]
    PAGE.write_text(f"{before}{START}\n\n{figures(json.loads(KEPT.read_text())['rows'])}\n\n{END}{after}")


if __name__ == "__main__":
    main()
