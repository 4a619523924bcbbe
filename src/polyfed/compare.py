"""Several methods over several seeds on identical splits and initial weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from statistics import fmean
from typing import Any

from polyfed.api import execute, prepare
from polyfed.config import Config, check_same
from polyfed.core.checkpoint import read_json, write_json
from polyfed.core.cost import DOWN, UP
from polyfed.core.errors import InputError
from polyfed.core.lock import Lock
from polyfed.data import Clients
from polyfed.experiment import Experiment

REFERENCE = "local"


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


def compare(
    experiment: Experiment,
    labels: Sequence[str] | None = None,
    seeds: int | None = None,
    out: str | Path | None = None,
    started: Callable[[Config], Sequence[Callable[[dict[str, Any]], None]]] | None = None,
) -> list[Row]:
    """Run methods x seeds; with `local` as the reference row. Finished runs in `out` are kept and not run again.

    Raises
    ------
    InputError
        Before the first run, when any of the methods does not fit the models or data, or `out` holds a run with other
        settings.
    """
    seeds = experiment.seeds if seeds is None else seeds
    if seeds < 1:
        raise InputError(f"seeds must be at least 1, got {seeds}.")
    labels = list(dict.fromkeys(labels or experiment.compare or (experiment.base.label,)))
    if REFERENCE not in labels:
        labels.insert(0, REFERENCE)
    first = experiment.base.seed
    load = lru_cache(maxsize=1)(experiment.base.data.load)  # runs come seed by seed
    runs = [experiment.config(label, seed) for seed in range(first, first + seeds) for label in labels]
    for config in runs[: len(labels)]:
        prepare(config.method, load(first), config.models.names, config.settings(), config.models)
    if out is None:
        return _all(runs, None, load, started)
    with Lock(Path(out)):
        rows = _all(runs, Path(out), load, started)
        content = {"experiment": experiment.dump(), "rows": [vars(row) for row in rows]}
        write_json(Path(out) / "comparison.json", content)
    return rows


def _all(
    runs: Sequence[Config],
    out: Path | None,
    load: Callable[[int], Clients],
    started: Callable[[Config], Sequence[Callable[[dict[str, Any]], None]]] | None,
) -> list[Row]:
    """Run, continue, or read every run."""
    folders = [out / folder_of(config) if out else None for config in runs]
    begun = [folder is not None and (folder / "config.json").is_file() for folder in folders]
    for config, folder, there in zip(runs, folders, begun, strict=True):
        if there:  # nothing trains before all of them are known to be the same
            assert folder is not None
            check_same(folder, replace(config, fingerprint=load(config.seed).fingerprint))
    results: dict[str, list[dict[str, Any]]] = {config.label: [] for config in runs}
    for config, folder, there in zip(runs, folders, begun, strict=True):
        if folder is not None and (folder / "result.json").is_file():
            results[config.label].append(read_json(folder / "result.json"))
            continue
        observers = started(config) if started else ()
        done = execute(config, load(config.seed), out=folder, resume=there, observers=observers)
        results[config.label].append(done.summary())
    return summarize(results)


def folder_of(config: Config) -> Path:
    """Return where a comparison keeps a run."""
    return Path(config.label.replace("/", "-").replace(" ", "_")) / f"seed-{config.seed}"


def summarize(results: dict[str, list[dict[str, Any]]]) -> list[Row]:
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
