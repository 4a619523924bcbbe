"""Options of the command line, made from the fields of the configuration: a setting is written down once."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import MISSING, fields
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import typer

from polyfed.cli import complete
from polyfed.config import SECTIONS, Config, option_names, short_names
from polyfed.core.fields import in_words, meanings, types_of

Json = Annotated[bool, typer.Option("--json", help="Print the result as JSON (progress goes to the error stream).")]
Method = Annotated[
    str | None,
    typer.Option(
        help="Name of the method, or package.module:Class of your own.",
        autocompletion=complete.one_of(complete.methods),
    ),
]
Methods = Annotated[
    str | None,
    typer.Option(
        help="Methods to compare: a,b,c (local is always among them).",
        autocompletion=complete.list_of(complete.methods),
    ),
]
Analysis = Annotated[
    str,
    typer.Argument(
        help="Which analysis: cka, embedding, reconstruction, robustness, ...",
        autocompletion=complete.one_of(complete.analyses),
    ),
]


def with_settings(names: Sequence[str] | None = None) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command with `**given` an option for each of these settings; it receives them as texts (None: not given).

    Without names it gets those of all settings that have one.

    Texts are read and checked by the configuration, so that the command line, TOML and Python are refused alike.
    """

    def widen(command: Callable[..., None]) -> Callable[..., None]:
        signature = inspect.signature(command)
        own = [p for p in signature.parameters.values() if p.kind is not inspect.Parameter.VAR_KEYWORD]
        hints = get_type_hints(command, include_extras=True)
        made = [option(name) for name in (option_names() if names is None else names)]
        parameters = [p.replace(annotation=hints[p.name]) for p in own] + made
        command.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
        command.__annotations__ = {**{p.name: p.annotation for p in parameters}, "return": None}
        return command

    return widen


def option(name: str) -> inspect.Parameter:
    """Return the option of one setting."""
    section, dot, leaf = short_names()[name].partition(".")
    kind: Any = SECTIONS[section] if dot else Config
    field = leaf if dot else section
    flag = f"--{name.replace('_', '-')}"
    hint = types_of(kind)[field]
    annotation = Annotated[
        str | None,
        typer.Option(
            flag,
            help=f"{meanings(kind)[field]} {_default(kind, field)}".replace("`", "").strip(),
            metavar=_shape(hint),
            rich_help_panel=section.capitalize() if dot else "Run",
            show_default=False,
            autocompletion=_completion(name, _shape(hint)),
        ),
    ]
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)


def _default(kind: type[Any], field: str) -> str:
    found = next(item.default for item in fields(kind) if item.name == field)
    if found is MISSING or found is None or found == ():
        return ""
    return f"(default {', '.join(found) if isinstance(found, tuple) else found})"


def _completion(name: str, shape: str) -> complete.Complete | None:
    """Return what completes the values of a setting, where they are names or words."""
    named = {"data": complete.one_of(complete.data), "models": complete.list_of(complete.models)}
    return named.get(name) or (complete.one_of(lambda: shape.split("|")) if "|" in shape else None)


def _shape(hint: Any) -> str:
    """Return what an option takes, in a word: its words, a number, or text."""
    words = in_words(hint)
    if "|" in words and "true" not in words:
        return words.replace(" | ", "|").replace(" or none", "")
    base = get_args(hint)[0] if get_origin(hint) is Annotated else hint
    parts = [get_args(part)[0] if get_origin(part) is Annotated else part for part in (get_args(base) or (base,))]
    return "TEXT" if str in parts else {int: "N", float: "X"}.get(parts[0], "TEXT")
