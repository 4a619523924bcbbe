"""Errors in one sentence for the screen; of those that nobody foresaw, the traceback goes into a file."""

from __future__ import annotations

import os
import shlex
import sys
import tempfile
import traceback
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import typer

from polyfed.core.errors import InputError, PolyfedError
from polyfed.core.versions import versions
from polyfed.flower import plain


def sentence(error: Exception) -> str:
    """Return what went wrong in one line: kind, message, and the place in the code that raised it."""
    frames = traceback.extract_tb(error.__traceback__)
    where = f" ({Path(frames[-1].filename).name}, line {frames[-1].lineno})" if frames else ""
    what = " ".join(str(error).split()) or "no message"
    return f"{type(error).__name__}: {what.rstrip('.')}{where}."


def keep(error: Exception) -> Path:
    """Write traceback, command and versions into a new file, and return it."""
    now = datetime.now(UTC)
    text = "\n".join(
        [
            f"{now.isoformat(timespec='seconds')}  {shlex.join(sys.argv)}",
            ", ".join(f"{name} {number}" for name, number in versions().items()),
            "",
            "".join(traceback.format_exception(error)),
        ]
    )
    for folder in _folders():
        path = folder / f"error-{now:%Y%m%d-%H%M%S}-{os.getpid()}.log"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        except OSError:  # a home that cannot be written, as in many containers
            continue
        return path
    raise error  # nowhere to write: then the screen has to do


def _folders() -> Iterator[Path]:
    state = os.environ.get("XDG_STATE_HOME")
    yield (Path(state) if state else Path.home() / ".local" / "state") / "polyfed"
    yield Path(tempfile.gettempdir()) / f"polyfed-{os.getpid()}"


class sentences:
    """Turns our errors into one sentence and an exit code: 2 for a request that is not possible, 1 for the rest."""

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if type(error).__name__ == "Stopped":  # Ctrl-C: a stop, not a failure
            typer.echo(plain(str(error)), err=True)
            raise typer.Exit(130) from error
        if isinstance(error, PolyfedError):
            typer.echo(f"Error: {plain(str(error))}", err=True)
            raise typer.Exit(2 if isinstance(error, InputError) else 1) from error
        if isinstance(error, OSError):  # a folder that cannot be written, a file that cannot be read
            typer.echo(f"Error: {error}", err=True)
            raise typer.Exit(1) from error
        if isinstance(error, KeyboardInterrupt):
            typer.echo("Stopped.", err=True)
            raise typer.Exit(130) from error
