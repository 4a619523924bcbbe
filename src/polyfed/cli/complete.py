"""Values that a shell completes: names are read from files and entry points, since importing torch takes seconds."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from importlib.metadata import entry_points
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[1]
METHOD = re.compile(r'^    name: ClassVar\[str\] = "(\w+)"', re.MULTILINE)
MODEL = re.compile(r'^@?register\(\s*"(\w+)"', re.MULTILINE)
DEPTH = re.compile(r"\b(\d+): \(\d")  # of the tables of ResNets, which are registered by depth
DATA = re.compile(r'^    "([\w:-]+)": Known\(', re.MULTILINE)
ANALYSIS = re.compile(r'^    "(\w+)": \w+,$', re.MULTILINE)

Complete = Callable[[str], list[str]]


def methods() -> list[str]:
    """Return the names of all methods."""
    return _read(METHOD, (PACKAGE / "methods").glob("*.py"), "methods")


def models() -> list[str]:
    """Return the names of all networks and learners."""
    deep = [f"resnet{depth}" for depth in _read(DEPTH, [PACKAGE / "models" / "resnet.py"])]
    return sorted([*_read(MODEL, (PACKAGE / "models").glob("*.py"), "models"), *deep])


def data() -> list[str]:
    """Return the names of all data sets."""
    return _read(DATA, [PACKAGE / "data" / "catalog.py"], "data")


def analyses() -> list[str]:
    """Return the names of all analyses."""
    return _read(ANALYSIS, [PACKAGE / "analysis" / "command.py"])


def entries() -> list[str]:
    """Return the papers and their entries, of the current folder or the checkout that this package is in."""
    for folder in (Path.cwd(), PACKAGE.parents[1]):
        files = sorted((folder / "experiments" / "papers").glob("*/*.toml"))
        if files:
            return sorted({file.parent.name for file in files} | {f"{file.parent.name}/{file.stem}" for file in files})
    return []


def one_of(names: Callable[[], Iterable[str]]) -> Complete:
    """Return what completes one name."""

    def complete(incomplete: str) -> list[str]:
        return [name for name in names() if name.startswith(incomplete)]

    return complete


def list_of(names: Callable[[], Iterable[str]]) -> Complete:
    """Return what completes the last name of `a,b,c`."""

    def complete(incomplete: str) -> list[str]:
        before, comma, last = incomplete.rpartition(",")
        return [before + comma + name for name in one_of(names)(last)]

    return complete


def _read(pattern: re.Pattern[str], files: Iterable[Path], group: str | None = None) -> list[str]:
    others = entry_points(group=f"polyfed.{group}") if group else ()
    own = [name for file in files for name in pattern.findall(file.read_text(encoding="utf-8"))]
    return sorted({*own, *(point.name for point in others)})
