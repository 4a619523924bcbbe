"""The commands of a real federation: `polyfed keys ...`, `polyfed serve`, `polyfed join`.

`register(app)` adds them to a typer application. Flower itself is imported only when a command runs.
"""

from __future__ import annotations

import inspect
import shlex
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Annotated, Any

import typer
from rich.console import Console

from polyfed.cli.failure import sentences
from polyfed.cli.form import OF_A_SITE, form_app
from polyfed.cli.keys import keys_app
from polyfed.cli.options import with_settings
from polyfed.config import Config, Data, option_names, short_names
from polyfed.core.errors import InputError, RunDirectoryError
from polyfed.core.fields import split_names
from polyfed.core.summary import client_columns
from polyfed.flower import plain, require_flower

LOOPBACK = ("127.0.0.1", "localhost", "::1", "[::1]")

PORT = 9092
SITES = "the sites' own"
# Settings that are each site's own, by full name or section; the server decides the others for everybody.
THEIRS = ("data.", "execution.", "models.names", "evaluation.samples")
SIMULATED = "trust.attack"  # nobody is malicious on request
TOLD = tuple(short for short in option_names() if not short_names()[short].startswith((*THEIRS, SIMULATED)))


def register(app: typer.Typer) -> None:
    """Add the commands to an application."""
    app.add_typer(keys_app, name="keys")
    app.add_typer(form_app, name="form")
    app.command("serve")(serve)
    app.command("join")(join)


@with_settings(TOLD)
def serve(
    out: Annotated[Path, typer.Option(help="A new folder for the run (with --resume: its folder).")],
    method: Annotated[str | None, typer.Option(help="Name of the method, or module:Class of your own.")] = None,
    keys: Annotated[Path | None, typer.Option(help="The folder of 'polyfed keys init'.")] = None,
    min_sites: Annotated[int | None, typer.Option(help="So many sites make a round count; else all.")] = None,
    deadline: Annotated[float, typer.Option(help="Seconds that a site has for one exchange.")] = 600.0,
    wait: Annotated[float, typer.Option(help="Seconds to wait for missing sites.")] = 120.0,
    host: Annotated[
        str | None, typer.Option(help="Address to listen on; else all (with --insecure: this one).")
    ] = None,
    port: Annotated[
        int | None, typer.Option(help="Port to listen on; else 9092 (with --resume: the one of before).")
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue the run in --out.")] = False,
    insecure: Annotated[bool, typer.Option("--insecure", help="No TLS, no keys: on this machine only.")] = False,
    sites: Annotated[str, typer.Option(help="With --insecure: names of the sites.")] = "",
    set_: Annotated[list[str] | None, typer.Option("--set", help="key=value, as in 'polyfed run'.")] = None,
    public: Annotated[
        str | None,
        typer.Option(help="Public data: a name or file (NAME:N: so many of it), or package.module:function."),
    ] = None,
    max_mb: Annotated[int, typer.Option(help="Largest message in megabytes.")] = 1024,
    max_share: Annotated[float, typer.Option(help="What one site may weigh: its share of all samples.")] = 1.0,
    max_samples: Annotated[int, typer.Option(help="How many samples a site can say it has.")] = 10_000_000,
    alone: Annotated[
        bool, typer.Option(help="At the end, let each site train by itself, too, and report what it gained.")
    ] = True,
    quiet: Annotated[bool, typer.Option("--quiet", help="Say nothing but errors.")] = False,
    **told: str | None,
) -> None:
    """Run the server of a real federation."""
    given = locals().copy()
    _stop_politely()
    with sentences():
        require_flower()
        _check_security(insecure, keys, host or "127.0.0.1", "DIR (made by 'polyfed keys init')")
        from polyfed.flower import serve as serving
        from polyfed.flower.sitedata import read_public
        from polyfed.report import write_report
        from polyfed.terminal.live import watching
        from polyfed.terminal.tables import client_table

        _check_new(given)
        config = _config(given, told)
        hosting = serving.Hosting(
            host=host or ("127.0.0.1" if insecure else "0.0.0.0"),
            port=port or _port_of(out, resume),
            keys=keys,
            sites=split_names(sites),
            min_sites=min_sites,
            wait=wait,
            deadline=deadline,
            max_bytes=max_mb << 20,
            max_share=max_share,
            max_samples=max_samples,
            alone=alone,
        )
        samples = read_public(public) if public else None
        console = Console(quiet=quiet)

        def say(text: str) -> None:
            console.print(plain(text), highlight=False, soft_wrap=True, markup=False, emoji=False)

        with _way_on(given), watching(console, (), out, _again(given)) as watch:
            result = serving.serve(
                config,
                out,
                hosting,
                public=samples,
                resume=resume,
                observers=lambda: [
                    partial(_tell_missing, say),
                    *watch(config.label, config.rounds, {"sites": _site_names(hosting)}),
                ],
                say=say,
            )
        measured = [line["accuracy"] for line in result.history if "accuracy" in line]
        if measured:
            say(f"Report: {write_report(out)}")
            wide = Console(quiet=quiet, width=None if console.is_terminal else 120)
            wide.print(client_table(result.summary()))
            say(_in_words(result.accuracy(), _site_names(hosting)))
            for text in _left_out(result.history, _site_names(hosting)):
                say(text)
        say(f"Everything is in {out}.")


@with_settings((*OF_A_SITE, "tokenizer"))
def join(
    server: Annotated[str, typer.Option(help="HOST:PORT of the server.")],
    model: Annotated[str, typer.Option(help="Your model: package.module:function, or a name such as cnn:16-32.")],
    data: Annotated[
        str, typer.Option(help="Your data: a CSV or parquet file, package.module:function, or the name of a data set.")
    ],
    keys: Annotated[Path | None, typer.Option(help="The folder site-NAME that you got from the server.")] = None,
    state: Annotated[Path | None, typer.Option(help="Where this site keeps its model between rounds.")] = None,
    allow: Annotated[str, typer.Option(help="Methods that may run here: fedproto,fedin. Else all.")] = "",
    public: Annotated[
        str | None,
        typer.Option(help="Public data: a name or file (NAME:N: so many of it), or package.module:function."),
    ] = None,
    insecure: Annotated[bool, typer.Option("--insecure", help="No TLS, no keys: on this machine only.")] = False,
    name: Annotated[str, typer.Option(help="With --insecure: the name of this site.")] = "",
    wait: Annotated[float, typer.Option(help="Seconds to try until the server answers for the first time.")] = 300.0,
    give_up: Annotated[float, typer.Option(help="Seconds without a server after which this site stops.")] = 3600.0,
    max_mb: Annotated[int, typer.Option(help="Largest message in megabytes.")] = 1024,
    audit: Annotated[bool, typer.Option("--audit", help="Ask for the server's audit; it is kept in --state.")] = False,
    max_epsilon: Annotated[
        float | None, typer.Option(help="Take part with this epsilon for each sample at most. Else as the server asks.")
    ] = None,
    form: Annotated[Path | None, typer.Option(help="What the sites agreed on ('polyfed form agree').")] = None,
    set_: Annotated[list[str] | None, typer.Option("--set", help="data.key=value: how to read the data.")] = None,
    **given: str | None,
) -> None:
    """Take part in a federation with your own model and data, which stay here."""
    _stop_politely()
    with sentences():
        require_flower()
        _check_security(insecure, keys, server.rpartition(":")[0], "DIR/site-NAME (from the server)")
        from polyfed import methods
        from polyfed.data.agree import read_agreed
        from polyfed.experiment import read_experiment
        from polyfed.flower import join as joining
        from polyfed.flower.sitedata import read_data, read_model, try_model

        allowed = list(split_names(allow))
        for item in allowed:
            methods.find(item)
        if max_mb <= 0:
            raise InputError("--max-mb must be positive.")
        how = joining.Joining(server, keys, name, Path(), give_up, wait, audit, max_epsilon)
        found = joining.check_joining(how)
        how = replace(how, state=state or Path(f"polyfed-site-{found.name if found else name}"))
        _refuse_what_the_server_decides(set_ or ())
        asked = read_experiment(None, {"data": data, **given}, set_ or ()).base.data
        network, samples = read_model(model), read_data(asked, public, read_agreed(form) if form else None)
        try_model(model, network, samples)
        joining.join(how, network, samples, allowed, max_mb << 20, lambda text: typer.echo(plain(text)))


def _refuse_what_the_server_decides(settings: Sequence[str]) -> None:
    """Refuse settings of a site that are not about its data: they would be ignored."""
    from polyfed.command import parse_setting
    from polyfed.experiment import full_name

    for text in settings:
        full = full_name(parse_setting(text)[0])
        if not full.startswith("data."):
            raise InputError(f"'{full}' is not for a site: how to train is the server's to say (polyfed serve).")


def _check_security(insecure: bool, keys: Path | None, host: str, folder: str) -> None:
    """Refuse, before anything is loaded, a federation that is neither secure nor on this machine only."""
    if insecure == (keys is not None):
        raise InputError(f"Give --keys {folder}, or --insecure to try on this machine only.")
    if insecure and host and host not in LOOPBACK:
        raise InputError(f"--insecure works on this machine only, not with {host}: use --keys {folder}.")


def _in_words(accuracy: dict[str, Any], names: list[str]) -> str:
    """Return the final accuracies with the sites' names; a site may have been away."""
    who = accuracy.get("clients", range(len(accuracy["per_client"])))  # of a round before a new site came: the first
    each = ", ".join(f"{names[c]} {value:.1%}" for c, value in zip(who, accuracy["per_client"], strict=True))
    gains = client_columns(accuracy, len(names)).get("gain", [])
    told = ", ".join(f"{name} {100 * gain:+.1f}" for name, gain in zip(names, gains, strict=False) if gain is not None)
    gained = f" Gained over training alone, in points: {told}." if told else ""
    return f"Done: mean {accuracy.get('score', 'accuracy')} {accuracy['mean']:.1%} ({each}).{gained}"


def _tell_missing(say: Callable[[str], None], line: dict[str, Any]) -> None:
    """Name the sites that a round went on without."""
    for why in line.get("missing", {}).values():
        say(f"Round {line['round']} goes on without a site: {why}")


def _left_out(history: list[dict[str, Any]], names: list[str]) -> Iterator[str]:
    """Say of each site how many rounds went on without it, and why the last one did."""
    rounds = [line for line in history if line["phase"] == "round"]
    for number, name in enumerate(names):
        why = [line["missing"][str(number)] for line in rounds if str(number) in line.get("missing", {})]
        if why:
            yield f"{len(why)} of {len(rounds)} rounds went on without {name}; the last time: {why[-1]}"


def _config(given: dict[str, Any], told: dict[str, str | None]) -> Config:
    """Return the configuration from the options, or that of the run that is resumed."""
    from polyfed.api import prolonged
    from polyfed.command import parse_value
    from polyfed.core.settings import Execution
    from polyfed.experiment import read_experiment
    from polyfed.stored import read_config

    if given["resume"]:
        config = read_config(given["out"])
        _refuse_other_settings(config, given, told)
        rounds = parse_value(told["rounds"]) if told.get("rounds") else config.rounds
        return config if rounds == config.rounds else prolonged(given["out"], config, rounds)
    if given["method"] is None:
        raise InputError("Say what the sites are to do: --method NAME ('polyfed methods' lists them).")
    asked = read_experiment(None, {"method": given["method"], **told}, given["set_"] or ())
    config = asked.config()
    _refuse_what_sites_decide(config)
    # A checkpoint after every round: the sites' states follow it. Data and models are theirs.
    alone = Execution(engine="flower", checkpoint_seconds=0.0)
    theirs = Data(SITES, clients=None, partition=SITES, public=given["public"])
    return replace(config, execution=alone, data=theirs, script=("sites",))


def _refuse_other_settings(config: Config, given: dict[str, Any], told: dict[str, str | None]) -> None:
    """Refuse settings that a resumed run does not have: it would go on with its own, and nobody would notice."""
    from polyfed.command import parse_setting
    from polyfed.experiment import full_name, read_experiment
    from polyfed.methods import reference

    options = {name: text for name, text in told.items() if text is not None and name != "rounds"}
    names = [*options, *(parse_setting(text)[0] for text in given["set_"] or ())]
    own = reference(type(config.method))
    if given["method"] not in (None, own):
        raise InputError(f"{given['out']} runs {own}, not {given['method']}: leave out --method, or use another --out.")
    asked = read_experiment(None, {"method": own, **options}, given["set_"] or ()).config()

    def value(of: Config, name: str) -> Any:
        section, _, key = full_name(name).rpartition(".")
        return getattr(of.method, key) if section in ("method", of.label) else of.value(full_name(name))

    for name in names:
        if value(asked, name) != value(config, name):
            raise InputError(
                f"A resumed run keeps its settings, and {full_name(name)} is {value(config, name)} in {given['out']}, "
                f"not {value(asked, name)}: leave it out, or use another --out. Only --rounds can change."
            )


def _port_of(out: Path, resume: bool) -> int:
    """Return where a resumed run listened, or the usual port."""
    from polyfed.core.rundir import RunDirectory

    return int(RunDirectory.read_config(out).get("port", PORT)) if resume else PORT


def _refuse_what_sites_decide(config: Config) -> None:
    """Refuse settings that would be ignored: data, networks' names and machines are the sites' own."""
    usual = Config(config.method, config.label)
    for full in short_names().values():
        if not full.startswith(THEIRS) or config.value(full) == usual.value(full):
            continue
        if full == "models.names":
            raise InputError(f"'{full}' is not for the server: each site names its network (polyfed join --model).")
        raise InputError(
            f"'{full}' is not for the server: each site has data and a machine of its own (polyfed join), on which it "
            "measures; a checkpoint is written after every round."
        )


def _again(given: dict[str, Any]) -> str:
    """Return the command that resumes this run. Its folder knows how to train, but not where to listen."""
    words = ["polyfed", "serve", "--resume", *(["--insecure"] if given["insecure"] else [])]
    usual = inspect.signature(serve).parameters
    for name in (
        "out",
        "keys",
        "sites",
        "host",
        "port",
        "public",
        "min_sites",
        "deadline",
        "wait",
        "max_mb",
        "max_share",
        "max_samples",
    ):
        if given[name] != usual[name].default:
            words += [f"--{name.replace('_', '-')}", str(given[name])]
    return shlex.join([*words, *([] if given["alone"] else ["--no-alone"])])


def _check_new(given: dict[str, Any]) -> None:
    """Refuse to start where a federation was started before, with the command that continues it."""
    from polyfed.core.rundir import RunDirectory

    there = not given["resume"] and (given["out"] / "config.json").is_file()
    if there and "federation" in RunDirectory.read_config(given["out"]):
        raise RunDirectoryError(
            f"{given['out']} holds a federation already: choose another --out, or continue it with {_again(given)}"
        )


@contextmanager
def _way_on(given: dict[str, Any]) -> Iterator[None]:
    """Say how to go on when too few sites came or somebody stopped the wait for them."""
    from polyfed.flower.mailbox import TooFewSites
    from polyfed.terminal.stopping import Stopped

    try:
        yield
    except TooFewSites as error:
        raise TooFewSites(f"{error} Start the sites that are missing, then go on with {_again(given)}") from error
    except KeyboardInterrupt:
        if not (given["out"] / "config.json").is_file():
            raise
        raise Stopped(f"Stopped. Go on with {_again(given)}") from None


def _site_names(hosting: Any) -> list[str]:
    from polyfed.flower.keys import read_server_keys

    return list(read_server_keys(hosting.keys).sites) if hosting.keys else list(hosting.sites)


def _stop_politely() -> None:
    """Let a request to end (SIGTERM) close connections and child processes, as Ctrl-C does."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, stop)
