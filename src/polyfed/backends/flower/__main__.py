"""The three commands by themselves: `python -m polyfed.backends.flower serve ...`."""

from __future__ import annotations

import typer

from polyfed.backends.flower.commands import register

app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False)
register(app)

if __name__ == "__main__":
    app()
