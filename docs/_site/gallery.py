"""The gallery: reports of small real runs, made once and kept in build/gallery: `python docs/_site/gallery.py`."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
OUT = ROOT / "build" / "gallery"
TINY = ["--data", "digits", "--limit", "600", "--clients", "4", "--rounds", "3", "--epochs", "1", "--batch-size", "16"]
TINY += ["--lr", "0.05", "--momentum", "0.9"]  # whoever changes a page waits for these
MIXED = ["--models", "mlp:1x32,mlp:2x32,cnn:8-16", "--feature-dim", "32", "--public", "150"]
RUNS = {
    "unlike-networks": ["--methods", "fedavg,fedproto,fedmd,centralized", "--seeds", "2", *TINY, *MIXED],
    "width-slices": ["--methods", "heterofl,fedrolex", "--seeds", "2", *TINY, "--models", "mlp:2x64@1,mlp:2x64@0.5"],
    "sweep": ["--methods", "fedproto", "--seeds", "2", *TINY, "--models", "mlp:1x32,mlp:2x32", "--validation", "0.2"],
}
RUNS["sweep"] += ["--sweep", "method.lam=0.1,1", "--sweep", "lr=0.02,0.1"]


def reports() -> list[Path]:
    """Return the reports, made now where they are not there yet; finished runs are not run again."""
    found = []
    for name, options in RUNS.items():
        report = OUT / f"{name}.html"
        if not report.is_file():
            command = [sys.executable, "-m", "polyfed.cli", "compare", *options, "--out", str(OUT / name), "--quiet"]
            subprocess.run(command, check=True, env={**os.environ, "PYTHONPATH": str(ROOT / "src")}, stdout=-3)
            (OUT / name / "report.html").replace(report)
        found.append(report)
    return found


if __name__ == "__main__":
    for path in reports():
        sys.stdout.write(f"{path}\n")
