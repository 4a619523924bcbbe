"""An experiment as a file or as options: the same keys in TOML, on the command line and in Python."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from polyfed.core.errors import InputError, unknown


class Experiment(BaseModel):
    """Everything that describes a run (or a comparison of several)."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    method: str = "fedavg"
    methods: dict[str, dict[str, Any]] = {}  # label -> hyper-parameters; key `method` names the base of a variant
    compare: tuple[str, ...] = ()  # labels that `polyfed compare` runs when --methods is not given
    seeds: int = 3

    data: str = "digits"
    limit: int | tuple[int, int] | None = None
    resize: int | None = None
    clients: int = 10
    partition: str = "dirichlet:0.5"
    validation: float = 0.0
    public: int | float | str | None = None
    min_size: int = 1

    models: tuple[str, ...] = ("mlp:2",)
    feature_dim: int | None = None
    feature_adapter: str = "linear"

    rounds: int = 10
    participation: float = 1.0
    dropout: float = 0.0
    drop: str = "random"
    epochs: int = 1
    batch_size: int = 32
    optimizer: str = "sgd"
    lr: float = 0.05
    momentum: float = 0.0
    weight_decay: float = 0.0
    clip: float | None = None
    decay: float = 1.0
    decay_every: int = 1
    round_decay: float = 1.0

    seed: int = 0
    evaluate: str | int = "every=1"
    evaluate_clients: int | None = None  # before the end, where all are measured
    evaluate_samples: int | None = None
    checkpoint_seconds: float = 10.0
    engine: str = "threads"
    workers: int | None = None
    device: str = "cpu"

    def method_options(self, label: str) -> tuple[str, dict[str, Any]]:
        """Return the method's name and hyper-parameters for a label."""
        options = dict(self.methods.get(label, {}))
        return options.pop("method", label), options


TRAINING = (
    "epochs",
    "batch_size",
    "optimizer",
    "lr",
    "momentum",
    "weight_decay",
    "clip",
    "decay",
    "decay_every",
    "round_decay",
)


def read_experiment(
    path: Path | None = None,
    given: Mapping[str, Any] | None = None,
    settings: Sequence[str] = (),
    scale: str | None = None,
) -> Experiment:
    """Build an experiment from a file, then options, then `--set key=value`, each overriding the one before.

    Parameters
    ----------
    path
        A TOML file; its `[scales.NAME]` tables hold alternative sizes of the same experiment.
    given
        Options from the command line (None values are left out).
    settings
        Texts `key=value`; `method.KEY=...` sets a hyper-parameter of the method, `LABEL.KEY=...` of another one.
    scale
        Which `[scales.NAME]` table of the file to apply.

    Raises
    ------
    InputError
        For an unreadable file or an unknown key (with the nearest known name) or a value of the wrong kind.
    """
    values = _read_file(path, scale)
    values.update({key: value for key, value in (given or {}).items() if value is not None})
    for text in settings:
        key, separator, value = text.partition("=")
        if not separator:
            raise InputError(f"--set takes key=value, for instance --set method.mu=0.1, not '{text}'.")
        _assign(values, key.strip(), parse_value(value.strip()))
    if isinstance(values.get("models"), str):
        from polyfed.build import split_models

        values["models"] = split_models(values["models"])
    try:
        return Experiment(**values)
    except ValidationError as error:
        raise _explain(error, path) from error


def parse_value(text: str) -> Any:
    """Read a value as TOML does; anything else is a word."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def _read_file(path: Path | None, scale: str | None) -> dict[str, Any]:
    if path is None:
        if scale is not None:
            raise InputError("--scale needs an experiment file that defines it.")
        return {}
    try:
        values = tomllib.loads(path.read_text())
    except OSError as error:
        raise InputError(f"Cannot read the experiment file {path}: {error.strerror}.") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InputError(f"The experiment file {path} is not valid TOML: {error}.") from error
    scales = values.pop("scales", {})
    if scale is not None:
        if scale not in scales:
            raise unknown(f"scale of {path}", scale, scales or {"(none)"})
        values.update(scales[scale])
    return values


def _assign(values: dict[str, Any], key: str, value: Any) -> None:
    owner, dot, option = key.partition(".")
    if not dot:
        values[key] = value
        return
    label = values.get("method", Experiment.model_fields["method"].default) if owner == "method" else owner
    tables = dict(values.get("methods", {}))
    tables[label] = {**tables.get(label, {}), option: value}
    values["methods"] = tables


def _explain(error: ValidationError, path: Path | None) -> InputError:
    first = error.errors()[0]
    key = ".".join(str(part) for part in first["loc"][:1])
    where = f" in {path}" if path else ""
    if first["type"] == "extra_forbidden":
        return unknown(f"option{where}", key, Experiment.model_fields)
    return InputError(f"Option '{key}'{where} has a wrong value ({first['input']!r}): {first['msg'].lower()}.")
