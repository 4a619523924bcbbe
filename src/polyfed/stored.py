"""The configuration that a run's directory holds: read it, and say in what two runs differ."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from polyfed.config import Config
from polyfed.core.errors import InputError, RunDirectoryError
from polyfed.core.rundir import RunDirectory

UNIMPORTANT = ("execution.workers", "execution.checkpoint_seconds")  # they change no bit of a result


def read_config(out: str | Path) -> Config:
    """Return the configuration of a run directory.

    Raises
    ------
    RunDirectoryError
        When there is none, or it is damaged or from another version.
    """
    found = RunDirectory.read_config(Path(out))
    try:
        return Config.load(found)
    except (InputError, KeyError, TypeError) as error:
        raise RunDirectoryError(f"The configuration in {out} cannot be used: {error}") from error


def check_same(out: str | Path, config: Config) -> None:
    """Refuse a directory that holds a run with other settings.

    Raises
    ------
    RunDirectoryError
        Naming every setting that differs.
    """
    found = differences(read_config(out), config)
    if found:
        raise RunDirectoryError(
            f"{out} holds a run with other settings ({'; '.join(found)}): use the same ones, or another --out."
        )


def differences(earlier: Config, now: Config) -> list[str]:
    """Name every setting in which two runs differ: `training.lr was 0.05, now 0.1`."""
    before, after = _flat(earlier.dump()), _flat(now.dump())
    keys = [key for key in dict.fromkeys([*after, *before]) if key not in UNIMPORTANT]
    return [
        f"{key} was {before.get(key)!r}, now {after.get(key)!r}" for key in keys if before.get(key) != after.get(key)
    ]


def _flat(tree: Mapping[str, Any], start: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, Mapping):
            found |= _flat(value, f"{start}{key}.")
        else:
            found[start + key] = value
    return found
