"""Settings as texts of the command line: what `--set` says, and the command that runs the same again."""

from __future__ import annotations

import inspect
import json
import shlex
import tomllib
from collections.abc import Callable, Collection, Sequence
from dataclasses import fields, is_dataclass, make_dataclass
from typing import Any, get_args, get_type_hints

from polyfed.config import Config, known_fields, option_names, short_names
from polyfed.core.errors import InputError
from polyfed.core.fields import check_fields


def parse_setting(text: str) -> tuple[str, Any]:
    """Read the text of a `--set`, of whichever command: a key and its value.

    Raises
    ------
    InputError
        When it is not `key=value`.
    """
    key, separator, value = text.partition("=")
    if not separator:
        raise InputError(f"--set takes key=value, for instance --set lr=0.1, not '{text}'.")
    return key.strip(), parse_value(value.strip())


def parse_value(text: Any) -> Any:
    """Read a value as TOML does; anything else is a word."""
    try:
        return tomllib.loads(f"value = {text}")["value"] if isinstance(text, str) else text
    except tomllib.TOMLDecodeError:
        return text


def options_of(
    owner: str, work: Callable[..., Any], texts: Sequence[str], leave: Collection[str] = ()
) -> dict[str, Any]:
    """Return what texts of `--set` say about the parameters of a function, checked by their types as settings are.

    Parameters
    ----------
    owner
        What error messages call it.
    work
        The function; a parameter that is a dataclass is set field by field: `matching.gamma=2`.
    texts
        `key=value`.
    leave
        Parameters that are no options.

    Raises
    ------
    InputError
        For an unknown name (with the nearest known one), or a value that is not possible.
    """
    hints = get_type_hints(work, include_extras=True)
    parameters = [item for item in inspect.signature(work).parameters.values() if item.name not in leave]
    kind = make_dataclass(owner, [(item.name, hints[item.name], item.default) for item in parameters], frozen=True)
    given: dict[str, Any] = {}
    parts: dict[str, dict[str, Any]] = {}
    for key, value in map(parse_setting, texts):
        name, dot, field = key.partition(".")
        section: Any = next((part for part in get_args(hints.get(name)) if dot and is_dataclass(part)), None)
        if section is None:
            given[key] = value
            continue
        parts[name] = {**parts.get(name, {}), field: value}
        given[name] = section(**known_fields(name, section, parts[name]))
        check_fields(given[name], name)
    options = kind(**known_fields(owner, kind, given))
    check_fields(options, owner)
    return {name: getattr(options, name) for name in given}


def command(config: Config) -> str | None:
    """Return the command that runs the same again: what differs from the defaults. None: only a script can."""
    if config.script or "=" in config.label:
        return None
    words = ["polyfed", "run", "--method", config.label, *setting_words(config)]
    return shlex.join([*words, *method_words(config, "method")])


def setting_words(config: Config) -> list[str]:
    """Return the settings that differ from the defaults as options of the command line."""
    usual = Config(config.method, config.label)
    words, options = [], option_names()
    for short, full in short_names().items():
        value, default = config.value(full), usual.value(full)
        if value != default or short in ("data", "models"):
            text = ",".join(value) if full in ("models.names", "evaluation.metrics") else to_text(value)
            words += [f"--{short.replace('_', '-')}", text] if short in options else ["--set", f"{full}={text}"]
    return words


def method_words(config: Config, owner: str) -> list[str]:
    """Return what a label stands for and the hyper-parameters that are not the defaults, as `--set OWNER.key=...`."""
    from polyfed.methods import reference

    method, name = config.method, reference(type(config.method))
    usual = type(method)()
    changed = {item.name: getattr(method, item.name) for item in fields(method)}
    told = {} if name == config.label else {"method": name}
    told |= {key: value for key, value in changed.items() if value != getattr(usual, key)}
    return [word for key, value in told.items() for word in ("--set", f"{owner}.{key}={to_text(value)}")]


def to_text(value: Any) -> str:
    """Write a value so that `parse_value` reads it back: plain words stay bare, None is `none`."""
    if value is None:
        return "none"
    if isinstance(value, str):
        return value if parse_value(value) == value else json.dumps(value)
    if isinstance(value, list | tuple):
        return "[" + ", ".join(json.dumps(item) for item in value) + "]"
    return json.dumps(value)
