"""The exact command that runs the same thing again, from what a run directory holds."""

from __future__ import annotations

import shlex
from dataclasses import replace

from polyfed.config import Config
from polyfed.core.errors import InputError
from polyfed.experiment import command, method_words, setting_words
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
    words += setting_words(replace(next(iter(configs.values())), seed=study.seeds[0]))
    for label, config in configs.items():
        words += method_words(config, label)
    return [shlex.join(words)]


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
