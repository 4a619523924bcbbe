"""The exact command that runs the same thing again, from what a run directory holds."""

from __future__ import annotations

import shlex
from dataclasses import replace
from typing import Any

from polyfed.command import command, method_words, setting_words, to_text
from polyfed.config import Config, short_names
from polyfed.core.errors import InputError
from polyfed.report.runs import Run, Study


def commands(study: Study) -> list[str]:
    """Return the commands that make these runs again; empty where only a script can."""
    if study.experiment is not None:
        return _comparison(study)
    seeds: dict[str, list[int]] = {}  # by command without its seed
    for run in study.all:
        config = _config(run)
        line = command(replace(config, seed=0)) if config is not None else None
        if line is None:
            return []
        seeds.setdefault(line, []).append(run.seed)
    return [_with_seeds(line, numbers) for line, numbers in seeds.items()]


def _comparison(study: Study) -> list[str]:
    """Return one command for all methods and seeds."""
    first = {label: _config(runs[0]) for label, runs in study.runs.items()}
    configs = {label: config for label, config in first.items() if config is not None and not config.script}
    if len(configs) < len(first) or any(set(label) & set("=,") for label in configs):
        return []
    words = ["polyfed", "compare", "--methods", ",".join(configs), "--seeds", str(len(study.seeds))]
    if study.sweep and study.experiment is not None:
        return [shlex.join([*words, *_sweep_words(study.experiment, list(configs))])]
    words += setting_words(replace(next(iter(configs.values())), seed=study.seeds[0]))
    for label, config in configs.items():
        words += [*method_words(config, label), *_own_words(study.experiment or {}, label)]
    return [shlex.join(words)]


def _own_words(experiment: dict[str, Any], label: str) -> list[str]:
    """Return the settings of one label alone."""
    own = experiment.get("settings", {}).get(label, {})
    short = {full: name for name, full in short_names().items()}
    return [word for key, value in own.items() for word in ("--set", f"{label}.settings.{short[key]}={to_text(value)}")]


def _sweep_words(experiment: dict[str, Any], labels: list[str]) -> list[str]:
    """Return what a sweep was asked: the runs themselves know only the values that were chosen."""
    words = setting_words(Config.load(experiment))
    for label in labels:
        for key, value in experiment["methods"].get(label, {}).items():
            words += ["--set", f"{label}.{key}={to_text(value)}"]
        words += _own_words(experiment, label)
    for key, values in experiment["sweep"].items():
        words += ["--sweep", f"{key}={to_text(values)}"]
    return words


def _config(run: Run) -> Config | None:
    """Return a run's configuration; None where it has none that can be read (a real federation, another version)."""
    try:
        return Config.load(run.config)
    except (KeyError, TypeError, InputError):
        return None


def _with_seeds(line: str, seeds: list[int]) -> str:
    if len(seeds) == 1:
        return f"{line} --seed {seeds[0]}" if seeds[0] else line
    return f"for seed in {' '.join(map(str, seeds))}; do {line} --seed $seed; done"
