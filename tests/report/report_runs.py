"""Runs for the report: made by hand where numbers are checked, made by the library where files are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from polyfed.experiment import experiment
from polyfed.report.runs import Run

TINY = experiment(
    data="digits",
    limit=(200, 100),
    clients=4,
    partition="dirichlet:0.5",
    models=("mlp:1x8", "mlp:1x16"),
    feature_dim=8,
    rounds=2,
    lr=0.1,
)


def make_run(
    label: str,
    seed: int,
    accuracy: Sequence[Sequence[float]],
    architectures: Sequence[str] = ("small", "small", "large"),
    parameters: Sequence[int] = (10, 10, 99),
    up: int = 0,
    down: int = 0,
    **summary: Any,
) -> Run:
    """Return a run: `accuracy` by round and client; `up` and `down` bytes of all clients in each round."""
    clients = len(architectures)
    history = [
        {
            "round": number,
            "phase": "round",
            "accuracy": {"per_client": list(values), "mean": sum(values) / len(values), "worst": min(values)},
            "bytes_up": up,
            "bytes_down": down,
            "seconds": {"local": 2.0, "evaluate": 1.0, "total": 3.0},
        }
        for number, values in enumerate(accuracy, 1)
    ]
    last = list(accuracy[-1])
    rounds = len(accuracy)
    found = {
        "method": label,
        "seed": seed,
        "rounds": rounds,
        "accuracy": {"mean": sum(last) / clients, "worst": min(last), "per_client": last, "global": None},
        "architectures": list(architectures),
        "samples": [10] * clients,
        "parameters": list(parameters),
        "label_counts": [[5, 5], [10, 0], [1, 9]][:clients],
        "class_names": ["cat", "dog"],
        "cost": {
            "bytes_up": up * rounds,
            "bytes_down": down * rounds,
            "wire_up": 2 * up * rounds,  # half of what is on the wire is framing
            "wire_down": 2 * down * rounds,
            "kinds": {"main/up/params/main": up * rounds, "main/down/params/main": down * rounds} if up else {},
            "peak_memory": 1000,
            "seconds": {"total": 3.0 * rounds},
        },
        "versions": {"polyfed": "0"},
        **summary,
    }
    return Run(label, seed, found, history, {"label": label, "seed": seed, "fingerprint": f"split {seed}"})
