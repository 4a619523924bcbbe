"""`polyfed form ...`: sites agree on how their tables become numbers, without showing a row."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from polyfed.cli.failure import sentences
from polyfed.cli.options import with_settings

OF_A_SITE = ("label", "columns", "drop_columns", "kind", "task", "validation")  # how a site's file is read

form_app = typer.Typer(help="Agree on how tables become numbers, without showing a row.", no_args_is_help=True)


@form_app.command("tell")
@with_settings(OF_A_SITE[:-1])
def form_tell(
    data: Annotated[str, typer.Argument(help="Your CSV or parquet file, or package.module:function.")],
    out: Annotated[Path, typer.Option(help="The file to write, for whoever collects them.")],
    set_: Annotated[list[str] | None, typer.Option("--set", help="data.key=value: how to read the data.")] = None,
    **given: str | None,
) -> None:
    """At a site: write down counts, means, deviations and words of the columns. No row is in it."""
    with sentences():
        from polyfed.data.agree import write_told
        from polyfed.experiment import read_experiment

        write_told(read_experiment(None, {"data": data, **given}, set_ or ()).base.data.whole(0), out)
    typer.echo(f"Wrote {out}. Read it: this is what you tell about your rows. Then send it to whoever collects them.")


@form_app.command("agree")
def form_agree(
    files: Annotated[list[Path], typer.Argument(help="What the sites told.")],
    out: Annotated[Path, typer.Option(help="The file to write, for all sites.")],
) -> None:
    """Join what the sites told: one scaling, one list of words and classes for all of them."""
    with sentences():
        from polyfed.data.agree import agree, read_told, write_agreed

        agreed = agree({path.name: read_told(path) for path in files})
        write_agreed(agreed, out)
    typer.echo(f"Wrote {out}: {len(agreed.form.columns)} columns, classes or targets {', '.join(agreed.class_names)}.")
    for note in agreed.notes:
        typer.echo(f"Look at {note}.")
    typer.echo(f"Send it to all sites; they join with --form {out.name}.")
