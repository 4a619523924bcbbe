"""Trackers people already use: every measured number of a run goes to TensorBoard, MLflow or a CSV file.

A tracker is an observer of a run: called with the line of every finished round, closed at the end.
"""

from __future__ import annotations

import csv
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from polyfed.core.errors import InputError, unknown


def numbers(line: Mapping[str, Any]) -> dict[str, float]:
    """Return the numbers of a line of the history under flat names: accuracy/mean, bytes/up, seconds/local, ...

    Examples
    --------
    >>> numbers({"round": 1, "phase": "round", "loss": 0.5, "bytes_up": 8, "accuracy": {"mean": 0.25}})
    {'loss': 0.5, 'bytes/up': 8.0, 'accuracy/mean': 0.25}
    """
    found: dict[str, float] = {}
    for key, value in line.items():
        name = key.replace("bytes_", "bytes/")
        if key in ("round", "phase", "participants", "missing", "stopped"):
            continue
        if isinstance(value, Mapping):
            nested = numbers({f"{name}/{inner}": item for inner, item in value.items() if inner != "per_client"})
            found.update(nested)
        elif isinstance(value, int | float) and not isinstance(value, bool):
            found[name] = float(value)
    return found


class Tracker(ABC):
    """Receives the lines of a run."""

    @abstractmethod
    def __call__(self, line: Mapping[str, Any]) -> None:
        """Write the numbers of a finished round."""

    @abstractmethod
    def close(self) -> None:
        """Finish writing."""


class CsvTracker(Tracker):
    """One row for every number: round, phase, name, value. Rows are flushed as they come."""

    def __init__(self, folder: Path, label: str, config: Mapping[str, Any]) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.file = open(folder / f"{label}.csv", "a", newline="")  # noqa: SIM115 (open until the run ends)
        self.writer = csv.writer(self.file)
        if self.file.tell() == 0:
            self.writer.writerow(("round", "phase", "name", "value"))

    def __call__(self, line: Mapping[str, Any]) -> None:
        """Write the numbers of a finished round."""
        for name, value in numbers(line).items():
            self.writer.writerow((line["round"], line["phase"], name, value))
        self.file.flush()

    def close(self) -> None:
        """Close the file."""
        self.file.close()


class TensorBoardTracker(Tracker):
    """Scalars for TensorBoard, one folder per run; clients' accuracies as a histogram."""

    def __init__(self, folder: Path, label: str, config: Mapping[str, Any]) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self.writer = SummaryWriter(str(folder / "tensorboard" / label))
        lines = "\n".join(f"    {key}: {value}" for key, value in config.items())
        self.writer.add_text("configuration", lines, 0)

    def __call__(self, line: Mapping[str, Any]) -> None:
        """Write the numbers of a finished round."""
        from torch import tensor

        for name, value in numbers(line).items():
            self.writer.add_scalar(name, value, line["round"])
        per_client = line.get("accuracy", {}).get("per_client")
        if per_client:
            self.writer.add_histogram("accuracy/clients", tensor(per_client), line["round"])
        self.writer.flush()

    def close(self) -> None:
        """Close the event file."""
        self.writer.close()


class MlflowTracker(Tracker):
    """A run in a local MLflow store (`mlruns` in the folder), unless MLFLOW_TRACKING_URI names another one."""

    def __init__(self, folder: Path, label: str, config: Mapping[str, Any]) -> None:
        os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")  # a folder of plain files is what is asked for here
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        from mlflow import MlflowClient

        store = os.environ.get("MLFLOW_TRACKING_URI") or (folder / "mlruns").resolve().as_uri()
        self.client = MlflowClient(tracking_uri=store)
        found = self.client.get_experiment_by_name("polyfed")
        experiment = found.experiment_id if found else self.client.create_experiment("polyfed")
        self.run = self.client.create_run(experiment, run_name=label).info.run_id
        for key, value in config.items():
            self.client.log_param(self.run, key, str(value)[:500])

    def __call__(self, line: Mapping[str, Any]) -> None:
        """Write the numbers of a finished round."""
        for name, value in numbers(line).items():
            self.client.log_metric(self.run, name, value, step=line["round"])

    def close(self) -> None:
        """Mark the run as finished."""
        self.client.set_terminated(self.run)


TRACKERS: dict[str, type[Any]] = {"csv": CsvTracker, "tensorboard": TensorBoardTracker, "mlflow": MlflowTracker}


PACKAGES = {"tensorboard": "tensorboard", "mlflow": "mlflow"}


def check(kind: str) -> None:
    """Refuse a tracker that cannot work, before anything trains.

    Raises
    ------
    InputError
        For an unknown tracker, or one whose package is not installed.
    """
    if kind not in TRACKERS:
        raise unknown("tracker", kind, TRACKERS)
    package = PACKAGES.get(kind)
    if package is not None and find_spec(package) is None:
        raise InputError(f"--log {kind} needs the package {package}: pip install 'polyfed[{kind}]'.")


def make(kind: str, folder: str | Path, label: str, config: Mapping[str, Any] | None = None) -> Tracker:
    """Return a tracker that writes below a folder; nothing is written before the first line.

    Raises
    ------
    InputError
        For an unknown tracker, or one whose package is not installed.
    """
    check(kind)
    name = label.replace("/", "-").replace(" ", "_").replace("#", "")
    return Later(lambda: TRACKERS[kind](Path(folder), name, config or {}))


class Later(Tracker):
    """Opens a tracker at its first line: a run that is refused leaves nothing behind."""

    def __init__(self, build: Callable[[], Tracker]) -> None:
        self.build = build
        self.tracker: Tracker | None = None

    def __call__(self, line: Mapping[str, Any]) -> None:
        """Write the numbers of a finished round."""
        self.tracker = self.tracker or self.build()
        self.tracker(line)

    def close(self) -> None:
        """Finish writing, if anything was written."""
        tracker, self.tracker = self.tracker, None
        if tracker is not None:
            tracker.close()
