"""`polyfed fuse`: trained networks from files, fused into one."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from polyfed.cli.options import with_settings
from polyfed.terminal.tables import percent, say


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command()(fuse)


@with_settings(("label", "columns", "drop_columns", "kind", "tokenizer", "task"))
def fuse(
    files: Annotated[list[Path], typer.Argument(help="States of trained networks (safetensors or .pt).")],
    models: Annotated[
        str, typer.Option(help="Their model strings, dealt in turn: a,b,c; your own are package.module:function.")
    ],
    out: Annotated[Path, typer.Option(help="Where to write the fused model (.safetensors and .json).")],
    method: Annotated[
        str, typer.Option(help="ams-top1 | ams-topk | ams-full | ensemble | average | pfnm")
    ] = "ams-top1",
    data: Annotated[
        str,
        typer.Option(help="Data set, file or package.module:function: gives shape and classes, measures the result."),
    ] = "digits",
    distill_into: Annotated[str | None, typer.Option(help="Distill into one small model, for instance mlp:2.")] = None,
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", help="key=value: an option of polyfed.fuse (k=3, matching.gamma=2). May be repeated."),
    ] = None,
    **given: str | None,
) -> None:
    """Fuse trained networks into one model, without any training of theirs."""
    from polyfed.cli.fusing import data_for
    from polyfed.command import options_of
    from polyfed.core.task import CLASSIFICATION
    from polyfed.experiment import read_experiment
    from polyfed.fusion import fuse, fuse_files, score_on
    from polyfed.specs import split_models

    own = ("models", "method", "search", "public", "distill_into", "input_shape", "task")
    options = options_of("fuse", fuse, set_ or (), leave=own)
    console = Console()
    loaded, header, prepared = data_for(files, read_experiment(None, {"data": data, **given}).base.data)
    say(console, prepared)
    if distill_into:
        options |= {"distill_into": distill_into, "public": loaded.train}
    fused = fuse_files(
        files,
        split_models(models),
        method,
        input_shape=loaded.input_shape,
        num_classes=loaded.num_classes if header is None else header["outputs"],
        out=out,
        header=header,
        task=loaded.task,
        **options,
    )
    what = "" if loaded.task == CLASSIFICATION else f"{loaded.task.title} "
    reached = percent(score_on(fused, loaded.test, loaded.task))
    say(console, f"{method} of {len(files)} networks: {what}{reached} % on the test set of {data}")
    written = out if out.suffix == ".safetensors" else f"{out}.safetensors"
    if header is not None:
        say(
            console,
            f"Written to {written}: polyfed predict {written} ROWS --out FILE.csv, polyfed.load_model in Python",
        )
    else:
        how = f"polyfed.fusion.load_fused('{written}'), a module that takes inputs scaled as above"
        say(console, f"Written to {written}; use it in Python with {how}")
