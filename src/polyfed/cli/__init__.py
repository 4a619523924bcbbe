"""The command line: commands, and options made from the configuration."""

from polyfed.cli.commands import app, main

__all__ = ["app", "main"]
