"""What is wrong with the words of a command line, as one sentence that says what was meant, perhaps."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

import click
from click.exceptions import BadOptionUsage, MissingParameter, NoSuchOption, UsageError

FEW = 8  # names that a sentence can list


def complaint(error: click.ClickException, words: list[str]) -> str | None:
    """Return the sentence, or None where the help was asked for by saying nothing.

    `words` are those of the command line: the parser forgets which command it was reading when a value is missing.
    """
    if type(error).__name__ == "NoArgsIsHelpError":  # older releases of click show the help by themselves
        return None
    context = getattr(error, "ctx", None)
    command = context.command_path if context is not None else " ".join(["polyfed", *words[:1]])
    asked = f"{command} --help"
    if isinstance(error, NoSuchOption):
        known = [name for one in context.command.get_params(context) for name in one.opts] if context else []
        return f"{command} has no option '{error.option_name}'{_nearest(error.option_name, known, asked)}"
    if isinstance(error, BadOptionUsage):
        return f"{command}: the option '{error.option_name}' needs a value: see '{asked}'."
    if isinstance(error, MissingParameter) and error.param is not None:
        one = error.param
        name = one.opts[0] if isinstance(one, click.Option) else one.human_readable_name.strip("[].").upper()
        meaning = _within(str(getattr(one, "help", None) or ""))
        return f"{command} needs {name}{f' ({meaning})' if meaning else ''}: see '{asked}'."
    group = getattr(context, "command", None)
    if isinstance(group, click.Group) and "command" in error.format_message() and context is not None:
        given = next((word for word in words if f"'{word}'" in error.format_message()), "")
        return f"{command} has no command '{given}'{_nearest(given, group.list_commands(context), asked)}"
    sentence = _within(error.format_message())
    return f"{command}: {sentence}: see '{asked}'." if isinstance(error, UsageError) else f"{sentence}."


def _within(sentence: str) -> str:
    """Return a sentence as a part of another; a word in capitals (HOST:PORT) stays one."""
    start = sentence[:1] if sentence[1:2].isupper() else sentence[:1].lower()
    return start + sentence[1:].rstrip(".")


def _nearest(given: str, known: Iterable[str], asked: str) -> str:
    """Return the end of the sentence: the name that was meant, else all of a few names, else where they are."""
    names = sorted(known)
    near = difflib.get_close_matches(given, names, n=1, cutoff=0.65)  # at 0.6 "--lr" is near "--help"
    if near:
        return f": did you mean '{near[0]}'?"
    return f": it has {', '.join(names)}." if 0 < len(names) <= FEW else f": see '{asked}'."
