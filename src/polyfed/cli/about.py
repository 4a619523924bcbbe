"""Commands that tell what is there: `polyfed methods`, `models`, `data` and `doctor`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from polyfed.cli import complete
from polyfed.cli.options import Json
from polyfed.terminal.tables import say


def register(app: typer.Typer) -> None:
    """Add these commands to an application."""
    app.command("methods")(list_methods)
    app.command("models")(list_models)
    app.command("data")(list_data)
    app.command("doctor")(doctor)


def list_methods(
    name: Annotated[
        str | None, typer.Argument(help="One method, in full.", autocompletion=complete.one_of(complete.methods))
    ] = None,
    experiment: Annotated[
        Path | None,
        typer.Option("--for", help="Which of them (or whether NAME) apply to this experiment, and why others do not."),
    ] = None,
    as_json: Json = False,
) -> None:
    """List the methods, or print one in full: its options, what it needs, what leaves a client."""
    from polyfed.cli.listing import METHODS, show_applicable

    if experiment is not None:
        show_applicable(experiment, as_json, name)
        return
    METHODS.show(name, as_json)


def list_models(
    name: Annotated[
        str | None, typer.Argument(help="One network, in full.", autocompletion=complete.one_of(complete.models))
    ] = None,
    as_json: Json = False,
) -> None:
    """List the networks of the zoo and how to write them, or print one in full."""
    from polyfed.cli.listing import MODELS

    MODELS.show(name, as_json)


def list_data(as_json: Json = False) -> None:
    """List the known data sets and whether they are on this machine."""
    from polyfed.cli.listing import print_json, print_rows
    from polyfed.data import describe_sources

    rows = describe_sources()
    if as_json:
        print_json(rows)
        return
    print_rows(rows, ("name", "kind", "classes", "rows", "groups", "found"))
    say(Console(), "With --json also their licenses, and where the Hugging Face Hub has them.")


def doctor(
    server: Annotated[str | None, typer.Option(help="HOST:PORT of a federation: does it answer from here?")] = None,
    as_json: Json = False,
) -> None:
    """Look at this installation and machine, and say what to do: versions, processor, data, extras, Flower."""
    from polyfed.cli.doctor import PROBLEM, as_rows, examine
    from polyfed.cli.listing import print_json

    found = examine(server)
    if as_json:
        print_json(as_rows(found))
    else:
        for finding in found:
            say(Console(), f"{finding.state:<8} {finding.subject:<18} {finding.found}")
            if finding.advice:
                say(Console(), f"{'':<27} -> {finding.advice}")
    if any(finding.state == PROBLEM for finding in found):
        raise typer.Exit(1)
