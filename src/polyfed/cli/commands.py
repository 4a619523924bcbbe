"""The command line. Heavy imports happen inside the commands, so that `polyfed --help` answers at once."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from polyfed import __version__
from polyfed.cli.about import register as register_about
from polyfed.cli.federation import register as register_flower
from polyfed.cli.fuse import register as register_fuse
from polyfed.cli.options import Analysis, Json, Method, Methods, with_settings
from polyfed.cli.reproduce import register as register_reproduce
from polyfed.cli.trained import register as register_trained
from polyfed.core.errors import InputError
from polyfed.core.fields import split_names
from polyfed.core.launch import rank
from polyfed.terminal.tables import in_rounds, say

app = typer.Typer(
    name="polyfed",
    help="Federated learning for parties with different neural networks.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",  # help texts keep their [square brackets]
)

File = Annotated[Path | None, typer.Argument(help="An experiment file (TOML); options override its values.")]
Out = Annotated[Path | None, typer.Option(help="A new directory for everything the run leaves behind.")]
Quiet = Annotated[bool, typer.Option("--quiet", help="No progress lines.")]
Set = Annotated[
    list[str] | None,
    typer.Option("--set", help="key=value: any setting, or method.mu=0.1 for a hyper-parameter. May be repeated."),
]
Log = Annotated[
    list[str] | None, typer.Option("--log", help="Also write to csv, tensorboard or mlflow. May be repeated.")
]
Scale = Annotated[str | None, typer.Option(help="Which [scales.NAME] table of the experiment file to use.")]


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"polyfed {__version__}")
        raise typer.Exit


@app.callback()
def _polyfed(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and stop.", is_eager=True, callback=_print_version)
    ] = False,
) -> None:
    """Federated learning for parties with different neural networks."""


@app.command()
def demo(
    out: Annotated[Path, typer.Option(help="Directory of the run.")] = Path("runs/demo"),
    rounds: Annotated[int, typer.Option(help="Number of rounds.")] = 8,
    quiet: Quiet = False,
) -> None:
    """Ten clients with five different networks learn together on real handwritten digits."""
    from polyfed.cli.demo import demonstrate

    demonstrate(_fresh(out), rounds, Console(quiet=quiet), Console())


@app.command()
@with_settings()
def run(
    file: File = None,
    method: Method = None,
    out: Out = None,
    quiet: Quiet = False,
    as_json: Json = False,
    set_: Set = None,
    scale: Scale = None,
    log: Log = None,
    **given: str | None,
) -> None:
    """Run one method."""
    from polyfed.api import execute
    from polyfed.experiment import read_experiment
    from polyfed.terminal.live import watching

    config = read_experiment(file, {"method": method, **given}, set_ or (), scale).config()
    if rank() > 0:  # of torch's launcher: the first process shows and writes everything
        from polyfed.engines.link import deaf

        with deaf():  # also while it makes its data and waits for the others
            execute(config, out=out, progress=False)
        return
    progress = Console(stderr=as_json, quiet=quiet)
    with watching(progress, log or (), out, f"polyfed resume {out}" if out else None) as watch:
        observers = watch(config.label, config.planned_rounds(), config.dump())
        result = execute(config, out=out, observers=observers)
    _report(out, progress)
    _show(result, as_json)


@app.command()
@with_settings()
def compare(
    file: File = None,
    methods: Methods = None,
    seeds: Annotated[int | None, typer.Option(help="How many seeds.")] = None,
    out: Out = None,
    quiet: Quiet = False,
    as_json: Json = False,
    set_: Set = None,
    scale: Scale = None,
    log: Log = None,
    sweep: Annotated[
        list[str] | None,
        typer.Option(
            help="key=a,b,c: values to try of a setting (lr) or an option (method.lam, LABEL.lam), chosen on "
            "validation data. May be repeated."
        ),
    ] = None,
    jobs: Annotated[
        str, typer.Option(help="How many runs at once: auto (as many as there are cores and memory for), or a number.")
    ] = "auto",
    **given: str | None,
) -> None:
    """Run several methods over several seeds on the same splits and initial weights."""
    from polyfed.cli.listing import print_json
    from polyfed.compare import compare as run_all
    from polyfed.experiment import read_experiment
    from polyfed.terminal.live import watching
    from polyfed.terminal.tables import comparison_table

    labels = None if methods is None else list(split_names(methods))
    if labels == []:
        raise InputError("--methods names no method: write a,b,c.")
    experiment = read_experiment(file, given, set_ or (), scale, labels, sweep or ())
    progress = Console(stderr=as_json, quiet=quiet)
    again = "the same command: finished runs are kept, the others go on" if out else None
    with watching(progress, log or (), out, again) as watch:
        rows = run_all(
            experiment,
            labels,
            seeds,
            out,
            started=lambda config, place: watch(
                f"{config.label} #{config.seed} {place.what}".strip(), config.planned_rounds(), config.dump(), place
            ),
            jobs=jobs,
        )
    _report(out, progress)
    if as_json:
        print_json([vars(row) for row in rows])
        return
    data = experiment.base.data
    clients = f"{data.clients} clients, " if data.clients else ""
    title = f"{data.source}, {clients}{data.partition}, {in_rounds(experiment.base.rounds)}"
    _paper().print(comparison_table(rows, title))
    if out:
        say(Console(), f"Everything is in {out}")


@app.command()
def resume(
    directory: Annotated[Path, typer.Argument(help="The directory of a run that was stopped, or is to go on.")],
    rounds: Annotated[int | None, typer.Option(help="Go on to so many rounds in all.")] = None,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Continue a run from its checkpoint."""
    from polyfed.api import resume as continue_run
    from polyfed.stored import read_config
    from polyfed.terminal.live import watching

    config = read_config(directory)
    if rank() > 0:
        from polyfed.engines.link import deaf

        with deaf():
            continue_run(directory, rounds=rounds, progress=False)
        return
    progress = Console(stderr=as_json, quiet=quiet)
    with watching(progress, (), directory, f"polyfed resume {directory}") as watch:
        planned = rounds or config.planned_rounds()
        result = continue_run(directory, watch(config.label, planned, config.dump()), rounds=rounds)
    _report(directory, progress)
    _show(result, as_json)


@app.command()
def add(
    directory: Annotated[Path, typer.Argument(help="The directory of a finished run; it stays as it is.")],
    data: Annotated[str, typer.Option(help="The new client's data: a file, a folder or package.module:function.")],
    model: Annotated[str, typer.Option(help="Its network or learner, such as mlp:2x64; =FILE behind it: weights.")],
    rounds: Annotated[int, typer.Option(help="Go on to so many rounds in all.")],
    out: Annotated[Path, typer.Option(help="A new directory, for the run with the new client.")],
    name: Annotated[str | None, typer.Option(help="The new client's name.")] = None,
    test: Annotated[str | None, typer.Option(help="Its own test data; else a fifth of its rows.")] = None,
    label: Annotated[str | None, typer.Option(help="Its label column, where it is not called as in the run.")] = None,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Let a new client join a finished run, which goes on with it in another directory."""
    from polyfed.adding import add_client
    from polyfed.stored import read_config
    from polyfed.terminal.live import watching

    config = read_config(directory)
    progress = Console(stderr=as_json, quiet=quiet)
    with watching(progress, (), out, "the same command: it goes on where it stopped") as watch:
        observers = watch(config.label, rounds, config.dump())
        asked = {"model": model, "rounds": rounds, "out": out, "name": name, "test": test, "label": label}
        result = add_client(directory, data, **asked, observers=observers)  # type: ignore[arg-type]
    _report(out, progress)
    _show(result, as_json)


@app.command()
def report(
    runs: Annotated[list[Path], typer.Argument(help="Directories of runs or comparisons.")],
    out: Annotated[
        Path | None, typer.Option(help="The file to write; by default report.html in the directory.")
    ] = None,
    export: Annotated[
        Path | None, typer.Option(help="Also write figures (PDF, SVG, PNG) and tables (LaTeX, Markdown, CSV) here.")
    ] = None,
    target: Annotated[
        list[float] | None, typer.Option(help="Accuracy from 0 to 1 for the rounds-to-target table. May be repeated.")
    ] = None,
) -> None:
    """Write one page about runs: who gained, what it cost, and why."""
    from polyfed.report import export as write_files
    from polyfed.report import write_report

    console = Console()
    source = runs[0] if len(runs) == 1 else runs
    say(console, f"Wrote {write_report(source, out, target)}")
    if export:
        say(console, f"Wrote {len(write_files(source, export))} files to {export}")


@app.command()
def analyze(
    name: Analysis,
    runs: Annotated[list[Path], typer.Argument(help="Directories of runs.")],
    out: Annotated[
        Path | None, typer.Option(help="Folder of the figures; by default analysis/NAME in the run.")
    ] = None,
    settings: Annotated[
        list[str] | None, typer.Option("--set", help="key=value: an option of the analysis. May be repeated.")
    ] = None,
) -> None:
    """Look into finished runs as the papers do: figures and numbers."""
    from polyfed.analysis.command import analyze as look

    for line in look(name, runs, out, settings or []):
        say(Console(), line)


register_fuse(app)
register_trained(app)
register_about(app)
register_reproduce(app)
register_flower(app)


def _fresh(path: Path) -> Path:
    """Return the path, or the same with a number, so that an earlier run is never overwritten."""
    number = 2
    candidate = path
    while candidate.exists():
        candidate = path.with_name(f"{path.name}-{number}")
        number += 1
    return candidate


def _report(out: Path | None, console: Console) -> None:
    """Write the page of a finished run or comparison and say where it is."""
    if out is None:
        return
    from polyfed.report import write_report

    say(console, f"Report: {write_report(out)}")


def _show(result: Any, as_json: bool) -> None:
    from polyfed.cli.listing import print_json

    if as_json:
        print_json(result.summary())
        return
    console = _paper()
    console.print(result.table())
    for note in result.notes:
        say(console, f"The data: {note}")
    if result.directory is not None:
        say(console, f"Everything is in {result.directory}")


def _paper() -> Console:
    """Return a console for tables: as wide as the terminal, or wide enough where the output goes to a file."""
    return Console(width=None if sys.stdout.isatty() else 120)
