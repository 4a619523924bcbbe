"""Run an experiment, or several methods over several seeds on identical splits and initial weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from polyfed import methods
from polyfed.api import prepare, run
from polyfed.core.checkpoint import read_json, write_json
from polyfed.core.cost import DOWN, UP
from polyfed.core.errors import InputError, RunDirectoryError
from polyfed.core.federation import Settings
from polyfed.core.method import Participation
from polyfed.core.party import Training
from polyfed.core.rundir import RunDirectory
from polyfed.data import Clients, load, split
from polyfed.experiment import TRAINING, Experiment
from polyfed.result import Result

REFERENCE = "local"


def make_clients(experiment: Experiment, seed: int) -> Clients:
    """Load and split the data of an experiment."""
    data = load(experiment.data, limit=experiment.limit, seed=seed, resize=experiment.resize)
    return split(
        data,
        experiment.clients,
        experiment.partition,
        seed,
        validation=experiment.validation,
        public=experiment.public,
        min_size=experiment.min_size,
    )


def rounds_of(experiment: Experiment, label: str | None = None) -> int:
    """Return the rounds that a method of an experiment will take: its own number, or the experiment's."""
    name, options = experiment.method_options(label or experiment.method)
    planned = methods.make(name, options).plan().rounds
    return planned if planned is not None else experiment.rounds


def run_experiment(
    experiment: Experiment,
    label: str | None = None,
    seed: int | None = None,
    out: str | Path | None = None,
    clients: Clients | None = None,
    observers: Sequence[Callable[[dict[str, Any]], None]] = (),
    resume: bool = False,
) -> Result:
    """Run one method of an experiment with one seed."""
    label = label or experiment.method
    seed = experiment.seed if seed is None else seed
    name, options = experiment.method_options(label)
    return run(
        methods.make(name, options),
        clients if clients is not None else make_clients(experiment, seed),
        list(experiment.models),
        experiment.rounds,
        Training(**{key: getattr(experiment, key) for key in TRAINING}),
        seed,
        out,
        participation=Participation(experiment.participation, experiment.dropout, experiment.drop),
        feature_dim=experiment.feature_dim,
        feature_adapter=experiment.feature_adapter,
        evaluate=experiment.evaluate,
        evaluate_clients=experiment.evaluate_clients,
        evaluate_samples=experiment.evaluate_samples,
        checkpoint_seconds=experiment.checkpoint_seconds,
        engine=experiment.engine,
        workers=experiment.workers,
        device=experiment.device,
        config={"label": label},
        observers=observers,
        resume=resume,
    )


@dataclass(frozen=True)
class Row:
    """One method over all seeds."""

    method: str
    accuracy: list[float]  # mean over clients, by seed
    worst: list[float]  # worst client, by seed
    globals: list[float]  # global model, by seed (may be empty)
    gain: list[float]  # over local training, paired by seed (empty without a reference)
    bytes_up: float  # payload of one client, mean
    bytes_down: float
    wire_up: float  # the same as serialised, with framing
    wire_down: float
    seconds: float
    took_part: list[float]  # mean over clients that took part in a round, by seed (empty: all clients did)


def interval(values: Sequence[float], level: float = 0.95) -> tuple[float, float]:
    """Return mean and half width of the t confidence interval over seeds (0 for a single one)."""
    mean = fmean(values)
    if len(values) < 2:
        return mean, 0.0
    from scipy import stats  # type: ignore[import-untyped]  # takes longer to import than a first round

    half = stats.t.ppf((1 + level) / 2, len(values) - 1) * np.std(values, ddof=1) / np.sqrt(len(values))
    return mean, float(half)


def compare(
    experiment: Experiment,
    labels: Sequence[str] | None = None,
    seeds: int | None = None,
    out: str | Path | None = None,
    started: Callable[[str, int], Sequence[Callable[[dict[str, Any]], None]]] | None = None,
) -> list[Row]:
    """Run methods x seeds; with `local` as the reference row. Finished runs in `out` are kept and not run again.

    Raises
    ------
    InputError
        Before the first run, when any of the methods does not fit the models or data.
    """
    labels = list(dict.fromkeys(labels or experiment.compare or (experiment.method,)))
    if REFERENCE not in labels:
        labels.insert(0, REFERENCE)
    numbers = range(experiment.seed, experiment.seed + (seeds or experiment.seeds))
    if not numbers:
        raise InputError("seeds must be at least 1.")
    first = make_clients(experiment, experiment.seed)
    for label in labels:
        _check_fits(experiment, label, first)
    results: dict[str, list[dict[str, Any]]] = {label: [] for label in labels}
    for seed in numbers:
        clients = make_clients(experiment, seed)
        for label in labels:
            folder = Path(out) / label.replace("/", "-").replace(" ", "_") / f"seed-{seed}" if out else None
            observers = started(label, seed) if started else ()
            results[label].append(_one(experiment, label, seed, folder, clients, observers))
    rows = summarise(results)
    if out:
        write_json(
            Path(out) / "comparison.json", {"experiment": experiment.model_dump(), "rows": [vars(r) for r in rows]}
        )
    return rows


def _one(
    experiment: Experiment, label: str, seed: int, folder: Path | None, clients: Clients, observers: Sequence[Any]
) -> dict[str, Any]:
    """Run, continue, or read one run of a comparison."""
    if folder is not None and (folder / "result.json").is_file():
        _, config = RunDirectory.open(folder)
        if config["fingerprint"] != clients.fingerprint or config["rounds"] != experiment.rounds:
            raise RunDirectoryError(f"{folder} holds a run with other settings: choose another --out.")
        found: dict[str, Any] = read_json(folder / "result.json")
        return found
    begun = folder is not None and (folder / "config.json").is_file()
    return run_experiment(experiment, label, seed, folder, clients, observers, resume=begun).summary()


def _check_fits(experiment: Experiment, label: str, clients: Clients) -> None:
    """Refuse a method that does not fit before any of the others has trained."""
    name, options = experiment.method_options(label)
    settings = Settings(experiment.rounds, experiment.seed)
    prepare(
        methods.make(name, options),
        clients,
        list(experiment.models),
        settings,
        experiment.feature_dim,
        experiment.feature_adapter,
    )


def summarise(results: dict[str, list[dict[str, Any]]]) -> list[Row]:
    """Turn results by method and seed into rows."""
    reference = [r["accuracy"]["mean"] for r in results.get(REFERENCE, [])]
    rows = []
    for label, runs in results.items():
        means = [r["accuracy"]["mean"] for r in runs]
        clients = len(runs[0]["architectures"])
        rows.append(
            Row(
                method=label,
                accuracy=means,
                worst=[r["accuracy"]["worst"] for r in runs],
                globals=[r["accuracy"]["global"] for r in runs if r["accuracy"]["global"] is not None],
                gain=[a - b for a, b in zip(means, reference, strict=True)] if reference and label != REFERENCE else [],
                bytes_up=fmean(r["cost"][f"bytes_{UP}"] for r in runs) / clients,
                bytes_down=fmean(r["cost"][f"bytes_{DOWN}"] for r in runs) / clients,
                wire_up=fmean(r["cost"][f"wire_{UP}"] for r in runs) / clients,
                wire_down=fmean(r["cost"][f"wire_{DOWN}"] for r in runs) / clients,
                seconds=fmean(r["cost"]["seconds"]["total"] for r in runs),
                took_part=_of_those_who_took_part([r["accuracy"] for r in runs]),
            )
        )
    return rows


def _of_those_who_took_part(found: Sequence[dict[str, Any]]) -> list[float]:
    """Return by seed the mean over clients that took part in a round; nothing where all did in every seed."""
    if not any("took_part" in accuracy for accuracy in found):
        return []
    means = [accuracy.get("took_part", accuracy)["mean"] for accuracy in found]
    return [mean for mean in means if mean is not None]
