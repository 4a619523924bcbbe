"""The exact command that runs the same thing again, from what a run directory holds."""

from __future__ import annotations

import shlex
from dataclasses import replace

from polyfed.config import Config, option_words, setting_words
from polyfed.methods import reference
from polyfed.report.runs import Run, Study


def commands(study: Study) -> list[str]:
    """Return the commands that make these runs again; empty where only a script can."""
    configs = [_config(run) for run in study.all]
    if any(config is None or config.script for config in configs):
        return []
    if study.experiment is not None:
        return _comparison(study)
    seeds: dict[str, list[int]] = {}  # by command without its seed
    for config in configs:
        assert config is not None
        words = ["polyfed", "run", "--method", reference(type(config.method))]
        words += [*setting_words(replace(config, seed=0)), *option_words("method", config.method)]
        seeds.setdefault(shlex.join(words), []).append(config.seed)
    return [_with_seeds(line, numbers) for line, numbers in seeds.items()]


def _comparison(study: Study) -> list[str]:
    """Return one command for all methods and seeds."""
    first: dict[str, Config] = {}
    for label, runs in study.runs.items():
        config = _config(runs[0])
        assert config is not None
        if set(label) & set("=,"):
            return []
        first[label] = config
    start = ["polyfed", "compare", "--methods", ",".join(first), "--seeds", str(len(study.seeds))]
    base = next(iter(first.values()))
    words = [*start, *setting_words(replace(base, seed=study.seeds[0]))]
    for label, config in first.items():
        name = reference(type(config.method))
        words += [] if name == label else ["--set", f"{label}.method={name}"]
        words += option_words(label, config.method)
    return [shlex.join(words)]


def _config(run: Run) -> Config | None:
    """Return a run's configuration; None where it has none that can be read (a real federation, another version)."""
    try:
        return Config.load(run.config)
    except (KeyError, TypeError, ValueError):
        return None


def _with_seeds(line: str, seeds: list[int]) -> str:
    if len(seeds) == 1:
        return f"{line} --seed {seeds[0]}"
    return f"for seed in {' '.join(map(str, seeds))}; do {line} --seed $seed; done"
