"""From a CSV file to predictions: a simulation, a real federation of two hospitals, and a model that is used.

Run `python examples/csv/run.py`. It writes `patients.csv`, tries the federation out in one process, starts a server
and two hospitals, each with a CSV file of its own, and predicts for women who come later with the file that one of them
ends with. The page `docs/how-to/from-csv-to-prediction.md` tells the same step by step.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pandas as pd
from patients import HOSPITALS, write
from sklearn.metrics import roc_auc_score

import polyfed as pf
from polyfed.flower import require_flower
from polyfed.flower.link import free_port

COMMAND = [sys.executable, "-m", "polyfed.cli"]  # `polyfed`
TRAINING = ["--epochs", "3", "--optimizer", "adam", "--lr", "0.01", "--batch-size", "16"]


def main() -> None:
    """Simulate, federate, predict."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--folder", type=Path, help="Where everything stays; else it is removed at the end.")
    given = parser.parse_args()
    require_flower()
    if given.folder is not None:
        given.folder.mkdir(parents=True, exist_ok=True)
        everything(given.folder, given.rounds)
        return
    with tempfile.TemporaryDirectory() as folder:
        everything(Path(folder), given.rounds)


def everything(folder: Path, rounds: int) -> None:
    """Do all steps in one folder."""
    write(folder)
    simulate(folder, rounds)
    federate(folder, rounds)
    predict(folder)


def simulate(folder: Path, rounds: int) -> None:
    """Try it out in one process, with another network at each hospital."""
    data = pf.load(folder / "patients.csv", label="finding")
    clients = pf.split(data, by=pf.ByColumn("hospital"), test=0.3)
    print(clients.describe())
    training = pf.Training(epochs=3, optimizer="adam", lr=0.01, batch_size=16)
    rows = pf.compare(
        ["fedgh"],
        clients=clients,
        models=["tabular:1x16", "mlp:2x32"],
        feature_dim=16,
        rounds=rounds,
        training=training,
        metrics=["auroc"],
        seeds=1,
    )
    print(rows.table("a network each, in one process"))


def federate(folder: Path, rounds: int) -> None:
    """Agree on the form of the tables, make keys, start a server and both hospitals, and wait for the end."""
    for name in HOSPITALS:
        call(folder, "form", "tell", f"{name}.csv", "--label", "finding", "--out", f"{name}-form.json")
    call(folder, "form", "agree", *(f"{name}-form.json" for name in HOSPITALS), "--out", "form.json")
    call(folder, "keys", "init", "keys", "--server", "localhost", "--sites", ",".join(HOSPITALS))
    port = str(free_port())
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    serve = ["serve", "--method", "fedavg", "--rounds", str(rounds), *TRAINING, "--metrics", "auroc", "--keys", "keys"]
    serve += ["--host", "127.0.0.1", "--port", port, "--out", "run"]
    processes = [subprocess.Popen([*COMMAND, *serve], cwd=folder, env=environment)]
    try:
        for name in HOSPITALS:
            join = ["join", "--server", f"127.0.0.1:{port}", "--keys", f"keys/site-{name}", "--model", "tabular:1x16"]
            join += ["--data", f"{name}.csv", "--label", "finding", "--set", f"data.test={name}-test.csv"]
            join += ["--form", "form.json", "--state", name]
            with (folder / f"{name}.log").open("wb") as log:
                site = subprocess.Popen([*COMMAND, *join], cwd=folder, env=environment, stdout=log, stderr=log)
            processes.append(site)
        for process in processes:
            if process.wait():
                raise SystemExit("The federation failed; see above, and the logs of the hospitals.")
    finally:
        for process in processes:
            if process.poll() is None:
                process.terminate()
                process.wait(30)
    print((folder / "north.log").read_text().split("Connected.")[-1].strip())


def predict(folder: Path) -> None:
    """Use the file that north ended with on women who came later."""
    file, later = folder / "north" / "north.safetensors", folder / "north-later.csv"
    model = pf.load_model(file)
    malignant = pd.read_csv(later)["finding"] == "malignant"
    shown = model.probabilities(later)[:, model.class_names.index("malignant")].numpy()
    print(f"Your model: {file.name}. For {len(malignant)} women who came later its AUC is", end=" ")
    print(f"{roc_auc_score(malignant, shown):.3f}; the first of them: {model.predict(later)[:3]}")


def call(folder: Path, *words: str) -> None:
    """Run a command of polyfed."""
    subprocess.run([*COMMAND, *words], cwd=folder, check=True)


if __name__ == "__main__":
    main()
