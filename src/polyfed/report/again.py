"""The exact command that runs the same thing again, from what a run directory holds."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from typing import Any

from polyfed.report.runs import Study

# Keys of an experiment that have an option of their own; all others are written as --set key=value.
OWN = (
    "method",
    "data",
    "limit",
    "clients",
    "partition",
    "models",
    "feature_dim",
    "rounds",
    "participation",
    "epochs",
    "batch_size",
    "optimizer",
    "lr",
    "seed",
    "evaluate",
    "evaluate_clients",
    "evaluate_samples",
    "engine",
    "workers",
    "device",
    "public",
)
SAME = ("evaluate_clients", "evaluate_samples", "checkpoint_seconds", "engine", "workers", "device")
OPTIONS = {key: f"--{key.replace('_', '-')}" for key in OWN}


def commands(study: Study) -> list[str]:
    """Return the commands that make these runs again; empty where only a script can."""
    if study.experiment is not None:
        experiment = {
            key: value for key, value in study.experiment.items() if key not in ("compare", "seeds", "method", "seed")
        }
        if any("," in label for label in study.labels):
            return []
        start = ["polyfed", "compare", "--methods", ",".join(study.labels), "--seeds", str(len(study.seeds))]
        line = _line(start, experiment)
        return [f"{line} --seed {study.seeds[0]}"] if line else []
    seeds: dict[str, list[int]] = {}  # by command without its seed
    for run in study.all:
        own = _experiment(run.config)
        line = None if own is None else _line(["polyfed", "run"], own)
        if line is None:
            return []
        seeds.setdefault(line, []).append(run.seed)
    return [_with_seeds(line, numbers) for line, numbers in seeds.items()]


def _with_seeds(line: str, seeds: list[int]) -> str:
    if len(seeds) == 1:
        return f"{line} --seed {seeds[0]}"
    return f"for seed in {' '.join(map(str, seeds))}; do {line} --seed $seed; done"


def _experiment(config: Mapping[str, Any]) -> dict[str, Any] | None:
    """Turn a run's configuration back into the keys of an experiment."""
    recipe = config.get("clients") or {}
    if not config.get("repeatable") or not recipe.get("repeatable"):
        return None
    data = dict(recipe["data"])
    source, limit, resize = data.pop("source"), data.pop("limit", None), data.pop("resize", None)
    seeds = {config["seed"], recipe["seed"], data.pop("seed", 0)}  # the command line has one seed for all three
    sides = set(resize or ())
    if data or len(seeds) > 1 or len(sides) > 1:
        return None
    training, participation = config["training"], config["participation"]
    method, label = config["method"], config["label"]
    options = {key: value for key, value in config["options"].items() if value != _defaults(method).get(key)}
    return {
        "method": label,
        "methods": {"method": options} if label == method else {label: {"method": method, **options}},
        "data": source,
        "limit": limit,
        "resize": next(iter(sides), None),
        "clients": recipe["clients"],
        "partition": recipe["by"],
        "validation": recipe["validation"],
        "public": recipe["public"],
        "min_size": recipe["min_size"],
        "models": config["models"],
        "feature_dim": config["feature_dim"],
        "feature_adapter": config["feature_adapter"],
        "rounds": config["rounds"],
        "participation": participation["share"],
        "dropout": participation["dropout"],
        "drop": participation["who"],
        **training,
        "evaluate": f"every={config['evaluate_every']}" if config["evaluate_every"] else "end",
        **{key: config[key] for key in SAME},
    }


def _defaults(method: str) -> dict[str, Any]:
    from dataclasses import fields

    from polyfed.methods import registry

    if method not in registry():
        return {}
    return {field.name: json.loads(json.dumps(field.default, default=str)) for field in fields(registry()[method])}


def _line(start: list[str], experiment: Mapping[str, Any]) -> str | None:
    """Write the values that differ from the defaults as options."""
    from polyfed.experiment import Experiment

    usual = json.loads(json.dumps({key: field.default for key, field in Experiment.model_fields.items()}))
    words = list(start)
    for key, value in experiment.items():
        if key == "methods" or value is None or (value == usual.get(key) and key not in ("data", "method")):
            continue
        if key == "models":
            words += [OPTIONS[key], ",".join(value)]
        elif key in OPTIONS and not isinstance(value, list):
            words += [OPTIONS[key], str(value)]
        else:
            words += ["--set", f"{key}={_toml(value)}"]
    for label, options in experiment.get("methods", {}).items():
        for key, value in options.items():
            if value is None or "." in label or "=" in label:  # --set cannot say it
                return None
            words += ["--set", f"{label}.{key}={_toml(value)}"]
    return shlex.join(words)


def _toml(value: Any) -> str:
    """Write a value so that --set reads it back: plain words stay bare."""
    from polyfed.experiment import parse_value

    if isinstance(value, str):
        return value if parse_value(value) == value else json.dumps(value)
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(key)} = {_toml_strict(item)}" for key, item in value.items()) + "}"
    return _toml_strict(value)


def _toml_strict(value: Any) -> str:
    if isinstance(value, dict):
        return _toml(value)
    if isinstance(value, list | tuple):
        return "[" + ", ".join(_toml_strict(item) for item in value) + "]"
    return json.dumps(value)
