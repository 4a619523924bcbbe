"""The command line: commands, and options made from the configuration."""

from polyfed.cli.commands import app
from polyfed.cli.entry import main

__all__ = ["app", "main"]
