"""The gallery: reports of small real runs, made once and kept in build/gallery: `python docs/_site/gallery.py`."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
OUT = ROOT / "build" / "gallery"
TINY = (
    "--seeds 2 --rounds 3 --epochs 1 --batch-size 16 --lr 0.05 --momentum 0.9"  # whoever changes a page waits for these
)
DIGITS = f"{TINY} --data digits --limit 600 --clients 4"
RUNS = {  # by file: title, what is to be seen, options
    "unlike-networks": (
        "Unlike networks",
        "Two MLPs and a CNN: FedAvg, FedProto, FedMD, and the two references.",
        f"--methods fedavg,fedproto,fedmd,centralized {DIGITS} --models mlp:1x32,mlp:2x32,cnn:8-16 --feature-dim 32 "
        "--public 150",
    ),
    "width-slices": (
        "Width slices",
        "One network in two widths: HeteroFL and FedRolex.",
        f"--methods heterofl,fedrolex {DIGITS} --models mlp:2x64@1,mlp:2x64@0.5",
    ),
    "sweep": (
        "A sweep",
        "Four tries for each method, chosen on validation data, reported on test data.",
        f"--methods fedproto {DIGITS} --models mlp:1x32,mlp:2x32 --validation 0.2 --sweep method.lam=0.1,1 "
        "--sweep lr=0.02,0.1",
    ),
    "private": (
        "A private federation",
        "Noise and a budget for every client; what each has spent.",
        f"--methods fedavg,fedproto {DIGITS} --models mlp:1x32 --epsilon 8 --delta 1e-5",
    ),
    "bad-sites": (
        "Bad sites",
        "Every fourth client sends the opposite of what it learned; a rule leaves out whoever is far from the rest.",
        f"--methods fedavg,fedproto {DIGITS} --clients 8 --models mlp:1x32 --attack signflip:0.25 --robust distance",
    ),
    "clinics": (
        "Clinics with tables",
        "Real findings in clinics of unequal size, measured by AUROC, too.",
        f"--methods fedavg,fedgh {TINY} --data opt --partition column:clinic --models tabular:1x16 --metrics auroc",
    ),
}


def reports() -> list[Path]:
    """Return the reports, made now where they are not there yet; finished runs are not run again."""
    found = []
    for name, (_, _, options) in RUNS.items():
        report = OUT / f"{name}.html"
        if not report.is_file():
            words = ["compare", *options.split(), "--out", str(OUT / name), "--quiet"]
            subprocess.run(
                [sys.executable, "-m", "polyfed.cli", *words],
                check=True,
                env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
                stdout=-3,
            )
            (OUT / name / "report.html").replace(report)
        found.append(report)
    return found


def previews() -> str:
    """Return a card for each report with its own first sentences."""
    parts = ['<div class="doors" markdown>']
    for name, (title, seen, _) in RUNS.items():
        found = re.search(r'<p class="answer">(.*?)</p>', (OUT / f"{name}.html").read_text(), re.DOTALL)
        if found is None:
            raise ValueError(f"The report {name} has no answer: was its page changed?")
        link = f"[{title}](gallery/{name}.html)"
        parts += ["<div markdown>", f"### {link}", "", seen, "", f"*{' '.join(found[1].split())}*", "", "</div>"]
    return "\n".join(["", *parts, "</div>", ""])


if __name__ == "__main__":
    for path in reports():
        sys.stdout.write(f"{path}\n")
