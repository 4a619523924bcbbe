"""One file for each paper. Every `Method` with a name in this package is found by itself: no list to keep."""

from __future__ import annotations

import importlib
import pkgutil
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields
from functools import cache
from typing import Any

from polyfed.core.errors import InputError, unknown
from polyfed.core.method import Method
from polyfed.core.plugins import plugins


@cache
def registry() -> dict[str, type[Method]]:
    """Return all methods by name: those of this package, and those that other packages offer (`core/plugins.py`)."""
    found: dict[str, type[Method]] = {}
    for module in pkgutil.iter_modules(__path__, f"{__name__}."):
        for value in vars(importlib.import_module(module.name)).values():
            own = isinstance(value, type) and issubclass(value, Method) and value.__module__ == module.name
            if own and vars(value).get("name"):  # a base without a name of its own is no method
                found[value.name] = value
    for name, value in plugins("methods").items():
        if not (isinstance(value, type) and issubclass(value, Method) and vars(value).get("name") == name):
            warnings.warn(f"The entry point '{name}' of polyfed.methods is no Method of that name.", stacklevel=2)
        elif name in found:
            warnings.warn(f"Another package's method '{name}' is left out: polyfed has one.", stacklevel=2)
        else:
            found[name] = value
    return dict(sorted(found.items()))


def find(name: str) -> type[Method]:
    """Return the method of this name; `package.module:Class` names one of your own.

    Raises
    ------
    InputError
        With the nearest known name.
    """
    if ":" in name:
        return _imported(name)
    if name not in registry():
        raise unknown("method", name, registry())
    return registry()[name]


def make(name: str, options: dict[str, Any] | None = None) -> Method:
    """Return a method with its hyper-parameters; an unknown one is refused with the nearest name."""
    kind = find(name)
    known = {field.name for field in fields(kind)}
    for option in options or {}:
        if option not in known:
            raise unknown(f"option of method {name}", option, known or {"(it has none)"})
    return kind(**(options or {}))


def check_name(kind: type[Method]) -> type[Method]:
    """Return a method's class; one that has its name from another method would pass as that one in every table.

    Raises
    ------
    InputError
        With the method whose name it has.
    """
    named = next(base for base in kind.__mro__ if "name" in vars(base))
    if kind is not named and kind.name:
        raise InputError(
            f"{kind.__name__} has no name of its own and would pass as {named.__name__} ('{kind.name}'): write "
            f"name: ClassVar[str] = '{kind.__name__.lower()}' into the class."
        )
    return kind


def reference(kind: type[Method]) -> str:
    """Return the name by which `find` finds a method: its own, or `package.module:Class`."""
    return kind.name if registry().get(kind.name) is kind else f"{kind.__module__}:{kind.__qualname__}"


def is_importable(kind: type[Method]) -> bool:
    """Tell whether another process can find a method by its reference: not where it is a script's own."""
    return registry().get(kind.name) is kind or not (kind.__module__ == "__main__" or "<" in kind.__qualname__)


@contextmanager
def _current_folder() -> Iterator[None]:
    """Let the current folder count for imports, as with `python -m`; an installed command would not look there."""
    sys.path.insert(0, "")
    try:
        yield
    finally:
        sys.path.remove("")  # the one that was put there: the module may have added others to keep


def candidates() -> list[Method]:
    """Return all methods that need no arguments: to be named where another one does not fit."""
    return [kind() for kind in registry().values() if not kind.pools_data]


def _imported(name: str) -> type[Method]:
    module, _, attribute = name.partition(":")
    if not module or not attribute:
        raise InputError(f"Method '{name}' names nothing to import: write module:Class.")
    try:
        with _current_folder():
            found = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise InputError(f"Cannot import method '{name}': {error}.") from error
    if not (isinstance(found, type) and issubclass(found, Method)):
        raise InputError(f"'{name}' is not a polyfed Method: subclass polyfed.Method (see CONTRIBUTING.md).")
    return check_name(found)
