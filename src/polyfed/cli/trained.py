"""`polyfed export` and `predict`: what becomes of a trained model."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from polyfed.terminal.tables import say

OwnModel = Annotated[
    str | None, typer.Option("--model", help="What builds the network, where it is your own: package.module:function.")
]

Tokenizer = Annotated[
    str | None,
    typer.Option(help="Of texts, where it was code of yours: package.module:function."),
]


def register(app: typer.Typer) -> None:
    """Add the commands."""
    app.command()(export)
    app.command()(predict)


def export(
    directory: Annotated[Path, typer.Argument(help="The directory of a finished run, or the file of a site's model.")],
    out: Annotated[Path, typer.Option(help="The file to write.")],
    client: Annotated[str | None, typer.Option(help="Of a run: number or name of the client.")] = None,
    format: Annotated[
        str, typer.Option(help="safetensors | torch (torch.export) | torchscript | onnx")
    ] = "safetensors",
    model: OwnModel = None,
) -> None:
    """Write the model of one client, or of a site, for use elsewhere."""
    from polyfed.exporting import export as write

    say(Console(), f"Wrote {write(_trained(directory, client, model), out, format)}")
    if format == "safetensors":
        say(Console(), f"Load it with polyfed.load_model('{out}'): it takes raw inputs.")
    else:
        say(Console(), "It takes inputs as polyfed.load_model(...).inputs(raw) makes them.")


def predict(
    trained: Annotated[Path, typer.Argument(help="The file of a model (NAME.safetensors), or a finished run.")],
    data: Annotated[
        Path, typer.Argument(help="New rows: a CSV or parquet file; images: a folder or a file; arrays: .npy.")
    ],
    out: Annotated[Path, typer.Option(help="The CSV file to write, which must not be there yet.")],
    client: Annotated[str | None, typer.Option(help="Of a run: number or name of the client.")] = None,
    model: OwnModel = None,
    tokenizer: Tokenizer = None,
    keep: Annotated[
        str | None, typer.Option(help="Columns of a table to write beside the predictions, such as an identifier: a,b.")
    ] = None,
) -> None:
    """Predict for new rows with the model of a client or a site."""
    from polyfed.core.fields import split_names
    from polyfed.exporting import write_predictions

    made = _trained(trained, client, model, tokenizer)
    with warnings.catch_warnings(record=True, action="always") as notes:
        rows = write_predictions(made, data, out, split_names(keep or ""))
    for note in notes:
        say(Console(), f"The data: {note.message}")
    say(Console(), f"Wrote {rows} predictions to {out}")


def _trained(place: Path, client: str | None, model: str | None, tokenizer: str | None = None) -> Any:
    from polyfed.trained import load_model

    number = int(client) if client is not None and client.isdigit() else client
    return load_model(place, number, model, tokenizer)
