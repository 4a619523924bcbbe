"""Errors for people: one sentence that names what is wrong and what to do."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable

ESCAPE_CODES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")  # colors, as some packages put them into their messages


def first_line(error: BaseException) -> str:
    """Return what an error of another package says, in one line without colors and a full stop, to be quoted."""
    told = ESCAPE_CODES.sub("", str(error)).strip() or type(error).__name__
    return told.splitlines()[0].rstrip(". ")


class PolyfedError(Exception):
    """Base of every error that polyfed raises on purpose."""


class InputError(PolyfedError):
    """The request cannot be carried out as given. Raised before any training; the command line exits with code 2."""


class TrainingError(PolyfedError):
    """Training went wrong at a named client, round and batch (for instance a loss that is not a number)."""


class MessageError(PolyfedError):
    """A message from another party is damaged, too large, or not what the method declared."""


class MethodError(PolyfedError):
    """A method does what only parties in one process could: between machines it would give other results."""


class RankGone(PolyfedError):
    """Another process of a divided run died: rank 0 says so, or one of the others if it was rank 0."""


class RunDirectoryError(InputError):
    """A run directory cannot be used: it exists already, is from another version, or is damaged."""


def unknown(kind: str, name: str, known: Iterable[str]) -> InputError:
    """Say that `name` is not a known `kind`, with the nearest known name or the whole list."""
    return InputError(f"Unknown {kind} '{name}': {nearest(name, known, 'known are:')}")


def nearest(name: str, known: Iterable[str], listed: str) -> str:
    """Return a question for the nearest of the known names, or the whole list after the words `listed`."""
    known = sorted(set(known))
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.6)  # at 0.5 "nope" is near "inco"
    return f"did you mean '{near[0]}'?" if near else f"{listed} {', '.join(known)}."
