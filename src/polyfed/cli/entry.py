"""The entry point: runs a command, and turns whatever goes wrong into one sentence and an exit code."""

from __future__ import annotations

import sys
import warnings

import click
from rich.console import Console
from rich.text import Text

from polyfed.cli.commands import app
from polyfed.core.launch import rank, world_size
from polyfed.terminal.tables import say

USUAL = warnings.formatwarning


def main() -> None:
    """Run the command line; errors for people exit with code 2 (bad input) or 1 (something broke).

    An error that nobody foresaw is one sentence as well; its traceback goes to a file which the sentence names.
    """
    from polyfed.core.errors import InputError, PolyfedError

    warnings.formatwarning = _as_sentence
    try:
        _check_launched()
        # The name also under `python -m polyfed`: completion goes by it. Not standalone: errors come here.
        code = app(prog_name="polyfed", standalone_mode=False)
        sys.exit(code if isinstance(code, int) else 0)
    except (KeyboardInterrupt, click.Abort):
        Console(stderr=True).print("Stopped.")
        sys.exit(130)
    except click.ClickException as error:
        from polyfed.cli.usage import complaint

        sentence = complaint(error, sys.argv[1:])
        if sentence is None:
            error.show()
        else:
            _complain(sentence)
        sys.exit(2)
    except InputError as error:
        _complain(error)
        sys.exit(2)
    except PolyfedError as error:
        if type(error).__name__ == "Stopped":  # Ctrl-C: a stop, not a failure
            say(Console(stderr=True), str(error))
            sys.exit(130)
        _complain(error)
        sys.exit(1)
    except Exception as error:
        from polyfed.cli import failure

        _complain(f"{failure.sentence(error)} The traceback is in {failure.keep(error)}.")
        sys.exit(1)


def _as_sentence(
    message: Warning | str, category: type[Warning], filename: str, lineno: int, line: str | None = None
) -> str:
    """Return a warning for people without the line of code that it came from; others as Python writes them."""
    return (
        f"Warning: {message}\n"
        if issubclass(category, UserWarning)
        else USUAL(message, category, filename, lineno, line)
    )


def _complain(error: Exception | str) -> None:
    from polyfed.core.errors import RankGone

    if rank() > 0 and not isinstance(error, RankGone):  # the first process says the same
        return
    say(Console(stderr=True), Text.assemble(("Error:", "bold red"), f" {error}"))


def _check_launched() -> None:
    """Refuse to do several times what one process does: torch's launcher is for one large run."""
    if world_size() > 1 and sys.argv[1:2] not in (["run"], ["resume"]):
        from polyfed.core.errors import InputError

        raise InputError("torchrun divides the clients of one run: use it with 'polyfed run' or 'polyfed resume'.")
