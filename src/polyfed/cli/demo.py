"""The demonstration: ten clients, five networks, real digits; who gained what at which cost."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.console import Console

from polyfed.compare import compare
from polyfed.core.checkpoint import read_json
from polyfed.experiment import experiment
from polyfed.terminal.progress import PlainProgress
from polyfed.terminal.tables import client_table, comparison_table, say

METHODS = ("local", "fedavg", "fedmd", "fedproto")
SETTINGS: dict[str, Any] = {
    "data": "digits",
    "clients": 10,
    "partition": "dirichlet:0.3",
    "public": 200,
    "models": ("mlp:1x64", "mlp:2x64", "cnn:16-32", "cnn:16-32,bn", "resnet10:w8"),
    "feature_dim": 64,
    "epochs": 3,
    "batch_size": 16,
    "lr": 0.05,
    "momentum": 0.9,
    "methods": {"fedmd": {"digest_epochs": 5, "public_epochs": 0, "private_epochs": 3}},  # public data is unlabeled
}


def demonstrate(out: Path, rounds: int, progress: Console, console: Console) -> None:
    """Run the demonstration into a fresh directory and print its tables."""
    shown = experiment(rounds=rounds, **SETTINGS)
    networks = ", ".join(shown.base.models.names)
    say(console, f"{shown.base.data.clients} clients, five networks ({networks}), real 8x8 handwritten digits.\n")
    rows = compare(
        shown, METHODS, 1, out, started=lambda config, place: [PlainProgress(progress, rounds, config.label, place)]
    )
    best = max(rows, key=lambda row: row.accuracy[0])
    console.print()
    console.print(comparison_table(rows, "digits, Dirichlet(0.3): who gained what, at which cost"))
    local, winner = (read_json(out / name / "seed-0" / "result.json") for name in ("local", best.method))
    console.print(client_table(winner, local["accuracy"]["per_client"]))
    from polyfed.report import write_report

    say(console, f"Open {write_report(out)} in a browser; everything else is in {out}")
